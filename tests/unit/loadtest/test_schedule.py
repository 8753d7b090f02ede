"""Arrivals against their statistics, drawn in numbers that make a chance failure of a right schedule negligible."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from windlass.clients.loadtest import load_plan as module
from windlass.clients.loadtest.load_plan import Arrivals, Replay, intended_times, ramp
from windlass.clients.loadtest.target import LoadTestError

N = 40_000


def gaps(schedule, seed=1, count=N):
    times = list(itertools.islice(schedule.times(seed), count + 1))
    assert times[0] == 0
    return np.diff(times)


def offered(schedule, count=None, seconds=None):
    return schedule.offered_rate(intended_times(schedule, 1, count, seconds))


def test_constant_arrivals_are_evenly_spaced():
    assert np.allclose(gaps(Arrivals(8.0, None)), 1 / 8, rtol=1e-9)


def test_poisson_gaps_are_exponential():
    drawn = gaps(Arrivals(5.0))
    # Six standard errors: of the mean 1/sqrt(N), of the variance sqrt(8/N) for the exponential.
    assert drawn.mean() == pytest.approx(0.2, rel=6 / math.sqrt(N))
    assert drawn.var() == pytest.approx(0.04, rel=6 * math.sqrt(8 / N))
    for quantile in (0.1, 0.5, 0.9, 0.99):
        expected = -math.log(1 - quantile) / 5
        assert (drawn <= expected).mean() == pytest.approx(quantile, abs=6 * math.sqrt(quantile * (1 - quantile) / N))
    correlation = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(correlation) < 6 / math.sqrt(N)  # without memory


def test_poisson_counts_have_their_mean_for_a_variance():
    times = np.cumsum(gaps(Arrivals(10.0)))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(10, rel=0.02)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=6 * math.sqrt(2 / len(counts)))


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 2.0, 4.0])
def test_gamma_gaps_have_the_mean_of_the_rate_and_their_own_spread(burstiness):
    drawn = gaps(Arrivals(3.0, burstiness))
    cv = 1 / math.sqrt(burstiness)
    assert drawn.mean() == pytest.approx(1 / 3, rel=6 * cv / math.sqrt(N))
    # Kurtosis of the gamma distribution: 3 + 6/shape; the relative error of a standard deviation follows from it.
    error = math.sqrt((2 + 6 / burstiness) / N) / 2
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=6 * (error + cv / math.sqrt(N)))


@pytest.mark.parametrize("burstiness", [None, 1.0])
@pytest.mark.parametrize(("start", "end"), [(10.0, 100.0), (100.0, 10.0), (0.0, 50.0), (20.0, 20.0)])
def test_a_ramp_has_its_rate_at_every_time(start, end, burstiness):
    seconds = 400.0
    times = np.array(intended_times(ramp(start, end, None, seconds, burstiness), 3, None, seconds))
    assert np.all(np.diff(times) >= 0)
    total = (start + end) / 2 * seconds
    assert len(times) == pytest.approx(total, abs=2 if burstiness is None else 6 * math.sqrt(total))
    for begin in range(0, 400, 50):
        expected = 50 * (start + (end - start) * (begin + 25) / seconds)
        seen = ((times >= begin) & (times < begin + 50)).sum()
        assert seen == pytest.approx(expected, abs=2 if burstiness is None else 6 * math.sqrt(expected))


def test_a_ramp_over_a_number_of_requests_ends_with_them():
    times = intended_times(ramp(1.0, 9.0, 100, None, None), 0, 100, None)
    assert len(times) == 100 and times[-1] == pytest.approx(20, abs=0.2)
    assert times[-1] - times[-2] == pytest.approx(1 / 9, rel=0.05)


def test_a_ramp_stays_at_its_end_rate():
    times = np.array(list(itertools.islice(Arrivals(1.0, None, 4.0, 10.0).times(0), 200)))
    late = np.diff(times[times > 10])
    assert len(late) > 100 and np.allclose(late, 0.25)


def test_the_same_seed_gives_the_same_times_and_another_others():
    schedule = Arrivals(5.0, 0.5)
    assert np.array_equal(gaps(schedule, 7, 100), gaps(schedule, 7, 100))
    assert not np.array_equal(gaps(schedule, 7, 100), gaps(schedule, 8, 100))


def test_a_replay_keeps_its_distances():
    schedule = Replay([100.0, 100.5, 102.0], speed=2.0)
    assert list(schedule.times(0)) == [0.0, 0.25, 1.0]
    assert offered(schedule) == 2.0
    assert offered(Replay([1.0, 1.0])) is None and offered(Replay([3.0])) is None
    assert offered(Replay([0.0, 1e-320])) is None  # no number


def test_the_offered_rate_is_that_of_what_is_sent():
    trace = Replay([0.0, 1.0, 2.0, 2.1, 2.2, 2.3])
    assert offered(trace, 3, None) == offered(trace, None, 2.05) == 1.0
    assert offered(ramp(1.0, 9.0, 100, None, None), 100, None) == pytest.approx(5.0, rel=0.02)
    assert offered(ramp(0.0, 8.0, None, 50.0, None), None, 50.0) == pytest.approx(4.0, rel=0.03)
    # A run that ends before its ramp does has seen the beginning of it alone.
    assert offered(ramp(1.0, 9.0, None, 100.0, None), 12, None) == pytest.approx(1.4, rel=0.1)


@pytest.mark.parametrize("burstiness", [None, 1.0, 0.5])
def test_a_steady_rate_is_offered_as_it_was_asked_for(burstiness):
    assert offered(Arrivals(5.0, burstiness), 3, None) == offered(Arrivals(5.0, burstiness), 1, None) == 5.0


def test_a_mistyped_rate_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_REQUESTS", 100)
    assert len(intended_times(Arrivals(1e12, None), 0, 100, None)) == 100
    for count, seconds in ((101, None), (None, 60.0)):
        with pytest.raises(LoadTestError, match="more than 100 requests"):
            intended_times(Arrivals(1e12, None), 0, count, seconds)


def test_both_bounds_hold():
    schedule = Arrivals(10.0, None)
    assert intended_times(schedule, 0, 3, None) == [0.0, 0.1, 0.2]
    assert len(intended_times(schedule, 0, None, 0.95)) == 10
    assert len(intended_times(schedule, 0, 4, 0.95)) == 4
    assert intended_times(Replay([0.0, 1.0, 2.0]), 0, None, 1.5) == [0.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrivals(0.0),
        lambda: Arrivals(-1.0),
        lambda: Arrivals(math.inf),
        lambda: Arrivals(math.nan),
        lambda: Arrivals(1.0, 0.0),
        lambda: Arrivals(1.0, math.nan),
        lambda: Arrivals(1.0, 1.0, 0.0, 5.0),
        lambda: ramp(1.0, 2.0, None, None, None),
        lambda: Replay([0.0], speed=0.0),
    ],
)
def test_a_rate_that_makes_no_schedule_is_refused(make):
    with pytest.raises(LoadTestError):
        make()
