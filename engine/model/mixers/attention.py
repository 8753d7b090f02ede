"""Attention over the cached keys and values of a sequence: specification, metadata shared by the layers of a step, and
the layer.

Torch is imported only where tensors are made, because the API process reads specifications.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from windlass.engine.cache.sequence_cache import UNBOUNDED
from windlass.engine.model.adapted_linear import adapted_linear
from windlass.engine.model.norm import Norm, NormSpec, PerHeadNorm
from windlass.engine.model.weight_spec import (
    InterleavedParts,
    RotaryRows,
    StoredTensor,
    WeightSpec,
    projection,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from windlass.engine.model.forward_batch import ForwardBatch
    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import AttentionCall, Backend, KeyRanges, KVPages, Weight


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Checkpoint tensor names within the layer."""

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None  # q, k and v in one tensor
    # "parts": all queries, all keys, all values. "groups": for each key head its queries, its key and its value.
    # "quarters": four groups of heads, each as its queries, values and keys (CodeGen).
    qkv_order: Literal["parts", "groups", "quarters"] = "parts"
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output_norm: str | None = None  # RMS norm of the attention output
    gate: str | None = None  # projection whose sigmoid multiplies the attention output
    sinks: str = "self_attn.sinks"
    transposed: bool = False  # matrices are stored as [columns, rows] (GPT-2)


class AttentionKind(NamedTuple):
    """The part of a layer that its attention call depends on. slopes: of ALiBi, one per head."""

    kv_group: int
    scale: float
    window: int | None
    soft_cap: float | None
    rotates: bool
    causal: bool = True
    slopes: tuple[float, ...] | None = None
    chunked: bool = False


def _alibi_slopes(heads: int, factor: float) -> tuple[float, ...]:
    """ALiBi slopes times `factor`: 2^(-8 h / n) for heads h = 1 to n (2108.12409) if n is a power of two.

    Otherwise n is the power of two below, and the remaining heads use every second slope of twice as many heads.
    """
    even = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * h / even) for h in range(1, even + 1)]
    slopes += [2.0 ** (-4 * h / even) for h in range(1, 2 * (heads - even), 2)]
    return tuple([slope * factor for slope in slopes])


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer. rotary_group and kv_group index into the model's groups."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    rotary_group: int | None = 0  # None: the layer does not rotate (NoPE)
    kv_group: int = 0
    window: int | None = None  # keys that a query sees, itself included
    soft_cap: float | None = None  # see kernels
    qkv_bias: bool = False
    out_bias: bool = False
    # A norm of each head, before or after the rotation; "all heads": one norm over all of them, before it; "by head": before it,
    # with separate weights for each head, in one tensor or in one for each "{head}" of their names.
    qk_norm: Literal["before", "after", "all heads", "by head"] | None = None
    interleaved_dims: int = 0  # leading dims of a head that are stored as pairs (2j, 2j + 1), not (j, j + d/2)
    names: AttentionNames = AttentionNames()
    qk_norm_form: NormSpec = field(default_factory=NormSpec)
    clip: float | None = None  # projected queries, keys and values are limited to ±clip
    swapped_dims: int = 0  # leading dims of a head that are stored as pairs (j + d/2, j)
    sinks: bool = False  # learned sink logits
    causal: bool = True  # False: a query also sees `window` keys from itself on
    alibi: float = 0.0  # factor of the ALiBi slopes; 0: none
    chunked: bool = False  # a query sees keys of its own chunk of `window` tokens, which begins at a multiple of that
    values_normed: bool = False  # each head of a value is divided by its root mean square
    keys_as_values: bool = False  # the projected key before its norm is also the value
    kv_source_layer: int | None = None  # KV sharing: the layer whose keys and values are read
    # The query projection also gives each head a gate, whose sigmoid multiplies the output. Norms come before the rotation.
    gated_queries: bool = False

    @property
    def kind(self) -> AttentionKind:
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
        """Number of projected heads of queries, gates, keys and values."""
        gates = self.num_heads if self.gated_queries else 0
        if self.kv_source_layer is not None:
            return self.num_heads, gates, 0, 0
        return self.num_heads, gates, self.num_kv_heads, 0 if self.keys_as_values else self.num_kv_heads

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `AttentionWeights`. Projections are fused, so that their input is read once."""
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
        """Norm weights follow the stored order of rotated dims."""
        size = heads * self.head_dim
        if self.qk_norm == "by head":
            if "{head}" in stored:
                named, pairs = [stored.format(head=head) for head in range(heads)], self._interleaved(1)
                tensors = tuple(StoredTensor(f"{one}.weight", self.head_dim, pairs) for one in named)
            else:
                tensors = (StoredTensor(f"{stored}.weight", size, self._interleaved(heads), reshape_rows=heads),)
            return (WeightSpec(name, "norm", (size,), tensors),)
        over_all = self.qk_norm == "all heads"
        pairs = self._interleaved(heads if over_all else 1)
        return self.qk_norm_form.weights(name, stored, size if over_all else self.head_dim, pairs)

    def _fused(self) -> InterleavedParts | None:
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        if self.names.qkv_order == "groups":
            return InterleavedParts(kv_heads, (heads // kv_heads * dim, dim, dim))
        if self.names.qkv_order == "quarters":  # values before keys
            return InterleavedParts(4, (heads // 4 * dim, kv_heads // 4 * dim, kv_heads // 4 * dim), (0, 2, 1))
        return None

    def _interleaved(self, heads: int) -> RotaryRows | None:
        dims = self.interleaved_dims or self.swapped_dims
        if not dims:
            return None
        return RotaryRows(heads, self.head_dim, dims, "interleaved" if self.interleaved_dims else "swapped")


@dataclass(slots=True)
class AttentionWeights:
    """Weights listed by `AttentionSpec.weights`. Norm weights are float32, with the offset applied."""

    qkv: Weight  # [(Hq + 2 Hkv) * D, hidden], or fewer heads, see `AttentionSpec.projected_heads`; gates follow queries
    out: Weight  # [hidden, Hq * D]
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D], or [Hq * D] over all heads
    k_norm: Tensor | None = None  # [D], or [Hkv * D]
    q_norm_bias: Tensor | None = None  # as q_norm
    k_norm_bias: Tensor | None = None  # as k_norm
    output_norm: Tensor | None = None  # [Hq * D]
    gate: Weight | None = None  # [Hq * D, hidden]
    sinks: Tensor | None = None  # [Hq] float32


@dataclass(slots=True)
class AttentionMetadata:
    """Views of the forward batch by rotary and KV group, which all attention layers of a step share.

    They are made once per step instead of once per layer. No number of the batch is copied.
    """

    rotations: list[tuple[Tensor, Tensor, Tensor]]  # per rotary group cos and sin [T, d/2], q_scale [T]
    pre_norm_scales: list[Tensor]  # per rotary group [T], see `ForwardBatch.pre_norm_scale`; empty if there is none
    slots: list[Tensor]  # per KV group [T]
    calls: list[AttentionCall]  # per `AttentionKind`
    # See `RotatedQueryCopies`; rotations are cos and sin per rotary group, [V, d/2] or [T, d/2].
    copy_sources: Tensor | None = None  # [V] int64; None: no copies
    copy_rotations: Sequence[tuple[Tensor, Tensor]] = ()
    pre_norm_rotations: Sequence[tuple[Tensor, Tensor]] = ()  # applied to queries before the weights of their norm
    query_indices: Tensor | None = None  # [T] int64, with pre_norm_rotations
    second_key_slots: Sequence[Tensor] = ()  # per KV group [T], -1: no second key copy
    second_key_rotations: Sequence[tuple[Tensor, Tensor]] = ()

    def append_key_copies(
        self,
        rotary_group: int | None,
        kv_group: int,
        no_query: Tensor,
        k: Tensor,
        v: Tensor,
        pages: KVPages,
        backend: Backend,
    ) -> None:
        """Append second key copies of k and v [T, Hkv, D], if the distance rule uses them. no_query: [T, 0, D]."""
        if not self.second_key_slots:
            return
        group = rotary_group or 0
        cos, sin = self.second_key_rotations[group]
        if rotary_group is None:
            cos, sin = cos[:, :0], sin[:, :0]
        q_scale = self.rotations[group][2]
        backend.rotate_and_append(no_query, k, v, cos, sin, q_scale, pages, self.second_key_slots[kv_group])


def _full_range(batch: ForwardBatch) -> KeyRanges:
    """Key ranges of queries that attend to all keys unchanged."""
    import torch

    from windlass.kernels import KeyRanges

    far = torch.full_like(batch.seq_lens, UNBOUNDED)[:, None]  # [B, 1]
    return KeyRanges(far, batch.query_start[:-1, None], far, torch.zeros_like(far))


class AttentionMetadataBuilder:
    """Builds `AttentionMetadata` once per step. kind_by_layer: for each attending layer its index into
    `AttentionMetadata.calls`."""

    def __init__(self, kinds: Sequence[AttentionKind], rotary_dims: Sequence[int]) -> None:
        """kinds: of every attending layer. rotary_dims: of every rotary group."""
        self._kinds = list(dict.fromkeys(kinds))
        self.kind_by_layer = [self._kinds.index(kind) for kind in kinds]
        self._windows = tuple(dict.fromkeys(kind.window for kind in kinds))
        self._rotated_pairs = [dim // 2 for dim in rotary_dims]
        self._alibi_slope_tensors: dict[tuple[float, ...], Tensor] = {}

    def build(self, batch: ForwardBatch) -> AttentionMetadata:
        from windlass.kernels import AttentionCall, KeyRanges

        rotations = [
            # The batch's cosines have the width of the widest group.
            (batch.cos[group, :, :pairs], batch.sin[group, :, :pairs], batch.q_scale[group])
            for group, pairs in enumerate(self._rotated_pairs)
        ]
        tables, query_copies = batch.block_tables.unbind(0), batch.query_copies
        calls = []
        for kind in self._kinds:
            score_scale = batch.score_scale
            if not kind.rotates and batch.unrotated_score_scale is not None:
                score_scale = batch.unrotated_score_scale
            operands = tables[kind.kv_group], batch.query_start, batch.seq_lens, score_scale, kind.scale
            window, cap = kind.window, kind.soft_cap
            if kind.slopes is not None:
                slopes = self._alibi_slope_tensor(kind.slopes, batch.seq_lens.device)
                if query_copies is None:
                    ranges = _full_range(batch)
                else:
                    rows, reach = query_copies.unrotated_rows, query_copies.reaches[0]
                    ranges = KeyRanges(query_copies.ends, rows, reach, query_copies.gaps)
                calls.append(AttentionCall(*operands, soft_cap=cap, ranges=ranges, alibi_slopes=slopes))
            elif kind.chunked:  # tokens of such a model never move, so there are no query copies
                calls.append(AttentionCall(*operands, chunk=window, soft_cap=cap, prompts=batch.prompts))
            elif query_copies is None:
                call = AttentionCall(*operands, window=window, soft_cap=cap, causal=kind.causal, prompts=batch.prompts)
                calls.append(call)
            else:
                rows = query_copies.rows if kind.rotates else query_copies.unrotated_rows
                ranges = KeyRanges(query_copies.ends, rows, query_copies.reaches[self._windows.index(window)])
                calls.append(AttentionCall(*operands, soft_cap=cap, ranges=ranges))
        pre_norm_scales = [] if batch.pre_norm_scale is None else list(batch.pre_norm_scale.unbind(0))
        metadata = AttentionMetadata(rotations, pre_norm_scales, list(batch.slots.unbind(0)), calls)
        if query_copies is not None:
            if query_copies.sources.shape[0]:
                metadata.copy_sources = query_copies.sources
                metadata.copy_rotations = self._by_group(query_copies.cos, query_copies.sin)
            metadata.pre_norm_rotations = self._by_group(query_copies.anchor_cos, query_copies.anchor_sin)
            metadata.query_indices = query_copies.query_indices
            if query_copies.second_key_slots is not None:
                metadata.second_key_slots = query_copies.second_key_slots.unbind(0)
                metadata.second_key_rotations = self._by_group(query_copies.second_key_cos, query_copies.second_key_sin)
        return metadata

    def _alibi_slope_tensor(self, slopes: tuple[float, ...], device: torch.device) -> Tensor:
        """[H] float32, cached: a captured step must not copy from the host."""
        tensor = self._alibi_slope_tensors.get(slopes)
        if tensor is None:
            import torch

            tensor = self._alibi_slope_tensors[slopes] = torch.tensor(slopes, dtype=torch.float32, device=device)
        return tensor

    def _by_group(self, cos: Tensor | None, sin: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Rotations by rotary group, as wide as the group rotates; empty if there are none."""
        if cos is None or sin is None:
            return []
        return [(cos[group, :, :pairs], sin[group, :, :pairs]) for group, pairs in enumerate(self._rotated_pairs)]


class Attention:
    """Project, norm and rotate the heads, append keys and values to the pages, attend, project back.

    weights: the fields of `AttentionWeights`. kind: of this layer, see `AttentionMetadataBuilder`.
    """

    def __init__(
        self, spec: AttentionSpec, weights: Mapping[str, Any], norm_eps: float, kind: int, backend: Backend
    ) -> None:
        self.spec = spec
        self.weights = AttentionWeights(**weights)
        self._backend, self._kind = backend, kind
        # A norm commutes with the rotation, its weights do not: if they follow the rotation, the key is cached without them.
        after, over_all = spec.qk_norm == "after", spec.qk_norm == "all heads"
        form = NormSpec(spec.qk_norm_form.centered, weight=False) if after else spec.qk_norm_form

        def head_norm(name: str, count: int) -> Norm | PerHeadNorm | None:
            size = count * spec.head_dim if over_all else spec.head_dim
            if spec.qk_norm == "by head":
                return PerHeadNorm(form, weights[name], count, norm_eps, backend)
            return None if spec.qk_norm is None else Norm.from_weights(form, weights, name, size, norm_eps, backend)

        self._q_norm = head_norm("q_norm", spec.num_heads)
        self._k_norm = head_norm("k_norm", spec.num_kv_heads) if spec.kv_source_layer is None else None
        self._v_norm: Norm | None = None
        if spec.values_normed:
            self._v_norm = Norm.from_weights(NormSpec(weight=False), {}, "", spec.head_dim, norm_eps, backend)
        self._output_norm = Norm(NormSpec(), self.weights.output_norm, None, norm_eps, backend)

    def with_backend(self, backend: Backend) -> Attention:
        """The same layer with the same weights on another backend."""
        other = copy(self)
        other._backend = backend
        return other

    def forward(self, x: Tensor, metadata: AttentionMetadata, pages: KVPages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. pages: those that its queries attend to. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        cos, sin, q_scale = metadata.rotations[spec.rotary_group or 0]
        if spec.rotary_group is None:
            cos, sin = cos[:, :0], sin[:, :0]
        projected = adapted_linear(backend, "qkv", x, w.qkv, w.qkv_bias, lora)
        if spec.clip is not None:
            backend.clip(projected, spec.clip)
        counts = spec.projected_heads
        q, gates, k, v = projected.view(x.shape[0], sum(counts), dim).split_with_sizes(counts, 1)  # [T, H, D] views
        if spec.keys_as_values:
            v = k
        after = spec.qk_norm == "after"
        if after:
            # The original model norms heads that the attention factor has made longer. The norm undoes that except for its eps.
            backend.scale_rows(
                projected[:, : (heads + kv_heads) * dim], metadata.pre_norm_scales[spec.rotary_group or 0]
            )
        if self._q_norm is not None:
            if spec.qk_norm == "all heads":
                q, k = q.view(q.shape[0], -1), k.view(k.shape[0], -1)
            q = self._q_norm(q).view(-1, heads, dim)
        if self._k_norm is not None:
            k = self._k_norm(k).view(-1, kv_heads, dim)
        if self._v_norm is not None and spec.kv_source_layer is None:
            v = self._v_norm(v)
        backend.rotate_and_append(q, k, v, cos, sin, q_scale, pages, metadata.slots[spec.kv_group])
        if spec.kv_source_layer is None:
            metadata.append_key_copies(spec.rotary_group, spec.kv_group, q[:, :0], k, v, pages, backend)
        group = spec.rotary_group
        if after and w.q_norm is not None and w.k_norm is not None:
            if metadata.pre_norm_rotations and metadata.query_indices is not None and group is not None:
                q = backend.rotate_queries(q, metadata.query_indices, *metadata.pre_norm_rotations[group])[q.shape[0] :]
            backend.scale_columns(q.view(-1, dim), w.q_norm, w.k_norm)
        if metadata.copy_sources is not None and group is not None:
            q = backend.rotate_queries(q, metadata.copy_sources, *metadata.copy_rotations[group])
        call = metadata.calls[self._kind]
        if w.sinks is not None:
            call = replace(call, sink_logits=w.sinks)
        attended = backend.paged_attention(q, pages, call)  # [T, Hq, D]
        attended = self._output_norm(attended.view(attended.shape[0], -1))
        if w.gate is not None:
            backend.gate_by_sigmoid(attended, adapted_linear(backend, "gate", x, w.gate, lora=lora))
        if spec.gated_queries:
            backend.gate_by_sigmoid(attended, gates.view(attended.shape))
        return adapted_linear(backend, "out", attended, w.out, w.out_bias, lora)
