"""Confidence intervals of percentiles, means, rates and shares, and of their differences. Importing it loads numpy and mpmath.

Latencies: percentile intervals of a circular block bootstrap over requests in the order of intended sends (Politis and
Romano, "A circular block-resampling procedure for stationary data", 1992). Neighbouring requests share a queue and a batch
and are therefore drawn together, in blocks of about the cube root of their number. The values of a request, such as the
gaps between its tokens, stay together. Where both runs sent the same requests, each resample draws the same ones from both,
which cancels the differences between long and short requests.

Several runs of each side: Welch's interval of the difference of the means, with one value per run.

Rates of one run: batch means (Schmeiser, "Batch size effects in the analysis of simulation output", 1982) over twenty equal
spans of time, with Student's t, and Welch's for a difference. Shares: Wilson's interval, and Newcombe's method 10 for a
difference ("Interval estimation for the difference between independent proportions", 1998).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

MIN_REQUESTS = 20  # for a reliable mean or median
MIN_BEYOND = 5  # values above a percentile, so that resampling can move it
BATCHES = 20

_Floats = NDArray[np.float64]


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Difference:
    """Two values of one figure and the interval of second - first. Intervals are None where there are too few data."""

    first: float
    second: float
    first_interval: Interval | None
    second_interval: Interval | None
    interval: Interval | None


class Clustered:
    """Values in ordered clusters (requests). Statistics of resamples are exact, without copying values."""

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
        """The percentile, linear between order statistics as in `results.percentile`."""
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
            counts = np.bincount(chosen, minlength=self.clusters)  # how often each cluster was drawn
            total = int(counts @ self.sizes)
            if total == 0:
                means[row], found[row] = math.nan, math.nan
                continue
            means[row] = counts @ self.sums / total
            found[row] = self._weighted_percentiles(np.cumsum(counts[self._owner]), total, percents)
        return means, found

    def _weighted_percentiles(self, ranks: NDArray[np.int64], total: int, percents: Sequence[float]) -> _Floats:
        """Percentiles of a resample. ranks: number of drawn values up to each sorted value. total: number of drawn values."""
        positions = (total - 1) * np.asarray(percents) / 100
        below = np.floor(positions)
        low = self._sorted[np.searchsorted(ranks, below, side="right")]
        high = self._sorted[np.searchsorted(ranks, np.minimum(below + 1, total - 1), side="right")]
        result: _Floats = low + (high - low) * (positions - below)
        return result


def block_length(clusters: int) -> int:
    """Number of clusters drawn together: the cube root of their number, rounded up."""
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
    """`mean` and `p50`, … of two runs and their differences. Equal arguments give equal results.

    paired: cluster k of both is the same request, and resamples draw the same clusters from both. Raises ValueError
    where the numbers of clusters differ.
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
    """Whether the data suffice for an interval of a percentile (None: of the mean)."""
    if int((data.sizes > 0).sum()) < MIN_REQUESTS:
        return False
    return percent is None or len(data) * (1 - percent / 100) >= MIN_BEYOND - 1e-9


def _interval(values: _Floats, confidence: float) -> Interval:
    rest = (1 - confidence) / 2
    low, high = np.nanquantile(values, [rest, 1 - rest])
    return Interval(float(low), float(high))


def compare_means(first: Sequence[float], second: Sequence[float], confidence: float) -> Difference:
    """Means of independent values, two or more of each side, and Welch's interval of their difference."""
    (a, around_a), (b, around_b) = mean_interval(first, confidence), mean_interval(second, confidence)
    errors = [float(np.var(values, ddof=1)) / len(values) for values in (first, second)]
    total = sum(errors)
    gap = b - a
    parts = sum(error**2 / (len(values) - 1) for error, values in zip(errors, (first, second), strict=True))
    half_width = student_quantile(confidence, total**2 / parts) * math.sqrt(total) if parts > 0 else 0.0
    return Difference(a, b, around_a, around_b, Interval(gap - half_width, gap + half_width))


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, Interval | None]:
    """The mean of independent values and its Student's interval, None for fewer than two values."""
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) < 2:
        return mean, None
    half_width = student_quantile(confidence, len(data) - 1) * math.sqrt(float(data.var(ddof=1)) / len(data))
    return mean, Interval(mean - half_width, mean + half_width)


def compare_shares(first: tuple[int, int], second: tuple[int, int], confidence: float) -> Difference:
    """Shares as (hits, total) and Newcombe's interval of their difference. Shares of nothing have no interval."""
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
    """Shares of several runs of each side.

    The interval covers the variation between the runs and the chance within them: equal, small numbers of failures in all
    runs of a side do not prove a difference.
    """
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

    The probability beyond t is the regularized incomplete beta function (Abramowitz and Stegun, 26.7.1). Its logarithm is
    nearly linear in log t, so that the secant method finds the root also far out.
    """
    share = 1 - confidence

    def surplus(log_t: mpmath.mpf) -> mpmath.mpf:
        x = freedom / (freedom + mpmath.exp(2 * log_t))
        return mpmath.log(mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True) / share)

    return float(mpmath.exp(mpmath.findroot(surplus, math.log(-NormalDist().inv_cdf(share / 2)))))
