"""A bound on how many jobs run at once, where waiting callers take turns. Knows nothing of what a job is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LaneFullError(Exception):
    """More work waits in this lane than it takes."""


class Lane:
    """Lets `width` jobs run at once. Callers that wait take turns, so one with a hundred jobs holds another up by one.

    max_waiting: the total size of the jobs that may wait.
    """

    def __init__(self, width: int, max_waiting: int) -> None:
        self._free = width
        self._max_waiting = max_waiting
        self._waiting_size = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

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
        if self._waiting_size + size > self._max_waiting:
            raise LaneFullError
        place = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(caller, deque())
        queue.append(place)
        self._waiting_size += size
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._pass_on()  # it was given the place in the same moment
            else:
                queue.remove(place)
                if not queue and self._queues.get(caller) is queue:
                    del self._queues[caller]
            raise
        finally:
            self._waiting_size -= size

    def _pass_on(self) -> None:
        if not self._queues:
            self._free += 1
            return
        caller, queue = next(iter(self._queues.items()))
        place = queue.popleft()
        if queue:
            self._queues.move_to_end(caller)
        else:
            del self._queues[caller]
        place.set_result(None)
