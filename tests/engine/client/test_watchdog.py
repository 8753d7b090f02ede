"""When a child counts as stuck: by its messages, its CPU time, and the expected duration of its step."""

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
    """As much of a child, and of what the system says of it, as the watchdog asks for."""

    used_seconds: float | None = 0.0
    inactive: bool = False
    stopped: bool = False
    stopped_until: int = 10**9  # the check from which on it is not
    ended: bool = False
    a_tick: float = 0.25  # processor seconds that it uses in a tick
    ticks: int = 0
    owes: bool = True
    owes_until: int = 10**9  # the check from which on it does not
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
    """Seconds of silence after which the child is given up; None after `most` checks, four a second."""

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


async def test_of_a_first_step_nothing_is_known(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child()) == HANG


async def test_one_that_computes_far_longer_than_expected(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child(), StepDone((), 0.01)) == 20.0


async def test_a_long_step_that_was_announced(monkeypatch) -> None:
    done = StepDone((), 0.01)
    assert await killed_after(monkeypatch, Child(), done, StepStarted(3.0)) == 60.0
    assert await killed_after(monkeypatch, Child(), done, StepStarted(30.0), most=2600) == 600.0
    assert await killed_after(monkeypatch, Child(), done, StepStarted(None)) == HANG
    assert await killed_after(monkeypatch, Child(), StepStarted(3.0), done) == 20.0


async def test_one_that_gets_no_processor_is_not_to_blame(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child(a_tick=0.0625), StepDone((), 0.01)) == 40.25  # 10 seconds of its own
    assert await killed_after(monkeypatch, Child(a_tick=0.005), StepDone((), 0.01)) == HANG
    assert await killed_after(monkeypatch, Child(used_seconds=None), StepDone((), 0.01)) == HANG  # no Linux


async def test_questions_take_as_long_as_they_take(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child(looks=True), StepDone((), 0.01)) == HANG


async def test_one_that_has_nothing_to_do_is_left_alone(monkeypatch) -> None:
    assert await killed_after(monkeypatch, Child(owes=False, inactive=True), StepDone((), 0.01)) is None


async def test_one_that_does_nothing_is_suspected_first(monkeypatch) -> None:
    child = Child(inactive=True, a_tick=0.0)
    assert await killed_after(monkeypatch, child) == 2.75
    assert child.suspected == [False] * 4 + [True] * 6


async def test_one_that_was_stopped_is_suspected_at_once(monkeypatch) -> None:
    child = Child(stopped=True, inactive=True, a_tick=0.0)
    assert await killed_after(monkeypatch, child, StepDone((), 0.01)) == 1.0
    assert child.suspected == [True] * 3
    assert await killed_after(monkeypatch, Child(stopped=True, inactive=True, owes=False)) is None
    assert await killed_after(monkeypatch, Child(stopped=True, inactive=True), StepStarted(None)) == 1.0


async def test_one_that_owes_nothing_any_more_is_not_suspected(monkeypatch) -> None:
    """Otherwise its standby process would wait until the next request."""
    child = Child(inactive=True, a_tick=0.0, owes_until=8)
    assert await killed_after(monkeypatch, child, most=10) is None
    assert child.suspected == [False] * 4 + [True] * 3 + [False] * 3


async def test_one_that_was_stopped_for_a_moment_goes_on(monkeypatch) -> None:
    child = Child(stopped=True, inactive=True, stopped_until=4)
    assert await killed_after(monkeypatch, child, StepDone((), 0.01), most=20) is None
    assert child.suspected == [True] * 3 + [False] * 17
    assert await killed_after(monkeypatch, Child(stopped=True), most=20) is None  # it continued between any two checks
