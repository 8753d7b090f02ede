"""Names of the engine's configuration fields outside the engine: one flat name for each, and the option that sets it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from windlass.engine.interface.config import EngineConfig

_RENAMED = {
    "cache.dtype": "kv_cache_dtype",
    "cache.memory": "kv_cache_memory",
    "cache.device_share": "gpu_memory_utilization",
    "cache.persist": "kv_persist",
    "cache.persist_size": "kv_persist_size",
    "cache.host_memory": "kv_host_memory",
    "adapters.sources": "lora",
    "adapters.max_loaded": "max_loras",
    "adapters.max_rank": "max_lora_rank",
    "adapters.dtype": "lora_dtype",
    "loading.format": "load_format",
    "rotary.scaling": "rope_scaling",
    "rotary.update": "rope_update",
    "rotary.ladder": "rope_ladder",
    "scheduling.speculation.num_tokens": "speculative_ngram",
    "scheduling.speculation.min_match": "speculative_ngram_min",
    "scheduling.speculation.max_match": "speculative_ngram_max",
    "scheduling.speculation.model": "speculative_model",
    "scheduling.speculation.quantization": "speculative_model_quantization",
    "scheduling.speculation.mtp": "speculative_mtp",
    "scheduling.speculation.draft_tokens": "speculative_tokens",
    "scheduling.speculation.adaptive": "speculative_adaptive",
}

# What `run_engine_benchmark` takes beside a configuration.
_BENCHMARK = {"batch_size": "--batch-size", "input_len": "--input-len", "output_len": "--output-len"}

_NAMED = re.compile(r"`([a-z_.]+)(?:=([^`]*))?`")  # see `windlass.engine.errors`

_OTHER_OPTIONS = {"cores": "--pin-cores", "target_step_seconds": "--target-step-ms", "burst_seconds": "--burst-ms"}


def flat_names() -> dict[str, str]:
    """The flat name of every field by its path: `cache.memory` is kv_cache_memory, `compute.threads` is threads."""
    return {path: _RENAMED.get(path, path.rpartition(".")[2]) for path in _leaves(EngineConfig(model=""))}


def option_names() -> dict[str, str]:
    """The option that sets a field, by the field's path."""
    return {path: _OTHER_OPTIONS.get(name, "--" + name.replace("_", "-")) for path, name in flat_names().items()}


def with_option_names(text: str) -> str:
    """What the engine says, in the words of the command: `cache.memory` becomes --kv-cache-memory."""

    def spelt(named: re.Match[str]) -> str:
        option = names.get(named[1])
        if option is None:
            return named[0]
        return option if named[2] is None else f"{option} {named[2]}"

    names = option_names() | _BENCHMARK
    return _NAMED.sub(spelt, text)


def to_flat(config: EngineConfig) -> dict[str, Any]:
    """Every value of a configuration by its flat name."""
    leaves = _leaves(config)
    return {name: leaves[path] for path, name in flat_names().items()}


def from_flat(model: str, values: Mapping[str, Any]) -> EngineConfig:
    """A configuration from flat names. Raises ValueError for a name there is not."""
    paths = {name: path for path, name in flat_names().items()}
    unknown = sorted(set(values) - set(paths))
    if unknown:
        raise ValueError(f"this version of Windlass has no {', '.join(unknown)}")
    config: EngineConfig = _replaced(EngineConfig(model=model), {paths[n]: value for n, value in values.items()})
    return config


def _leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if _is_part(value):
            found |= _leaves(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


def _replaced(config: Any, values: Mapping[str, Any]) -> Any:
    """The same with the values at these paths."""
    parts: dict[str, dict[str, Any]] = {}
    changes: dict[str, Any] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            parts.setdefault(name, {})[rest] = value
        else:
            changes[name] = value
    changes |= {name: _replaced(getattr(config, name), inner) for name, inner in parts.items()}
    return replace(config, **changes)


def _is_part(value: object) -> bool:
    return is_dataclass(value) and type(value).__module__ == EngineConfig.__module__
