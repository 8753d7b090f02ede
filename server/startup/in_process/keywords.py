"""The options of `windlass.LLM`: those of the command, given as Python says them. Knows how each is spelt; starts nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from windlass.engine.errors import LoadError, did_you_mean
from windlass.server.options.engine import EngineOptions
from windlass.server.options.engine_names import in_options
from windlass.server.options.server import ServerOptions

# Of the server's options those that say how requests are read and answered.
ANSWER_OPTIONS = (
    "chat_template",
    "rerank_tokens",
    "rerank_template",
    "generation_config",
    "override_generation_config",
    "default_chat_template_kwargs",
    "tool_call_parser",
    "reasoning_parser",
    "default_max_tokens",
    "max_response_bytes",
    "rope_exact",
    "context_overflow",
    "keep_tokens",
    "attention_window",
    "attention_sinks",
    "cache_reuse",
)
_SIZES = ("kv_cache_memory", "kv_persist_size", "kv_host_memory", "max_response_bytes")
_SCALING = '{"rope_type": "yarn", "factor": 4}'
# Those that the command line takes as JSON, and an example of each.
_OBJECTS = {
    "rope_scaling": _SCALING,
    "override_generation_config": '{"temperature": 0.7}',
    "default_chat_template_kwargs": '{"enable_thinking": False}',
}
# What to say of those that may be more than one thing.
_FORMS = dict.fromkeys(_SIZES, "should be a size such as '4GiB', or a number of bytes")
_FORMS |= {name: f"should be a mapping such as {example}" for name, example in _OBJECTS.items()}
_FORMS |= {
    "rope_scaling": f"should be a mapping such as {_SCALING}, or a text",
    "rope_profile": f"should be a mapping of names to scalings such as {_SCALING}",
    "chat_template": "should be a path",
    "generation_config": "should be 'auto', 'none' or a path",
}


def read_options(given: Mapping[str, Any]) -> tuple[EngineOptions, ServerOptions]:
    """Raises LoadError, one line, for an option that there is not, or a value that is none of its kind."""
    types = {name: kind for name, kind in get_type_hints(ServerOptions).items() if name in ANSWER_OPTIONS}
    of_engine = get_type_hints(EngineOptions)
    types |= of_engine
    for name in given:
        if name not in types:
            raise LoadError(f"there is no option {name!r}{did_you_mean(name, types)}")
    values = {name: _checked(name, _spelt(name, value), value, types[name]) for name, value in given.items()}
    return (
        EngineOptions(**{name: value for name, value in values.items() if name in of_engine}),
        ServerOptions(**{name: value for name, value in values.items() if name not in of_engine}),
    )


def in_keywords(message: str) -> str:
    """What is said of options, with their names in Python."""
    return re.sub(r"--([a-z][a-z-]*[a-z])", lambda option: option[1].replace("-", "_"), in_options(message))


def _spelt(name: str, value: Any) -> Any:
    """What Python says with objects, as the command line spells it."""
    if name in _OBJECTS and isinstance(value, Mapping):
        return _as_json(name, value, _OBJECTS[name])
    if name == "rope_profile" and isinstance(value, Mapping):
        return [f"{profile}={_as_json(name, scaling)}" for profile, scaling in value.items()]
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if name in ("rerank_tokens", "rope_profile", "rope_ladder", "lora") and isinstance(value, str):
        return [value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_json(name: str, value: Any, example: str = _SCALING) -> str:
    if not isinstance(value, Mapping):
        raise LoadError(f"{name}: a scaling must be a mapping such as {_SCALING}, got {_shown(value)}")
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise LoadError(f"{name}: this cannot be written as JSON ({error}): give a mapping such as {example}") from None


def _checked(name: str, spelt: Any, given: Any, kind: Any) -> Any:
    if isinstance(spelt, bool) and kind is not bool:
        raise LoadError(f"{name} is no switch, got {_shown(given)}")
    try:
        return TypeAdapter(kind).validate_python(spelt)
    except ValidationError as error:
        reason = _FORMS.get(name) or str(error.errors(include_url=False)[0]["msg"]).removeprefix("Input ")
        raise LoadError(f"{name} {reason}, got {_shown(given)}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
