"""Two load tests side by side: every measure's values, the interval of their difference, and a plain verdict.

`intervals.py` has the methods; here are the measures, which way of each is better, and what makes two runs hard to
compare. numpy is loaded by a comparison, not by an import.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from windlass.clients.loadtest import words
from windlass.clients.loadtest.figures import MEASURES, beginning, tokens_per_chunk
from windlass.clients.loadtest.results import PERCENTILES, RequestRecord, RunResult

if TYPE_CHECKING:
    from windlass.clients.loadtest.intervals import Difference

FORMAT = "windlass-bench-comparison/1"
Verdict = Literal["better", "worse", "no difference shown", "too few requests"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure of both runs. measure and statistic name it; interval: of second - first, in `unit`; change: second over
    first less one, None where the first is 0. verdict: whether the second run is better."""

    measure: str
    statistic: str
    unit: str
    first: float | None
    second: float | None
    first_interval: tuple[float, float] | None
    second_interval: tuple[float, float] | None
    interval: tuple[float, float] | None
    change: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """lines: the figures; cautions: what a reader should know first; differing: settings that are not the same.
    paired: both runs sent the same requests, and latencies were compared request by request."""

    lines: tuple[Line, ...]
    cautions: tuple[str, ...]
    differing: dict[str, tuple[str, str]]
    paired: bool
    confidence: float
    resamples: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"format": FORMAT, **asdict(self)}


def compare(
    first: RunResult, second: RunResult, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Comparison:
    """Set `second` against `first`. Equal arguments give equal results. confidence: of every interval, 0 to 1."""
    differing = _differing(first, second)
    return Comparison(
        lines=(*_rates(first, second, confidence), *_latencies(first, second, confidence, resamples, seed)),
        cautions=tuple(_cautions(first, second)),
        differing=differing,
        paired=_same_requests(first, second),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def _latencies(first: RunResult, second: RunResult, confidence: float, resamples: int, seed: int) -> Iterator[Line]:
    from windlass.clients.loadtest.intervals import Clustered, compare_latency

    paired = _same_requests(first, second)
    for measure in MEASURES:
        data = [Clustered(_by_request(run, measure, keep=paired)) for run in (first, second)]
        if not len(data[0]) or not len(data[1]):
            continue
        found = compare_latency(
            data[0], data[1], PERCENTILES, resamples=resamples, confidence=confidence, seed=seed, paired=paired
        )
        for statistic, difference in found.items():
            yield _line(measure, statistic, "ms", difference, lower_is_better=True)


def _same_requests(first: RunResult, second: RunResult) -> bool:
    """Whether both runs sent prompts of the same lengths in the same order, as equal seeds make them. Lengths of
    requests that failed may be unknown and do not count."""
    by_index = [{record.index: record for record in run.records} for run in (first, second)]
    if by_index[0].keys() != by_index[1].keys() or any(
        len(found) != len(run.records) for found, run in zip(by_index, (first, second), strict=True)
    ):
        return False
    return all(
        record.input_tokens == by_index[1][index].input_tokens
        for index, record in by_index[0].items()
        if record.completed and by_index[1][index].completed
    )


def _by_request(run: RunResult, measure: str, *, keep: bool = False) -> list[list[float]]:
    """The values of each completed request in the order of sending; keep: nothing, for each of the others."""
    ordered = sorted(run.records, key=lambda record: (record.index,) if keep else (record.intended, record.index))
    values = (_values(record, measure) if record.completed else [] for record in ordered)
    return [each for each in values if each or keep]


def _values(record: RequestRecord, measure: str) -> list[float]:
    if measure == "itl":
        return record.gaps_ms
    value: float | None = getattr(record, f"{measure}_ms")
    return [] if value is None else [value]


def _rates(first: RunResult, second: RunResult, confidence: float) -> Iterator[Line]:
    from windlass.clients.loadtest.intervals import compare_rates, compare_shares

    runs = (first, second)
    if first.duration_s > 0 and second.duration_s > 0:
        tokens = [_batches(run, _token_arrivals(run)) for run in runs]
        yield _line("output", "per second", "tokens/s", compare_rates(tokens[0], tokens[1], confidence))
        ends = [_batches(run, ((r.ended, 1.0) for r in run.completed if r.ended is not None)) for run in runs]
        yield _line("requests", "per second", "requests/s", compare_rates(ends[0], ends[1], confidence))
        if first.slo and first.slo == second.slo:
            good = [
                _batches(run, ((r.ended, 1.0) for r in run.completed if r.ended is not None and run.meets_slo(r)))
                for run in runs
            ]
            yield _line("goodput", "per second", "requests/s", compare_rates(good[0], good[1], confidence))
    shares = [(failed, failed + len(run.completed)) for run in runs for failed in [sum(run.errors.values())]]
    yield _line("failed", "share", "", compare_shares(shares[0], shares[1], confidence), lower_is_better=True)


def _token_arrivals(run: RunResult) -> Iterator[tuple[float, float]]:
    """(when, how many) of the output tokens of completed requests."""
    for record in run.completed:
        per_chunk = tokens_per_chunk(record) if record.output_tokens else 0.0
        yield from ((moment, per_chunk) for moment in record.chunks)


def _batches(run: RunResult, arrivals: Iterator[tuple[float, float]]) -> list[float]:
    """Rates of equal spans of the run; their mean is the rate of the whole."""
    from windlass.clients.loadtest.intervals import BATCHES

    width, begin = run.duration_s / BATCHES, beginning(run)
    amounts = [0.0] * BATCHES
    for moment, amount in arrivals:
        amounts[min(max(int((moment - begin) / width), 0), BATCHES - 1)] += amount
    return [amount / width for amount in amounts]


def _line(measure: str, statistic: str, unit: str, difference: Difference, *, lower_is_better: bool = False) -> Line:
    interval = difference.interval
    verdict: Verdict = "too few requests"
    if interval is not None:
        verdict = "no difference shown"
        if interval.excludes_zero:
            verdict = "better" if (interval.high < 0) == lower_is_better else "worse"
    ends = [
        None if each is None else (each.low, each.high)
        for each in (difference.first_interval, difference.second_interval, interval)
    ]
    first, second = (None if math.isnan(value) else value for value in (difference.first, difference.second))
    return Line(
        measure=measure,
        statistic=statistic,
        unit=unit,
        first=first,
        second=second,
        first_interval=ends[0],
        second_interval=ends[1],
        interval=ends[2],
        change=second / first - 1 if first and second is not None else None,
        verdict=verdict,
    )


def _differing(first: RunResult, second: RunResult) -> dict[str, tuple[str, str]]:
    """Settings and facts of the server but its address that are not the same, absent ones as –."""
    found = {}
    for prefix, mappings in (("", (first.settings, second.settings)), ("server.", (first.server, second.server))):
        flat = [dict(words.flat(mapping, prefix)) for mapping in mappings]
        for name in dict.fromkeys([*flat[0], *flat[1]]):
            values = flat[0].get(name, "–"), flat[1].get(name, "–")
            if values[0] != values[1] and name != "server.url":
                found[name] = values
    return found


def _cautions(first: RunResult, second: RunResult) -> Iterator[str]:
    for name, run in (("first", first), ("second", second)):
        if run.interrupted:
            yield f"the {name} run was interrupted"
        if run.generator.get("limited"):
            yield f"in the {name} run the load generator, not the server, was the limit"
        failed = sum(run.errors.values())
        if failed:
            yield f"{failed:,} of {len(run.records):,} requests of the {name} run failed; latencies leave them out"
        if run.duration_s <= 0:
            yield f"the {name} run took no time: its rates cannot be told"
    if first.slo != second.slo:
        yield "the runs had different limits: their goodput is not compared"
    for name, run in (("first", first), ("second", second)):
        if _drifts(run):
            yield f"time to first token kept growing during the {name} run: its figures depend on how long it lasted"


def _drifts(run: RunResult) -> bool:
    """Whether each fifth of the requests waited longer for its first token than the one before, the last twice the first."""
    waits = [value for each in _by_request(run, "ttft") for value in each]
    size = len(waits) // 5
    if size < 10:
        return False
    fifths = [math.fsum(waits[k * size : (k + 1) * size]) / size for k in range(5)]
    return all(later > earlier for earlier, later in pairwise(fifths)) and fifths[-1] > 2 * fifths[0]
