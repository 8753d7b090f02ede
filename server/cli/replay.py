"""`windlass replay`: repeats the requests of a recording and compares the results."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from windlass.clients import APIError, Client, RetryPolicy
from windlass.clients.loadtest.display import ProgressDisplay
from windlass.clients.loadtest.runner import Progress, RunProgress, report_progress, run_until_stopped
from windlass.clients.loadtest.workload import WORDS
from windlass.clients.sse import SSEDecoder
from windlass.clients.streams import drain_response_async
from windlass.clients.terminal import CommandError, print_status, stop_on_signals
from windlass.engine.errors import LoadError, with_place
from windlass.engine.interface.model_info import PoolingKind
from windlass.server.cli.managed_server import managed_server
from windlass.server.cli.parameters import with_key_hint
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.server_options import SamplingOptions
from windlass.server.serving.observers import OK, RECORD_VERSION, digest, rows_digest

Model = TypeVar("Model", bound=BaseModel)
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class RecordHead(BaseModel):
    """Header of a recording: the server that wrote the following requests."""

    windlass_record: int
    model: str = ""
    fingerprint: str = ""
    deterministic: bool = False
    text: bool = False


class RecordedAnswer(BaseModel):
    """A recorded answer. digest: of its tokens, or of a text's rows; None if text was not recorded."""

    choice: int
    tokens: Annotated[int, Field(ge=0)] = 0
    digest: str | None = None


class RecordedRows(BaseModel):
    """Pooling of a request's texts into rows: see `PoolingRule`."""

    kind: PoolingKind
    dimensions: int | None = None
    normalize: bool = False


class RecordedLine(BaseModel):
    """A recorded request. line: its number in the file. of: the header above it."""

    at: float
    request_id: str
    route: str
    model: str = ""
    stream: bool = False
    prompt_tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=4096)]
    fields: dict[str, Any]
    outcome: str
    seconds: float = 0.0
    answers: list[RecordedAnswer] = []
    prompt_token_ids: list[TokenIds] | None = None
    texts: dict[str, Any] = {}
    exact: bool = False
    body: dict[str, Any] | None = None
    chat: bool = False
    pooling: RecordedRows | None = None  # of requests without generation
    line: int = 0
    of: RecordHead = RecordHead(windlass_record=RECORD_VERSION)

    @property
    def ended_well(self) -> bool:
        return self.outcome == OK

    @property
    def expected_digests(self) -> tuple[str, ...] | None:
        """Digests of the answers by choice; None if an equal request may get others."""
        if not self.exact or not self.ended_well:
            return None
        digests = [answer.digest for answer in sorted(self.answers, key=lambda answer: answer.choice)]
        return tuple(digest for digest in digests if digest is not None)

    @property
    def tokens(self) -> int:
        """Number of tokens of the longest answer."""
        return max((answer.tokens for answer in self.answers), default=0)


@dataclass(frozen=True, slots=True)
class RecordedWorkload:
    """Requests of a file, ordered by arrival time. head: header of the last server that wrote to it."""

    head: RecordHead
    requests: list[RecordedLine]


def read_recording(path: Path) -> RecordedWorkload:
    """Read a recording. A truncated last line is skipped with a notice. Raises CommandError with the file and line at fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    head: RecordHead | None = None
    requests = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if number == len(lines):
            print_status(f"notice: the last line of {path} is truncated and skipped")
            continue
        found = _read(line, path, number)
        if "windlass_record" in found:
            head = _checked(RecordHead, found, path, number)
            if head.windlass_record != RECORD_VERSION:
                raise CommandError(
                    f"{path}, line {number}: format version {head.windlass_record} is not supported, only {RECORD_VERSION}"
                )
        elif head is None:
            raise CommandError(f"{path} was not written by `windlass serve --record`: it has no header")
        else:
            request = _checked(RecordedLine, found, path, number)
            request.line, request.of = number, head
            requests.append(request)
    if head is None or not requests:
        raise CommandError(f"{path} contains no requests")
    return RecordedWorkload(head, sorted(requests, key=lambda request: request.at))


def _read(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}, line {number} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CommandError(f"{path}, line {number} is not an object")
    return found


def _checked(kind: type[Model], found: Mapping[str, Any], path: Path, number: int) -> Model:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CommandError(f"{path}, line {number}: {where}: {first['msg']}") from None


# Fields of one client or one moment.
_OMITTED_FIELDS = ("request_id", "timeout", "user", "metadata", "stream_options", "model", "safety_identifier")

_TASKS = {"all": "token_embed", "classify": "classify", "classify tokens": "token_classify", "answer": "classify"}


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A request to send. expected: digests of its answers by choice, None if there is nothing to compare.

    allows_subset: whether the answers are a subset of `expected`, as with best_of.
    """

    recorded: RecordedLine
    path: str
    body: dict[str, Any]
    expected: tuple[str, ...] | None = None
    allows_subset: bool = False


def make_replay_request(recorded: RecordedLine, ordinary: Sequence[int]) -> ReplayRequest:
    """The request that repeats a recorded one. ordinary: token ids of prompts whose own are not recorded."""
    if recorded.pooling is not None:
        return _pooling_request(recorded, recorded.pooling, ordinary)
    path = "/v1/completions"
    if recorded.prompt_token_ids is None:
        return ReplayRequest(recorded, path, {**_common(recorded), **_synthetic(recorded, ordinary)})
    expected = recorded.expected_digests
    if recorded.body is not None:
        kept = {name: value for name, value in recorded.body.items() if name not in _OMITTED_FIELDS}
        body = {
            **kept,
            **_common(recorded),
            "seed": recorded.fields.get("seed"),
            **_limits_of_incomplete(recorded, kept),
        }
        allows_subset = bool(expected) and (kept.get("best_of") or 1) > (kept.get("n") or 1)
        return ReplayRequest(recorded, "/v1/chat/completions" if recorded.chat else path, body, expected, allows_subset)
    ids: Any = recorded.prompt_token_ids
    body = {**recorded.fields, **recorded.texts, **_common(recorded), "prompt": ids[0] if len(ids) == 1 else ids}
    return ReplayRequest(recorded, path, {**body, **_limits_of_incomplete(recorded, body)}, expected)


def _limits_of_incomplete(recorded: RecordedLine, body: dict[str, Any]) -> dict[str, Any]:
    """The limits of a request that did not finish: the client received no more than this."""
    if recorded.ended_well:
        return {}
    most = max(1, recorded.tokens)
    limits = {"max_tokens": most, "min_tokens": min(body.get("min_tokens") or 0, most)}
    return limits | ({"max_completion_tokens": most} if "max_completion_tokens" in body else {})


def _pooling_request(recorded: RecordedLine, rule: RecordedRows, ordinary: Sequence[int]) -> ReplayRequest:
    """A request for the rows themselves, as float32, which can be compared even if only scores were computed from them."""
    kind: dict[str, Any] = {"task": _TASKS[rule.kind]} if rule.kind in _TASKS else {"pooling": rule.kind}
    if kind.get("task") in ("classify", "token_classify"):
        kind["use_activation"] = False
    else:
        kind |= {"normalize": rule.normalize}
        if rule.dimensions is not None:
            kind["dimensions"] = rule.dimensions
    ids = recorded.prompt_token_ids or _random_prompts(recorded, ordinary)
    body = {
        **recorded.fields,
        **recorded.texts,
        **kind,
        **_adapter_field(recorded),
        "encoding_format": "base64",
        "input": ids,
    }
    return ReplayRequest(recorded, "/pooling", body, recorded.expected_digests)


def _common(recorded: RecordedLine) -> dict[str, Any]:
    """Fields of every repeated generation."""
    return {"stream": recorded.stream, "return_token_ids": True, **_adapter_field(recorded)}


def _adapter_field(recorded: RecordedLine) -> dict[str, Any]:
    """The model field, for adapters only: the model may have another name now."""
    return {"model": recorded.model} if recorded.model and recorded.model != recorded.of.model else {}


def _random_prompts(recorded: RecordedLine, ordinary: Sequence[int]) -> list[list[int]]:
    """Prompts of the same lengths with pseudorandom tokens, equal in each replay of the file."""
    random = Random(f"{recorded.line}/{recorded.request_id}")
    return [random.choices(ordinary, k=max(1, count)) for count in recorded.prompt_tokens]


def _synthetic(recorded: RecordedLine, ordinary: Sequence[int]) -> dict[str, Any]:
    """Fields of a request with prompts and answers of the recorded lengths."""
    prompts = _random_prompts(recorded, ordinary)
    tokens = recorded.tokens if recorded.ended_well or recorded.answers else 1
    fixed = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    return {**recorded.fields, **fixed, "prompt": prompts[0] if len(prompts) == 1 else prompts}


# A response that is not streamed arrives when it is complete, and a recorded one may have taken hours.
_TIMEOUT = httpx.Timeout(None, connect=10.0)

_SHOWN = 200  # characters of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPace:
    """Pace of a replay. speed: 2 halves the recorded times, None ignores them. concurrent: limit of requests in flight."""

    speed: float | None = 1.0
    concurrent: int = 1024


@dataclass(slots=True)
class ReplayResult:
    """Result of one request. error: reason if there is no answer. late: delay of sending, in seconds."""

    replayed_request: ReplayRequest
    digests: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    fingerprint: str = ""
    seconds: float = 0.0
    late: float = 0.0
    error: str = ""

    @property
    def compared(self) -> bool:
        return self.replayed_request.expected is not None

    @property
    def failed(self) -> bool:
        """Whether it failed although the recorded request succeeded."""
        return bool(self.error) and self.replayed_request.recorded.ended_well

    @property
    def equal(self) -> bool:
        """Whether all answers equal the recorded ones."""
        expected = self.replayed_request.expected
        if expected is None or self.error:
            return False
        if self.replayed_request.allows_subset:
            return not Counter(self.digests) - Counter(expected)
        return self.digests == expected


@dataclass(slots=True)
class ReplayRun:
    """Results in the order of the recording. seconds: from the first request to the last answer.

    interrupted: whether it was stopped early; then requests still in flight are missing.
    """

    requests: list[ReplayResult]
    seconds: float = 0.0
    interrupted: bool = False


@dataclass(slots=True)
class _AnswerReader:
    """Accumulates token ids by choice, or digests of rows by text."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, str] = field(default_factory=dict)
    fingerprint: str = ""

    def add_payload(self, payload: Any) -> None:
        if (error := payload.get("error")) or isinstance(error, dict):
            raise ValueError(_reason(payload))
        self.fingerprint = payload.get("system_fingerprint") or self.fingerprint
        for choice in payload.get("choices", ()):
            self.ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        for item in payload.get("data", ()):
            self.rows[item["index"]] = rows_digest(base64.b64decode(item["data"]))


async def replay(
    url: str,
    api_key: str | None,
    replayed_request: Sequence[ReplayRequest],
    pace: ReplayPace,
    *,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
) -> ReplayRun:
    """Send requests to the server at `url` (without /v1) and wait for all answers. Failures are in the result, not raised.

    progress: called about twice a second. stop: ends the replay early when set.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(
        max_connections=pace.concurrent, max_keepalive_connections=pace.concurrent, keepalive_expiry=4.0
    )
    slots = asyncio.Semaphore(pace.concurrent)
    # Answers that are not streamed have no chunks.
    progress_state = RunProgress(phase="running", total=len(replayed_request), chunks=None)
    results: list[ReplayResult | None] = [None] * len(replayed_request)
    begun = time.monotonic()
    first = replayed_request[0].recorded.at if replayed_request else 0.0
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=False
    ) as http:

        async def one(index: int, each: ReplayRequest) -> None:
            async with slots:
                due = begun if pace.speed is None else begun + (each.recorded.at - first) / pace.speed
                sent = time.monotonic()
                progress_state.running += 1
                result = await _send(http, each)
                progress_state.running -= 1
                progress_state.ended += 1
                progress_state.failed += result.failed
                result.seconds = time.monotonic() - sent
                result.late = 0.0 if pace.speed is None else max(0.0, sent - due)
                results[index] = result

        async def every_one() -> None:
            async with asyncio.TaskGroup() as group:
                for index, each in enumerate(replayed_request):
                    if pace.speed is not None:
                        due = begun + (each.recorded.at - first) / pace.speed
                        await asyncio.sleep(max(0.0, due - time.monotonic()))
                    group.create_task(one(index, each))

        ticker = asyncio.create_task(report_progress(progress, lambda: progress_state))
        try:
            finished = await run_until_stopped(every_one(), stop or asyncio.Event())
        finally:
            ticker.cancel()
        seconds = time.monotonic() - begun
    return ReplayRun([result for result in results if result is not None], seconds, not finished)


async def _send(http: httpx.AsyncClient, replayed_request: ReplayRequest) -> ReplayResult:
    read = _AnswerReader()
    try:
        async with http.stream("POST", replayed_request.path, json=replayed_request.body) as response:
            if response.status_code != 200:
                raise ValueError(_refusal(response.status_code, await response.aread()))
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                await _read_stream(response, read)
            else:
                payload = json.loads(await response.aread())
                if not isinstance(payload, dict):
                    raise ValueError(f"the answer is not an object (HTTP {response.status_code})")
                read.add_payload(payload)
    except httpx.HTTPError as error:
        return ReplayResult(replayed_request, error=f"{type(error).__name__}: {error}"[:_SHOWN])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return ReplayResult(replayed_request, error=str(error)[:_SHOWN] or type(error).__name__)
    if read.rows:
        return ReplayResult(replayed_request, tuple(read.rows[index] for index in sorted(read.rows)))
    if not read.ids:
        return ReplayResult(replayed_request, error="the answer has no choices")
    ids = [read.ids[choice] for choice in sorted(read.ids)]
    return ReplayResult(replayed_request, tuple(map(digest, ids)), tuple(map(len, ids)), read.fingerprint)


def _refusal(status: int, body: bytes) -> str:
    """The message of an error response. Proxies and other servers have formats of their own."""
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        payload = None
    reason = _reason(payload) if isinstance(payload, dict) else body.decode("utf-8", "replace")
    return f"HTTP {status}: {' '.join(reason.split())}".removesuffix(": ")


def _reason(payload: dict[str, Any]) -> str:
    error = payload.get("error") or payload.get("message") or payload.get("detail") or ""
    return str(error.get("message") or error if isinstance(error, dict) else error)


async def _read_stream(response: httpx.Response, read: _AnswerReader) -> None:
    events = SSEDecoder()
    pieces = response.aiter_bytes()
    async for data in pieces:
        for event in events.feed(data):
            if event.data == "[DONE]":
                await drain_response_async(response, pieces)
                return
            read.add_payload(json.loads(event.data))
    raise ValueError("the stream ended early")


MAX_SHOWN = 20  # mismatches, and failures, in the report


def is_success(replayed: ReplayRun) -> bool:
    """Whether no request failed and all compared answers are equal."""
    return not any(each.failed or (each.compared and not each.equal) for each in replayed.requests)


def to_dict(recording: RecordedWorkload, replayed: ReplayRun) -> dict[str, Any]:
    """The report as JSON, with every mismatch and failure."""
    compared = [each for each in replayed.requests if each.compared]
    return {
        "requests": len(replayed.requests),
        "recorded_requests": len(recording.requests),
        "interrupted": replayed.interrupted,
        "seconds": round(replayed.seconds, 3),
        "recorded_seconds": round(_span(recording), 3),
        "failed": [_identify(each) | {"error": each.error} for each in replayed.requests if each.failed],
        "compared": len(compared),
        "equal": sum(each.equal for each in compared),
        "mismatches": [
            _identify(each)
            | {
                "recorded": list(each.replayed_request.expected or ()),
                "now": list(each.digests),
                "error": each.error or None,
            }
            for each in compared
            if not each.equal
        ],
        "deterministic": recording.head.deterministic,
        "fingerprint": {"recorded": recording.head.fingerprint, "now": _fingerprint(replayed)},
        "most_late_seconds": round(max((each.late for each in replayed.requests), default=0.0), 3),
        "tokens": sum(sum(each.tokens) for each in replayed.requests),
    }


def report_lines(recording: RecordedWorkload, replayed: ReplayRun) -> Iterator[str]:
    """The report as text."""
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
    yield from _limited_lines(failed, lambda each: f"failed: {_name(each)}: {each.error}")
    compared = [each for each in requests if each.compared]
    if not compared and replayed.interrupted:
        yield "no answer was compared yet"
        return
    if not compared:
        yield "no answer was compared: the recording has no text (--record-text)"
        return
    different = [each for each in compared if not each.equal]
    yield from _limited_lines([each for each in different if not each.error], _difference)
    yield f"{len(compared):,} compared: {len(compared) - len(different):,} identical, {len(different):,} different"
    now, then = _fingerprint(replayed), recording.head.fingerprint
    if different and now and then and now != then:
        yield f"this server has another model or other settings: its fingerprint is {now}, the recorded one was {then}"
    elif different and not recording.head.deterministic:
        yield "the recorded server ran without --deterministic: answers may depend on the requests that ran at the same time"


def _difference(each: ReplayResult) -> str:
    expected = each.replayed_request.expected or ()
    if each.replayed_request.allows_subset or len(expected) != len(each.digests):
        return f"mismatch: {_name(each)}: {len(expected)} answers recorded, {len(each.digests)} now, with differences"
    index = next(i for i, (then, now) in enumerate(zip(expected, each.digests, strict=True)) if then != now)
    if each.replayed_request.recorded.pooling is not None:
        return f"mismatch: {_name(each)}: text {index}: its numbers were {expected[index]}, now {each.digests[index]}"
    answers = sorted(each.replayed_request.recorded.answers, key=lambda answer: answer.choice)
    return (
        f"mismatch: {_name(each)}: answer {index}: {answers[index].tokens} tokens {expected[index]} recorded, "
        f"{each.tokens[index]} tokens {each.digests[index]} now"
    )


def _limited_lines(found: Sequence[ReplayResult], render: Any) -> Iterator[str]:
    for each in found[:MAX_SHOWN]:
        yield render(each)
    if len(found) > MAX_SHOWN:
        yield f"and {len(found) - MAX_SHOWN:,} more (--json has all)"


def _name(each: ReplayResult) -> str:
    recorded = each.replayed_request.recorded
    return f"line {recorded.line}, {recorded.route}, request {recorded.request_id}"


def _identify(each: ReplayResult) -> dict[str, Any]:
    recorded = each.replayed_request.recorded
    return {"line": recorded.line, "route": recorded.route, "request_id": recorded.request_id}


def _span(recording: RecordedWorkload) -> float:
    requests = recording.requests
    return max(request.at + request.seconds for request in requests) - requests[0].at


def _fingerprint(replayed: ReplayRun) -> str:
    return next((each.fingerprint for each in replayed.requests if each.fingerprint), "")


def read_pace(speed: float, as_fast_as_possible: bool, concurrency: int) -> ReplayPace:
    """The pace of these options. Raises LoadError for an invalid speed."""
    if not (math.isfinite(speed) and speed > 0):
        raise LoadError(f"--speed must be more than 0, got {speed:g}")
    return ReplayPace(speed=None if as_fast_as_possible else speed, concurrent=concurrency)


def replay_remote(file: Path, url: str, api_key: str | None, pace: ReplayPace, as_json: bool) -> int:
    """Repeat the recording on the server at `url`. Returns the exit code; raises CommandError, one line."""
    recording = read_recording(file)
    try:
        client = Client(url, api_key=api_key, timeout=30, retry=RetryPolicy(max_retries=0))
    except ValueError as error:
        raise CommandError(f"{url}: {error}") from error
    return _finish(recording, client, api_key, pace, as_json)


def replay_locally(
    file: Path, model: str | None, options: EngineOptions, sampling: SamplingOptions, pace: ReplayPace, as_json: bool
) -> int:
    """Repeat the recording on a managed server. Returns the exit code. Raises CommandError and EngineError."""
    options.to_config(Path())  # report bad options before anything is downloaded
    sampling.check()
    recording = read_recording(file)
    with managed_server(model, options, sampling) as server:
        server.wait_ready()
        client = server.client(timeout=30, retry=RetryPolicy(max_retries=0))
        return _finish(recording, client, server.api_key, pace, as_json)


def _finish(recording: RecordedWorkload, client: Client, api_key: str | None, pace: ReplayPace, as_json: bool) -> int:
    url = client.base_url
    try:
        with client:
            client.models()  # report a wrong address or key once, not for every request
            replayed, stopped_by = _run(recording, client, url, api_key, pace)
    except APIError as error:
        raise CommandError(with_place(url, with_key_hint(error))) from error
    except ValueError as error:
        raise CommandError(f"{url}: {error}") from error
    if as_json:
        print(json.dumps(to_dict(recording, replayed)))
    else:
        for line in report_lines(recording, replayed):
            print(line)
    if stopped_by is not None:
        return 128 + stopped_by
    return 0 if is_success(replayed) else 1


def _run(
    recording: RecordedWorkload, client: Client, url: str, api_key: str | None, pace: ReplayPace
) -> tuple[ReplayRun, signal.Signals | None]:
    """The results, and the signal that stopped the replay, if any."""
    ordinary: list[int] = []
    if any(request.prompt_token_ids is None for request in recording.requests):
        found = client.tokenize(" ".join(WORDS), add_special_tokens=False)
        ordinary = sorted(set(found.tokens))
    replayed_request = [make_replay_request(request, ordinary) for request in recording.requests]
    print_status(f"repeating {len(replayed_request):,} requests on {url}")
    return asyncio.run(_until_stopped(url, api_key, replayed_request, pace))


async def _until_stopped(
    url: str, api_key: str | None, replayed_request: Sequence[ReplayRequest], pace: ReplayPace
) -> tuple[ReplayRun, signal.Signals | None]:
    stop, signals = asyncio.Event(), list[signal.Signals]()
    display = ProgressDisplay()
    with stop_on_signals(stop, signals), contextlib.ExitStack() as ending:
        ending.callback(display.stop)
        replayed = await replay(url, api_key, replayed_request, pace, progress=display, stop=stop)
    return replayed, signals[0] if signals else None
