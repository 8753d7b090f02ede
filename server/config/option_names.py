"""Names of engine fields and options in messages, and flat names of the engine's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from windlass.engine.interface.config import EngineConfig
from windlass.server.config.engine_options import EngineOptions, field_values, replace_fields
from windlass.server.config.option import Option, options_of
from windlass.server.config.server_options import OPTIONS

# Engine fields that no option sets and whose last part is not unique.
_FLAT_NAMES = {
    "adapters.sources": "lora",
    "adapters.dtype": "lora_dtype",
    "rotary.ladder": "rope_ladder",
    "scheduling.speculation.min_match": "speculative_ngram_min",
    "scheduling.speculation.max_match": "speculative_ngram_max",
}

# Engine fields that are part of the value of an option.
_PARTS = {"adapters.sources": "lora", "rotary.ladder": "rope_scaling"}

# Parameters of the engine benchmark, which are no fields of the configuration.
_BENCHMARK = {"batch_size": "--batch-size", "input_len": "--input-len", "output_len": "--output-len"}

_NAMED = re.compile(r"`([a-z_.]+)(?:=([^`]*))?`")  # the notation of `windlass.server.config.option`


def flat_names() -> dict[str, str]:
    """A flat name for the path of every engine field: `cache.memory` is kv_cache_memory, `compute.threads` is threads."""
    same = {each.sets: each.name for each in options_of(EngineOptions).values() if each.sets and each.convert is None}
    names = {**same, **_FLAT_NAMES}
    return {path: names.get(path, path.rpartition(".")[2]) for path in field_values(EngineConfig(model=""))}


def to_flat(config: EngineConfig) -> dict[str, Any]:
    """Every value of a configuration by its flat name."""
    values = field_values(config)
    return {name: values[path] for path, name in flat_names().items()}


def from_flat(model: str, values: Mapping[str, Any]) -> EngineConfig:
    """A configuration from values by flat name. Raises ValueError for an unknown name."""
    paths = {name: path for path, name in flat_names().items()}
    unknown = sorted(set(values) - set(paths))
    if unknown:
        raise ValueError(f"this version of Windlass has no {', '.join(unknown)}")
    return cast(EngineConfig, replace_fields(EngineConfig(model=model), {paths[n]: v for n, v in values.items()}))


def with_option_names(text: str) -> str:
    """A message as the reader of a command's output writes the options: `cache.memory` becomes --kv-cache-memory."""
    return _spell(text, keyword=False)


def with_keyword_names(text: str) -> str:
    """A message as a user of `LLM` writes the options: `cache.memory` becomes kv_cache_memory."""
    return _spell(text, keyword=True)


@cache
def _named_options() -> dict[str, Option]:
    """Each option by its own name and by the path of the engine field that it sets."""
    parts = {path: OPTIONS[name] for path, name in _PARTS.items()}
    return {each.sets: each for each in OPTIONS.values() if each.sets} | OPTIONS | parts


def _spell(text: str, *, keyword: bool) -> str:
    def spell(found: re.Match[str]) -> str:
        if (option := _named_options().get(found[1])) is not None:
            return option.spell(found[2], keyword=keyword)
        flag = _BENCHMARK.get(found[1])
        return found[0] if flag is None else flag if found[2] is None else f"{flag} {found[2]}"

    return _NAMED.sub(spell, text)
