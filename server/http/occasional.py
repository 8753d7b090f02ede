"""A log line that an attacker can cause, at most once a minute. Knows nothing of what it says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PAUSE_SECONDS = 60.0


class Occasional:
    """Logs an event the first time, and then at most once in PAUSE_SECONDS with how often it came since."""

    def __init__(self, logger: logging.Logger, level: int, *, clock: Callable[[], float] | None = None) -> None:
        self._logger = logger
        self._level = level
        self._clock = clock or time.monotonic
        self._next = -float("inf")
        self._count = 0

    def say(self, message: str) -> bool:
        """Count the event, and log it if it is time; returns whether it was."""
        self._count += 1
        now = self._clock()
        if now < self._next:
            return False
        times = f" ({self._count} times since this was said last)" if self._count > 1 else ""
        self._logger.log(self._level, "%s%s", message, times)
        self._next = now + PAUSE_SECONDS
        self._count = 0
        return True
