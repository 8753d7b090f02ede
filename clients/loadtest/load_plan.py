"""What one load test is: which server, what is asked, when, and how the answers are judged. Runs nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.clients.loadtest.errors import LoadTestError
from windlass.clients.loadtest.schedule import Schedule
from windlass.clients.loadtest.target import Target
from windlass.clients.loadtest.workload_spec import WorkloadSpec

SLO_MEASURES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One load test.

    schedule: arrivals of an open loop; None for a closed loop. concurrency: clients of a closed loop, each of which
    sends its next request when its last has ended; in an open loop the most requests in flight, None for no bound (a
    request that waits for others is late, and its TTFT from the intended send says so). count: conversations (requests,
    where they have one turn); duration_s: none begins later. At least one of the two, or a workload that ends. warmup:
    requests before the measured part. timeout_s: for each request. slo: limits in ms by measure (ttft, tpot, itl, e2el).
    vocab_size, text_prompts: see vocabulary.py. keep_text: record texts and token ids. settings: what
    was asked for, as the report shows it.

    Raises LoadTestError for bounds that make no run.
    """

    target: Target
    workload: WorkloadSpec
    schedule: Schedule | None = None
    concurrency: int | None = 1
    count: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    timeout_s: float = 600.0
    ready_s: float = 60.0
    seed: int = 0
    slo: Mapping[str, float] = field(default_factory=dict)
    vocab_size: int | None = None
    text_prompts: bool = False
    keep_text: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count is None and self.duration_s is None and not self.workload.trace:
            raise LoadTestError("a run needs an end: give a number of prompts or a duration")
        if self.schedule is None and self.concurrency is None:
            raise LoadTestError("a closed loop needs a concurrency: give one, or a request rate")
        for name, value, least in (
            ("the number of prompts", self.count, 1),
            ("the concurrency", self.concurrency, 1),
            ("the number of warm-up requests", self.warmup, 0),
        ):
            if value is not None and value < least:
                raise LoadTestError(f"{name} must be at least {least}, got {value}")
        for name, seconds in (("the duration", self.duration_s), ("the timeout", self.timeout_s)):
            if seconds is not None and not seconds > 0:
                raise LoadTestError(f"{name} must be more than 0 seconds, got {seconds:g}")
        for measure, limit in self.slo.items():
            if measure not in SLO_MEASURES:
                raise LoadTestError(f"no SLO can be set for {measure!r}: there are {', '.join(SLO_MEASURES)}")
            if not 0 < limit < math.inf:
                raise LoadTestError(f"the SLO for {measure} must be a number of ms above 0, got {limit:g}")
