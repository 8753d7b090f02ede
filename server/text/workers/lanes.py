"""A bound on how many jobs run at once, where waiting callers take turns. Knows nothing of what a job is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


class LaneFullError(Exception):
    """More work waits in this lane than it takes."""


class Lane:
    """Lets `width` jobs run at once. Callers that wait take turns, so one with a hundred jobs holds another up by one.

    max_waiting: the total size of the jobs that may wait; those of one caller may be half of it.
    """

    def __init__(self, width: int, max_waiting: int) -> None:
        self._free = width
        self._max_waiting = max_waiting
        self._queues: OrderedDict[str, deque[_Place]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, caller: str, size: int) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises LaneFullError without waiting."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(caller, size)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str, size: int) -> None:
        waiting = {name: sum(place.size for place in queue) for name, queue in self._queues.items()}
        if sum(waiting.values()) + size > self._max_waiting or waiting.get(caller, 0) + size > self._max_waiting // 2:
            raise LaneFullError
        place = _Place(size, asyncio.get_running_loop().create_future())
        self._queues.setdefault(caller, deque()).append(place)
        try:
            await place.given
        except asyncio.CancelledError:
            if place.given.cancelled():
                self._forget(caller, place)
            else:
                self._pass_on()  # it was given the place in the same moment
            raise

    def _pass_on(self) -> None:
        while self._queues:
            caller, queue = next(iter(self._queues.items()))
            place = queue.popleft()
            if queue:
                self._queues.move_to_end(caller)
            else:
                del self._queues[caller]
            # One that was cancelled a moment ago stays queued until its task runs again.
            if not place.given.done():
                place.given.set_result(None)
                return
        self._free += 1

    def _forget(self, caller: str, place: _Place) -> None:
        queue = self._queues.get(caller)
        if queue is not None and place in queue:
            queue.remove(place)
            if not queue:
                del self._queues[caller]


@dataclass(eq=False, slots=True)
class _Place:
    """A job that waits. given: done once it may run."""

    size: int
    given: asyncio.Future[None]
