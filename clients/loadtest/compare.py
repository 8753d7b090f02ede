"""Comparison of load tests: differences with their confidence intervals, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from windlass.clients.loadtest import figures
from windlass.clients.loadtest.results import MEASURES, PERCENTILES, RunResult

if TYPE_CHECKING:
    from windlass.clients.loadtest.intervals import Difference

FORMAT = "windlass-bench-comparison/2"

_PER_RUN_SETTINGS = {"seed"}  # settings that may differ between the runs of one side
_CACHE_MEASURES = ("cached", "reused")  # shares of a prompt, averaged over requests

Side = Sequence[RunResult]

Verdict = Literal["better", "worse", "no difference shown", "too few requests", "one run cannot tell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure of both sides.

    measure, statistic: its name. first, second: the value of the run, or the mean of the values of the runs. interval: of
    second - first, in `unit`. change: second / first - 1, None where the first is 0. verdict: whether the second side is
    better.
    """

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
    """The result of `compare`.

    cautions: facts to know before relying on the figures. differing: settings with different values. runs: how many of
    each side. intervals_over: "runs", or "requests within a run" where each side has one run; the latter leaves out
    differences from run to run. paired: both single runs sent the same requests, so latencies were compared per request.
    """

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
    """Compare `second` with `first`, each a run or several runs with the same settings. Equal arguments give equal results.

    Verdicts need two or more runs of each side, better three. With one run of each the intervals are those within the runs,
    without a verdict. confidence: of every interval, 0 to 1. resamples, seed: of the bootstrap within runs.

    Raises ValueError for a side without runs, and for one run of one side with several of the other.
    """
    sides = [[side] if isinstance(side, RunResult) else list(side) for side in (first, second)]
    if not all(sides):
        raise ValueError("a comparison needs a run of each side")
    single = max(map(len, sides)) == 1
    if not single and min(map(len, sides)) == 1:
        raise ValueError("one run of a side cannot be compared with several of the other: repeat it, too")
    if single:
        lines = [*_rates(sides[0][0], sides[1][0], confidence)]
        lines += _latencies(sides[0][0], sides[1][0], confidence, resamples, seed)
    else:
        lines = list(_over_runs(sides, confidence))
    return Comparison(
        lines=tuple(lines),
        cautions=tuple(_cautions(*sides)),
        differing=_differing(*sides),
        runs=(len(sides[0]), len(sides[1])),
        intervals_over="requests within a run" if single else "runs",
        paired=single and _same_requests(sides[0][0], sides[1][0]),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def _differing(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    """Settings and properties of the server, except its URL, with different values on both sides; absent ones as –."""
    sides = [[_settings(run) for run in side] for side in (first, second)]
    found = {}
    for name in dict.fromkeys(name for side in sides for settings in side for name in settings):
        values = [list(dict.fromkeys(settings.get(name, "–") for settings in side)) for side in sides]
        if sorted(values[0]) != sorted(values[1]):
            found[name] = (", ".join(values[0]), ", ".join(values[1]))
    return found


def _settings(run: RunResult) -> dict[str, str]:
    found = dict([*figures.flatten_settings(run.settings), *figures.flatten_settings(run.server, "server.")])
    found.pop("server.url", None)
    return found


def _cautions(first: Side, second: Side) -> Iterator[str]:
    """Facts to know before relying on the figures, a line each."""
    for name, side in (("first", first), ("second", second)):
        for number, run in enumerate(side, 1):
            run_name = f"{name} run" if len(side) == 1 else f"{name} side's run {number}"
            yield from (f"{run_name}: {warning}" for warning in run.warnings())
            if run.duration_s <= 0:
                yield f"{run_name}: it took no time, so its rates are unknown"
            if _ttft_grows(run):
                yield f"{run_name}: time to first token kept growing, so its figures depend on the length of the run"
        settings = [_settings(run) for run in side]
        unequal = [
            key
            for key in settings[0]
            if key not in _PER_RUN_SETTINGS and any(other.get(key) != settings[0][key] for other in settings)
        ]
        if unequal:
            yield f"the runs of the {name} side differ in {', '.join(unequal)}"
    if any(run.slo != first[0].slo for run in (*first, *second)):
        yield "the runs had different SLOs: their goodput is not compared"


def _ttft_grows(run: RunResult) -> bool:
    """Whether each fifth of the requests waited longer for the first token than the one before, and the last twice the first."""
    ordered = sorted(run.records, key=lambda record: (record.intended, record.index))
    waits = [record.ttft_ms for record in ordered if record.completed and record.ttft_ms is not None]
    size = len(waits) // 5
    if size < 10:
        return False
    fifths = [math.fsum(waits[k * size : (k + 1) * size]) / size for k in range(5)]
    return all(later > earlier for earlier, later in pairwise(fifths)) and fifths[-1] > 2 * fifths[0]


def _over_runs(sides: Sequence[Sequence[RunResult]], confidence: float) -> Iterator[Line]:
    """Each figure with one value per run, and Welch's interval of the difference of the means."""
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
    """Whether both runs sent prompts of the same lengths in the same order, as equal seeds do.

    Failed requests are not compared: their lengths may be unknown.
    """
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
    """Values of each completed request in the order of sending. keep: include an empty list for each other request."""
    ordered = sorted(run.records, key=lambda record: (record.index,) if keep else (record.intended, record.index))
    values = (record.values(measure) if record.completed else [] for record in ordered)
    return [each for each in values if each or keep]


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
    shares = [(run.failed, run.failed + len(run.completed)) for run in runs]
    yield _line("failed", "share", "", compare_shares(shares[0], shares[1], confidence), lower_is_better=True)

    for measure in _CACHE_MEASURES:
        shares_by_side = [_shares(run, measure) for run in runs]
        if _is_worth_reporting(shares_by_side) and min(map(len, shares_by_side)) > 1:
            yield _line(measure, "share", "", compare_means(shares_by_side[0], shares_by_side[1], confidence))


def _shares(run: RunResult, measure: str) -> list[float]:
    """Cached or reused share of the prompt of each completed request; empty unless all are known."""
    shares = [getattr(record, f"{measure}_share") for record in run.completed]
    return [] if None in shares else shares


def _is_worth_reporting(shares: Iterable[Sequence[float]]) -> bool:
    """Whether the shares of every run are known, and one is above 0."""
    known = list(shares)
    return all(known) and any(map(any, known))


def _token_arrivals(run: RunResult) -> Iterator[tuple[float, float]]:
    """(time, number) of the output tokens of completed requests."""
    for record in run.completed:
        per_chunk = record.tokens_per_chunk if record.output_tokens else 0.0
        yield from ((moment, per_chunk) for moment in record.chunks)


def _batches(run: RunResult, arrivals: Iterator[tuple[float, float]]) -> list[float]:
    """Rates within equal spans of the run; their mean is the rate of the run."""
    from windlass.clients.loadtest.intervals import BATCHES

    width, start = run.duration_s / BATCHES, run.start
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
    """over_runs: the interval covers runs, so that it allows a verdict. known: the runs have enough requests."""
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
