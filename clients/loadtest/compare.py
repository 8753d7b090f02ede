"""Load tests side by side: differences, their intervals, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from windlass.clients.loadtest import figures
from windlass.clients.loadtest.figures import MEASURES, start_time, tokens_per_chunk
from windlass.clients.loadtest.results import PERCENTILES, RequestRecord, RunResult

if TYPE_CHECKING:
    from windlass.clients.loadtest.intervals import Difference


Side = Sequence[RunResult]

_PER_RUN_SETTINGS = {"seed"}  # settings that runs of one side are free to differ in


def differing(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    """Settings and facts of the server but its address that are not the same on both sides, absent ones as –."""
    sides = [[_flat(run) for run in side] for side in (first, second)]
    found = {}
    for name in dict.fromkeys(name for side in sides for flat in side for name in flat):
        values = [list(dict.fromkeys(flat.get(name, "–") for flat in side)) for side in sides]
        if sorted(values[0]) != sorted(values[1]):
            found[name] = (", ".join(values[0]), ", ".join(values[1]))
    return found


def cautions(first: Side, second: Side) -> Iterator[str]:
    """What a reader should know first, a line each."""
    runs = [*_named("first", first), *_named("second", second)]
    for name, run in runs:
        if run.interrupted:
            yield f"the {name} was interrupted"
        if run.generator.get("limited"):
            yield f"in the {name} the load generator, not the server, was the limit"
        failed = sum(run.errors.values())
        if failed:
            yield f"{failed:,} of {len(run.records):,} requests of the {name} failed; latencies leave them out"
        if run.duration_s <= 0:
            yield f"the {name} took no time: its rates cannot be told"
    for name, side in (("first", first), ("second", second)):
        flats = [_flat(run) for run in side]
        unequal = [
            key
            for key in flats[0]
            if key not in _PER_RUN_SETTINGS and any(flat.get(key) != flats[0][key] for flat in flats)
        ]
        if unequal:
            yield f"the runs of the {name} side differ among themselves in {', '.join(unequal)}"
    if any(run.slo != first[0].slo for run in (*first, *second)):
        yield "the runs had different limits: their goodput is not compared"
    for name, run in runs:
        if _drifts(run):
            yield f"time to first token kept growing during the {name}: its figures depend on how long it lasted"


def _named(side: str, runs: Side) -> list[tuple[str, RunResult]]:
    if len(runs) == 1:
        return [(f"{side} run", runs[0])]
    return [(f"{side} side's run {number}", run) for number, run in enumerate(runs, 1)]


def _flat(run: RunResult) -> dict[str, str]:
    flat = {**dict(figures.flat(run.settings)), **dict(figures.flat(run.server, "server."))}
    return {name: value for name, value in flat.items() if name != "server.url"}


def _drifts(run: RunResult) -> bool:
    """Whether each fifth of the requests waited longer for its first token than the one before, the last twice the first."""
    ordered = sorted(run.records, key=lambda record: (record.intended, record.index))
    waits = [record.ttft_ms for record in ordered if record.completed and record.ttft_ms is not None]
    size = len(waits) // 5
    if size < 10:
        return False
    fifths = [math.fsum(waits[k * size : (k + 1) * size]) / size for k in range(5)]
    return all(later > earlier for earlier, later in pairwise(fifths)) and fifths[-1] > 2 * fifths[0]


FORMAT = "windlass-bench-comparison/2"

# Means over requests of the share of a prompt that came from a cache, and of the part of it that stood elsewhere.
_CACHE_MEASURES = ("cached", "reused")

Verdict = Literal["better", "worse", "no difference shown", "too few requests", "one run cannot tell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure of both sides. measure and statistic name it; first, second: the value of the run, or the mean of the
    values of the runs; interval: of second - first, in `unit`; change: second over first less one, None where the first
    is 0. verdict: whether the second side is better."""

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
    runs: how many of each side. intervals_over: what the intervals cover: "runs", or where a side has one run only
    "requests within a run", which leaves out what differs from run to run. paired: one run each, which sent the same
    requests, so that latencies were compared request by request."""

    lines: tuple[Line, ...]
    cautions: tuple[str, ...]
    differing: dict[str, tuple[str, str]]
    runs: tuple[int, int]
    intervals_over: Literal["runs", "requests within a run"]
    paired: bool
    confidence: float
    resamples: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"format": FORMAT, **asdict(self)}


def compare(
    first: RunResult | Sequence[RunResult],
    second: RunResult | Sequence[RunResult],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Set `second` against `first`, each a run or several runs of the same thing. Equal arguments give equal results.

    Verdicts need at least two runs of each side, three are better. With one of each the intervals are those within the
    runs, and no verdict is given. confidence: of every interval, 0 to 1. resamples, seed: of the bootstrap within runs.

    Raises ValueError for a side without runs, and for one run beside several.
    """
    sides = [[side] if isinstance(side, RunResult) else list(side) for side in (first, second)]
    if not all(sides):
        raise ValueError("a comparison needs a run of each side")
    single = max(map(len, sides)) == 1
    if not single and min(map(len, sides)) == 1:
        raise ValueError("one run of a side cannot be set against several of the other: repeat it, too")
    if single:
        lines = [*_rates(sides[0][0], sides[1][0], confidence)]
        lines += _latencies(sides[0][0], sides[1][0], confidence, resamples, seed)
    else:
        lines = list(_over_runs(sides, confidence))
    return Comparison(
        lines=tuple(lines),
        cautions=tuple(cautions(*sides)),
        differing=differing(*sides),
        runs=(len(sides[0]), len(sides[1])),
        intervals_over="requests within a run" if single else "runs",
        paired=single and _same_requests(sides[0][0], sides[1][0]),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def _over_runs(sides: Sequence[Sequence[RunResult]], confidence: float) -> Iterator[Line]:
    """Every figure's values of the runs, one a run, and Welch's interval of the difference of their means."""
    from windlass.clients.loadtest.intervals import Clustered, compare_means, compare_repeated_shares, enough

    def line(name: tuple[str, str, str], values: list[list[float]], *, less: bool, known: bool = True) -> Line:
        difference = compare_means(values[0], values[1], confidence)
        return _line(*name, difference, lower_is_better=less, known=known, over_runs=True)

    runs = [run for side in sides for run in side]
    summaries = [[run.summary() for run in side] for side in sides]
    rates = [("output", "output_tokens_per_second", "tokens/s"), ("requests", "request_rate", "requests/s")]
    if runs[0].slo and all(run.slo == runs[0].slo for run in runs):
        rates.append(("goodput", "goodput", "requests/s"))
    if all(run.duration_s > 0 for run in runs):
        for measure, name, unit in rates:
            values = [[summary[name] for summary in side] for side in summaries]
            yield line((measure, "per second", unit), values, less=False)
    if all(summary["failed"] + summary["completed"] for side in summaries for summary in side):
        shares = [[(each["failed"], each["failed"] + each["completed"]) for each in side] for side in summaries]
        difference = compare_repeated_shares(shares[0], shares[1], confidence)
        yield _line("failed", "share", "", difference, lower_is_better=True, over_runs=True)
    for measure in _CACHE_MEASURES:
        shares_by_side = [[_shares(run, measure) for run in side] for side in sides]
        if _is_worth_reporting(each for side in shares_by_side for each in side):
            means = [[math.fsum(each) / len(each) for each in side] for side in shares_by_side]
            yield line((measure, "share", ""), means, less=False)
    for measure in MEASURES:
        data = [[Clustered(_by_request(run, measure)) for run in side] for side in sides]
        if not all(len(each) for side in data for each in side):
            continue
        for percent in (None, *PERCENTILES):
            values = [[each.mean() if percent is None else each.percentile(percent) for each in side] for side in data]
            known = all(enough(each, percent) for side in data for each in side)
            yield line((measure, "mean" if percent is None else f"p{percent:g}", "ms"), values, less=True, known=known)


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
    from windlass.clients.loadtest.intervals import compare_means, compare_shares

    runs = (first, second)
    if first.duration_s > 0 and second.duration_s > 0:
        tokens = [_batches(run, _token_arrivals(run)) for run in runs]
        yield _line("output", "per second", "tokens/s", compare_means(tokens[0], tokens[1], confidence))
        ends = [_batches(run, ((r.ended, 1.0) for r in run.completed if r.ended is not None)) for run in runs]
        yield _line("requests", "per second", "requests/s", compare_means(ends[0], ends[1], confidence))
        if first.slo and first.slo == second.slo:
            good = [
                _batches(run, ((r.ended, 1.0) for r in run.completed if r.ended is not None and run.meets_slo(r)))
                for run in runs
            ]
            yield _line("goodput", "per second", "requests/s", compare_means(good[0], good[1], confidence))
    shares = [(failed, failed + len(run.completed)) for run in runs for failed in [sum(run.errors.values())]]
    yield _line("failed", "share", "", compare_shares(shares[0], shares[1], confidence), lower_is_better=True)

    for measure in _CACHE_MEASURES:
        shares_by_side = [_shares(run, measure) for run in runs]
        if _is_worth_reporting(shares_by_side) and min(map(len, shares_by_side)) > 1:
            yield _line(measure, "share", "", compare_means(shares_by_side[0], shares_by_side[1], confidence))


def _shares(run: RunResult, measure: str) -> list[float]:
    """How much of each completed request's prompt was cached, or reused; empty where that is not known of all."""
    shares = [getattr(record, f"{measure}_share") for record in run.completed]
    return [] if None in shares else shares


def _is_worth_reporting(shares: Iterable[Sequence[float]]) -> bool:
    """Whether every run knows, and one of them has some."""
    known = list(shares)
    return all(known) and any(map(any, known))


def _token_arrivals(run: RunResult) -> Iterator[tuple[float, float]]:
    """(when, how many) of the output tokens of completed requests."""
    for record in run.completed:
        per_chunk = tokens_per_chunk(record) if record.output_tokens else 0.0
        yield from ((moment, per_chunk) for moment in record.chunks)


def _batches(run: RunResult, arrivals: Iterator[tuple[float, float]]) -> list[float]:
    """Rates of equal spans of the run; their mean is the rate of the whole."""
    from windlass.clients.loadtest.intervals import BATCHES

    width, start = run.duration_s / BATCHES, start_time(run)
    amounts = [0.0] * BATCHES
    for moment, amount in arrivals:
        amounts[min(max(int((moment - start) / width), 0), BATCHES - 1)] += amount
    return [amount / width for amount in amounts]


def _line(
    measure: str,
    statistic: str,
    unit: str,
    difference: Difference,
    *,
    lower_is_better: bool = False,
    over_runs: bool = False,
    known: bool = True,
) -> Line:
    """over_runs: the interval is one over runs, so that it may be judged. known: the runs have enough requests."""
    interval = difference.interval if known else None
    verdict: Verdict = "no difference shown"
    if interval is None:
        verdict = "too few requests"
    elif not over_runs:
        verdict = "one run cannot tell"
    elif interval.excludes_zero:
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
