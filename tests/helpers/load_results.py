"""Simulated results of load tests, deterministic by seed."""

from __future__ import annotations

import random

from windlass.clients.loadtest.results import RequestRecord, RunResult


def simulated_run(
    *,
    rate: float = 4.0,
    count: int = 60,
    seed: int = 0,
    input_tokens: tuple[int, ...] = (256, 512, 1024, 2048),
    output_tokens: int = 32,
    slots: int = 8,
    slowness: float = 1.0,
    failing: int = 0,
    message: str = "the queue is full",
    limited: bool = False,
    interrupted: bool = False,
    slo: dict[str, float] | None = None,
    closed_loop: bool = False,
) -> RunResult:
    """Poisson arrivals at a server with `slots`, prefill and decode times that grow with the context, and some failures."""
    chance = random.Random(seed)
    records, free, now = [], [0.0] * slots, 0.0
    for index in range(count):
        now += chance.expovariate(rate)
        tokens = input_tokens[index % len(input_tokens)]
        sent = now + chance.expovariate(1 / 0.002)
        common = {"index": index, "intended": now, "input_tokens": tokens, "request_id": f"req-{seed}-{index}"}
        common["label"] = "long" if tokens > 1000 else "short"
        if index % 7 == 3 and failing > 0:
            failing -= 1
            kind = "http_429" if index % 2 else "timeout"
            records.append(RequestRecord(**common, sent=sent, ended=sent + 0.4, outcome=kind, message=message))
            continue
        place = min(range(slots), key=free.__getitem__)
        start = max(sent, free[place])
        moment = start + slowness * (0.02 + tokens * 2e-4) * chance.uniform(0.9, 1.2)
        chunks = []
        for position in range(output_tokens):
            chunks.append(moment)
            moment += slowness * (0.012 + (tokens + position) * 4e-6) * chance.lognormvariate(0, 0.2)
        free[place] = chunks[-1]
        records.append(
            RequestRecord(
                **common,
                sent=sent,
                chunks=tuple(chunks),
                ended=chunks[-1] + 0.001,
                output_tokens=output_tokens,
                cached_tokens=0,
            )
        )
    return RunResult(
        records=tuple(records),
        duration_s=max((record.ended or 0.0 for record in records), default=0.0),
        offered_rate=None if closed_loop else rate,
        settings={"arrival": "poisson", "rate": rate, "num_prompts": count, "output_len": output_tokens, "seed": seed},
        server={"model": "demo", "version": "0.1.0", "rotary": {"rope_type": "yarn", "factor": 4}},
        server_metrics={
            "windlass_generation_tokens_total": float(count * output_tokens),
            "windlass_request_queue_time_seconds_sum": 1.5,
            "windlass_request_queue_time_seconds_count": float(count),
            "windlass_request_prefill_time_seconds_sum": 9.0,
            "windlass_request_prefill_time_seconds_count": float(count),
        },
        slo=slo or {},
        generator={"limited": limited, "cpu_share": 0.12},
        interrupted=interrupted,
        started_at="2026-01-02T03:04:05+00:00",
    )
