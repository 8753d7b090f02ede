"""`LoopThread`: an event loop on a thread of its own, to which other threads hand work, from its start to its end.

Knows no engine and no app. Nobody waits for ever: work that the end overtakes fails, and so does work in a process that was
forked, where the thread does not exist.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from windlass.engine.errors import EngineDeadError

T = TypeVar("T")

_LEAVE_SECONDS = 5.0
_CLOSED = "this model was closed: make another LLM"
_FORKED = (
    "this LLM is of the process that made it, and a fork has none of its threads: make one in the process that uses it"
)


class LoopThread:
    """`start` it; `end` it, then `close` it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="windlass", daemon=True)
        self._process = os.getpid()
        self._lock = threading.Lock()  # over the next two: what is accepted is begun before the loop stops
        self._ended = False
        self._accepted: set[concurrent.futures.Future[Any]] = set()

    @property
    def forked(self) -> bool:
        """Whether this is a process that has the object alone."""
        return os.getpid() != self._process

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. An interrupt of the caller's thread cancels the work. Raises EngineDeadError behind the end."""
        if self.forked:  # before the lock: perhaps it was held when the process was forked
            work.close()
            raise EngineDeadError(_FORKED)
        with self._lock:
            if self._ended:
                work.close()
                raise EngineDeadError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._accepted.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # by the end
            raise EngineDeadError(_CLOSED) from None
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._accepted.discard(future)

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Carry out `last`, then accept nothing more, cancel what still runs and wait for the thread."""
        try:
            self.run(last)
        finally:
            with self._lock:
                self._ended = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            with self._lock:
                left = list(self._accepted)
            for future in left:  # of work that would not be cancelled
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_exception(EngineDeadError(_CLOSED))

    def close(self) -> None:
        self._loop.close()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_LEAVE_SECONDS)
    for task in others:
        if task.done() and not task.cancelled():
            task.exception()  # it was seen: nothing is logged of it
