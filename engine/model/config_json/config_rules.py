"""Rules by which a family's config.json is read: checked values, layer patterns and defaults.

Values are read with messages that name the key. A layer pattern gives, for each layer, its attention ("full_attention" or
"sliding_attention") and its rotary group. `ConfigRules` holds a family's defaults; the families themselves are in `families`.
Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

Config = Mapping[str, Any]


def read_size(config: Config, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
    """A positive integer up to `most`; `default` if the key is absent or null. Raises LoadError if there is no default either."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise LoadError(f"config.json: {key} must be a positive integer up to {most}, got {format_value(value)}")
    return value


def read_number(config: Config, key: str) -> float | None:
    """A positive, finite number; None if the key is absent or null."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise LoadError(f"config.json: {key} must be a positive number, got {format_value(value)}")
    return float(value)


def read_flag(config: Config, key: str, default: bool = False) -> bool:
    """A flag; `default` if the key is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadError(f"config.json: {key} must be true or false, got {format_value(value)}")
    return value


def read_object(config: Config, key: str) -> Config | None:
    """A non-empty object, or None."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise LoadError(f"config.json: {key} must be an object, got {format_value(value)}")
    return value or None


def read_list(config: Config, key: str, length: int) -> list[Any] | None:
    """A list with at least one entry per layer, cut to `length`; None if it is absent or empty."""
    value = config.get(key)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) < length:
        raise LoadError(f"config.json: {key} must be a list with one entry for each of the {length} layers")
    return value[:length]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Layer information in keys of config.json that all families share.

    given: `layer_types`, None if absent. rotates: whether each layer does. windowed: there is a `sliding_window`.
    """

    count: int
    given: list[str] | None
    rotates: list[bool]
    windowed: bool


# Attention and rotary group of each layer, both as one of `GROUP_NAMES`; None: the layer does not rotate. Raises LoadError.
Pattern = Callable[[Config, LayerFacts], tuple[Sequence[str], Sequence[str | None]]]


def _every_layer(kind: str, group: str | None) -> Pattern:
    """The same attention and rotary group in every layer. Raises LoadError for a mixture of kinds."""

    def pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
        kinds = [kind] * facts.count
        if facts.given and facts.given != (kinds if facts.windowed else [FULL_ATTENTION] * facts.count):
            raise LoadError(
                f"config.json: layer_types mixes windows in a way that model_type {format_value(config.get('model_type'))} does "
                "not: remove it"
            )
        return kinds, [group] * facts.count

    return pattern


full_attention_layers = _every_layer(FULL_ATTENTION, FULL_ATTENTION)
nope_layers = _every_layer(FULL_ATTENTION, None)
sliding_window_layers = _every_layer(SLIDING_ATTENTION, FULL_ATTENTION)  # full attention if the window is null


def layer_types_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """The `layer_types`, or a sliding window in every layer; one rotary group."""
    full = [FULL_ATTENTION] * facts.count
    if not facts.windowed:
        return full, full
    return facts.given or [SLIDING_ATTENTION] * facts.count, full


def every_nth_full(interval: int, *, first: bool = False, groups: bool = False) -> Pattern:
    """Full attention in every n-th layer and a sliding window in the others, unless `layer_types` lists the layers.

    first: in the first of each n layers instead of the last. groups: the two kinds may have different rotary groups.
    """

    def pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
        full = [FULL_ATTENTION] * facts.count
        own = [i % interval == (0 if first else interval - 1) for i in range(facts.count)]
        kinds = facts.given or [FULL_ATTENTION if one else SLIDING_ATTENTION for one in own]
        if not facts.windowed:
            kinds = full
        return kinds, list(kinds if groups else full)

    return pattern


def local_layers_rotate(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
    """Full attention without rotation in every n-th layer, by default the fourth; a window with rotation in the others."""
    kinds, groups = every_nth_full(read_size(config, "sliding_window_pattern", 4))(config, facts)
    return list(kinds), [
        group if kind == SLIDING_ATTENTION else None for kind, group in zip(kinds, groups, strict=True)
    ]


# A conversion of key names, which raises LoadError.
Rewrite = Callable[[Config], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Default sizes."""

    context: int  # max_position_embeddings
    hidden: int = 4096  # hidden_size
    layers: int = 32  # num_hidden_layers
    heads: int = 32  # num_attention_heads
    kv_heads: int | None = None  # num_key_value_heads; None: as many as heads
    head_dim: int | None = None  # None: hidden / heads


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """A family's defaults, mostly under the names of config.json, and its differences in reading it.

    head_dim_key: the key of the dimensions that rotate; scales_scores: see `RotaryBase`. local_rope_theta: set if
    sliding layers have their own theta. rope_parameters: the object used if config.json has none.
    no_rope_layer_interval: every n-th layer does not rotate. query_temperature: whether the rotary object may have
    Ministral's `llama_4_scaling_beta`. scales_full_attention_only: `rope_scaling` is not for layers with a window
    (OLMo 3). intermediate_factor: width of a feed-forward as a multiple of hidden_size. full_head_dim: head size of
    full-attention layers if it differs, read from `full_head_dim_key`. longrope_names: older names of longrope that
    mean something else in other families. other_layers: layer types other than attention. rewrite: converts the
    family's key names to the common ones.
    """

    sizes: Sizes
    layer_pattern: Pattern = full_attention_layers
    head_dim_key: str = "head_dim"
    full_head_dim: int | None = None
    full_head_dim_key: str | None = None
    scales_scores: bool = False
    rms_norm_eps: float = 1e-6
    intermediate_factor: int | None = None
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = ()
    sliding_window: int | None = None
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    no_rope_layer_interval: int | None = None
    query_temperature: bool = False
    scales_full_attention_only: bool = False
    longrope_names: tuple[str, ...] = ("su",)
    other_layers: tuple[str, ...] = ()
    rewrite: Rewrite = dict


# Keys of sizes in config.json of GPT-2 and families derived from it.
GPT_NAMES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}


def renamed(names: Mapping[str, str]) -> Rewrite:
    """A conversion of key names. names: the family's to the common ones. Raises LoadError if both are present and differ."""

    def rewrite(config: Config) -> dict[str, Any]:
        result = {key: value for key, value in config.items() if key not in names}
        for own, common in names.items():
            value = config.get(own)
            if value is None:
                continue
            if result.get(common) not in (None, value):
                raise LoadError(
                    f"config.json: {common} is {format_value(result[common])} and {own} is {format_value(value)}: keep one"
                )
            result[common] = value
        return result

    return rewrite
