"""What lookers-on may cost the engine: answers shared by all who ask within a moment, and work done one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from windlass.server.errors import ApiError

T = TypeVar("T")

MOMENT = 0.2  # seconds that an answer is good for
_REST = 20.0  # times what it cost: it may take a twentieth of the time
MOST_WAITING = 8


class Recent(Generic[T]):
    """The last answer, and until when it is good. For one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._answer: T | None = None
        self._good_until = 0.0

    async def get(self, make: Callable[[], Awaitable[tuple[T, float]]]) -> T:
        """The last answer while it is recent, else a new one. make: gives it, and the seconds that it cost the engine."""
        async with self._turn:
            if self._answer is None or time.monotonic() >= self._good_until:
                self._answer, cost = await make()
                self._good_until = time.monotonic() + max(MOMENT, _REST * cost)
            return self._answer


class OneAtATime:
    """Work of which a new piece begins when the one before has ended, also where nobody waits for that any more."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The work's result; raises ApiError 429 where too much waits already. Cancelling it leaves the work to end by itself."""
        if len(self._waiting) >= MOST_WAITING:
            raise ApiError(
                429,
                f"{MOST_WAITING} such requests wait already",
                type="rate_limit_error",
                code="too_many_requests",
                retry_after=1,
            )
        task = asyncio.create_task(self._in_turn(work))
        self._waiting.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            return await work()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._waiting.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it, if anybody did
