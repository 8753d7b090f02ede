"""The one decoder: runs any ModelSpec over a flat ForwardBatch. Knows nothing of files, requests or scheduling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.engine.cache.storage import KVStorage
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.model.spec import LayerSpec, ModelSpec
from windlass.kernels import AttentionCall, Backend, PackedWeight, Quantization, Weight


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer, projections fused so that each input is read once. Norm weights are float32, offset applied."""

    input_norm: Tensor  # [hidden]
    qkv: Weight  # [(Hq + 2 Hkv) * D, hidden]
    out: Weight  # [hidden, Hq * D]
    mlp_norm: Tensor  # [hidden]
    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    post_attention_norm: Tensor | None = None  # [hidden], sandwich only
    post_mlp_norm: Tensor | None = None  # [hidden], sandwich only


@dataclass(slots=True)
class _SharedInputs:
    """What the layers of one step share, by group."""

    rotations: list[tuple[Tensor, Tensor, Tensor]]  # per rotary group cos and sin [T, d/2], q_scale [T]
    slots: list[Tensor]  # per KV group [T]
    attention: list[AttentionCall]  # per layer


class Decoder:
    """Embedding, layers, final norm and head of one model, on the backend that it is given.

    Matrices may be stored narrower than they are computed with (weight_dtype); biases are stored in the compute dtype.
    With a quantization the layers' matrices have its width and the head has 8 bits. An embedding of its own is only
    gathered from, a row per token, and stays as it is; one tied to the head is the head's 8-bit rows.
    """

    def __init__(self, spec: ModelSpec, backend: Backend) -> None:
        """Allocate uninitialised weights; `weights.load_weights` or `weights.randomize_weights` fills them."""
        self.spec, self.backend = spec, backend
        self.dtype, self.device, self.weight_dtype = backend.dtype, backend.device, backend.weight_dtype
        self.quantization: Quantization | None = None if backend.quantization == "none" else backend.quantization
        hidden = spec.hidden_size
        self.head: Weight
        self.embedding: Tensor | PackedWeight
        if spec.tied_embeddings:
            self.head = self.embedding = backend.table_and_head(spec.vocab_size, hidden)
        else:
            self.head = backend.head(spec.vocab_size, hidden)
            self.embedding = backend.table(spec.vocab_size, hidden)
        self.final_norm = self._norm(hidden)
        self.layers = [self._allocate(layer) for layer in spec.layers]
        kinds = [(a.kv_group, a.scale, a.window, a.soft_cap) for a in (layer.attention for layer in spec.layers)]
        self._attention_kinds = list(dict.fromkeys(kinds))
        self._kind_of_layer = [self._attention_kinds.index(kind) for kind in kinds]
        self._rotated_pairs = [group.base.rotary_dim // 2 for group in spec.rotary_groups]
        self._unit_norm = torch.ones(spec.layers[0].attention.head_dim, dtype=torch.float32, device=self.device)

    def _bias(self, size: int) -> Tensor:
        return self.backend.empty((size,), self.dtype)

    def _norm(self, size: int) -> Tensor:
        return self.backend.empty((size,), torch.float32)

    def _allocate(self, layer: LayerSpec) -> LayerWeights:
        attention, hidden = layer.attention, self.spec.hidden_size
        q_size = attention.num_heads * attention.head_dim
        qkv_size = q_size + 2 * attention.num_kv_heads * attention.head_dim
        sandwich = layer.norms == "sandwich"
        return LayerWeights(
            input_norm=self._norm(hidden),
            qkv=self.backend.matrix(qkv_size, hidden),
            out=self.backend.matrix(hidden, q_size),
            mlp_norm=self._norm(hidden),
            gate_up=self.backend.matrix(2 * layer.intermediate_size, hidden),
            down=self.backend.matrix(hidden, layer.intermediate_size),
            qkv_bias=self._bias(qkv_size) if attention.qkv_bias else None,
            out_bias=self._bias(hidden) if attention.out_bias else None,
            gate_up_bias=self._bias(2 * layer.intermediate_size) if layer.mlp_bias else None,
            down_bias=self._bias(hidden) if layer.mlp_bias else None,
            q_norm=self._norm(attention.head_dim) if attention.qk_norm else None,
            k_norm=self._norm(attention.head_dim) if attention.qk_norm else None,
            post_attention_norm=self._norm(hidden) if sandwich else None,
            post_mlp_norm=self._norm(hidden) if sandwich else None,
        )

    def forward(self, batch: ForwardBatch, cache: KVStorage) -> Tensor:
        """Append the batch's keys and values to `cache` and return the normed hidden states [T, hidden]."""
        x, batch = self.embed(batch)
        return self.run_layers(x, batch, cache)

    def embed(self, batch: ForwardBatch) -> tuple[Tensor, ForwardBatch]:
        """The first layer's input [T, hidden], in memory of its own, and the batch with the model's temperatures applied."""
        x = self.backend.embed(self.embedding, batch.input_ids, self.spec.embedding_scale)
        if self.spec.temperature is not None:
            beta, length = self.spec.temperature
            growth = 1 + beta * self.backend.log1p(batch.positions // length)  # [T]
            batch = replace(batch, score_scale=batch.score_scale * growth)
        return x, batch

    def run_layers(self, x: Tensor, batch: ForwardBatch, cache: KVStorage) -> Tensor:
        """The rest of `forward`. x: [T, hidden] as `embed` gave it; it is overwritten."""
        backend, eps = self.backend, self.spec.norm_eps
        shared = self._shared_inputs(batch)
        normed = backend.rms_norm(x, self.layers[0].input_norm, eps)
        following = [w.input_norm for w in self.layers[1:]] + [self.final_norm]
        for index, (layer, w) in enumerate(zip(self.spec.layers, self.layers, strict=True)):
            y = self._attention(normed, layer, w, batch, shared, cache, index)
            if w.post_attention_norm is not None:
                y = backend.rms_norm(y, w.post_attention_norm, eps)
            normed = backend.add_rms_norm(x, y, w.mlp_norm, eps)
            y = backend.linear(normed, w.gate_up, w.gate_up_bias)
            y = backend.linear(backend.gated_activation(y, layer.activation), w.down, w.down_bias)
            if w.post_mlp_norm is not None:
                y = backend.rms_norm(y, w.post_mlp_norm, eps)
            normed = backend.add_rms_norm(x, y, following[index], eps)
        return normed

    def _shared_inputs(self, batch: ForwardBatch) -> _SharedInputs:
        """The views that layers take of the batch, made once per step instead of once per layer."""
        groups = [
            # The batch's cosines are as wide as the widest group's.
            (batch.cos[group, :, :pairs], batch.sin[group, :, :pairs], batch.q_scale[group])
            for group, pairs in enumerate(self._rotated_pairs)
        ]
        tables = batch.block_tables.unbind(0)
        calls = [
            AttentionCall(
                tables[group], batch.query_start, batch.seq_lens, batch.score_scale, scale, window=window, soft_cap=cap
            )
            for group, scale, window, cap in self._attention_kinds
        ]
        return _SharedInputs(groups, list(batch.slots.unbind(0)), [calls[kind] for kind in self._kind_of_layer])

    def _attention(
        self,
        x: Tensor,
        layer: LayerSpec,
        w: LayerWeights,
        batch: ForwardBatch,
        shared: _SharedInputs,
        cache: KVStorage,
        index: int,
    ) -> Tensor:
        spec, backend = layer.attention, self.backend
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = backend.linear(x, w.qkv, w.qkv_bias).view(x.shape[0], heads + 2 * kv_heads, dim)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)  # [T, H, D] views
        after = spec.qk_norm == "after"
        if after:
            # The original norms what the attention factor has made longer; that comes out again but for the norm's eps.
            grown = batch.q_scale[spec.rotary_group or 0].sqrt()[:, None, None]  # [T, 1, 1]
            q, k = (q * grown).to(x.dtype), (k * grown).to(x.dtype)
        if w.q_norm is not None and w.k_norm is not None:
            # A norm commutes with the rotation, its weights do not: when they follow it, the key is cached without.
            q = backend.rms_norm(q, self._unit_norm if after else w.q_norm, self.spec.norm_eps)
            k = backend.rms_norm(k, self._unit_norm if after else w.k_norm, self.spec.norm_eps)
        pages = cache.pages(index)
        cos, sin, q_scale = shared.rotations[spec.rotary_group or 0]
        if spec.rotary_group is None:  # it takes none of the cosines
            cos, sin = cos[:, :0], sin[:, :0]
        if after:
            q_scale = torch.ones_like(q_scale)
        backend.rotate_and_append(q, k, v, cos, sin, q_scale, pages, shared.slots[spec.kv_group])
        if after and w.q_norm is not None and w.k_norm is not None:
            q.mul_(w.q_norm * w.k_norm)
        attended = backend.paged_attention(q, pages, shared.attention[index])  # [T, Hq, D]
        return backend.linear(attended.view(attended.shape[0], -1), w.out, w.out_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits, float32 [R, V], of normed hidden states [R, hidden]."""
        logits = self.backend.linear(hidden, self.head).float()
        if self.spec.logit_soft_cap is not None:
            logits = self.backend.soft_cap(logits, self.spec.logit_soft_cap)
        return logits

    def num_parameters(self) -> int:
        return sum(t.numel() for t in self.tensors())

    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Weight]:
        """Every distinct weight."""
        head = [] if self.spec.tied_embeddings else [self.head]
        layers = [getattr(w, name) for w in self.layers for name in LayerWeights.__slots__]
        return [self.embedding, *head, self.final_norm, *(t for t in layers if t is not None)]
