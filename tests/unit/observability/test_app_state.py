"""State of the application: cached introspection, jobs that run one at a time, and health conditions."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from helpers.live_server import live_server

from windlass.clients import Client
from windlass.server.app import state
from windlass.server.app.state import CONDITION_SECONDS, MAX_WAITING, HealthConditions, SerialExecutor, TimedCache
from windlass.server.errors import ApiError

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("cost", "good_for"), [(0.0, 0.2), (0.1, 2.0)])
async def test_a_value_is_cached_for_a_while(monkeypatch: pytest.MonkeyPatch, cost: float, good_for: float) -> None:
    now, made = 100.0, 0
    monkeypatch.setattr(state.time, "monotonic", lambda: now)

    async def make() -> tuple[int, float]:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        return made, cost

    shared: TimedCache[int] = TimedCache()
    assert await asyncio.gather(*(shared.get(make) for _ in range(5))) == [1] * 5
    now += 0.99 * good_for
    assert await shared.get(make) == 1
    now += 0.02 * good_for
    assert await shared.get(make) == 2


async def test_a_cancelled_job_still_ends_first() -> None:
    turn, gate, running, most = SerialExecutor(), asyncio.Event(), 0, 0

    async def work() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return "done"

    waiting = [asyncio.create_task(turn.run(work)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0.01)
    with pytest.raises(ApiError) as caught:
        await turn.run(work)
    assert caught.value.status == 429
    waiting[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting[0]
    await asyncio.sleep(0.01)
    assert running == 1  # its own still
    gate.set()
    assert await asyncio.gather(*waiting[1:]) == ["done"] * (MAX_WAITING - 1) and most == 1
    assert await turn.run(work) == "done"


async def test_an_error_reaches_only_its_caller() -> None:
    turn = SerialExecutor()

    async def fail() -> None:
        raise KeyError("no")

    async def work() -> int:
        return 3

    with pytest.raises(KeyError):
        await turn.run(fail)
    assert await turn.run(work) == 3


# ---- health conditions ------------------------------------------------------------------------------------------------
def test_a_condition_is_reported_for_a_minute() -> None:
    now = 1000.0
    conditions = HealthConditions(lambda: now)
    assert conditions.current() == []
    conditions.mark("text_process_lost")
    now += CONDITION_SECONDS / 2
    conditions.mark("engine_restarted")
    assert conditions.current() == ["engine_restarted", "text_process_lost"]
    now += CONDITION_SECONDS / 2
    assert conditions.current() == ["engine_restarted"]
    now += CONDITION_SECONDS / 2
    assert conditions.current() == []


def test_counts_that_grow() -> None:
    now = 0.0
    conditions = HealthConditions(lambda: now)
    for count in (0, 0, 1):
        conditions.update_count("engine_restarted", count)
    assert conditions.current() == ["engine_restarted"]
    now += CONDITION_SECONDS
    conditions.update_count("engine_restarted", 1)
    assert conditions.current() == []
    conditions.update_count("engine_restarted", 3)
    assert conditions.current() == ["engine_restarted"]


def test_health_reports_conditions() -> None:
    with live_server() as live, Client(live.url) as client:
        assert client.health().degraded == ()
        assert live.http.get("/health").json() == {"status": "ready"}
        live.on_loop(lambda: live.state.observe_event_loop_lag(0.9))
        assert client.health().degraded == ()
        live.on_loop(lambda: live.state.observe_event_loop_lag(1.2))
        assert live.http.get("/health").json() == {"status": "ready", "degraded": ["event_loop_stalled"]}
        health = client.health()
        assert health.ok and health.degraded == ("event_loop_stalled",)
        assert live.http.get("/ready").json() == {"status": "ready"}
