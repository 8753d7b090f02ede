"""An asyncio event loop with a simulated clock: when no work is left, the clock jumps to the next timer.

It provides time, the work of threads, and connections, which `network` makes. Everything happens in one thread, in an order that
depends on the seed only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

START = 100_000.0  # seconds of the monotonic clock at which a simulation begins
WALL_START = 1_800_000_000.0


class StuckError(AssertionError):
    """A wait can never end, because no timer is left."""


class _Clockwork:
    """Replaces a selector: it never waits, and moves the clock instead."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise StuckError("nothing is left to happen, and the simulation has not ended")
        if timeout > 0:
            self._loop.jump_to_next_timer()
        return []

    def close(self) -> None:
        pass


class SimulatedLoop(asyncio.BaseEventLoop):
    """delay: returns the seconds of a piece of work on a thread; it may raise instead of the work."""

    def __init__(self, delay: Callable[[str], float]) -> None:
        super().__init__()
        self._now = START
        self._wall = WALL_START - START
        self._selector = _Clockwork(self)
        self._delay = delay
        self._readers: dict[Any, Callable[[], None]] = {}
        self.failures: list[str] = []  # unhandled errors
        self.set_exception_handler(self._note)

    # ---- time --------------------------------------------------------------------------------------------------------
    def time(self) -> float:
        return self._now

    def wall_time(self) -> float:
        return self._now + self._wall

    def jump_to_next_timer(self) -> None:
        """Advance to the time of the next timer."""
        self._now = max(self._now, self._scheduled[0].when())

    def stand_still(self, seconds: float) -> None:
        """Stop the process for some seconds: timers that were due meanwhile are late."""
        self._now += seconds

    def set_wall_clock(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._wall += seconds

    # ---- abstract methods of BaseEventLoop ------------------------------------------------------------------------------
    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context.get('message')}: {error!r}")

    # ---- threads -----------------------------------------------------------------------------------------------------
    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run the work at once, after a simulated delay."""
        future: asyncio.Future[Any] = self.create_future()
        name = getattr(func, "__qualname__", "")

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        def fail(error: Exception) -> None:
            if not future.cancelled():
                future.set_exception(error)

        try:
            seconds = self._delay(name)
        except Exception as error:
            self.call_soon(fail, error)
        else:
            self.call_later(seconds, work)
        return future

    # ---- connections: listeners and sockets are those of `network` -----------------------------------------------------
    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self._readers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def readable(self, fd: Any) -> None:
        """Call the reader of a listener with waiting connections."""
        if (callback := self._readers.get(fd)) is not None:
            self.call_soon(callback)

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], sock: Any, **options: Any
    ) -> tuple[Any, asyncio.Protocol]:
        return await self._open(protocol_factory, sock)

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], path: Any = None, *, sock: Any, **options: Any
    ) -> tuple[Any, asyncio.Protocol]:
        return await self._open(protocol_factory, sock)

    async def _open(self, protocol_factory: Callable[[], asyncio.Protocol], sock: Any) -> tuple[Any, asyncio.Protocol]:
        await asyncio.sleep(0)
        protocol = protocol_factory()
        sock.end.open(protocol)
        return sock.end, protocol


@contextlib.contextmanager
def simulated_time(loop: SimulatedLoop) -> Iterator[None]:
    """Replace the clocks of `time` with that of the loop."""
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "perf_counter", loop.time),
        mock.patch.object(time, "time", loop.wall_time),
    ):
        yield
