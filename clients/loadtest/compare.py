"""Comparison of load tests: differences with their confidence intervals, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from windlass.clients.loadtest import figures
from windlass.clients.loadtest.results import MEASURES, PERCENTILES, RequestRecord, RunResult

if TYPE_CHECKING:
    from windlass.clients.loadtest.intervals import Difference, Interval

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
    first_interval: Interval | None
    second_interval: Interval | None
    interval: Interval | None
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
    paired = single and _same_requests(sides[0][0], sides[1][0])
    lines = [*_rates(sides, confidence)]
    lines += (
        _latencies(sides[0][0], sides[1][0], paired, confidence, resamples, seed)
        if single
        else _latencies_of_runs(sides, confidence)
    )
    return Comparison(
        lines=tuple(lines),
        cautions=tuple(_cautions(*sides)),
        differing=_differing(*sides),
        runs=(len(sides[0]), len(sides[1])),
        intervals_over="requests within a run" if single else "runs",
        paired=paired,
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


def _rates(sides: Sequence[Side], confidence: float) -> Iterator[Line]:
    """Rates and shares. With one run of each side, their intervals are those of the values within a run."""
    from windlass.clients.loadtest.intervals import compare_means, compare_repeated_shares, compare_shares

    runs = [run for side in sides for run in side]
    single = len(runs) == 2

    def line(measure: str, statistic: str, unit: str, values: Callable[[RunResult], Sequence[float]]) -> Line:
        """A figure of a run that is the mean of `values`."""
        data = [[values(run) for run in side] for side in sides]
        first, second = (side[0] if single else [math.fsum(each) / len(each) for each in side] for side in data)
        return _line(measure, statistic, unit, compare_means(first, second, confidence), over_runs=not single)

    if all(run.duration_s > 0 for run in runs):
        yield line("output", "per second", "tokens/s", lambda run: _batches(run, _token_arrivals(run)))
        yield line("requests", "per second", "requests/s", lambda run: _ends(run, run.completed))
        if runs[0].slo and all(run.slo == runs[0].slo for run in runs):
            yield line(
                "goodput", "per second", "requests/s", lambda run: _ends(run, filter(run.meets_slo, run.completed))
            )
    failures = [[(run.failed, run.failed + len(run.completed)) for run in side] for side in sides]
    if single:
        difference = compare_shares(failures[0][0], failures[1][0], confidence)
        yield _line("failed", "share", "", difference, lower_is_better=True)
    elif all(total for side in failures for _, total in side):
        difference = compare_repeated_shares(failures[0], failures[1], confidence)
        yield _line("failed", "share", "", difference, lower_is_better=True, over_runs=True)
    for measure in _CACHE_MEASURES:
        shares = [_shares(run, measure) for run in runs]
        enough = not single or min(map(len, shares)) > 1
        if enough and all(shares) and any(map(any, shares)):  # known in every run, and not 0 everywhere
            yield line(measure, "share", "", partial(_shares, measure=measure))


def _latencies(
    first: RunResult, second: RunResult, paired: bool, confidence: float, resamples: int, seed: int
) -> Iterator[Line]:
    """Latencies of single runs, with intervals within the runs."""
    from windlass.clients.loadtest.intervals import Clustered, compare_latency

    for measure in MEASURES:
        data = [Clustered(_by_request(run, measure, keep=paired)) for run in (first, second)]
        if not len(data[0]) or not len(data[1]):
            continue
        found = compare_latency(
            data[0], data[1], PERCENTILES, resamples=resamples, confidence=confidence, seed=seed, paired=paired
        )
        for statistic, difference in found.items():
            yield _line(measure, statistic, "ms", difference, lower_is_better=True)


def _latencies_of_runs(sides: Sequence[Side], confidence: float) -> Iterator[Line]:
    """Latencies with one value per run, and Welch's interval of the difference of the means."""
    from windlass.clients.loadtest.intervals import Clustered, compare_means, enough

    for measure in MEASURES:
        data = [[Clustered(_by_request(run, measure)) for run in side] for side in sides]
        if not all(len(each) for side in data for each in side):
            continue
        for percent in (None, *PERCENTILES):
            values = [[each.mean() if percent is None else each.percentile(percent) for each in side] for side in data]
            known = all(enough(each, percent) for side in data for each in side)
            statistic, difference = (
                "mean" if percent is None else f"p{percent:g}",
                compare_means(values[0], values[1], confidence),
            )
            yield _line(measure, statistic, "ms", difference, lower_is_better=True, over_runs=True, known=known)


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


def _shares(run: RunResult, measure: str) -> list[float]:
    """Cached or reused share of the prompt of each completed request; empty unless all are known."""
    shares = [record.prompt_share(getattr(record, f"{measure}_tokens")) for record in run.completed]
    known = [share for share in shares if share is not None]
    return known if len(known) == len(shares) else []


def _token_arrivals(run: RunResult) -> Iterator[tuple[float, float]]:
    """(time, number) of the output tokens of completed requests."""
    for record in run.completed:
        per_chunk = record.tokens_per_chunk if record.output_tokens else 0.0
        yield from ((moment, per_chunk) for moment in record.chunks)


def _ends(run: RunResult, records: Iterable[RequestRecord]) -> list[float]:
    """Batches of the ends of requests."""
    return _batches(run, ((record.ended, 1.0) for record in records if record.ended is not None))


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
    first, second = (None if math.isnan(value) else value for value in (difference.first, difference.second))
    return Line(
        measure=measure,
        statistic=statistic,
        unit=unit,
        first=first,
        second=second,
        first_interval=difference.first_interval,
        second_interval=difference.second_interval,
        interval=interval,
        change=second / first - 1 if first and second is not None else None,
        verdict=verdict,
    )
