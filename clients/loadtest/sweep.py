"""The highest request rate within the SLOs, and the judgement of a run at an offered rate."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from windlass.clients.loadtest.results import RequestRecord, RunResult, Summary, to_json
from windlass.clients.loadtest.target import LoadTestError

MIN_ACHIEVED_SHARE = 0.95  # of the offered rate, at least, where a server keeps up

MIN_REQUESTS = 10

MIN_LATENCIES = 5.0  # how long to send, in median latencies: a queue shows only once requests wait for answers

Verdict = Literal["met", "missed", "behind", "short"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """offered, achieved: requests per second, achieved None where it cannot be told. attainment: the share of requests
    within every SLO. sending_s: how long requests were sent; needed_s: how long they have to be, by the rate and by the
    latency of the answers. verdict: "met"; "missed" where too few requests were within the SLOs; "behind" where the server
    did not keep up with the rate; "short" where neither showed in a run that is too short to show it; None where the run
    was interrupted, or the load generator could not send all of it."""

    offered: float
    achieved: float | None
    attainment: float
    sending_s: float
    needed_s: float
    verdict: Verdict | None

    def line(self) -> str:
        """For a person: "64 requests per second: 20.9 achieved, the server falls behind"."""
        says = {
            None: "no verdict",
            "met": "meets the SLOs",
            "missed": f"misses the SLOs ({self.attainment:.1%} of the requests within them)",
            "behind": "the server falls behind",
            "short": f"{self.sending_s:.1f} s of sending are too short beside these answers, {self.needed_s:.0f} s are needed",
        }
        achieved = "" if self.achieved is None else f"{self.achieved:,.4g} achieved, "
        return f"{self.offered:,.4g} requests per second: {achieved}{says[self.verdict]}"


def judge_run(run: RunResult, share: float, min_seconds: float) -> Judgement:
    """share: of the requests that must meet every SLO. min_seconds: of sending.

    Raises ValueError for a run without an offered rate.
    """
    if run.offered_rate is None:
        raise ValueError("a run without an offered rate says nothing of one")
    intended = sorted(record.intended for record in run.records if record.scheduled)
    count = len(intended)
    # By the number of requests or by the clock: random gaps make either the longer one.
    sending = max(count / run.offered_rate, (intended[-1] - intended[0]) * count / (count - 1)) if count > 1 else 0.0
    latency = Summary.of(record.e2el_ms for record in run.completed).p50 or 0.0
    needed = max(min_seconds, MIN_REQUESTS / run.offered_rate, MIN_LATENCIES * latency / 1000)
    achieved, pace, attained = run.achieved_rate, run.pace, attainment(run)
    slow = achieved is not None and achieved < MIN_ACHIEVED_SHARE * run.offered_rate
    # A queue that grows makes answers late, so a longer run is no help: it shows in a short one, too.
    certain = slow and pace is not None and pace.slope - 2 * pace.error > 1 / MIN_ACHIEVED_SHARE
    verdict: Verdict | None = "met"
    if run.interrupted or run.abandoned.get("unsent"):
        verdict = None
    elif attained < share:
        verdict = "missed"
    elif certain or (slow and sending >= needed):
        verdict = "behind"
    elif sending < needed or achieved is None:
        verdict = "short"
    return Judgement(
        offered=run.offered_rate,
        achieved=achieved,
        attainment=attained,
        sending_s=sending,
        needed_s=needed,
        verdict=verdict,
    )


def attainment(run: RunResult) -> float:
    """The share of its requests that met every SLO; those that failed did not, those given up on purpose do not count."""
    counted = len(run.completed) + sum(run.errors.values())
    return sum(map(run.meets_slo, run.completed)) / counted if counted else 0.0


FORMAT = "windlass-bench-sweep/2"

Run = Callable[[float, int, float], Awaitable[RunResult]]

_DURATION_TOLERANCE = 0.9  # random gaps end a run of so many seconds a little early


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """start: the first rate, requests per second. share: of the requests that must meet every SLO for a rate to count as
    met. max_runs: bound on the search. precision: it ends when the bounds are within this share of each other.
    min_seconds: that a run sends for."""

    start: float = 1.0
    share: float = 0.99
    max_runs: int = 12
    precision: float = 0.05
    min_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise LoadTestError(
                f"the share of requests that meet the SLOs lies above 0 and at most at 1, got {self.share:g}"
            )
        if self.max_runs < 1:
            raise LoadTestError(f"a sweep makes at least 1 run, got {self.max_runs}")
        if not 0 < self.min_seconds < math.inf:
            raise LoadTestError(f"a run of a sweep sends for more than 0 seconds, got {self.min_seconds:g}")
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
    run: Run, spec: SweepSpec, slo: Mapping[str, float], on_run: Callable[[Judgement, RunResult], None] | None = None
) -> SweepResult:
    """Search. run: makes the run for a rate. Its second argument numbers the runs, so that each can draw its own prompts
    (a server that remembers prompts would answer the second run faster); its third is how many seconds it is to send, at
    least. told: called after each. Raises LoadTestError without an SLO, or what `run` raises in the first run; a later
    one ends the sweep.

    A rate counts as met by a run long enough to show a queue (see `judge_run`). One that is too short is made once more,
    longer; one that cannot be longer ends the sweep.
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
        judged = judge_run(result, spec.share, spec.min_seconds)
        runs.append(result)
        judgements.append(judged)
        if result.interrupted:
            ended = "interrupted"
            break
        if on_run is not None:
            on_run(judged, result)
        if not result.completed and not result.abandoned:
            # Nothing was answered, though a lower rate was fine: the rate alone does not do that.
            ended = "failed" if set(result.errors) <= {"connection"} else ended
            if ended == "failed":
                break
        if judged.verdict is None:
            ended = "generator"
            break
        if judged.verdict == "short":
            if judged.sending_s < seconds * _DURATION_TOLERANCE:
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


# -- files -------------------------------------------------------------------------------------------------------------
_FIELDS = (
    "index",
    "label",
    "outcome",
    "message",
    "intended",
    "sent",
    "ended",
    "input_tokens",
    "output_tokens",
    "asked_tokens",
    "cached_tokens",
    "reused_tokens",
    "finish_reason",
    "request_id",
)

_MEASURES = ("ttft_ms", "ttft_actual_ms", "tpot_ms", "e2el_ms", "lag_ms")

COLUMNS = ("run", "rate", *_FIELDS, "chunks", *_MEASURES, "itl_mean_ms", "itl_p99_ms")


def write_csv(result: RunResult | SweepResult, path: Path) -> None:
    """One row per request under COLUMNS; times in seconds of their run, measures in ms, empty where there is none.

    run: 0, or the number of the run in its sweep. Raises OSError.
    """
    runs = result.runs if isinstance(result, SweepResult) else (result,)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number, run in enumerate(runs):
            writer.writerows([number, run.offered_rate, *_row(record)] for record in run.records)


def write_sweep(result: SweepResult, path: Path) -> None:
    """The sweep as one JSON object. Raises OSError."""
    head = json.dumps(result.summary(), indent=1, allow_nan=False).removesuffix("\n}")
    path.write_text(head + ',\n "runs": [\n' + ",\n".join(map(to_json, result.runs)) + "\n ]\n}\n", encoding="utf-8")


def _row(record: RequestRecord) -> list[object]:
    gaps = Summary.of(record.gaps_ms)
    return [
        *(getattr(record, name) for name in _FIELDS),
        len(record.chunks),
        *(getattr(record, name) for name in _MEASURES),
        gaps.mean,
        gaps.p99,
    ]
