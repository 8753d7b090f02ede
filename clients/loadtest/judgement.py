"""Judges a run at an offered rate: met, missed, fallen behind, or nothing that could be told.

Knows one result at a time: no search, no options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.clients.loadtest.results import RunResult, Summary

KEPT_UP = 0.95  # of the offered rate, at least, where a server keeps up
LEAST_REQUESTS = 10
LATENCIES = 5.0  # how long to send, in median latencies: a queue shows only once requests wait for answers

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


def judge(run: RunResult, share: float, least_seconds: float) -> Judgement:
    """share: of the requests that must meet every SLO. least_seconds: of sending.

    Raises ValueError for a run without an offered rate.
    """
    if run.offered_rate is None:
        raise ValueError("a run without an offered rate says nothing of one")
    intended = sorted(record.intended for record in run.records if record.scheduled)
    count = len(intended)
    # By the number of requests or by the clock: random gaps make either the longer one.
    sending = max(count / run.offered_rate, (intended[-1] - intended[0]) * count / (count - 1)) if count > 1 else 0.0
    latency = Summary.of(record.e2el_ms for record in run.completed).p50 or 0.0
    needed = max(least_seconds, LEAST_REQUESTS / run.offered_rate, LATENCIES * latency / 1000)
    achieved, pace, attained = run.achieved_rate, run.pace, attainment(run)
    slow = achieved is not None and achieved < KEPT_UP * run.offered_rate
    # A queue that grows makes answers late, so a longer run is no help: it shows in a short one, too.
    surely = slow and pace is not None and pace.slope - 2 * pace.error > 1 / KEPT_UP
    verdict: Verdict | None = "met"
    if run.interrupted or run.abandoned.get("unsent"):
        verdict = None
    elif attained < share:
        verdict = "missed"
    elif surely or (slow and sending >= needed):
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
