"""Search for the highest request rate within the SLOs, and the judgement of a run at an offered rate."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from windlass.clients.loadtest.results import Judgement, RunResult, Summary, SweepResult, Verdict
from windlass.clients.loadtest.target import LoadTestError

MIN_ACHIEVED_SHARE = 0.95  # of the offered rate, where a server keeps up
MIN_REQUESTS = 10
MIN_LATENCIES = (
    5.0  # shortest time of sending, in median latencies: a queue shows only once requests wait for responses
)

_DURATION_TOLERANCE = 0.9  # random gaps may end a run of a given duration a little early

Run = Callable[[float, int, float], Awaitable[RunResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """Parameters of the search.

    start: the first rate, in requests per second. share: of the requests that must meet every SLO. max_runs: limit of the
    search. precision: relative distance of the bounds at which it ends. min_seconds: shortest time of sending of a run.
    Raises LoadTestError for values out of range.
    """

    start: float = 1.0
    share: float = 0.99
    max_runs: int = 12
    precision: float = 0.05
    min_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise LoadTestError(f"the share of requests that meet the SLOs must be in (0, 1], got {self.share:g}")
        if self.max_runs < 1:
            raise LoadTestError(f"a sweep needs at least 1 run, got {self.max_runs}")
        if not 0 < self.min_seconds < math.inf:
            raise LoadTestError(f"a run of a sweep must send for more than 0 seconds, got {self.min_seconds:g}")
        if not 0 < self.start < math.inf:
            raise LoadTestError(f"a sweep must start at a finite rate above 0, got {self.start:g}")


async def find_highest_rate(
    run: Run, spec: SweepSpec, slo: Mapping[str, float], on_run: Callable[[Judgement, RunResult], None] | None = None
) -> SweepResult:
    """Find the highest rate whose run meets the SLOs: doubling or halving first, then bisection.

    run: makes one run for (rate, number of the run, shortest time of sending in seconds). The number lets each run draw
    prompts of its own, since a server that caches prompts would respond to the second run faster. on_run: called after each.
    A run that is too short to show a queue (see `judge_run`) is repeated with a longer time of sending, and ends the sweep
    where it cannot be longer. Raises LoadTestError without an SLO, and where the first run raises it; a later one ends the
    sweep.
    """
    if not slo:
        raise LoadTestError("a sweep needs an SLO to meet: give --slo, such as --slo ttft:500")
    runs: list[RunResult] = []
    judgements: list[Judgement] = []
    low: float | None = None  # met
    high: float | None = None  # not met
    rate, ended, seconds = spec.start, "found", spec.min_seconds
    while True:
        if len(runs) == spec.max_runs:
            ended = "runs"
            break
        try:
            result = await run(rate, len(runs), seconds)
        except LoadTestError:
            if not runs:
                raise
            ended = "failed"
            break
        judgement = judge_run(result, spec.share, spec.min_seconds)
        runs.append(result)
        judgements.append(judgement)
        if result.interrupted:
            ended = "interrupted"
            break
        if on_run is not None:
            on_run(judgement, result)
        if not result.completed and not result.abandoned and set(result.errors) <= {"connection"}:
            ended = "failed"  # a rate that is too high does not refuse every connection
            break
        if judgement.verdict is None:
            ended = "generator"
            break
        if judgement.verdict == "short":
            if judgement.sending_s < seconds * _DURATION_TOLERANCE:
                ended = "short"
                break
            seconds = max(judgement.needed_s, 2 * judgement.sending_s)
            continue
        low, high = (rate, high) if judgement.verdict == "met" else (low, rate)
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


def judge_run(run: RunResult, share: float, min_seconds: float) -> Judgement:
    """Judge a run at an offered rate.

    share: of the requests that must meet every SLO. min_seconds: shortest time of sending. Raises ValueError for a run
    without an offered rate.
    """
    if run.offered_rate is None:
        raise ValueError("a run without an offered rate cannot be judged")
    intended = sorted(record.intended for record in run.records if record.scheduled)
    count = len(intended)
    # By the number of requests or by the clock: with random gaps either may be longer.
    sending = max(count / run.offered_rate, (intended[-1] - intended[0]) * count / (count - 1)) if count > 1 else 0.0
    latency = Summary.of(run.values("e2el")).p50 or 0.0
    needed = max(min_seconds, MIN_REQUESTS / run.offered_rate, MIN_LATENCIES * latency / 1000)
    achieved, pace, attainment = run.achieved_rate, run.pace, run.attainment
    slow = achieved is not None and achieved < MIN_ACHIEVED_SHARE * run.offered_rate
    # A growing queue delays responses, so that a longer run does not help; it shows in a short run, too.
    certain = slow and pace is not None and pace.slope - 2 * pace.error > 1 / MIN_ACHIEVED_SHARE
    verdict: Verdict | None
    if run.interrupted or run.abandoned.get("unsent"):
        verdict = None
    elif attainment < share:
        verdict = "missed"
    elif certain or (slow and sending >= needed):
        verdict = "behind"
    elif sending < needed or achieved is None:
        verdict = "short"
    else:
        verdict = "met"
    return Judgement(
        offered=run.offered_rate,
        achieved=achieved,
        attainment=attainment,
        sending_s=sending,
        needed_s=needed,
        verdict=verdict,
    )
