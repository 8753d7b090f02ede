"""Gated DeltaNet (2412.06464): specification and layer. It carries a recurrent state instead of reading all earlier keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from windlass.engine.cache.kv_cache_spec import StateGroupSpec
from windlass.engine.model.weight_spec import InterleavedParts, StoredTensor, WeightSpec, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows, Weight


@dataclass(frozen=True, slots=True)
class GatedDeltaNetNames:
    """Of a checkpoint's tensors, within their layer.

    qkv, gate, strength, decay: what is projected, a tensor each; or qkvz in place of two, which holds of each head of keys its
    query, its key, and the values and gates of the heads that share it, and ba of the others, the strengths and decays of those.
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
    """One layer. heads: of its memory, each with values of value_dim; they share key_heads heads of queries and keys of key_dim.

    width: of the convolution, in tokens. tiled_heads: heads of values meet those of keys by turns, see `Backend.gated_delta_rule`;
    adapters are made for the other order, and change nothing here. in_gguf: a file has rates and not their logarithms, negative.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int
    names: GatedDeltaNetNames = field(default_factory=GatedDeltaNetNames)
    tiled_heads: bool = False
    in_gguf: bool = False

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Of all heads."""
        return self.heads * self.value_dim

    @property
    def projected(self) -> tuple[int, int, int, int]:
        """How many numbers of each kind are projected: queries, keys and values; gates; strengths; decays."""
        return self.channels, self.values, self.heads, self.heads

    def state_group(self, layers: tuple[int, ...]) -> StateGroupSpec:
        """The states of these layers, all of this kind."""
        return StateGroupSpec(layers, self.channels, self.width, self.heads, self.key_dim, self.value_dim)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `GatedDeltaNetWeights`. Strengths and decays, a row for each head, have no role: they keep more bits."""
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
        taps = StoredTensor(f"{names.convolution}.weight", channels, channels=not self.in_gguf)
        rate = StoredTensor(names.rate, self.heads, made="negative" if self.in_gguf else "exp")
        return (
            *projection("projections", stored, hidden_size, bias=False),
            WeightSpec("convolution", "score", (channels, self.width), (taps,)),
            WeightSpec("rate", "shift", (self.heads,), (rate,)),
            WeightSpec("decay_bias", "shift", (self.heads,), (StoredTensor(names.decay_bias, self.heads),)),
            WeightSpec("norm", "shift", (self.value_dim,), (StoredTensor(f"{names.norm}.weight", self.value_dim),)),
            *projection("out", [StoredTensor(names.out, hidden_size, role="out")], values, bias=False),
        )


@dataclass(slots=True)
class GatedDeltaNetWeights:
    """As `GatedDeltaNetSpec.weights` lists them. Hk heads of keys of D numbers, H of values of V; C = 2 Hk D + H V channels."""

    projections: Weight  # [C + H V + 2 H, hidden]: queries, keys and values, gates, strengths, decays
    convolution: Tensor  # [C, width] float32
    rate: Tensor  # [H] float32
    decay_bias: Tensor  # [H] float32
    norm: Tensor  # [V] float32
    out: Weight  # [hidden, H V]


class GatedDeltaNet:
    """Projects, convolves, reads and corrects the memory, norms what each head read, gates it, projects back.

    weights: the fields of `GatedDeltaNetWeights`.
    """

    def __init__(self, spec: GatedDeltaNetSpec, weights: Mapping[str, Any], norm_eps: float, backend: Backend) -> None:
        self.spec = spec
        self.weights = GatedDeltaNetWeights(**weights)
        self._norm_eps, self._backend = norm_eps, backend

    def forward(self, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. states: of this layer, changed in place. changes: what adapters add. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        projected = backend.linear(x, w.projections)
        lora = None if spec.tiled_heads else lora
        if lora is not None:
            lora.add("projections", projected, x)
        qkv, gate, strength, decay = projected.split_with_sizes(spec.projected, 1)
        qkv = backend.short_convolution(qkv, w.convolution, states.window, rows, "silu")
        gates = decay, strength, w.rate, w.decay_bias
        read = backend.gated_delta_rule(qkv, *gates, states.memory, rows, tiled_heads=spec.tiled_heads)  # [T, H V]
        normed = backend.rms_norm(read.view(-1, spec.heads, spec.value_dim), w.norm, self._norm_eps).view(read.shape)
        backend.multiply(normed, backend.activation(gate, "silu"))
        out = backend.linear(normed, w.out)
        if lora is not None:
            lora.add("out", out, normed)
        return out
