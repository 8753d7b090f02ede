"""Gated DeltaNet (2412.06464): specification and layer. It carries a recurrent state instead of reading all earlier keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from windlass.engine.cache.kv_cache_spec import StateGroupSpec
from windlass.engine.model.adapted_linear import adapted_linear
from windlass.engine.model.weight_spec import (
    InterleavedParts,
    StoredTensor,
    WeightSpec,
    depthwise_convolution,
    projection,
)

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows, Weight


@dataclass(frozen=True, slots=True)
class GatedDeltaNetNames:
    """Checkpoint tensor names within the layer.

    The projections are qkv, gate, strength and decay. qkvz replaces the first two: for each key head its query, its
    key, and the values and gates of the value heads that share it. ba replaces the others: for each key head the
    strengths and decays of those heads.
    """

    qkv: str = "linear_attn.in_proj_qkv"
    gate: str = "linear_attn.in_proj_z"
    strength: str = "linear_attn.in_proj_b"
    decay: str = "linear_attn.in_proj_a"
    qkvz: str | None = None
    ba: str | None = None
    convolution: str = "linear_attn.conv1d"
    rate: str = "linear_attn.A_log"
    decay_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


@dataclass(frozen=True, slots=True)
class GatedDeltaNetSpec:
    """One layer with `heads` heads of state, each with values of value_dim; they share key_heads heads of queries and
    keys of key_dim."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int  # of the convolution, in tokens
    names: GatedDeltaNetNames = field(default_factory=GatedDeltaNetNames)
    # Order of the value heads, see `Backend.gated_delta_rule`; adapters are not applied to it
    tiled_heads: bool = False
    in_gguf: bool = False  # rates are stored as negative numbers, not as logarithms

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Number of values of all heads."""
        return self.heads * self.value_dim

    @property
    def projected(self) -> tuple[int, int, int, int]:
        """Projected columns: queries, keys and values; gates; strengths; decays."""
        return self.channels, self.values, self.heads, self.heads

    def state_group(self, layers: tuple[int, ...]) -> StateGroupSpec:
        """State group of these layers, which all have this specification."""
        return StateGroupSpec(layers, self.channels, self.width, self.heads, self.key_dim, self.value_dim)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `GatedDeltaNetWeights`. Strengths and decays have one row per head and no role, so that they
        keep more bits."""
        names = self.names
        channels, values, strengths, decays = self.projected
        shared = self.heads // self.key_heads
        stored = [StoredTensor(names.qkv, channels, role="q k v"), StoredTensor(names.gate, values, role="gate")]
        if names.qkvz is not None:
            turns = InterleavedParts(self.key_heads, (self.key_dim, self.key_dim, *[shared * self.value_dim] * 2))
            stored = [StoredTensor(names.qkvz, channels + values, role="q k v", interleaved_parts=turns)]
        if names.ba is not None:
            turns = InterleavedParts(self.key_heads, (shared, shared))
            stored += [StoredTensor(names.ba, strengths + decays, interleaved_parts=turns)]
        else:
            stored += [StoredTensor(names.strength, strengths), StoredTensor(names.decay, decays)]
        rate = StoredTensor(names.rate, self.heads, transform="negative" if self.in_gguf else "exp")
        return (
            *projection("projections", stored, hidden_size, bias=False),
            *depthwise_convolution(names.convolution, channels, self.width, bias=False, in_gguf=self.in_gguf),
            WeightSpec("rate", "shift", (self.heads,), (rate,)),
            WeightSpec("decay_bias", "shift", (self.heads,), (StoredTensor(names.decay_bias, self.heads),)),
            WeightSpec("norm", "shift", (self.value_dim,), (StoredTensor(f"{names.norm}.weight", self.value_dim),)),
            *projection("out", [StoredTensor(names.out, hidden_size, role="out")], values, bias=False),
        )


@dataclass(slots=True)
class GatedDeltaNetWeights:
    """Weights listed by `GatedDeltaNetSpec.weights`. Hk key heads of D, H value heads of V; C = 2 Hk D + H V channels."""

    projections: Weight  # [C + H V + 2 H, hidden]: queries, keys and values, gates, strengths, decays
    convolution: Tensor  # [C, width] float32
    rate: Tensor  # [H] float32
    decay_bias: Tensor  # [H] float32
    norm: Tensor  # [V] float32
    out: Weight  # [hidden, H V]


class GatedDeltaNet:
    """Project, convolve, read and update the state, norm and gate what each head read, project back.

    weights: the fields of `GatedDeltaNetWeights`.
    """

    def __init__(self, spec: GatedDeltaNetSpec, weights: Mapping[str, Any], norm_eps: float, backend: Backend) -> None:
        self.spec = spec
        self.weights = GatedDeltaNetWeights(**weights)
        self._norm_eps, self._backend = norm_eps, backend

    def forward(self, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. states: of this layer, changed in place. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        lora = None if spec.tiled_heads else lora
        projected = adapted_linear(backend, "projections", x, w.projections, lora=lora)
        qkv, gate, strength, decay = projected.split_with_sizes(spec.projected, 1)
        qkv = backend.short_convolution(qkv, w.convolution, states.window, rows, "silu")
        gates = decay, strength, w.rate, w.decay_bias
        read = backend.gated_delta_rule(qkv, *gates, states.memory, rows, tiled_heads=spec.tiled_heads)  # [T, H V]
        normed = backend.rms_norm(read.view(-1, spec.heads, spec.value_dim), w.norm, self._norm_eps).view(read.shape)
        backend.multiply(normed, backend.activation(gate, "silu"))
        return adapted_linear(backend, "out", normed, w.out, lora=lora)
