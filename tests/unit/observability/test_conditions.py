"""Health conditions: recent problems, and how long they are reported."""

from __future__ import annotations

from helpers.live_server import live_server

from windlass.clients import Client
from windlass.server.app.state import CONDITION_SECONDS, HealthConditions


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
