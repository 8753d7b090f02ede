"""A loop that stands still is noticed while it does, with the place that holds it up."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from windlass.server.http.loop_watch import LoopWatch

pytestmark = pytest.mark.anyio


def hold_up(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_stall_is_logged_while_it_lasts_and_observed(caplog: pytest.LogCaptureFixture) -> None:
    late: list[float] = []
    caplog.set_level(logging.WARNING, "windlass.server")
    watch = LoopWatch(late.append, stall=0.4)
    watch.start()
    await asyncio.sleep(0.3)
    assert late and (not caplog.records or max(late) > 0.3)  # a machine with other work may hold it up itself
    hold_up(1.0)
    stalled = [record for record in caplog.records if "hold_up" in record.message]
    assert len(stalled) == 1 and "has stood still" in stalled[0].message and "test_loop_watch.py" in stalled[0].message
    async with asyncio.timeout(10):
        while not any("runs again after" in record.message for record in caplog.records):
            await asyncio.sleep(0.05)
    assert max(late) > 0.8
    watch.stop()
    count = len(late)
    await asyncio.sleep(0.3)
    assert len(late) <= count + 1


async def test_stalls_that_follow_soon_are_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "windlass.server")
    late: list[float] = []
    watch = LoopWatch(late.append, stall=0.04)
    watch.start()
    for count in (1, 2, 3):
        hold_up(0.3)
        async with asyncio.timeout(10):
            while sum(seconds > 0.1 for seconds in late) < count:
                await asyncio.sleep(0.02)
    watch.stop()
    assert sum("has stood still" in record.message for record in caplog.records) == 1
    assert sum("runs again" in record.message for record in caplog.records) <= 1
