"""What the reader of config.json is told of a family: the values that stand where the file says nothing.

Responsible for the shape of these rules only; each family's own stand in `families`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.model.config_json.patterns import Pattern, full_layers


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """A family's defaults, under the names of config.json, and what it reads differently from others.

    num_key_value_heads None: as many as heads. head_dim None: hidden_size / num_attention_heads. local_rope_theta: set
    where sliding layers have a theta of their own. rope_parameters: the object used when config.json has none.
    no_rope_layer_interval: every n-th layer does not rotate. query_temperature: whether the rotary object may carry
    Ministral's `llama_4_scaling_beta`. scales_full_layers_alone: `rope_scaling` is not for layers with a window (OLMo 3).
    longrope_names: older names of longrope that mean something else elsewhere.
    """

    max_position_embeddings: int
    layer_pattern: Pattern = full_layers
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
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
    scales_full_layers_alone: bool = False
    longrope_names: tuple[str, ...] = ("su",)
