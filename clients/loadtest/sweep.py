"""Finds the highest request rate at which a server still meets the SLOs: doubling, then bisection, a run for each rate.

Knows runs by their results only: how one is made is the caller's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.clients.loadtest.errors import LoadTestError
from windlass.clients.loadtest.results import RunResult

FORMAT = "windlass-bench-sweep/1"

Run = Callable[[float, int], Awaitable[RunResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """start: the first rate, requests per second. share: of the requests that must meet every SLO for a rate to count as
    met. most_runs: bound on the search. precision: it ends when the bounds are within this share of each other."""

    start: float = 1.0
    share: float = 0.99
    most_runs: int = 12
    precision: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise LoadTestError(
                f"the share of requests that meet the SLOs lies above 0 and at most at 1, got {self.share:g}"
            )
        if self.most_runs < 1:
            raise LoadTestError(f"a sweep makes at least 1 run, got {self.most_runs}")
        if not self.start > 0:
            raise LoadTestError(f"a sweep starts at a rate above 0, got {self.start:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep found. highest_rate: the highest rate that met the SLOs, None for none. runs: in the order they were
    made. ended: why it ended ("found", "runs", "interrupted", or "failed" where nothing was answered any more)."""

    runs: tuple[RunResult, ...]
    highest_rate: float | None
    slo: Mapping[str, float] = field(default_factory=dict)
    share: float = 0.99
    ended: str = "found"

    @property
    def interrupted(self) -> bool:
        return self.ended == "interrupted"

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the sweep."""
        return {**self.summary(), "runs": [run.to_dict() for run in self.runs]}

    def summary(self) -> dict[str, Any]:
        """The same without its runs."""
        return {
            "format": FORMAT,
            "slo": dict(self.slo),
            "share": self.share,
            "highest_rate": self.highest_rate,
            "ended": self.ended,
        }


def attainment(run: RunResult) -> float:
    """The share of its requests that met every SLO; those that failed did not, those given up on purpose do not count."""
    counted = len(run.completed) + sum(run.errors.values())
    return sum(map(run.meets_slo, run.completed)) / counted if counted else 0.0


async def find_highest_rate(
    run: Run, spec: SweepSpec, slo: Mapping[str, float], told: Callable[[float, RunResult, bool], None] | None = None
) -> SweepResult:
    """Search. run: makes the run for a rate; its second argument numbers the runs, so that each can draw its own prompts
    (a server that remembers prompts would answer the second run faster). told: called after each with whether it met
    the SLOs. Raises LoadTestError without an SLO, or what `run` raises in the first run; a later one ends the sweep.
    """
    if not slo:
        raise LoadTestError("a sweep needs an SLO to meet: give --slo, such as --slo ttft:500")
    runs: list[RunResult] = []
    low: float | None = None  # met
    high: float | None = None  # not met
    rate, ended = spec.start, "found"
    while True:
        if len(runs) == spec.most_runs:
            ended = "runs"
            break
        try:
            result = await run(rate, len(runs))
        except LoadTestError:
            if not runs:
                raise
            ended = "failed"
            break
        runs.append(result)
        if result.interrupted:
            ended = "interrupted"
            break
        met = attainment(result) >= spec.share
        if told is not None:
            told(rate, result, met)
        if not result.completed and not result.abandoned:
            # Nothing was answered: a rate is no reason for that where a lower one was fine.
            ended = "failed" if set(result.errors) <= {"connection"} else ended
            if ended == "failed":
                break
        low, high = (rate, high) if met else (low, rate)
        if low is None:
            assert high is not None
            rate = high / 2
        elif high is None:
            rate = low * 2
        elif high - low <= spec.precision * low:
            break
        else:
            rate = (low + high) / 2
    return SweepResult(runs=tuple(runs), highest_rate=low, slo=dict(slo), share=spec.share, ended=ended)
