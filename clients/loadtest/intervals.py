"""How sure a figure of a load test is: intervals for percentiles, means, rates and shares, and for their differences.

Knows arrays of numbers, no runs and no files. Importing it loads numpy and mpmath.

Latencies: a circular block bootstrap over requests in the order they were to be sent (Politis and Romano, "A circular
block-resampling procedure for stationary data", 1992). Neighbours share a queue and a batch, so they are drawn
together, in blocks of about the cube root of their number. A measure with several values per request, such as the gaps
between tokens, keeps each request's values together. Intervals are percentile intervals. Where both runs sent the same
requests, each resample draws the same ones from both: what long and short requests differ by then cancels out.

Several runs of each side: their values of a figure, one a run, and Welch's interval of the difference of the means.

Rates of one run: batch means (Schmeiser, "Batch size effects in the analysis of simulation output", 1982): the run in
twenty equal spans of time, Student's t over their rates, Welch's for a difference. Shares: Wilson's interval, Newcombe's method
10 for a difference ("Interval estimation for the difference between independent proportions", 1998).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

MIN_REQUESTS = 20  # fewer say nothing reliable about a mean or a median
MIN_BEYOND = 5  # values that must lie above a percentile, so that resampling can move it
BATCHES = 20

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """The two ends, low first."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Difference:
    """Two values of one figure and the interval of second - first; intervals are None where the data are too few."""

    first: float
    second: float
    first_interval: Interval | None
    second_interval: Interval | None
    interval: Interval | None


class Clustered:
    """Values in clusters (requests), in order. Statistics of resamples are exact, without copying values."""

    def __init__(self, clusters: Sequence[Sequence[float]]) -> None:
        sizes = [len(cluster) for cluster in clusters]
        values = np.fromiter((value for cluster in clusters for value in cluster), dtype=np.float64, count=sum(sizes))
        owner = np.repeat(np.arange(len(sizes)), sizes)
        order = np.argsort(values, kind="stable")
        self.clusters = len(sizes)
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.sums = np.bincount(owner, weights=values, minlength=len(sizes))  # per cluster
        self._sorted, self._owner = values[order], owner[order]

    def __len__(self) -> int:
        return len(self._sorted)

    def percentile(self, percent: float) -> float:
        """Linear between order statistics, as in a run's summary."""
        return float(np.percentile(self._sorted, percent))

    def mean(self) -> float:
        return float(self.sums.sum() / len(self))

    def resampled(
        self, percents: Sequence[float], resamples: int, generator: np.random.Generator
    ) -> tuple[_Floats, _Floats]:
        """Means [R] and percentiles [R, P] of `resamples` circular block resamples."""
        means, found = np.empty(resamples), np.empty((resamples, len(percents)))
        block = block_length(self.clusters)
        draws = math.ceil(self.clusters / block)
        steps = np.arange(block)
        for row in range(resamples):
            starts = generator.integers(self.clusters, size=draws)
            chosen = ((starts[:, None] + steps) % self.clusters).ravel()[: self.clusters]
            counts = np.bincount(chosen, minlength=self.clusters)  # how often each request was drawn
            total = int(counts @ self.sizes)
            if total == 0:
                means[row], found[row] = math.nan, math.nan
                continue
            means[row] = counts @ self.sums / total
            found[row] = self._weighted_percentiles(np.cumsum(counts[self._owner]), total, percents)
        return means, found

    def _weighted_percentiles(self, half_width: NDArray[np.int64], total: int, percents: Sequence[float]) -> _Floats:
        """Percentiles of the sorted values, each as often as it was drawn; reach: how many are at or before it."""
        positions = (total - 1) * np.asarray(percents) / 100
        below = np.floor(positions)
        low = self._sorted[np.searchsorted(half_width, below, side="right")]
        high = self._sorted[np.searchsorted(half_width, np.minimum(below + 1, total - 1), side="right")]
        result: _Floats = low + (high - low) * (positions - below)
        return result


def block_length(clusters: int) -> int:
    """Requests drawn together: the cube root of their number, rounded up."""
    return max(1, math.ceil(round(math.pow(clusters, 1 / 3), 6)))


def compare_latency(
    first: Clustered,
    second: Clustered,
    percents: Sequence[float],
    *,
    resamples: int,
    confidence: float,
    seed: int,
    paired: bool = False,
) -> dict[str, Difference]:
    """`mean` and `p50`, … of two runs and their difference. Equal arguments give equal results.

    paired: cluster k of both is the same request, and resamples draw the same clusters from both. Raises ValueError
    where their numbers differ all the same.
    """
    if paired and first.clusters != second.clusters:
        raise ValueError(f"pairs of {first.clusters} and {second.clusters} requests")
    generators = np.random.default_rng(seed).spawn(2)
    if paired:
        generators = [np.random.default_rng(seed), np.random.default_rng(seed)]
    drawn = [data.resampled(percents, resamples, g) for data, g in zip((first, second), generators, strict=True)]
    found = {}
    for position, name in enumerate(["mean", *(f"p{percent:g}" for percent in percents)]):
        percent = None if position == 0 else percents[position - 1]
        values = [data.mean() if percent is None else data.percentile(percent) for data in (first, second)]
        a, b = (means if percent is None else rows[:, position - 1] for means, rows in drawn)
        known = [enough(data, percent) for data in (first, second)]
        found[name] = Difference(
            values[0],
            values[1],
            _interval(a, confidence) if known[0] else None,
            _interval(b, confidence) if known[1] else None,
            _interval(b - a, confidence) if all(known) else None,
        )
    return found


def enough(data: Clustered, percent: float | None) -> bool:
    """Whether a percentile (None: the mean) can be told from these data."""
    if int((data.sizes > 0).sum()) < MIN_REQUESTS:
        return False
    return percent is None or len(data) * (1 - percent / 100) >= MIN_BEYOND - 1e-9


def _interval(values: _Floats, confidence: float) -> Interval:
    rest = (1 - confidence) / 2
    low, high = np.nanquantile(values, [rest, 1 - rest])
    return Interval(float(low), float(high))


def compare_means(first: Sequence[float], second: Sequence[float], confidence: float) -> Difference:
    """Means of two or more independent values of each side, and Welch's interval of their difference."""
    (a, around_a), (b, around_b) = mean_interval(first, confidence), mean_interval(second, confidence)
    errors = [float(np.var(values, ddof=1)) / len(values) for values in (first, second)]
    total = sum(errors)
    gap = b - a
    parts = sum(error**2 / (len(values) - 1) for error, values in zip(errors, (first, second), strict=True))
    half_width = student_quantile(confidence, total**2 / parts) * math.sqrt(total) if parts > 0 else 0.0
    return Difference(a, b, around_a, around_b, Interval(gap - half_width, gap + half_width))


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, Interval | None]:
    """The mean of independent values and Student's interval of it, None where there are fewer than two."""
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) < 2:
        return mean, None
    half_width = student_quantile(confidence, len(data) - 1) * math.sqrt(float(data.var(ddof=1)) / len(data))
    return mean, Interval(mean - half_width, mean + half_width)


def compare_shares(first: tuple[int, int], second: tuple[int, int], confidence: float) -> Difference:
    """Shares as (hits, of how many); nothing of nothing has no interval."""
    if not first[1] or not second[1]:
        shares = [hits / total if total else math.nan for hits, total in (first, second)]
        return Difference(shares[0], shares[1], None, None, None)
    p, q = first[0] / first[1], second[0] / second[1]
    a, b = wilson(*first, confidence), wilson(*second, confidence)
    low = q - p - math.hypot(q - b.low, a.high - p)
    high = q - p + math.hypot(b.high - q, p - a.low)
    return Difference(p, q, a, b, Interval(low, high))


def compare_repeated_shares(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]], confidence: float
) -> Difference:
    """Shares of several runs of each side. The interval holds both what the runs vary by and what chance does within
    them: runs that all failed at the same few requests are no proof."""
    means = compare_means([h / n for h, n in first], [h / n for h, n in second], confidence)
    pooled = compare_shares(_total(first), _total(second), confidence)
    if means.interval is None or pooled.interval is None:
        return means
    low, high = min(means.interval.low, pooled.interval.low), max(means.interval.high, pooled.interval.high)
    return replace(means, interval=Interval(low, high))


def _total(shares: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(hits for hits, _ in shares), sum(total for _, total in shares)


def wilson(hits: int, total: int, confidence: float) -> Interval:
    """Wilson's score interval of hits / total."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, square = hits / total, z * z / total
    middle = (share + square / 2) / (1 + square)
    half_width = z / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return Interval(0.0 if hits == 0 else middle - half_width, 1.0 if hits == total else middle + half_width)


def student_quantile(confidence: float, freedom: float) -> float:
    """Two-sided quantile of Student's t, for 1 degree of freedom or more.

    The probability beyond t is the regularized incomplete beta function (Abramowitz and Stegun, 26.7.1). In logarithms it
    falls nearly evenly, so that a secant finds the root however far out it lies.
    """
    share = 1 - confidence

    def surplus(log_t: mpmath.mpf) -> mpmath.mpf:
        x = freedom / (freedom + mpmath.exp(2 * log_t))
        return mpmath.log(mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True) / share)

    return float(mpmath.exp(mpmath.findroot(surplus, math.log(-NormalDist().inv_cdf(share / 2)))))
