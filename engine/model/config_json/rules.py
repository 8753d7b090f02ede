"""What the reader of config.json is told of a family: the values that stand where the file says nothing.

Responsible for the shape of these rules only; each family's own stand in `families`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.patterns import Pattern, full_attention_layers
from windlass.engine.model.config_json.values import Config
from windlass.engine.rotary.fields import format_value

# Raises LoadError.
Rewrite = Callable[[Config], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """A family's defaults, under the names of config.json, and what it reads differently from others.

    num_key_value_heads None: as many as heads. head_dim None: hidden_size / num_attention_heads. head_dim_key: the key of
    the dimensions that rotate; scales_scores: see `RotaryBase`. local_rope_theta: set where sliding layers have a theta of
    their own. rope_parameters: the object used when config.json has none. no_rope_layer_interval: every n-th layer does not
    rotate. query_temperature: whether the rotary object may carry Ministral's `llama_4_scaling_beta`. scales_full_attention_only:
    `rope_scaling` is not for layers with a window (OLMo 3). intermediate_factor: how many times hidden_size a feed-forward is
    wide. full_head_dim: of layers that see everything, where their heads have another size, under `full_head_dim_key`.
    longrope_names: older names of longrope that mean something else elsewhere. other_layers: what `layer_types` may have beside
    kinds of attention. rewrite: the config in the names that other families have, where this one has its own.
    """

    max_position_embeddings: int
    layer_pattern: Pattern = full_attention_layers
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
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


# The sizes of a model as GPT-2's config.json names them, and those of families after it.
GPT_NAMES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}


def renamed(names: Mapping[str, str]) -> Rewrite:
    """A rewriting of keys. names: the common name of each of a family's own. Raises LoadError where both say different things."""

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
