"""Engine errors, each with a message that says what to change.

The engine knows nothing of HTTP status codes. A message or a model's notice names a field of `EngineConfig` by its path in
backquotes, with a value where there is one: "lower `cache.memory`", "use `compute.device=cpu`". Callers with other names for
the fields, such as command-line options, translate them by that path. `did_you_mean` suggests the nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 64  # characters looked at: comparing takes time by the square of them

_CUTOFF = 0.7  # share of characters that agree: "prompts" is near "prompt", "foo" near nothing


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
    """The engine process ended while the request was in flight, or is being restarted.

    begun: whether the engine may have begun with the request; if not, another one can run it as if nothing had been.
    """

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


OUT_OF_MEMORY = (
    "the device ran out of memory in a step in which this request was the newest: send it again later, or a shorter one"
)

OUT_OF_MEMORY_ROTATING = (
    "the device ran out of memory for the keys of this request, which turn by rope_update: send it again later, or with "
    "rope_update 'frozen'"
)


class DeviceMemoryError(EngineError):
    """The device had no memory left for a step, or for what a request needs beside steps; the newest request of that step or
    that request fails, and the others go on."""


class DeadlineError(EngineError):
    """The request's deadline passed before it finished."""


class SlowConsumerError(EngineError):
    """More of an answer waited for whoever reads it than is kept."""


def nearest(given: object, known: Iterable[str], cutoff: float = _CUTOFF) -> str | None:
    """The nearest of a few known names, letter case aside; None where none is near, or `given` is no text.

    cutoff: the share of characters that must agree.
    """
    if not isinstance(given, str):
        return None
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(given[:_LONGEST].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The words " (did you mean 'yarn'?)", to stand behind a name in a message, or nothing."""
    name = nearest(given, known)
    return "" if name is None else f" (did you mean {name!r}?)"
