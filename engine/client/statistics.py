"""Statistics on their way from an engine process: asked for, or pushed along with steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from windlass.engine.api.request import EngineStats
from windlass.engine.core.wire import AskStats, Message, Stats, StatsAccumulator, StepDone

STATS_TIMEOUT = 1.0  # seconds to wait for fresh statistics before the last known ones do


class StatsCalls:
    """send, require_engine: see `RequestRouter`."""

    def __init__(self, send: Callable[[Message], None], require_engine: Callable[[], None]) -> None:
        self._send, self._require_engine = send, require_engine
        self._stats = StatsAccumulator()
        self._waiter: asyncio.Future[None] | None = None

    async def ask(self) -> EngineStats:
        """Fresh ones, or the last known while a step takes longer than STATS_TIMEOUT. Raises EngineDeadError.

        The `*_seconds` samples are those since the previous call, each handed out once.
        """
        self._require_engine()
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._send(AskStats())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._waiter), STATS_TIMEOUT)
        self._require_engine()
        return self._stats.take()

    def deliver(self, message: Message) -> bool:
        """Take what a message has of them; False if it is about something else too."""
        if isinstance(message, StepDone):
            if message.stats is not None:
                self._stats.add(message.stats)
            return False
        if not isinstance(message, Stats):
            return False
        self._stats.add(message.stats)
        self._resolve()
        return True

    def engine_gone(self) -> None:
        """Its gauges and counters are void, and nobody answers whoever asked."""
        self._stats.forget_engine()
        self._resolve()

    def _resolve(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None
