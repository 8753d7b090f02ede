"""Access log, uvicorn's warnings, and limits for log lines that any client can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

LOG_INTERVAL_SECONDS = 60.0


class RateLimitedLogger:
    """Logs an event the first time, and then at most once in LOG_INTERVAL_SECONDS with how often it came since."""

    def __init__(self, logger: logging.Logger, level: int, *, clock: Callable[[], float] | None = None) -> None:
        self._logger = logger
        self._level = level
        self._clock = clock or time.monotonic
        self._next = -float("inf")
        self._count = 0

    def log(self, message: str) -> bool:
        """Count the event, and log it if it is time; returns whether it was."""
        self._count += 1
        now = self._clock()
        if now < self._next:
            return False
        times = f" ({self._count} times since this was said last)" if self._count > 1 else ""
        self._logger.log(self._level, "%s%s", message, times)
        self._next = now + LOG_INTERVAL_SECONDS
        self._count = 0
        return True


class AccessLog:
    """Stands where uvicorn expects the logger of its access lines.

    No endpoint takes a query, so what stands there is a mistake, and often a key that belongs into a header: neither
    names nor values are written.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, line: str, client: str, method: str, path: str, version: str, status: int) -> None:
        """One answered request; `path` may have a query."""
        path, mark, _ = path.partition("?")
        self._logger.info(line, client, method, path + ("?..." if mark else ""), version, status)


def is_not_lost_write_warning(record: logging.LogRecord) -> bool:
    """A filter of asyncio's logger, which warns of each further write to a client that has left: nothing is wrong, and a crowd
    of them fills the log.
    """
    return record.msg != "socket.send() raised exception."


class WarningsLog:
    """Stands where a connection of uvicorn expects its logger. Its warnings are about bytes that are not HTTP.

    better: what to say instead of a warning, where it has words.
    """

    def __init__(self, logger: logging.Logger, warned: RateLimitedLogger, better: Callable[[], str | None]) -> None:
        self._logger = logger
        self._warned = warned
        self._better = better

    @property
    def level(self) -> int:
        return self._logger.level

    def warning(self, message: str) -> None:
        """Said at most once a minute, by all connections together."""
        self._warned.log(self._better() or message)

    def error(self, message: str, *args: Any, **options: Any) -> None:
        """A request that failed: always said."""
        self._logger.error(message, *args, **options)

    def log(self, level: int, message: str, *args: Any) -> None:
        """Traces, where they are on."""
        self._logger.log(level, message, *args)
