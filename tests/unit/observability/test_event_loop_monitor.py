"""Event loop monitor: stalls are logged while they last, with the blocking code."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest

from windlass.server.observability.event_loop_monitor import EventLoopMonitor

pytestmark = pytest.mark.anyio


def hold_up(seconds: float, noticed: Callable[[], bool] = lambda: True) -> None:
    """Block for this long, and until it was noticed."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds or not (noticed() or time.monotonic() > begin + 30):
        time.sleep(0.05)


async def test_a_stall_is_logged_while_it_lasts_and_observed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "windlass.server")
    for _ in range(3):  # a busy machine may stall the loop itself, and only one line a minute is logged
        caplog.clear()
        late: list[float] = []
        watch = EventLoopMonitor(late.append, stall=0.4)
        watch.start()
        await asyncio.sleep(0.3)
        assert late and (not caplog.records or max(late) > 0.3)
        if not caplog.records:
            break
        watch.stop()
    hold_up(1.0, lambda: bool(caplog.records))
    stalled = [record for record in caplog.records if "hold_up" in record.message]
    assert (
        len(stalled) == 1
        and "has been blocked" in stalled[0].message
        and "test_event_loop_monitor.py" in stalled[0].message
    )
    async with asyncio.timeout(30):
        while not any("runs again after" in record.message for record in caplog.records):
            await asyncio.sleep(0.05)
    assert max(late) > 0.8
    watch.stop()
    count = len(late)
    await asyncio.sleep(0.3)
    assert len(late) <= count + 1


async def test_repeated_stalls_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "windlass.server")
    late: list[float] = []
    watch = EventLoopMonitor(late.append, stall=0.04)
    watch.start()
    for count in (1, 2, 3):
        hold_up(0.3)
        async with asyncio.timeout(30):
            while sum(seconds > 0.1 for seconds in late) < count:
                await asyncio.sleep(0.02)
    watch.stop()
    assert sum("has been blocked" in record.message for record in caplog.records) == 1
    assert sum("runs again" in record.message for record in caplog.records) <= 1
