"""A declarative description of a decoder: everything the one decoder class needs to reproduce a model family.

Only shapes, switches and numbers live here; names in checkpoints and config files belong to `families`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.cache.layout import KVGroupSpec
from windlass.engine.rotary.groups import RotaryGroup


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer. scale multiplies q·k; window: keys a query sees, itself included; soft_cap: see kernels.

    rotary_group and kv_group index into the model's groups; rotary_group None: the layer does not rotate (NoPE).
    qk_norm: RMS norm per head, before or after the rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary_group: int | None = 0
    kv_group: int = 0
    window: int | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["before", "after"] | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """norms "pre": before attention and MLP. "sandwich": before and after both (Gemma 2 and 3)."""

    attention: AttentionSpec
    intermediate_size: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    mlp_bias: bool = False
    norms: Literal["pre", "sandwich"] = "pre"


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """How a family's checkpoints differ from what the decoder holds; `weights` acts on it while loading.

    interleaved: pairs are (2j, 2j+1), not (j, j + d/2). fused_qkv, fused_gate_up: stored as one matrix. norms: which of
    the known ways of naming the layers' norms.
    """

    interleaved: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    norms: Literal["llama", "gemma", "glm4", "hunyuan"] = "llama"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """norm_offset: norms multiply by (offset + weight), 1 for Gemma. trained_len: the model's own context length M.

    temperature: (beta, length): the query at position p is multiplied by 1 + beta ln(1 + floor(p / length)).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rotary_groups: tuple[RotaryGroup, ...]
    kv_groups: tuple[KVGroupSpec, ...]
    trained_len: int
    norm_eps: float
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    logit_soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    temperature: tuple[float, int] | None = None
    checkpoint: CheckpointLayout = field(default_factory=CheckpointLayout)
    notices: tuple[str, ...] = ()
