"""InlineClient: the same promises as the process client's, with the engine in a thread."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from helpers.configs import engine_config
from helpers.scripted_core import CRASH, REFUSE, ScriptedCore

from windlass.engine.api.looks import CacheQuestion
from windlass.engine.api.request import EngineRequest, SamplingParams
from windlass.engine.client.inline import InlineClient
from windlass.engine.errors import EngineDeadError, LoadError, RequestError

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def client(monkeypatch):
    monkeypatch.setenv("SCRIPT_STEP_SECONDS", "0.005")
    client = InlineClient(engine_config("scripted"), core=ScriptedCore)
    yield client
    await client.close()
    assert "engine" not in [thread.name for thread in threading.enumerate()]


def request(name: str, first: int = 50, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(name, [first], SamplingParams(max_tokens=max_tokens))


async def tokens(client: InlineClient, wanted: EngineRequest) -> list[int]:
    return [token async for output in client.generate(wanted) for token in output.token_ids]


async def test_requests_run_side_by_side(client):
    seen = []
    client.progress = lambda *report: seen.append(report)
    with pytest.raises(EngineDeadError, match="loading"):
        await tokens(client, request("early"))
    info = await client.start()
    assert info.architecture == "ScriptedForCausalLM" and client.state == "ready"
    assert [done for _, done, _ in seen] == [1, 2, 3]
    short, long = await asyncio.gather(
        tokens(client, request("a", max_tokens=2)), tokens(client, request("b", max_tokens=4))
    )
    assert (short, long) == ([100, 101], [100, 101, 102, 103])
    with pytest.raises(RequestError):
        await tokens(client, request("c", REFUSE))
    stats = await client.stats()
    assert stats.generation_tokens == 6 and stats.num_running == 0
    assert len(stats.queue_seconds) == 2
    assert (await client.stats()).queue_seconds == ()


async def test_closing_a_stream_aborts(client):
    await client.start()
    stream = client.generate(request("a", max_tokens=10_000))
    await anext(stream)
    await stream.aclose()
    stats = await client.stats()
    assert stats.recomputed_tokens == {"aborts": 1} and stats.num_steps <= 3


async def test_a_crash_fails_everything_for_good(client, caplog):
    await client.start()
    results = await asyncio.gather(
        tokens(client, request("bad", CRASH, 10)), tokens(client, request("good", max_tokens=10_000)),
        return_exceptions=True,
    )  # fmt: skip
    assert [type(result) for result in results] == [EngineDeadError, EngineDeadError]
    assert client.state == "failed" and "scripted crash" in caplog.text
    with pytest.raises(EngineDeadError, match="scripted crash"):
        await tokens(client, request("late"))
    with pytest.raises(EngineDeadError):
        await client.stats()


async def test_close_ends_streams_in_flight(client):
    await client.start()
    running = asyncio.create_task(tokens(client, request("a", max_tokens=10_000)))
    await asyncio.sleep(0.05)
    start = time.monotonic()
    await client.close()
    assert time.monotonic() - start < 1.0
    with pytest.raises(EngineDeadError, match="closed"):
        await running


async def test_load_error(client, monkeypatch):
    monkeypatch.setenv("SCRIPT_LOAD_ERROR", "no weights here")
    with pytest.raises(LoadError, match="no weights here"):
        await client.start()
    assert client.state == "failed"


async def test_a_question_is_answered_or_refused(client):
    with pytest.raises(EngineDeadError, match="loading"):
        await client.look(CacheQuestion())
    await client.start()
    with pytest.raises(RequestError, match="nothing to see"):
        await client.look(CacheQuestion())
    assert await tokens(client, request("a", max_tokens=2)) == [100, 101]
