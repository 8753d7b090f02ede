"""Metrics of the server: their values, separate registries, and errors that should alert an operator."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from helpers.live_server import Live, live_server, toy_tokenizer
from helpers.scripted_engine import ScriptedEngine
from prometheus_client.parser import text_string_to_metric_families

from windlass.engine.errors import DeadlineError, DeviceMemoryError, EngineDeadError, QueueFullError
from windlass.engine.interface.outputs import EngineStats
from windlass.server.application import create_app
from windlass.server.config.settings import ServerSettings

FAULTS = [
    (QueueFullError("full"), 429, "queue_full"),
    (DeadlineError("late"), 504, "deadline_exceeded"),
    (EngineDeadError("dead"), 503, "engine_unavailable"),
    (DeviceMemoryError("no memory"), 503, "out_of_memory"),
    (KeyError("a defect"), 500, "internal"),
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("error", "status", "code"), FAULTS, ids=[code for _, _, code in FAULTS])
def test_server_errors_are_exported_from_zero(error: Exception, status: int, code: str) -> None:
    """Prometheus sees no increase in a series whose first value is already 1."""
    engine = ScriptedEngine(refuse=lambda request: error)
    app = create_app(engine, toy_tokenizer(), ServerSettings(served_model_name="toy"))
    line = f'windlass_request_errors_total{{code="{code}"}}'

    async def ask() -> tuple[str, int, str]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            before = (await client.get("/metrics")).text
            answer = await client.post("/v1/completions", json={"prompt": "a"})
            return before, answer.status_code, (await client.get("/metrics")).text

    before, answered, after = asyncio.run(ask())
    assert f"{line} 0.0" in before.splitlines()
    assert answered == status and f"{line} 1.0" in after.splitlines()


def samples(live: Live) -> dict[str, float]:
    response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation and family.name.startswith("windlass_")
        for sample in family.samples:
            labels = "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items()) if k != "le")
            if "le" not in sample.labels:
                found[sample.name.removeprefix("windlass_") + labels] = sample.value
    return found


def test_values_of_metrics() -> None:
    with live_server() as live:
        live.engine.engine_stats = EngineStats(
            num_running=3,
            num_waiting=2,
            kv_cache_usage=0.25,
            rotary_specs_live=1,
            num_preemptions=4,
            prefix_cache_queries=100,
            prefix_cache_hits=60,
            prompt_tokens=11,
            generation_tokens=12,
            spec_decode_num_drafts=5,
            spec_decode_num_draft_tokens=15,
            spec_decode_num_accepted_tokens=9,
            recomputed_tokens={"preemption": 7},
            queue_seconds=(0.5, 1.5),
            prefill_seconds=(0.25,),
            decode_seconds=(2.0,),
        )
        live.engine.restarts = 2
        found = samples(live)
        expected = {
            "num_requests_running": 3,
            "num_requests_waiting": 2,
            "kv_cache_usage_perc": 0.25,
            "rotary_specs_live": 1,
            "num_preemptions_total": 4,
            "prefix_cache_queries_total": 100,
            "prefix_cache_hits_total": 60,
            "prompt_tokens_total": 11,
            "generation_tokens_total": 12,
            "spec_decode_num_drafts_total": 5,
            "spec_decode_num_draft_tokens_total": 15,
            "spec_decode_num_accepted_tokens_total": 9,
            "recomputed_tokens_total{reason=preemption}": 7,
            "request_queue_time_seconds_sum": 2.0,
            "request_queue_time_seconds_count": 2,
            "request_prefill_time_seconds_sum": 0.25,
            "request_decode_time_seconds_sum": 2.0,
            "engine_restarts_total": 2,
            "request_success_total{finished_reason=stop}": 0,
            "time_to_first_token_seconds_count": 0,
        }
        assert {name: found[name] for name in expected} == expected

        live.engine.engine_stats = EngineStats()
        live.complete(max_tokens=5, n=2)
        live.complete(max_tokens=5, stop="c")
        live.engine.delay = 0.02
        live.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4})
        live.refuse("/v1/completions", {"prompt": "a", "timeout": 0.01, "max_tokens": 50}, 504)
        found = samples(live)
        assert found["request_success_total{finished_reason=length}"] == 3
        assert found["request_success_total{finished_reason=stop}"] == 1
        assert found["request_errors_total{code=deadline_exceeded}"] == 1
        assert found["time_to_first_token_seconds_count"] == 3
        assert found["e2e_request_latency_seconds_count"] == 4
        assert found["inter_token_latency_seconds_count"] == 4 + 4 + 1 + 3
        assert found["inter_token_latency_seconds_sum"] >= 0.06
        assert found["request_queue_time_seconds_count"] == 2  # samples are handed out once

        live.engine.state = "restarting"
        assert samples(live)["engine_up"] == 0


@pytest.mark.slow
def test_two_apps_have_separate_metrics(live: Live) -> None:
    with live_server() as other:
        other.complete(max_tokens=1)
        assert samples(other)["time_to_first_token_seconds_count"] == 1
        before = samples(live)["time_to_first_token_seconds_count"]
        other.complete(max_tokens=1)
        assert samples(live)["time_to_first_token_seconds_count"] == before
