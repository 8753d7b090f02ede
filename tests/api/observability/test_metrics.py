"""Metrics of the server: errors that should alert an operator."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from helpers.live_server import toy_tokenizer
from helpers.scripted_engine import ScriptedEngine

from windlass.engine.errors import DeadlineError, DeviceMemoryError, EngineDeadError, QueueFullError
from windlass.server.application import create_app
from windlass.server.config.settings import ServerSettings

FAULTS = [
    (QueueFullError("full"), 429, "queue_full"),
    (DeadlineError("late"), 504, "deadline_exceeded"),
    (EngineDeadError("dead"), 503, "engine_unavailable"),
    (DeviceMemoryError("no memory"), 503, "out_of_memory"),
    (KeyError("a defect"), 500, "internal"),
]


@pytest.mark.parametrize(("error", "status", "code"), FAULTS, ids=[code for _, _, code in FAULTS])
def test_server_errors_are_exported_from_zero(error, status, code):
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
