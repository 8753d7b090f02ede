"""A thread that notices when the event loop stands still."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from windlass.server.http.logs import Occasional

_logger = logging.getLogger("windlass.server")

BEAT = 0.1  # seconds between two signs of life

STALL = 1.0  # seconds without one that are worth a line in the log, and of which `/health` tells

_FRAMES = 8  # the innermost ones of a stack


class LoopWatch:
    """`start` it inside the event loop, `stop` it there too.

    observe: told, about ten times a second, by how many seconds the loop was late. stall: seconds after which it is logged.
    """

    def __init__(self, observe: Callable[[float], None], stall: float = STALL) -> None:
        self._observe = observe
        self._stall = stall
        self._beat_at = time.monotonic()
        self._ended = threading.Event()
        self._loop_thread = threading.get_ident()
        self._task: asyncio.Task[None] | None = None
        self._said = Occasional(_logger, logging.WARNING)

    def start(self) -> LoopWatch:
        self._loop_thread = threading.get_ident()
        self._beat_at = time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._beat(), name="loop-watch")
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        return self

    def stop(self) -> None:
        self._ended.set()
        if self._task is not None:
            self._task.cancel()

    def _late(self) -> float:
        return max(0.0, time.monotonic() - self._beat_at - BEAT)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self._observe(self._late())
            self._beat_at = time.monotonic()

    def _watch(self) -> None:
        stalled_since: float | None = None
        told = False
        while not self._ended.wait(self._stall / 4):
            if stalled_since is None and self._late() >= self._stall:
                stalled_since = self._beat_at
                told = self._said.say(
                    f"the event loop has stood still for {self._late():.1f} s; it runs:\n{self._stack()}"
                )
            elif stalled_since is not None and stalled_since != self._beat_at:
                if told:
                    _logger.warning("the event loop runs again after %.1f s", self._beat_at - stalled_since)
                stalled_since = None

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        found = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        return "\n".join(f"  {entry.filename}:{entry.lineno} {entry.name}" for entry in found)
