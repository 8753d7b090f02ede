"""`LoopThread`: every caller gets a result or an error, at any moment of the end."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from windlass.engine.errors import EngineDeadError
from windlass.server.startup.in_process import LoopThread


async def nothing() -> None:
    pass


def test_work_interrupted_by_the_end_fails() -> None:
    for _ in range(50):
        loop, ended = LoopThread(), []

        def ask(loop: LoopThread = loop, ended: list[str] = ended) -> None:
            try:
                while True:
                    loop.run(asyncio.sleep(0))
            except EngineDeadError as error:
                ended.append(str(error))

        def wait(loop: LoopThread = loop, ended: list[str] = ended) -> None:
            try:
                loop.run(asyncio.sleep(3600))
            except EngineDeadError as error:
                ended.append(str(error))

        loop.start()
        threads = [threading.Thread(target=each, daemon=True) for each in (ask, ask, ask, wait)]
        for thread in threads:
            thread.start()
        loop.end(nothing())
        for thread in threads:
            thread.join(10)
        assert ended == ["this model was closed: create another LLM"] * 4
        loop.close()
        with pytest.raises(EngineDeadError):
            loop.run(nothing())


def test_work_that_ignores_cancellation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.server.startup.in_process._LEAVE_SECONDS", 0.01)
    loop, begun, caught = LoopThread(), threading.Event(), []

    async def stubborn() -> None:
        begun.set()
        while not loop.forked:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if released.is_set():
                    raise

    def ask() -> None:
        with pytest.raises(EngineDeadError, match="was closed") as error:
            loop.run(stubborn())
        caught.append(error.value)

    released = threading.Event()
    loop.start()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert begun.wait(10)
    loop.end(nothing())
    thread.join(10)
    assert len(caught) == 1
    released.set()
    (left,) = asyncio.all_tasks(loop._loop)
    left.cancel()
    loop._loop.run_until_complete(asyncio.wait({left}))
    loop.close()


def test_the_loop_ends_if_its_last_work_fails() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    loop = LoopThread()
    loop.start()
    with pytest.raises(ZeroDivisionError):
        loop.end(fail())
    with pytest.raises(EngineDeadError):
        loop.run(nothing())
    loop.close()


def test_work_in_a_fork_fails_even_with_a_held_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = LoopThread()
    loop.start()
    with loop._lock, monkeypatch.context() as elsewhere:
        pid = os.getpid()
        elsewhere.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(EngineDeadError, match="in the process that uses it"):
            loop.run(nothing())
    loop.end(nothing())
    loop.close()
