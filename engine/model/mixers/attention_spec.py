"""The description of an attention layer: shapes, switches, and its weights with their names in checkpoints.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from windlass.engine.model.norm_spec import NormSpec
from windlass.engine.model.weight_spec import (
    FusedHeads,
    InterleavedHeads,
    InterleavedParts,
    StoredTensor,
    WeightSpec,
    projection,
)


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Of a checkpoint's tensors, within their layer. qkv: where q, k and v are stored as one.

    qkv_order: "parts", all queries, all keys, all values; "groups", one key head after another, each as its queries, its key
    and its value; "quarters", four parts of the heads, each as its queries, values and keys (CodeGen).
    output_norm: of an RMS norm over what attention gives. gate: of a projection whose sigmoid multiplies it. transposed: matrices
    have columns where others have rows (GPT-2).
    """

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    qkv_order: Literal["parts", "groups", "quarters"] = "parts"
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output_norm: str | None = None
    gate: str | None = None
    sinks: str = "self_attn.sinks"
    transposed: bool = False


class AttentionKind(NamedTuple):
    """What attention is asked by layers of one kind. slopes: of ALiBi, one for each head."""

    kv_group: int
    scale: float
    window: int | None
    soft_cap: float | None
    rotates: bool
    causal: bool = True
    slopes: tuple[float, ...] | None = None
    chunked: bool = False


def _alibi_slopes(heads: int, factor: float) -> tuple[float, ...]:
    """2^(-8 h / n) of heads h = 1 to n (2108.12409), where n is a power of two; of the others those between, every second one.

    factor: of all of them.
    """
    even = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * h / even) for h in range(1, even + 1)]
    slopes += [2.0 ** (-4 * h / even) for h in range(1, 2 * (heads - even), 2)]
    return tuple([slope * factor for slope in slopes])


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer. scale multiplies q·k; window: keys a query sees, itself included; soft_cap: see kernels.

    rotary_group and kv_group index into the model's groups; rotary_group None: the layer does not rotate (NoPE).
    qk_norm: a norm per head, before or after the rotation; "all heads": one over all of them, before it; "by head": before it,
    each head with weights of its own, in one tensor, or in one for each "{head}" of their names. qk_norm_form: what
    it does. clip: queries, keys and values are limited to ±clip when they are projected.
    interleaved_dims: how many dims of each head the checkpoint holds as pairs (2j, 2j + 1);
    0: its pairs are (j, j + d/2) already. swapped_dims: how many it holds as pairs (j + d/2, j). sinks: it has
    learned sink logits. causal: keys behind a query are hidden from it; else it sees `window` keys from itself on as well.
    alibi: scores lose by the distance of their keys, by a slope for each head (2108.12409) times this; 0: they do not. chunked:
    a query sees the keys of its own chunk of `window` tokens only, which begin at multiples of it, not those `window` behind it.
    values_normed: each head of a value is divided by its root mean square. keys_as_values: what is projected to a key is, before
    its norm, the value too. kv_source_layer: the layer whose cached keys and values queries meet; this one makes none. gated_queries: the
    projection of queries makes of each head its query and behind it a gate, whose sigmoid multiplies what attention gives;
    where queries and keys are normed before the rotation, if at all.
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
    qk_norm: Literal["before", "after", "all heads", "by head"] | None = None
    interleaved_dims: int = 0
    names: AttentionNames = AttentionNames()
    qk_norm_form: NormSpec = field(default_factory=NormSpec)
    clip: float | None = None
    swapped_dims: int = 0
    sinks: bool = False
    causal: bool = True
    alibi: float = 0.0
    chunked: bool = False
    values_normed: bool = False
    keys_as_values: bool = False
    kv_source_layer: int | None = None
    gated_queries: bool = False

    @property
    def kind(self) -> AttentionKind:
        """The part of this layer that its attention call depends on."""
        return AttentionKind(
            self.kv_group,
            self.scale,
            self.window,
            self.soft_cap,
            self.rotary_group is not None,
            self.causal,
            _alibi_slopes(self.num_heads, self.alibi) if self.alibi else None,
            self.chunked,
        )

    @property
    def projected_heads(self) -> tuple[int, int, int, int]:
        """How many heads of queries, of their gates, of keys and of values are projected."""
        gates = self.num_heads if self.gated_queries else 0
        if self.kv_source_layer is not None:
            return self.num_heads, gates, 0, 0
        return self.num_heads, gates, self.num_kv_heads, 0 if self.keys_as_values else self.num_kv_heads

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `AttentionWeights`: projections fused, so that each input is read once."""
        names, heads, kv_heads = self.names, self.num_heads, self.num_kv_heads
        q_size, kv_size = heads * self.head_dim, kv_heads * self.head_dim
        if names.qkv is not None:
            order = self._interleaved(heads + kv_heads)
            size = q_size + 2 * kv_size
            qkv = [StoredTensor(names.qkv, size, order, self._fused(), "q k v", transposed=names.transposed)]
        else:
            queries, gates, keys, values = self.projected_heads
            gated = InterleavedParts(heads, (self.head_dim, self.head_dim)) if gates else None
            q_rows = (queries + gates) * self.head_dim
            qkv = [
                StoredTensor(names.q, q_rows, self._interleaved(heads), role="q", interleaved_parts=gated),
                StoredTensor(names.k, kv_size, self._interleaved(kv_heads), role="v" if self.keys_as_values else "k"),
                StoredTensor(names.v, kv_size, role="v"),
            ]
            qkv = [tensor for tensor, count in zip(qkv, (queries, keys, values), strict=True) if count]
        result = projection("qkv", qkv, hidden_size, bias=self.qkv_bias)
        out = StoredTensor(names.out, hidden_size, role="out", transposed=names.transposed)
        result += projection("out", [out], q_size, bias=self.out_bias)
        if self.qk_norm is not None:
            result += self._norm_weights("q_norm", names.q_norm, heads)
            if self.kv_source_layer is None:
                result += self._norm_weights("k_norm", names.k_norm, kv_heads)
        if names.output_norm is not None:
            result += NormSpec().weights("output_norm", names.output_norm, q_size)
        if names.gate is not None:
            result += projection("gate", [StoredTensor(names.gate, q_size)], hidden_size, bias=False)
        if self.sinks:
            result += (WeightSpec("sinks", "shift", (heads,), (StoredTensor(names.sinks, heads),)),)
        return result

    def _norm_weights(self, name: str, stored: str, heads: int) -> tuple[WeightSpec, ...]:
        """A norm's weights apply to rotated dims as the checkpoint numbers them."""
        size = heads * self.head_dim
        if self.qk_norm == "by head":
            if "{head}" in stored:
                named, pairs = [stored.format(head=head) for head in range(heads)], self._interleaved(1)
                tensors = tuple(StoredTensor(f"{one}.weight", self.head_dim, pairs) for one in named)
            else:
                tensors = (StoredTensor(f"{stored}.weight", size, self._interleaved(heads), by_head=heads),)
            return (WeightSpec(name, "norm", (size,), tensors),)
        over_all = self.qk_norm == "all heads"
        pairs = self._interleaved(heads if over_all else 1)
        return self.qk_norm_form.weights(name, stored, size if over_all else self.head_dim, pairs)

    def _fused(self) -> FusedHeads | None:
        if self.names.qkv_order == "groups":
            return FusedHeads(self.num_kv_heads, self.num_heads // self.num_kv_heads, 1, self.head_dim)
        if self.names.qkv_order == "quarters":
            return FusedHeads(4, self.num_heads // 4, self.num_kv_heads // 4, self.head_dim, values_first=True)
        return None

    def _interleaved(self, heads: int) -> InterleavedHeads | None:
        dims = self.interleaved_dims or self.swapped_dims
        return InterleavedHeads(heads, self.head_dim, dims, not self.interleaved_dims) if dims else None
