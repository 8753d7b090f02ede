"""Attention over the cached keys and values of a sequence: what one layer does, and what the layers of a step share.

Knows its spec, its weights and the backend. It knows no other layer, no checkpoint and no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from windlass.engine.cache.runs import NO_BOUND
from windlass.engine.model.mixers.attention_spec import AttentionKind, AttentionSpec
from windlass.engine.model.norm import HeadNorm, Norm
from windlass.engine.model.norm_spec import NormForm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerChanges
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
class AttentionInputs:
    """What the attention layers of one step take of its batch.

    sources: the query that each further version is of, None where there are none. anchors: how queries are turned before
    their norm's weights, None where they are not. far_slots: where keys are kept a second time, as they
    seem from far away; none where no token's are.
    """

    rotations: list[tuple[Tensor, Tensor, Tensor]]  # per rotary group cos and sin [T, d/2], q_scale [T]
    growths: list[Tensor]  # per rotary group [T], see `ForwardBatch.growth`; none where there is none
    slots: list[Tensor]  # per KV group [T]
    calls: list[AttentionCall]  # per kind of layer, see `SharedAttention`
    sources: Tensor | None = None  # [V] int64
    turns: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # per rotary group cos and sin [V, d/2]
    anchors: list[tuple[Tensor, Tensor]] | None = None  # per rotary group cos and sin [T, d/2]
    every_query: Tensor | None = None  # [T] int64, with anchors
    far_slots: list[Tensor] = field(default_factory=list)  # per KV group [T], -1 for tokens without
    far_turns: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # per rotary group cos and sin [T, d/2]

    def append_far_keys(
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
        if not self.far_slots:
            return
        group = rotary_group or 0
        cos, sin = self.far_turns[group]
        if rotary_group is None:
            cos, sin = cos[:, :0], sin[:, :0]
        q_scale = self.rotations[group][2]
        backend.rotate_and_append(no_query, k, v, cos, sin, q_scale, pages, self.far_slots[kv_group])


def _one_range(batch: ForwardBatch) -> KeyRanges:
    """The ranges of a call whose queries meet all keys as they are, at their distance."""
    import torch

    from windlass.kernels import KeyRanges

    far = torch.full_like(batch.seq_lens, NO_BOUND)[:, None]  # [B, 1]
    return KeyRanges(far, batch.query_start[:-1, None], far, torch.zeros_like(far))


class SharedAttention:
    """Makes the views that layers take of a batch once per step instead of once per layer.

    kind_of_layer: layers of one kind ask the same of attention; per layer an index into `AttentionInputs.calls`.
    """

    def __init__(self, kinds: Sequence[AttentionKind], rotary_dims: Sequence[int]) -> None:
        """kinds: of every layer that attends. rotary_dims: of every rotary group."""
        self._kinds = list(dict.fromkeys(kinds))
        self.kind_of_layer = [self._kinds.index(kind) for kind in kinds]
        self._windows = tuple(dict.fromkeys(kind.window for kind in kinds))
        self._rotated_pairs = [dim // 2 for dim in rotary_dims]
        self._made_slopes: dict[tuple[float, ...], Tensor] = {}

    def inputs(self, batch: ForwardBatch) -> AttentionInputs:
        from windlass.kernels import AttentionCall, KeyRanges

        rotations = [
            # The batch's cosines are as wide as the widest group's.
            (batch.cos[group, :, :pairs], batch.sin[group, :, :pairs], batch.q_scale[group])
            for group, pairs in enumerate(self._rotated_pairs)
        ]
        tables, versions = batch.block_tables.unbind(0), batch.versions
        calls = []
        for kind in self._kinds:
            score_scale = batch.score_scale
            if not kind.rotates and batch.unrotated_score_scale is not None:
                score_scale = batch.unrotated_score_scale
            operands = tables[kind.kv_group], batch.query_start, batch.seq_lens, score_scale, kind.scale
            window, cap = kind.window, kind.soft_cap
            if kind.slopes is not None:
                slopes = self._slopes_of(kind.slopes, batch.seq_lens.device)
                ranges = (
                    _one_range(batch)
                    if versions is None
                    else KeyRanges(versions.ends, versions.plain_rows, versions.reaches[0], versions.gaps)
                )
                calls.append(AttentionCall(*operands, soft_cap=cap, ranges=ranges, alibi_slopes=slopes))
            elif kind.chunked:  # nothing moves in such a model, so there are no versions
                calls.append(AttentionCall(*operands, chunk=window, soft_cap=cap, prompts=batch.prompts))
            elif versions is None:
                call = AttentionCall(*operands, window=window, soft_cap=cap, causal=kind.causal, prompts=batch.prompts)
                calls.append(call)
            else:
                rows = versions.rows if kind.rotates else versions.plain_rows
                ranges = KeyRanges(versions.ends, rows, versions.reaches[self._windows.index(window)])
                calls.append(AttentionCall(*operands, soft_cap=cap, ranges=ranges))
        growths = [] if batch.growth is None else list(batch.growth.unbind(0))
        inputs = AttentionInputs(rotations, growths, list(batch.slots.unbind(0)), calls)
        if versions is not None:
            if versions.sources.shape[0]:
                inputs.sources, inputs.turns = versions.sources, self._by_group(versions.cos, versions.sin)
            if versions.anchor_cos is not None and versions.anchor_sin is not None:
                inputs.anchors = self._by_group(versions.anchor_cos, versions.anchor_sin)
                inputs.every_query = versions.every_query
            if versions.far_slots is not None and versions.far_cos is not None and versions.far_sin is not None:
                inputs.far_slots = list(versions.far_slots.unbind(0))
                inputs.far_turns = self._by_group(versions.far_cos, versions.far_sin)
        return inputs

    def _slopes_of(self, slopes: tuple[float, ...], device: torch.device) -> Tensor:
        """[H] float32, made once: a step that is captured copies nothing from the host."""
        found = self._made_slopes.get(slopes)
        if found is None:
            import torch

            found = self._made_slopes[slopes] = torch.tensor(slopes, dtype=torch.float32, device=device)
        return found

    def _by_group(self, cos: Tensor, sin: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Those of every rotary group, as wide as it rotates."""
        return [(cos[group, :, :pairs], sin[group, :, :pairs]) for group, pairs in enumerate(self._rotated_pairs)]


class Attention:
    """Projects, norms and rotates the heads, appends keys and values to the pages, attends, projects back.

    weights: the fields of `AttentionWeights`. kind: of this layer, see `SharedAttention`.
    """

    def __init__(
        self, spec: AttentionSpec, weights: Mapping[str, Any], norm_eps: float, kind: int, backend: Backend
    ) -> None:
        self.spec = spec
        self.weights = AttentionWeights(**weights)
        self._backend, self._kind = backend, kind
        # A norm commutes with the rotation, its weights do not: when they follow it, the key is cached without.
        after, over_all = spec.qk_norm == "after", spec.qk_norm == "all heads"
        form = NormForm(spec.qk_norm_form.centered, weight=False) if after else spec.qk_norm_form

        def made(name: str, count: int) -> Norm | HeadNorm | None:
            size = count * spec.head_dim if over_all else spec.head_dim
            if spec.qk_norm == "by head":
                return HeadNorm(form, weights[name], count, norm_eps, backend)
            return None if spec.qk_norm is None else Norm.of(form, weights, name, size, norm_eps, backend)

        self._q_norm = made("q_norm", spec.num_heads)
        self._k_norm = made("k_norm", spec.num_kv_heads) if spec.keys_of is None else None
        self._v_norm: Norm | None = None
        if spec.values_normed:
            self._v_norm = Norm.of(NormForm(weight=False), {}, "", spec.head_dim, norm_eps, backend)
        self._output_norm = Norm(NormForm(), self.weights.output_norm, None, norm_eps, backend)

    def with_backend(self, backend: Backend) -> Attention:
        """The same layer, weights and all, that asks another backend."""
        other = copy(self)
        other._backend = backend
        return other

    def forward(
        self, x: Tensor, inputs: AttentionInputs, pages: KVPages, changes: LayerChanges | None = None
    ) -> Tensor:
        """x: [T, hidden], normed. pages: those that its queries meet. changes: what adapters add. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        cos, sin, q_scale = inputs.rotations[spec.rotary_group or 0]
        if spec.rotary_group is None:  # it takes none of the cosines
            cos, sin = cos[:, :0], sin[:, :0]
        projected = backend.linear(x, w.qkv, w.qkv_bias)
        if changes is not None:
            changes.add("qkv", projected, x)
        if spec.clip is not None:
            backend.clip(projected, spec.clip)
        counts = spec.projected_heads
        q, gates, k, v = projected.view(x.shape[0], sum(counts), dim).split_with_sizes(counts, 1)  # [T, H, D] views
        if spec.keys_as_values:
            v = k
        after = spec.qk_norm == "after"
        if after:
            # The original norms what the attention factor has made longer; that comes out again but for the norm's eps.
            backend.scale_rows(projected[:, : (heads + kv_heads) * dim], inputs.growths[spec.rotary_group or 0])
        if self._q_norm is not None:
            if spec.qk_norm == "all heads":
                q, k = q.view(q.shape[0], -1), k.view(k.shape[0], -1)
            q = self._q_norm(q).view(-1, heads, dim)
        if self._k_norm is not None:
            k = self._k_norm(k).view(-1, kv_heads, dim)
        if self._v_norm is not None and spec.keys_of is None:
            v = self._v_norm(v)
        backend.rotate_and_append(q, k, v, cos, sin, q_scale, pages, inputs.slots[spec.kv_group])
        if spec.keys_of is None:
            inputs.append_far_keys(spec.rotary_group, spec.kv_group, q[:, :0], k, v, pages, backend)
        group = spec.rotary_group
        if after and w.q_norm is not None and w.k_norm is not None:
            if inputs.anchors is not None and inputs.every_query is not None and group is not None:
                q = backend.turn_queries(q, inputs.every_query, *inputs.anchors[group])[q.shape[0] :]
            backend.scale_columns(q.view(-1, dim), w.q_norm, w.k_norm)
        if inputs.sources is not None and group is not None:
            q = backend.turn_queries(q, inputs.sources, *inputs.turns[group])
        call = inputs.calls[self._kind]
        if w.sinks is not None:
            call = replace(call, sink_logits=w.sinks)
        attended = backend.paged_attention(q, pages, call)  # [T, Hq, D]
        attended = self._output_norm(attended.view(attended.shape[0], -1))
        if w.gate is not None:
            gate = backend.linear(x, w.gate)
            if changes is not None:
                changes.add("gate", gate, x)
            backend.gate_by_sigmoid(attended, gate)
        if spec.gated_queries:
            backend.gate_by_sigmoid(attended, gates.view(attended.shape))
        out = backend.linear(attended, w.out, w.out_bias)
        if changes is not None:
            changes.add("out", out, attended)
        return out
