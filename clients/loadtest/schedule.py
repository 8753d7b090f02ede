"""When requests are to be sent: closed loops, constant, random and ramping rates, and times read from a trace.

Gives intended times in seconds from the start of the run; knows nothing of requests and of no clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from windlass.clients.loadtest.errors import LoadTestError

MOST_REQUESTS = 10_000_000  # more than one generator can send; beyond it a mistyped rate would fill the memory


class Schedule(Protocol):
    """An open loop: arrivals that do not wait for answers."""

    def offered_rate(self, times: Sequence[float]) -> float | None:
        """Requests per second that it asks for by these times of its own; None where there is no such number."""

    def times(self, seed: int) -> Iterator[float]:
        """Intended times, ascending from 0; the same ones for the same seed. Endless unless the schedule itself ends."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at a rate.

    rate: requests per second. burstiness: the shape of the gamma distribution that gaps are drawn from, whose
    coefficient of variation is 1/sqrt(burstiness): 1 is a Poisson process, below 1 comes in bursts, above 1 is more
    even; None: constant gaps. end_rate, over: the rate changes linearly to `end_rate` in the first `over` seconds and
    stays there.
    """

    rate: float
    burstiness: float | None = 1.0
    end_rate: float | None = None
    over: float = 0.0

    def __post_init__(self) -> None:
        rates = [self.rate] if self.end_rate is None else [self.rate, self.end_rate]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates) or rates[-1] == 0:
            raise LoadTestError(
                f"a request rate must be more than 0, got {rates[-1] if rates[-1] <= 0 else rates[0]:g}"
            )
        if self.burstiness is not None and not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise LoadTestError(f"the burstiness must be more than 0 (1 is Poisson), got {self.burstiness:g}")
        if self.end_rate is not None and not self.over > 0:
            raise LoadTestError("a ramp needs a time to run over: give the run a duration or a number of requests")

    def offered_rate(self, times: Sequence[float]) -> float | None:
        return self.rate if self.end_rate is None else _mean_rate(times)

    def times(self, seed: int) -> Iterator[float]:
        """Arrivals of a process of rate 1, their times stretched so that the rate becomes the wanted one.

        A Poisson process stays one under such a change of time (Çınlar, Introduction to Stochastic Processes, 1975).
        """
        random = Random(f"{seed}/arrivals")
        passed = 0.0  # arrivals expected until now
        while True:
            yield self._time_of(passed)
            passed += 1.0 if self.burstiness is None else random.gammavariate(self.burstiness, 1 / self.burstiness)

    def _time_of(self, count: float) -> float:
        """When the expected number of arrivals reaches `count`: the inverse of the integral of the rate."""
        if self.end_rate is None:
            return count / self.rate
        until_flat = (self.rate + self.end_rate) / 2 * self.over
        if count >= until_flat:
            return self.over + (count - until_flat) / self.end_rate
        slope = (self.end_rate - self.rate) / self.over
        # rate·t + slope·t²/2 = count, solved in the form that neither cancels nor divides by a slope of 0.
        root = math.sqrt(max(0.0, self.rate**2 + 2 * slope * count))
        return 2 * count / (self.rate + root) if count > 0 else 0.0


def ramp(start: float, end: float, count: int | None, seconds: float | None, burstiness: float | None) -> Arrivals:
    """A rate that goes from `start` to `end` over the whole run, bounded by `seconds` or by `count` requests."""
    if seconds is None and count is not None and start + end > 0:
        seconds = 2 * count / (start + end)
    return Arrivals(start, burstiness, end, seconds or 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    """Given times, ascending; `speed` 2 replays them in half the time. Its first request is sent at 0."""

    at: Sequence[float]
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise LoadTestError(f"the speed of a trace must be more than 0, got {self.speed:g}")

    def offered_rate(self, times: Sequence[float]) -> float | None:
        return _mean_rate(times)

    def times(self, seed: int) -> Iterator[float]:
        return ((time - self.at[0]) / self.speed for time in self.at)


def _mean_rate(times: Sequence[float]) -> float | None:
    span = times[-1] - times[0] if times else 0.0
    rate = (len(times) - 1) / span if span > 0 else math.inf
    return rate if math.isfinite(rate) else None


def intended_times(schedule: Schedule, seed: int, count: int | None, seconds: float | None) -> list[float]:
    """All times of a bounded run: at most `count` of them, none at `seconds` or later. Raises LoadTestError for too many."""
    times = schedule.times(seed)
    if seconds is not None:
        times = itertools.takewhile(lambda time: time < seconds, times)
    found = list(itertools.islice(times, MOST_REQUESTS + 1 if count is None else min(count, MOST_REQUESTS + 1)))
    if len(found) > MOST_REQUESTS:
        raise LoadTestError(f"this schedule holds more than {MOST_REQUESTS:,} requests: lower the rate or the duration")
    return found
