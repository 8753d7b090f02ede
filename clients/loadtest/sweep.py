"""Finds the highest request rate that a server keeps up with inside the SLOs: doubling, then bisection, a run for each rate.

Knows runs by their results only; the caller makes them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from windlass.clients.loadtest.errors import LoadTestError
from windlass.clients.loadtest.judgement import Judgement, judge
from windlass.clients.loadtest.results import RunResult

FORMAT = "windlass-bench-sweep/2"

Run = Callable[[float, int, float], Awaitable[RunResult]]

_NEARLY = 0.9  # random gaps end a run of so many seconds a little early


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """start: the first rate, requests per second. share: of the requests that must meet every SLO for a rate to count as
    met. most_runs: bound on the search. precision: it ends when the bounds are within this share of each other.
    least_seconds: that a run sends for."""

    start: float = 1.0
    share: float = 0.99
    most_runs: int = 12
    precision: float = 0.05
    least_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise LoadTestError(
                f"the share of requests that meet the SLOs lies above 0 and at most at 1, got {self.share:g}"
            )
        if self.most_runs < 1:
            raise LoadTestError(f"a sweep makes at least 1 run, got {self.most_runs}")
        if not 0 < self.least_seconds < math.inf:
            raise LoadTestError(f"a run of a sweep sends for more than 0 seconds, got {self.least_seconds:g}")
        if not 0 < self.start < math.inf:
            raise LoadTestError(f"a sweep starts at a finite rate above 0, got {self.start:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep found. highest_rate: the highest rate that met the SLOs, None for none. runs: in the order they were
    made, and what each of them says of its rate. ended: why it ended ("found", "runs", "short" where a run could not be as
    long as its rate needs, "interrupted", "generator" where that could not send a rate, or "failed" where nothing was
    answered any more)."""

    runs: tuple[RunResult, ...]
    judgements: tuple[Judgement, ...] = ()
    highest_rate: float | None = None
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
            "rates": [asdict(judged) for judged in self.judgements],
        }


async def find_highest_rate(
    run: Run, spec: SweepSpec, slo: Mapping[str, float], told: Callable[[Judgement, RunResult], None] | None = None
) -> SweepResult:
    """Search. run: makes the run for a rate. Its second argument numbers the runs, so that each can draw its own prompts
    (a server that remembers prompts would answer the second run faster); its third is how many seconds it is to send, at
    least. told: called after each. Raises LoadTestError without an SLO, or what `run` raises in the first run; a later
    one ends the sweep.

    A rate counts as met by a run long enough to show a queue (see `judge`). One that is too short is made once more,
    longer; one that cannot be longer ends the sweep.
    """
    if not slo:
        raise LoadTestError("a sweep needs an SLO to meet: give --slo, such as --slo ttft:500")
    runs: list[RunResult] = []
    judgements: list[Judgement] = []
    low: float | None = None  # met
    high: float | None = None  # not met
    rate, ended, seconds = spec.start, "found", spec.least_seconds
    while True:
        if len(runs) == spec.most_runs:
            ended = "runs"
            break
        try:
            result = await run(rate, len(runs), seconds)
        except LoadTestError:
            if not runs:
                raise
            ended = "failed"
            break
        judged = judge(result, spec.share, spec.least_seconds)
        runs.append(result)
        judgements.append(judged)
        if result.interrupted:
            ended = "interrupted"
            break
        if told is not None:
            told(judged, result)
        if not result.completed and not result.abandoned:
            # Nothing was answered, though a lower rate was fine: the rate alone does not do that.
            ended = "failed" if set(result.errors) <= {"connection"} else ended
            if ended == "failed":
                break
        if judged.verdict is None:
            ended = "generator"
            break
        if judged.verdict == "short":
            if judged.sending_s < seconds * _NEARLY:
                ended = "short"
                break
            seconds = max(judged.needed_s, 2 * judged.sending_s)
            continue
        low, high = (rate, high) if judged.verdict == "met" else (low, rate)
        if low is None:
            assert high is not None
            rate = high / 2
        elif high is None:
            rate = low * 2
        elif high - low <= spec.precision * low:
            break
        else:
            rate = (low + high) / 2
    return SweepResult(
        runs=tuple(runs),
        judgements=tuple(judgements),
        highest_rate=low,
        slo=dict(slo),
        share=spec.share,
        ended=ended,
    )
