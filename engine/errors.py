"""Engine errors, each with a message that states what to change.

HTTP status codes are unknown here. A message or a model's notice names a field of `EngineConfig` by its path in backquotes, with
a value if there is one: "lower `cache.memory`", "use `compute.device=cpu`". Callers with other names for the fields, such as
command-line options, translate them by that path. `did_you_mean` suggests the nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def reason_of(error: BaseException) -> str:
    """The message of an error, for a message that names the file: without the error number and the path."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def with_place(place: object, message: object) -> str:
    """A message after the path or URL that it is about, unless the message names it already."""
    text = str(message)
    return text if str(place) in text else f"{place}: {text}"


_MAX_COMPARED = 64  # characters: the time of a comparison grows quadratically
_CUTOFF = 0.7  # share of equal characters: "prompts" is near "prompt", "foo" is near nothing


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class LoadError(EngineError):
    """The model or the configuration cannot be served as given; the one-line message states what to do."""


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


class QueueFullError(EngineError):
    """The waiting queue is full; try again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(EngineError):
    """The engine process ended while the request was in flight, or is being restarted.

    begun: whether the engine may have started the request; if not, another engine can run it unchanged.
    """

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


OUT_OF_MEMORY = (
    "the device ran out of memory in a step in which this request was the newest: send it again later, or a shorter one"
)

OUT_OF_MEMORY_ROTATING = (
    "the device ran out of memory while rotating the keys of this request (rope_update): send it again later, or with "
    "rope_update 'frozen'"
)


class DeviceMemoryError(EngineError):
    """The device had no memory for a step, or for a request's work outside of steps. Only the newest request of the step, or
    that request, fails."""


class NotFiniteError(EngineError):
    """The model's numbers overflow for a request, because of the model's weights, an adapter or a rotary scaling."""


class DeadlineError(EngineError):
    """The request's deadline passed before it finished."""


class SlowConsumerError(EngineError):
    """The client read its stream too slowly, and the limit of buffered output was exceeded."""


def nearest(given: object, known: Iterable[str], cutoff: float = _CUTOFF) -> str | None:
    """The nearest of a few known names, ignoring case; None if none is near or `given` is not a string.

    cutoff: the share of characters that must be equal.
    """
    if not isinstance(given, str):
        return None
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(given[:_MAX_COMPARED].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The suggestion " (did you mean 'yarn'?)" to append to a name in a message, or an empty string."""
    name = nearest(given, known)
    return "" if name is None else f" (did you mean {name!r}?)"
