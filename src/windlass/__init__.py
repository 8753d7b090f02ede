"""Windlass: an inference server for language models with rotary attention. `LLM` runs a model without a server.

LoadError is raised for a model that cannot be loaded, the other errors by the methods of `LLM`; all of these are APIError.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from windlass._version import __version__ as __version__

if TYPE_CHECKING:
    from windlass.clients import APIConnectionError as APIConnectionError
    from windlass.clients import APIError as APIError
    from windlass.clients import APIStatusError as APIStatusError
    from windlass.clients import BadRequestError as BadRequestError
    from windlass.clients import NotFoundError as NotFoundError
    from windlass.clients import RateLimitError as RateLimitError
    from windlass.clients import ServerError as ServerError
    from windlass.clients import StreamError as StreamError
    from windlass.engine.errors import LoadError as LoadError
    from windlass.server.startup.in_process import LLM as LLM
    from windlass.server.startup.llm_arguments import SamplingParams as SamplingParams

_MODULES = {
    "LLM": "windlass.server.startup.in_process",
    "SamplingParams": "windlass.server.startup.llm_arguments",
    "LoadError": "windlass.engine.errors",
    "APIConnectionError": "windlass.clients",
    "APIError": "windlass.clients",
    "APIStatusError": "windlass.clients",
    "BadRequestError": "windlass.clients",
    "NotFoundError": "windlass.clients",
    "RateLimitError": "windlass.clients",
    "ServerError": "windlass.clients",
    "StreamError": "windlass.clients",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line is in this package, and must not wait for it.
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
