"""Errors the engine raises, each with a message that says what to change. Knows nothing of HTTP status codes.

A message, and a notice of a loaded model, names a field of `EngineConfig` by its path in backquotes, with a value where it
speaks of one: "lower `cache.memory`", "use `compute.device=cpu`". Whoever has names of their own for the fields, as a
command has options, finds them by that.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class LoadError(EngineError):
    """The model or the configuration cannot be served as given; the message is one line that says what to do."""


class RequestError(EngineError, ValueError):
    """A request cannot be run as given.

    `param` names the offending field as the caller wrote it, `code` is a short machine-readable reason
    (`context_length_exceeded`, …).
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str | None, str | None]]:
        return type(self), (self.message, self.param, self.code)


class QueueFullError(EngineError):
    """The waiting queue is full; try again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[QueueFullError], tuple[str, float]]:
        return type(self), (str(self), self.retry_after)


class EngineDeadError(EngineError):
    """The engine process ended while the request was in flight, or is being restarted."""


class DeadlineError(EngineError):
    """The request's deadline passed before it finished."""
