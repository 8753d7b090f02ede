"""Attention over the cached keys and values of a sequence: what one layer does, and what the layers of a step share.

Knows its spec, its weights and the backend. It knows no other layer, no checkpoint and no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from windlass.engine.cache.runs import UNBOUNDED
from windlass.engine.model.mixers.attention_spec import AttentionKind, AttentionSpec
from windlass.engine.model.norm import Norm, PerHeadNorm
from windlass.engine.model.norm_spec import NormSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.engine.model.batch import ForwardBatch
    from windlass.kernels import AttentionCall, Backend, KeyRanges, KVPages, Weight


@dataclass(slots=True)
class AttentionWeights:
    """As `AttentionSpec.weights` lists them. Norm weights are float32, offset applied."""

    qkv: Weight  # [(Hq + 2 Hkv) * D, hidden], or fewer heads, see `AttentionSpec.projected_heads`; gates behind queries
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
    """What the attention layers of one step take of its batch.

    sources: the query that each further version is of, None where there are none. anchors: how queries are turned before
    their norm's weights, None where they are not. second_key_slots: where keys are kept a second time, as they
    seem from far away; none where no token's are.
    """

    rotations: list[tuple[Tensor, Tensor, Tensor]]  # per rotary group cos and sin [T, d/2], q_scale [T]
    pre_norm_scales: list[Tensor]  # per rotary group [T], see `ForwardBatch.pre_norm_scale`; none where there is none
    slots: list[Tensor]  # per KV group [T]
    calls: list[AttentionCall]  # per kind of layer, see `AttentionMetadataBuilder`
    sources: Tensor | None = None  # [V] int64
    copy_rotations: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # per rotary group cos and sin [V, d/2]
    anchors: list[tuple[Tensor, Tensor]] | None = None  # per rotary group cos and sin [T, d/2]
    query_indices: Tensor | None = None  # [T] int64, with anchors
    second_key_slots: list[Tensor] = field(default_factory=list)  # per KV group [T], -1 for tokens without
    second_key_rotations: list[tuple[Tensor, Tensor]] = field(
        default_factory=list
    )  # per rotary group cos and sin [T, d/2]

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
        """Keep keys [T, Hkv, D] and values a second time where the rule of their distances asks for it, as they seem from far
        away. no_query: [T, 0, D]."""
        if not self.second_key_slots:
            return
        group = rotary_group or 0
        cos, sin = self.second_key_rotations[group]
        if rotary_group is None:
            cos, sin = cos[:, :0], sin[:, :0]
        q_scale = self.rotations[group][2]
        backend.rotate_and_append(no_query, k, v, cos, sin, q_scale, pages, self.second_key_slots[kv_group])


def _full_range(batch: ForwardBatch) -> KeyRanges:
    """The ranges of a call whose queries meet all keys as they are, at their distance."""
    import torch

    from windlass.kernels import KeyRanges

    far = torch.full_like(batch.seq_lens, UNBOUNDED)[:, None]  # [B, 1]
    return KeyRanges(far, batch.query_start[:-1, None], far, torch.zeros_like(far))


class AttentionMetadataBuilder:
    """Makes the views that layers take of a batch once per step instead of once per layer.

    kind_by_layer: layers of one kind ask the same of attention; per layer an index into `AttentionMetadata.calls`.
    """

    def __init__(self, kinds: Sequence[AttentionKind], rotary_dims: Sequence[int]) -> None:
        """kinds: of every layer that attends. rotary_dims: of every rotary group."""
        self._kinds = list(dict.fromkeys(kinds))
        self.kind_by_layer = [self._kinds.index(kind) for kind in kinds]
        self._windows = tuple(dict.fromkeys(kind.window for kind in kinds))
        self._rotated_pairs = [dim // 2 for dim in rotary_dims]
        self._alibi_slope_tensors: dict[tuple[float, ...], Tensor] = {}

    def metadata(self, batch: ForwardBatch) -> AttentionMetadata:
        from windlass.kernels import AttentionCall, KeyRanges

        rotations = [
            # The batch's cosines are as wide as the widest group's.
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
                ranges = (
                    _full_range(batch)
                    if query_copies is None
                    else KeyRanges(
                        query_copies.ends, query_copies.unrotated_rows, query_copies.reaches[0], query_copies.gaps
                    )
                )
                calls.append(AttentionCall(*operands, soft_cap=cap, ranges=ranges, alibi_slopes=slopes))
            elif kind.chunked:  # nothing moves in such a model, so there are no versions
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
                metadata.sources, metadata.copy_rotations = (
                    query_copies.sources,
                    self._by_group(query_copies.cos, query_copies.sin),
                )
            if query_copies.anchor_cos is not None and query_copies.anchor_sin is not None:
                metadata.anchors = self._by_group(query_copies.anchor_cos, query_copies.anchor_sin)
                metadata.query_indices = query_copies.query_indices
            if (
                query_copies.second_key_slots is not None
                and query_copies.second_key_cos is not None
                and query_copies.second_key_sin is not None
            ):
                metadata.second_key_slots = list(query_copies.second_key_slots.unbind(0))
                metadata.second_key_rotations = self._by_group(query_copies.second_key_cos, query_copies.second_key_sin)
        return metadata

    def _alibi_slope_tensor(self, slopes: tuple[float, ...], device: torch.device) -> Tensor:
        """[H] float32, made once: a step that is captured copies nothing from the host."""
        found = self._alibi_slope_tensors.get(slopes)
        if found is None:
            import torch

            found = self._alibi_slope_tensors[slopes] = torch.tensor(slopes, dtype=torch.float32, device=device)
        return found

    def _by_group(self, cos: Tensor, sin: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Those of every rotary group, as wide as it rotates."""
        return [(cos[group, :, :pairs], sin[group, :, :pairs]) for group, pairs in enumerate(self._rotated_pairs)]


class Attention:
    """Projects, norms and rotates the heads, appends keys and values to the pages, attends, projects back.

    weights: the fields of `AttentionWeights`. kind: of this layer, see `AttentionMetadataBuilder`.
    """

    def __init__(
        self, spec: AttentionSpec, weights: Mapping[str, Any], norm_eps: float, kind: int, backend: Backend
    ) -> None:
        self.spec = spec
        self.weights = AttentionWeights(**weights)
        self._backend, self._kind = backend, kind
        # A norm commutes with the rotation, its weights do not: when they follow it, the key is cached without.
        after, over_all = spec.qk_norm == "after", spec.qk_norm == "all heads"
        form = NormSpec(spec.qk_norm_form.centered, weight=False) if after else spec.qk_norm_form

        def made(name: str, count: int) -> Norm | PerHeadNorm | None:
            size = count * spec.head_dim if over_all else spec.head_dim
            if spec.qk_norm == "by head":
                return PerHeadNorm(form, weights[name], count, norm_eps, backend)
            return None if spec.qk_norm is None else Norm.of(form, weights, name, size, norm_eps, backend)

        self._q_norm = made("q_norm", spec.num_heads)
        self._k_norm = made("k_norm", spec.num_kv_heads) if spec.kv_source_layer is None else None
        self._v_norm: Norm | None = None
        if spec.values_normed:
            self._v_norm = Norm.of(NormSpec(weight=False), {}, "", spec.head_dim, norm_eps, backend)
        self._output_norm = Norm(NormSpec(), self.weights.output_norm, None, norm_eps, backend)

    def with_backend(self, backend: Backend) -> Attention:
        """The same layer, weights and all, that asks another backend."""
        other = copy(self)
        other._backend = backend
        return other

    def forward(self, x: Tensor, metadata: AttentionMetadata, pages: KVPages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. pages: those that its queries meet. changes: what adapters add. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        cos, sin, q_scale = metadata.rotations[spec.rotary_group or 0]
        if spec.rotary_group is None:  # it takes none of the cosines
            cos, sin = cos[:, :0], sin[:, :0]
        projected = backend.linear(x, w.qkv, w.qkv_bias)
        if lora is not None:
            lora.add("qkv", projected, x)
        if spec.clip is not None:
            backend.clip(projected, spec.clip)
        counts = spec.projected_heads
        q, gates, k, v = projected.view(x.shape[0], sum(counts), dim).split_with_sizes(counts, 1)  # [T, H, D] views
        if spec.keys_as_values:
            v = k
        after = spec.qk_norm == "after"
        if after:
            # The original norms what the attention factor has made longer; that comes out again but for the norm's eps.
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
            if metadata.anchors is not None and metadata.query_indices is not None and group is not None:
                q = backend.rotate_queries(q, metadata.query_indices, *metadata.anchors[group])[q.shape[0] :]
            backend.scale_columns(q.view(-1, dim), w.q_norm, w.k_norm)
        if metadata.sources is not None and group is not None:
            q = backend.rotate_queries(q, metadata.sources, *metadata.copy_rotations[group])
        call = metadata.calls[self._kind]
        if w.sinks is not None:
            call = replace(call, sink_logits=w.sinks)
        attended = backend.paged_attention(q, pages, call)  # [T, Hq, D]
        attended = self._output_norm(attended.view(attended.shape[0], -1))
        if w.gate is not None:
            gate = backend.linear(x, w.gate)
            if lora is not None:
                lora.add("gate", gate, x)
            backend.gate_by_sigmoid(attended, gate)
        if spec.gated_queries:
            backend.gate_by_sigmoid(attended, gates.view(attended.shape))
        out = backend.linear(attended, w.out, w.out_bias)
        if lora is not None:
            lora.add("out", out, attended)
        return out
