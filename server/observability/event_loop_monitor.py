"""Event loop monitor: a thread that logs stalls of the event loop while they last."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from windlass.server.observability.logging import RateLimitedLogger

HEARTBEAT_SECONDS = 0.1  # between two heartbeats of the loop
STALL_SECONDS = 1.0  # without a heartbeat: logged, and reported by `/health`
_FRAMES = 8  # of a stack, the innermost ones

_logger = logging.getLogger("windlass.server")


class EventLoopMonitor:
    """Call `start` and `stop` on the event loop.

    observe: called about ten times a second with the delay of the loop in seconds. stall: delay that is logged, in seconds.
    """

    def __init__(self, observe: Callable[[float], None], stall: float = STALL_SECONDS) -> None:
        self._observe = observe
        self._stall = stall
        self._beat_at = time.monotonic()
        self._stopped = threading.Event()
        self._loop_thread = threading.get_ident()
        self._task: asyncio.Task[None] | None = None
        self._stall_log = RateLimitedLogger(_logger, logging.WARNING)

    def start(self) -> EventLoopMonitor:
        self._loop_thread = threading.get_ident()
        self._beat_at = time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._beat(), name="loop-watch")
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        if self._task is not None:
            self._task.cancel()

    def _lag(self) -> float:
        return max(0.0, time.monotonic() - self._beat_at - HEARTBEAT_SECONDS)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._observe(self._lag())
            self._beat_at = time.monotonic()

    def _watch(self) -> None:
        stalled_since: float | None = None
        logged = False
        while not self._stopped.wait(self._stall / 4):
            if stalled_since is None and self._lag() >= self._stall:
                stalled_since = self._beat_at
                logged = self._stall_log.log(
                    f"the event loop has been blocked for {self._lag():.1f} s, so all requests wait; it runs:\n{self._stack()}"
                )
            elif stalled_since is not None and stalled_since != self._beat_at:
                if logged:
                    _logger.warning("the event loop runs again after %.1f s", self._beat_at - stalled_since)
                stalled_since = None

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        found = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        return "\n".join(f"  {entry.filename}:{entry.lineno} {entry.name}" for entry in found)
