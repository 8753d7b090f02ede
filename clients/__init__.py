"""A client for Windlass servers, synchronous and asynchronous. It needs httpx, and nothing else of Windlass.

The names are imported on first use: the command lines lie below this package, and they must not wait for an HTTP client
when they start. Prometheus' client is imported by `Metrics.parse` alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.clients._exports import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("__"):
        exports = import_module("windlass.clients._exports")
        if name == "__all__" or name in exports.__all__:
            return getattr(exports, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("windlass.clients._exports").__all__})
