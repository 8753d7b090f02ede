"""What uvicorn and asyncio log about a connection: what any client can cause is said at most once a minute, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from windlass.server.http.occasional import Occasional


def is_no_lost_write(record: logging.LogRecord) -> bool:
    """A filter of asyncio's logger, which warns of each further write to a client that has left: nothing is wrong, and a crowd
    of them fills the log.
    """
    return record.msg != "socket.send() raised exception."


class WarningsLog:
    """Stands where a connection of uvicorn expects its logger. Its warnings are about bytes that are not HTTP.

    better: what to say instead of a warning, where it has words.
    """

    def __init__(self, logger: logging.Logger, warned: Occasional, better: Callable[[], str | None]) -> None:
        self._logger = logger
        self._warned = warned
        self._better = better

    @property
    def level(self) -> int:
        return self._logger.level

    def warning(self, message: str) -> None:
        """Said at most once a minute, by all connections together."""
        self._warned.say(self._better() or message)

    def error(self, message: str, *args: Any, **options: Any) -> None:
        """A request that failed: always said."""
        self._logger.error(message, *args, **options)

    def log(self, level: int, message: str, *args: Any) -> None:
        """Traces, where they are on."""
        self._logger.log(level, message, *args)
