"""Detection of stuck processes by messages, CPU time and the expected duration of a step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from windlass.engine.client import supervision as module
from windlass.engine.client.supervision import Watchdog
from windlass.engine.core.messages import Message, StepDone, StepStarted

pytestmark = pytest.mark.anyio

HANG = 120.0


@pytest.fixture
def anyio_backend():
    return "asyncio"


@dataclass
class Child:
    """The properties of a process that the watchdog uses."""

    used_seconds: float | None = 0.0
    inactive: bool = False
    stopped: bool = False
    stopped_until: int = 10**9  # the check from which it is not
    ended: bool = False
    a_tick: float = 0.25  # CPU seconds per check
    ticks: int = 0
    owes: bool = True
    owes_until: int = 10**9  # the check from which it does not
    looks: bool = False
    suspected: list[bool] = field(default_factory=list)

    @property
    def process(self):
        return self

    pid = 1

    def refresh(self) -> None:
        self.ticks += 1
        if self.ticks == self.stopped_until:
            self.stopped = self.inactive = False
        if self.ticks == self.owes_until:
            self.owes = False
        if self.used_seconds is not None:
            self.used_seconds += self.a_tick


async def killed_after(monkeypatch, child: Child, *heard: Message, most: int = 800) -> float | None:
    """Seconds of silence after which the process counts as stuck; None after `most` checks, four per second."""

    async def tick(seconds: float) -> None:
        assert seconds == 0.25
        if child.ticks == most:
            child.ended = True

    monkeypatch.setattr(module, "ProcessActivity", lambda pid: child)
    monkeypatch.setattr(asyncio, "sleep", tick)
    watchdog = Watchdog(
        child,  # type: ignore[arg-type]
        HANG,
        has_pending_work=lambda: child.owes,
        has_inspections=lambda: child.looks,
        suspect=child.suspected.append,
    )
    for message in heard:
        watchdog.on_message(message)
    return None if await watchdog.watch() is None else child.ticks / 4


async def test_first_step_has_no_expected_duration(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child()) == HANG


async def test_step_far_longer_than_expected_is_stuck(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child(), StepDone((), 0.01)) == 20.0


async def test_announced_long_step_is_not_stuck(monkeypatch) -> None:
    done = StepDone((), 0.01)
    assert await killed_after(monkeypatch, Child(), done, StepStarted(3.0)) == 60.0
    assert await killed_after(monkeypatch, Child(), done, StepStarted(30.0), most=2600) == 600.0
    assert await killed_after(monkeypatch, Child(), done, StepStarted(None)) == HANG
    assert await killed_after(monkeypatch, Child(), StepStarted(3.0), done) == 20.0


async def test_process_without_cpu_time_is_not_stuck(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child(a_tick=0.0625), StepDone((), 0.01)) == 40.25  # 10 seconds of CPU time
    assert await killed_after(monkeypatch, Child(a_tick=0.005), StepDone((), 0.01)) == HANG
    assert await killed_after(monkeypatch, Child(used_seconds=None), StepDone((), 0.01)) == HANG  # not Linux


async def test_introspection_has_no_expected_duration(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child(looks=True), StepDone((), 0.01)) == HANG


async def test_idle_process_is_not_stuck(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child(owes=False, inactive=True), StepDone((), 0.01)) is None


async def test_inactive_process_is_suspected_first(monkeypatch) -> None:
    child = Child(inactive=True, a_tick=0.0)
    assert await killed_after(monkeypatch, child) == 2.75
    assert child.suspected == [False] * 4 + [True] * 6


async def test_stopped_process_is_suspected_immediately(monkeypatch) -> None:
    child = Child(stopped=True, inactive=True, a_tick=0.0)
    assert await killed_after(monkeypatch, child, StepDone((), 0.01)) == 1.0
    assert child.suspected == [True] * 3
    assert await killed_after(monkeypatch, Child(stopped=True, inactive=True, owes=False)) is None
    assert await killed_after(monkeypatch, Child(stopped=True, inactive=True), StepStarted(None)) == 1.0


async def test_process_without_pending_work_is_not_suspected(monkeypatch) -> None:
    """Otherwise its standby process would wait until the next request."""
    child = Child(inactive=True, a_tick=0.0, owes_until=8)
    assert await killed_after(monkeypatch, child, most=10) is None
    assert child.suspected == [False] * 4 + [True] * 3 + [False] * 3


async def test_briefly_stopped_process_is_not_stuck(monkeypatch) -> None:
    child = Child(stopped=True, inactive=True, stopped_until=4)
    assert await killed_after(monkeypatch, child, StepDone((), 0.01), most=20) is None
    assert child.suspected == [True] * 3 + [False] * 17
    assert await killed_after(monkeypatch, Child(stopped=True), most=20) is None  # it ran between any two checks
