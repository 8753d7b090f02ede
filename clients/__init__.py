"""Clients of Windlass servers, synchronous and asynchronous. They use httpx and no other package of Windlass.

The names are imported on first use, because the command lines import modules of this package and should not import an HTTP client
at start-up. Only `Metrics.parse` imports Prometheus' client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.clients._exports import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("__"):
        exports = vars(import_module("windlass.clients._exports"))
        names = sorted(export for export in exports if export[0].isupper())
        if name == "__all__":
            return names
        if name in names:
            return exports[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
