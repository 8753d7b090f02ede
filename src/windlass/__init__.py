"""Windlass: an inference server for language models with rotary attention. `LLM` runs a model without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass._version import __version__ as __version__

if TYPE_CHECKING:
    from windlass.server.startup.in_process import LLM


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line is in this package, and must not wait for it.
    if name == "LLM":
        from windlass.server.startup.in_process import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
