"""What a replay came to, as lines and as an object. Knows no server and no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from windlass.server.cli.replay.reading import RecordedWorkload
from windlass.server.cli.replay.running import Repeated, Replayed

MOST_SHOWN = 20  # mismatches, and failures, in lines


def good(replayed: Replayed) -> bool:
    """Whether all that was answered then is answered now, and all that is compared is equal."""
    return not any(each.failed or (each.compared and not each.equal) for each in replayed.requests)


def as_object(recording: RecordedWorkload, replayed: Replayed) -> dict[str, Any]:
    """The same as JSON, with every mismatch and failure."""
    compared = [each for each in replayed.requests if each.compared]
    return {
        "requests": len(replayed.requests),
        "recorded_requests": len(recording.requests),
        "interrupted": replayed.interrupted,
        "seconds": round(replayed.seconds, 3),
        "recorded_seconds": round(_span(recording), 3),
        "failed": [_told(each) | {"error": each.error} for each in replayed.requests if each.failed],
        "compared": len(compared),
        "equal": sum(each.equal for each in compared),
        "mismatches": [
            _told(each)
            | {"recorded": list(each.asked.wanted or ()), "now": list(each.digests), "error": each.error or None}
            for each in compared
            if not each.equal
        ],
        "deterministic": recording.head.deterministic,
        "fingerprint": {"recorded": recording.head.fingerprint, "now": _fingerprint(replayed)},
        "most_late_seconds": round(max((each.late for each in replayed.requests), default=0.0), 3),
        "tokens": sum(sum(each.tokens) for each in replayed.requests),
    }


def lines(recording: RecordedWorkload, replayed: Replayed) -> Iterator[str]:
    """For a person."""
    requests = replayed.requests
    tokens = sum(sum(each.tokens) for each in requests)
    late = max((each.late for each in requests), default=0.0)
    yield (
        f"{len(requests):,} requests in {replayed.seconds:.1f} s (recorded in {_span(recording):.1f} s), {tokens:,} tokens"
        + (f", sent up to {late:.2f} s late" if late >= 0.1 else "")
    )
    if replayed.interrupted:
        yield f"interrupted: {len(recording.requests) - len(requests):,} of {len(recording.requests):,} requests had not ended"
    failed = [each for each in requests if each.failed]
    yield from _some(failed, lambda each: f"failed: {_name(each)}: {each.error}")
    compared = [each for each in requests if each.compared]
    if not compared and replayed.interrupted:
        yield "no answer was compared yet"
        return
    if not compared:
        yield "no answer was compared: the recording has no text (--record-text)"
        return
    different = [each for each in compared if not each.equal]
    yield from _some([each for each in different if not each.error], _difference)
    yield f"{len(compared):,} compared: {len(compared) - len(different):,} equal to the last token, {len(different):,} not"
    now, then = _fingerprint(replayed), recording.head.fingerprint
    if different and now and then and now != then:
        yield f"this server computes with another model or other settings: it is {now}, the recorded one was {then}"
    elif different and not recording.head.deterministic:
        yield "the recorded server ran without --deterministic: answers may depend on what ran beside them"


def _difference(each: Repeated) -> str:
    wanted = each.asked.wanted or ()
    if each.asked.some or len(wanted) != len(each.digests):
        return f"mismatch: {_name(each)}: {len(wanted)} answers recorded, {len(each.digests)} now, others among them"
    index = next(i for i, (then, now) in enumerate(zip(wanted, each.digests, strict=True)) if then != now)
    if each.asked.recorded.pooling is not None:
        return f"mismatch: {_name(each)}: text {index}: its numbers were {wanted[index]}, now {each.digests[index]}"
    answers = sorted(each.asked.recorded.answers, key=lambda answer: answer.choice)
    return (
        f"mismatch: {_name(each)}: answer {index}: {answers[index].tokens} tokens {wanted[index]} recorded, "
        f"{each.tokens[index]} tokens {each.digests[index]} now"
    )


def _some(found: Sequence[Repeated], told: Any) -> Iterator[str]:
    for each in found[:MOST_SHOWN]:
        yield told(each)
    if len(found) > MOST_SHOWN:
        yield f"and {len(found) - MOST_SHOWN:,} more (--json has all)"


def _name(each: Repeated) -> str:
    recorded = each.asked.recorded
    return f"line {recorded.line}, {recorded.route}, request {recorded.request_id}"


def _told(each: Repeated) -> dict[str, Any]:
    recorded = each.asked.recorded
    return {"line": recorded.line, "route": recorded.route, "request_id": recorded.request_id}


def _span(recording: RecordedWorkload) -> float:
    requests = recording.requests
    return max(request.at + request.seconds for request in requests) - requests[0].at


def _fingerprint(replayed: Replayed) -> str:
    return next((each.fingerprint for each in replayed.requests if each.fingerprint), "")
