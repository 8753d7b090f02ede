"""What a family of models is to the one decoder: its names and defaults in config.json, its switches, its tensors.

Responsible for the shape of this description. The families themselves stand in a file each, and `registry` lists them.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.spec import CheckpointLayout


@dataclass(frozen=True, slots=True)
class Flag:
    """A switch that config.json sets under `key`."""

    key: str
    default: bool = False


ATTENTION_BIAS = Flag("attention_bias")
MLP_BIAS = Flag("mlp_bias")


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture as it differs from the plain decoder: RMS norms before each part, a silu-gated MLP, no biases.

    architecture, model_type: as config.json has them. A bias is there always, never, or where config.json says so.
    activation: of the feed-forward where config.json names none under `activation_key`. norm_offset: norms multiply by
    (offset + weight). scaled_embeddings: by the root of hidden_size. query_pre_attn_scalar: the default of the number
    whose inverse root scales q·k; None: the head's dimension. soft_caps: those of config.json hold.
    """

    architecture: str
    model_type: str
    rules: ConfigRules
    qkv_bias: bool | Flag = False
    out_bias: bool | Flag = False
    mlp_bias: bool | Flag = False
    qk_norm: Literal["before", "after"] | None = None
    norms: Literal["pre", "sandwich"] = "pre"
    norm_offset: float = 0.0
    activation: str = "silu"
    activation_key: str = "hidden_act"
    scaled_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    soft_caps: bool = False
    checkpoint: CheckpointLayout = field(default_factory=CheckpointLayout)
