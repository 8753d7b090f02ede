"""Confidence intervals against brute force, printed tables, published examples and simulated data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from windlass.clients.loadtest import intervals
from windlass.clients.loadtest.intervals import (
    Clustered,
    block_length,
    compare_latency,
    compare_means,
    compare_repeated_shares,
    compare_shares,
    mean_interval,
    student_quantile,
    wilson,
)


def test_resampled_statistics_equal_brute_force():
    """Compare with the statistics of all drawn values in one list."""
    chance = np.random.default_rng(3)
    clusters = [list(chance.exponential(size=chance.integers(0, 6))) for _ in range(30)]
    data = Clustered(clusters)
    means, found = data.resampled([0, 37.5, 50, 99, 100], 20, np.random.default_rng(5))
    again = np.random.default_rng(5)
    block = block_length(30)
    for row in range(20):
        starts = again.integers(30, size=math.ceil(30 / block))
        drawn = [(start + step) % 30 for start in starts for step in range(block)][:30]
        values = [value for request in drawn for value in clusters[request]]
        assert means[row] == pytest.approx(np.mean(values))
        assert found[row] == pytest.approx(np.percentile(values, [0, 37.5, 50, 99, 100]))


def test_statistics_equal_numpy():
    clusters = [[3.0, 1.0], [], [2.0], [10.0, 4.0, 4.0]]
    data, flat = Clustered(clusters), [3.0, 1.0, 2.0, 10.0, 4.0, 4.0]
    assert data.mean() == pytest.approx(np.mean(flat)) and len(data) == 6 and data.clusters == 4
    assert data.percentile(90) == pytest.approx(np.percentile(flat, 90))


def test_blocks_are_neighbours_drawn_uniformly():
    size = 27
    data = Clustered([[float(place)] for place in range(size)])
    means, _ = data.resampled([50], 4000, np.random.default_rng(0))
    assert block_length(size) == 3 and block_length(1000) == 10 and block_length(1) == 1
    assert means.mean() == pytest.approx((size - 1) / 2, abs=0.15)
    # A third of the independent draws gives about three times the variance of the mean.
    assert means.var() > 1.8 * (size**2 - 1) / 12 / size


def coverage(truth: float, make, trials: int) -> dict[str, float]:
    """Share of the 95 % intervals of second - first that contain the true difference, by statistic."""
    hits = {"mean": 0, "p50": 0, "p90": 0}
    for trial in range(trials):
        chance = np.random.default_rng(1000 + trial)
        first, second = make(chance), make(chance) + truth
        data = [Clustered([[value] for value in values]) for values in (first, second)]
        found = compare_latency(*data, [50, 90], resamples=250, confidence=0.95, seed=trial)
        for name in hits:
            hits[name] += found[name].interval.low <= truth <= found[name].interval.high
    return {name: count / trials for name, count in hits.items()}


@pytest.mark.slow
def test_coverage_of_intervals_of_independent_values():
    found = coverage(0.3, lambda chance: chance.exponential(size=120), trials=110)
    for name, share in found.items():
        assert 0.89 <= share <= 0.995, name


def autoregressive(chance: np.random.Generator) -> np.ndarray:
    """Correlated neighbours, as in a queue: each value is 0.6 of the previous one plus noise."""
    values = [chance.normal() / 0.8]
    for new in chance.normal(size=249):
        values.append(0.6 * values[-1] + new)
    return np.array(values)


@pytest.mark.slow
def test_coverage_of_block_bootstrap_for_correlated_values(monkeypatch):
    with_blocks = coverage(0.0, autoregressive, trials=70)["mean"]
    monkeypatch.setattr(intervals, "block_length", lambda clusters: 1)
    without = coverage(0.0, autoregressive, trials=70)["mean"]
    assert with_blocks >= 0.85 > without + 0.05


def test_pairing_cancels_differences_between_requests():
    chance = np.random.default_rng(1)
    lengths = chance.choice([100.0, 1000.0], size=200)
    first = Clustered([[value] for value in lengths + chance.normal(size=200)])
    second = Clustered([[value] for value in lengths + 3 + chance.normal(size=200)])
    alone, paired = (
        compare_latency(first, second, [50], resamples=300, confidence=0.95, seed=0, paired=pairs)["mean"].interval
        for pairs in (False, True)
    )
    assert not alone.excludes_zero and paired.excludes_zero
    assert paired.low < second.mean() - first.mean() < paired.high
    # Of 200 differences with deviation √2: an interval of about 2 · 1.96 · 0.1.
    assert 0.25 < paired.high - paired.low < 0.55
    with pytest.raises(ValueError, match="200 and 1"):
        compare_latency(first, Clustered([[1.0]]), [50], resamples=100, confidence=0.95, seed=0, paired=True)


def test_intervals_depend_on_the_seed():
    data = [Clustered([[value] for value in np.random.default_rng(k).exponential(size=50)]) for k in range(2)]
    runs = [compare_latency(*data, [50], resamples=200, confidence=0.9, seed=seed)["mean"] for seed in (4, 4, 5)]
    assert runs[0] == runs[1] != runs[2]


def test_too_few_values_have_no_interval():
    few = Clustered([[1.0]] * 19)
    some = Clustered([[float(k)] for k in range(99)])
    enough = Clustered([[float(k)] for k in range(100)])
    percents = [50, 90, 95, 99]

    def known(first, second):
        found = compare_latency(first, second, percents, resamples=100, confidence=0.95, seed=0)
        return [name for name, difference in found.items() if difference.interval is not None]

    assert known(few, enough) == []
    assert known(some, enough) == ["mean", "p50", "p90"]
    assert known(enough, enough) == ["mean", "p50", "p90", "p95"]
    # Many gaps of few requests do not suffice.
    assert known(Clustered([[1.0, 2.0] * 250]), enough) == []


@pytest.mark.parametrize(
    ("confidence", "freedom", "printed"),  # any table of Student's t
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.99, 3, 5.841),
        (0.95, 5, 2.571),
        (0.95, 10, 2.228),
        (0.95, 19, 2.093),
        (0.95, 38, 2.024),
        (0.99, 19, 2.861),
        (0.9, 30, 1.697),
    ],
)
def test_student_quantile_equals_printed_tables(confidence, freedom, printed):
    assert student_quantile(confidence, freedom) == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize("beyond", [0.5, 0.05, 1e-3, 1e-6, 1e-9, 1e-12])
def test_student_quantile_far_out(beyond):
    """One and two degrees of freedom have closed forms."""
    beyond = 1 - (1 - beyond)  # as exactly as a float represents the confidence
    assert student_quantile(1 - beyond, 1) == pytest.approx(1 / math.tan(math.pi * beyond / 2), rel=1e-9)
    assert student_quantile(1 - beyond, 2) == pytest.approx(
        (1 - beyond) / math.sqrt(beyond * (2 - beyond) / 2), rel=1e-9
    )
    assert student_quantile(1 - beyond, 1) > student_quantile(1 - beyond, 1.5) > student_quantile(1 - beyond, 2)


def test_means_are_compared_by_welch():
    first, second = [10.0, 12.0, 9.0, 11.0, 13.0, 10.5], [14.0, 15.5, 13.0, 16.0, 12.5, 15.0]
    found = compare_means(first, second, 0.95)
    a, b = np.var(first, ddof=1) / 6, np.var(second, ddof=1) / 6
    freedom = (a + b) ** 2 / (a**2 / 5 + b**2 / 5)
    half_width = 2.230 * math.sqrt(a + b)  # t at 9.97 degrees of freedom; 2.228 at ten
    assert 9.9 < freedom < 10
    assert (found.interval.low + found.interval.high) / 2 == pytest.approx(np.mean(second) - np.mean(first))
    assert (found.interval.high - found.interval.low) / 2 == pytest.approx(half_width, rel=3e-3)
    assert found.interval.excludes_zero


@pytest.mark.slow
def test_coverage_of_batch_means():
    """Two Poisson processes whose rates differ by 1 per second, counted in twenty spans of 5 s."""
    hits = 0
    for trial in range(300):
        chance = np.random.default_rng(trial)
        found = compare_means(chance.poisson(4 * 5, size=20) / 5, chance.poisson(5 * 5, size=20) / 5, 0.95)
        hits += found.interval.low <= 1 <= found.interval.high
    assert 0.92 <= hits / 300 <= 0.98


def test_constant_values_have_an_interval_of_no_width():
    found = compare_means([5.0] * 4, [5.0] * 4, 0.95)
    assert (found.interval.low, found.interval.high) == (0.0, 0.0) and not found.interval.excludes_zero


def test_mean_interval_of_four_values():
    """Mean 5, standard error sqrt(20/3/4), t = 3.1824 at 3 degrees of freedom."""
    mean, interval = mean_interval([2.0, 4.0, 6.0, 8.0], 0.95)
    assert mean == 5 and interval.high - 5 == pytest.approx(3.182446 * math.sqrt(20 / 12), rel=1e-6)
    assert 5 - interval.low == pytest.approx(interval.high - 5)
    assert mean_interval([3.0], 0.95) == (3.0, None)


def test_shares_equal_newcombes_paper():
    """Table II, example (a), of Newcombe (1998): 56/70 against 48/80, method 10: 0.0524 to 0.3339."""
    found = compare_shares((48, 80), (56, 70), 0.95)
    assert found.interval.low == pytest.approx(0.0524, abs=5e-5)
    assert found.interval.high == pytest.approx(0.3339, abs=5e-5)


def test_equal_small_shares_in_all_runs_do_not_prove_a_difference():
    few = compare_repeated_shares([(0, 100)] * 3, [(1, 100)] * 3, 0.95)
    assert (few.first, few.second) == (0, 0.01) and not few.interval.excludes_zero
    assert compare_repeated_shares([(0, 100)] * 3, [(20, 100)] * 3, 0.95).interval.excludes_zero
    assert not compare_repeated_shares([(0, 100), (40, 100)], [(60, 100), (20, 100)], 0.95).interval.excludes_zero


def test_wilson_interval():
    """Its ends solve |p - h/n| = z sqrt(p (1 - p) / n)."""
    ends = wilson(15, 148, 0.95)
    for share in (ends.low, ends.high):
        assert abs(share - 15 / 148) == pytest.approx(1.959964 * math.sqrt(share * (1 - share) / 148), rel=1e-5)
    assert wilson(0, 50, 0.95).low == 0 and wilson(50, 50, 0.95).high == 1
    assert compare_shares((0, 0), (1, 5), 0.95).interval is None
