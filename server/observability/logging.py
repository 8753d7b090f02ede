"""Logging: setup, the request that a record is about, the access log, limits for repeated lines, and stalls of the event loop.

`EventLoopMonitor` is a thread that logs stalls while they last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import Scope

from windlass.engine.process_setup import JSON_FORMAT, LOG_FORMAT_VARIABLE, log_as_json
from windlass.server.config.option_names import with_option_names

_logger = logging.getLogger("windlass.server")

CALLER_NAME = "windlass.caller_name"  # in a scope: the name of the caller's API key, if it has one
LOG_INTERVAL_SECONDS = 60.0

current_request: ContextVar[Scope | None] = ContextVar("windlass-request", default=None)


def request_id(scope: Scope) -> str:
    """The id of the request of this scope."""
    return str(scope["windlass.request_id"])


def set_request_id(scope: Scope, value: str) -> None:
    """Use the id that a request body asks for."""
    scope["windlass.request_id"] = value


def response_headers(scope: Scope) -> dict[str, str]:
    """Further headers of the response, which may be changed until it starts."""
    headers: dict[str, str] = scope.setdefault("windlass.response_headers", {})
    return headers


def log_to_stderr(level: str, log_format: str) -> None:
    """Set up logging of this process and of its later child processes. log_format: "text" or "json"."""
    if log_format == JSON_FORMAT:
        os.environ[LOG_FORMAT_VARIABLE] = JSON_FORMAT  # inherited by child processes, which are started in many places
        log_as_json("server", level, words=with_option_names, fields=_RequestFields())
    else:
        os.environ.pop(LOG_FORMAT_VARIABLE, None)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_OptionNameFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":
        logging.getLogger("uvicorn.error").setLevel("WARNING")  # its start and stop messages repeat ours
    logging.getLogger("asyncio").addFilter(is_not_lost_write_warning)


def is_not_lost_write_warning(record: logging.LogRecord) -> bool:
    """Filter of asyncio's logger, which warns at each further write to a closed connection.

    That is normal, and a crowd of clients that disconnect would fill the log.
    """
    return record.msg != "socket.send() raised exception."


class RateLimitedLogger:
    """Logs an event the first time, and then at most once in LOG_INTERVAL_SECONDS with the number of events since."""

    def __init__(self, logger: logging.Logger, level: int, *, clock: Callable[[], float] | None = None) -> None:
        self._logger = logger
        self._level = level
        self._clock = clock or time.monotonic
        self._next = -float("inf")
        self._count = 0

    def log(self, message: str) -> bool:
        """Count an event and log it if due. Returns whether it was logged."""
        self._count += 1
        now = self._clock()
        if now < self._next:
            return False
        times = f" ({self._count} times since the last such message)" if self._count > 1 else ""
        self._logger.log(self._level, "%s%s", message, times)
        self._next = now + LOG_INTERVAL_SECONDS
        self._count = 0
        return True


class AccessLog:
    """Replaces uvicorn's access logger.

    It hides query strings: no endpoint takes any, so they are mistakes, often API keys that belong in a header.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, line: str, client: str, method: str, path: str, version: str, status: int) -> None:
        """Log one request and its status; `path` may have a query."""
        path, mark, _ = path.partition("?")
        self._logger.info(line, client, method, path + ("?..." if mark else ""), version, status)


class _RequestFields(logging.Filter):
    """Adds the id and the caller's name of the current request to log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (scope := current_request.get()) is not None:
            record.request_id = getattr(record, "request_id", None) or request_id(scope)
            record.caller = scope.get(CALLER_NAME)
        return True


class _OptionNameFormatter(logging.Formatter):
    """Formats records with option names in place of configuration paths."""

    def format(self, record: logging.LogRecord) -> str:
        return with_option_names(super().format(record))


HEARTBEAT_SECONDS = 0.1  # between two heartbeats of the loop
STALL_SECONDS = 1.0  # without a heartbeat: logged, and reported by `/health`
_FRAMES = 8  # of a stack, the innermost ones


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
