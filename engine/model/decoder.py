"""Decoder: runs any ModelSpec over a flat ForwardBatch.

It holds the loop: embedding, layers with their norms, head. `mixers` and `feed_forward` define what a layer computes. It uses no
files, requests or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.errors import RequestError
from windlass.engine.model.classification_head import ClassificationHead
from windlass.engine.model.feed_forward.mlp import GatedMLP, GatedMLPSpec, PlainMLP
from windlass.engine.model.feed_forward.moe import MoEFeedForward, MoESpec, ParallelExperts
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.model.lora import LayerLoRA
from windlass.engine.model.mixers.attention import Attention, AttentionMetadata, AttentionMetadataBuilder, AttentionSpec
from windlass.engine.model.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetSpec
from windlass.engine.model.mixers.latent_attention import LatentAttention, LatentSpec
from windlass.engine.model.mixers.short_convolution import ShortConvolution, ShortConvolutionSpec
from windlass.engine.model.mixers.state_space import ParallelStateSpace, StateSpace, StateSpaceSpec
from windlass.engine.model.model_spec import FeedForwardSpec, LayerSpec, ModelSpec, RecurrentMixerSpec
from windlass.engine.model.mtp_input import MTPInput
from windlass.engine.model.norm import Norm
from windlass.engine.model.per_layer_embeddings import PerLayerEmbeddings, PerLayerProjection
from windlass.engine.model.weight_spec import WeightSpec
from windlass.engine.model.weight_storage import StoragePlan, allocate
from windlass.kernels import Backend, BlockWeight, Weight

FeedForward: TypeAlias = GatedMLP | PlainMLP | MoEFeedForward
RecurrentMixer: TypeAlias = GatedDeltaNet | ShortConvolution | StateSpace


@dataclass(slots=True)
class DecoderLayer:
    """The built parts of a `LayerSpec`; run by `Decoder.run_layers`."""

    mixer_norm: Norm
    mixer: Attention | LatentAttention | RecurrentMixer | None
    mixer_output_norm: Norm
    feed_forward_norm: Norm | None  # None: a parallel layer whose feed-forward reads the mixer's normed input
    feed_forward: FeedForward | None
    feed_forward_output_norm: Norm
    parallel: bool
    kv_layer: int  # the layer whose cached keys and values it reads, in most models itself
    output_norm: Norm | None  # only with post-LN, see `LayerNorms`
    parallel_experts: ParallelExperts | None
    per_layer_projection: PerLayerProjection | None
    output_scale: Tensor | None  # [1] float32
    parallel_state_space: ParallelStateSpace | None


class Decoder:
    """Embedding, layers, final norm and head of one model on one backend.

    Matrices may be stored in fewer bits than they are computed with, according to the plan; biases have the compute dtype.
    """

    def __init__(
        self, spec: ModelSpec, backend: Backend, plan: StoragePlan | None = None, base_model: Decoder | None = None
    ) -> None:
        """Allocate uninitialised weights; `weights.load_weights` or `loader.randomize_weights` fills them.

        plan: storage of the weights; None: all in the backend's weight dtype. base_model: for an MTP layer, the model whose
        embedding and head it shares.
        """
        self.spec, self.backend = spec, backend
        self.plan: StoragePlan = plan or {}
        self.dtype, self.device, self.weight_dtype = backend.dtype, backend.device, backend.weight_dtype
        self._weights = weights = allocate(backend, spec.weights(), self.plan)
        hidden, eps = spec.hidden_size, spec.norm_eps
        no_norm = Norm(spec.norm, None, None, eps, backend)
        self.embedding: Tensor | BlockWeight
        self.head: Weight
        self._head_bias: Tensor | None  # [V]
        self._mtp_input: MTPInput | None = None
        if base_model is None:
            self.embedding = weights["embedding"]
            self.head = weights["head"] if "head" in weights else self._own_head_rows(self.embedding)
            self._head_bias = weights.get("head_bias")
        else:
            self.embedding, self._head_bias = base_model.embedding, base_model._head_bias
            self.head = weights.get("head", base_model.head)
            self._mtp_input = MTPInput(spec.norm, weights, hidden, eps, backend)
        self._classes = None if spec.head is None else ClassificationHead(spec.head, weights, eps, backend)
        self._final_norm = no_norm if spec.names.final_norm is None else self._norm(weights, "final_norm")
        self._embedding_norm = no_norm
        if spec.embedding_norm is not None:
            self._embedding_norm = Norm.from_weights(
                spec.embedding_norm, weights, "embedding_norm", hidden, eps, backend
            )
        self._token_types: Tensor | None = weights.get("token_types")  # [token types, hidden]
        self._positions: Tensor | None = weights.get("positions")  # [max positions, hidden]
        self.per_layer_embeddings: PerLayerEmbeddings | None = None
        if spec.per_layer_embeddings is not None:
            self.per_layer_embeddings = PerLayerEmbeddings(spec.per_layer_embeddings, weights, hidden, eps, backend)
        self.first_kv_sharing_layer = spec.first_kv_sharing_layer
        self._norms_follow_rotation = spec.norms_follow_rotation
        rotary_dims = [group.base.rotary_dim for group in spec.rotary_groups]
        self._attention = AttentionMetadataBuilder([mixer.kind for mixer in spec.attention.values()], rotary_dims)
        self._kinds = dict(zip(spec.attention, self._attention.kind_by_layer, strict=True))
        self.layers = [self._layer(index, layer) for index, layer in enumerate(spec.layers)]

    def _own_head_rows(self, embedding: Tensor | BlockWeight) -> Weight:
        """The embedding as the head; of a model shard, its rows only."""
        own = self.spec.vocabulary
        if own is None:
            return embedding
        return embedding.narrow(0, *own) if isinstance(embedding, Tensor) else embedding.panels(*own)

    def _norm(self, weights: Mapping[str, Any], name: str) -> Norm:
        return Norm.from_weights(self.spec.norm, weights, name, self.spec.hidden_size, self.spec.norm_eps, self.backend)

    # -- building layers --

    def _layer(self, index: int, layer: LayerSpec) -> DecoderLayer:
        hidden, eps, backend = self.spec.hidden_size, self.spec.norm_eps, self.backend
        norm_weights = self._layer_weights(index, layer.norms.weights(hidden))
        no_norm = Norm(self.spec.norm, None, None, eps, backend)
        norms = {name: self._norm(norm_weights, name) for name in layer.norms.stored}
        shares_norm = layer.norms.parallel and layer.norms.feed_forward is None
        kv_source = layer.mixer.kv_source_layer if isinstance(layer.mixer, AttentionSpec) else None
        experts = projection = state_space = None
        if (spec := layer.parallel_experts) is not None:
            experts = ParallelExperts(spec, self._layer_weights(index, spec.weights(hidden)), eps, backend)
        if (narrow := layer.per_layer_projection) is not None:
            projection = PerLayerProjection(narrow, self._layer_weights(index, narrow.weights(hidden)), eps, backend)
        if (parallel := layer.parallel_state_space) is not None:
            state_space = ParallelStateSpace(parallel, self._layer_weights(index, parallel.weights(hidden)), backend)
        return DecoderLayer(
            mixer_norm=norms.get("mixer_norm", no_norm),
            mixer=None if layer.mixer is None else self._mixer(index, layer.mixer),
            mixer_output_norm=norms.get("mixer_output_norm", no_norm),
            feed_forward_norm=None if shares_norm else norms.get("feed_forward_norm", no_norm),
            feed_forward=None if layer.feed_forward is None else self._feed_forward(index, layer.feed_forward),
            feed_forward_output_norm=norms.get("feed_forward_output_norm", no_norm),
            parallel=layer.norms.parallel,
            kv_layer=index if kv_source is None else kv_source,
            output_norm=norms.get("output_norm"),
            parallel_experts=experts,
            per_layer_projection=projection,
            output_scale=None if layer.output_scale is None else self._weights[f"layers.{index}.scalar"],
            parallel_state_space=state_space,
        )

    def _layer_weights(self, index: int, specs: Iterable[WeightSpec]) -> dict[str, Any]:
        """Weights of a part of layer `index`, by their names in its spec."""
        return {spec.name: self._weights[f"layers.{index}.{spec.name}"] for spec in specs}

    def _mixer(
        self, index: int, spec: AttentionSpec | LatentSpec | RecurrentMixerSpec
    ) -> Attention | LatentAttention | RecurrentMixer:
        weights = self._layer_weights(index, spec.weights(self.spec.hidden_size))
        if isinstance(spec, GatedDeltaNetSpec):
            return GatedDeltaNet(spec, weights, self.spec.norm_eps, self.backend)
        if isinstance(spec, ShortConvolutionSpec):
            return ShortConvolution(spec, weights, self.backend)
        if isinstance(spec, StateSpaceSpec):
            return StateSpace(spec, weights, self.backend)
        if isinstance(spec, LatentSpec):
            return LatentAttention(spec, weights, self._kinds[index], self.backend)
        return Attention(spec, weights, self.spec.norm_eps, self._kinds[index], self.backend)

    def _feed_forward(self, index: int, spec: FeedForwardSpec) -> FeedForward:
        weights = self._layer_weights(index, spec.weights(self.spec.hidden_size))
        if isinstance(spec, GatedMLPSpec):
            return GatedMLP(spec, weights, self.spec.norm_eps, self.backend)
        if isinstance(spec, MoESpec):
            return MoEFeedForward(spec, weights, self.spec.norm_eps, self.backend)
        return PlainMLP(spec, weights, self.backend)

    # -- forward pass --

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Append the batch's keys and values to `cache` and return the normed hidden states [T, hidden].

        If the batch asks only for the last token of each sequence, the other rows may be zeros: layers at the end that read the
        keys of earlier layers leave them out.
        """
        x, batch = self.embed(batch)
        return self.run_layers(x, batch, cache)

    def embed(self, batch: ForwardBatch) -> tuple[Tensor, ForwardBatch]:
        """The first layer's input [T, hidden] in new memory, and the batch with the model's query scales and per-layer
        embeddings."""
        x = self.backend.embed(self.embedding, batch.input_ids, self.spec.embedding_scale)
        if self._token_types is not None:
            types = torch.zeros_like(batch.input_ids) if batch.token_types is None else batch.token_types
            self.backend.add(x, self.backend.embed(self._token_types, types))
        if self._positions is not None:
            self.backend.add(x, self.backend.embed(self._positions, batch.positions))
        x = self._embedding_norm(x)
        if self._mtp_input is not None:
            assert batch.hidden is not None
            x = self._mtp_input.forward(x, batch.hidden)
        if self.per_layer_embeddings is not None:
            batch = replace(batch, per_layer_embeddings=self.per_layer_embeddings.lookup(batch.input_ids))
        if self._norms_follow_rotation:  # the attention factor is applied before the norm, see `Attention.forward`
            batch = replace(batch, pre_norm_scale=batch.q_scale.sqrt(), q_scale=torch.ones_like(batch.q_scale))
        if self.spec.temperature is not None:
            beta, length = self.spec.temperature
            scale = 1 + beta * self.backend.log1p(batch.context_positions // length)  # [T]
            batch = replace(batch, score_scale=batch.score_scale * scale)
        if self.spec.unrotated_temperature is not None:
            beta, length = self.spec.unrotated_temperature
            scale = 1 + beta * self.backend.log1p((batch.context_positions + 1) // length)  # [T]
            batch = replace(batch, unrotated_score_scale=batch.score_scale * scale)
        return x, batch

    def run_layers(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The rest of `forward`. x: [T, hidden] from `embed`; it is overwritten.

        The residual addition of a layer's last part is fused with the norm of the next layer.
        """
        metadata = self._attention.build(batch)
        layer_inputs: tuple[Tensor, ...] = ()
        if self.per_layer_embeddings is not None and batch.per_layer_embeddings is not None:
            outer = None if batch.adapters is None else batch.adapters.for_outer_weights(self.backend)
            layer_inputs = self.per_layer_embeddings.for_layers(x, batch.per_layer_embeddings, outer)
        normed = self.layers[0].mixer_norm(x)
        next_norms = [layer.mixer_norm for layer in self.layers[1:]] + [self._final_norm]
        num_tokens, last_tokens = x.shape[0], None
        if batch.only_last_tokens and self.first_kv_sharing_layer is not None:
            last_tokens = batch.last_tokens
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            if last_tokens is not None and index == self.first_kv_sharing_layer:
                batch = batch.last_tokens_batch()
                metadata = self._attention.build(batch)
                x, normed = x[last_tokens], normed[last_tokens]
                layer_inputs = tuple([one[last_tokens] for one in layer_inputs])
            lora = None if batch.adapters is None else batch.adapters.for_layer(index, self.backend)
            if layer.mixer is None:
                assert layer.feed_forward is not None
                normed = next_norm.add_and_norm(x, self._all_reduce(layer.feed_forward.forward(normed, lora)))
                continue
            y = _run_mixer(layer, index, normed, batch, metadata, cache, lora)
            y = layer.mixer_output_norm(self._all_reduce(y))
            if layer.feed_forward is None:
                normed = next_norm.add_and_norm(x, y)
                continue
            if layer.output_norm is not None:  # post-LN
                assert layer.feed_forward_norm is not None
                x = layer.feed_forward_norm.add_and_norm(x, y)
                x = normed = layer.output_norm.add_and_norm(x, self._all_reduce(layer.feed_forward.forward(x, lora)))
                continue
            if layer.parallel:
                own = layer.feed_forward_norm
                z = self._all_reduce(layer.feed_forward.forward(normed if own is None else own(x), lora))
                self.backend.add(x, layer.feed_forward_output_norm(z))
            else:
                assert layer.feed_forward_norm is not None
                normed = layer.feed_forward_norm.add_and_norm(x, y)
                y = self._all_reduce(layer.feed_forward.forward(normed, lora))
                if layer.parallel_experts is not None:
                    y = layer.parallel_experts.combine(y, self._all_reduce(layer.parallel_experts.forward(x)))
                y = layer.feed_forward_output_norm(y)
            if layer.per_layer_projection is not None:
                self.backend.add(x, y)
                y = layer.per_layer_projection.forward(x, layer_inputs[index], lora)
            if layer.output_scale is not None:
                self.backend.add(x, y)
                self.backend.multiply(x, layer.output_scale)
                normed = next_norm(x)
                continue
            normed = next_norm.add_and_norm(x, y)
        if last_tokens is None:
            return normed
        return normed.new_zeros(num_tokens, normed.shape[1]).index_copy_(0, last_tokens, normed)

    def _all_reduce(self, y: Tensor) -> Tensor:
        """Sum y [T, hidden] over the ranks, in place."""
        self.backend.all_reduce(y)
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits, float32 [R, V], of normed hidden states [R, hidden]. Ranks other than the first return
        their own part."""
        logits = self.backend.logits(hidden, self.head, self._head_bias)
        if self.spec.logit_scale != 1:
            logits = self.backend.scaled(logits, self.spec.logit_scale)
        if self.spec.logit_soft_cap is not None:
            logits = self.backend.soft_cap(logits, self.spec.logit_soft_cap)
        return logits if self.spec.vocabulary is None else self.backend.gather_columns(logits)

    @property
    def classes(self) -> ClassificationHead:
        """The classification head. Raises RequestError where the model has none."""
        if self._classes is None:
            raise RequestError("this model has no classification head", "pooling", "no_classifier")
        return self._classes

    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Weight]:
        """Every distinct weight."""
        return list(self.weights().values())

    def weights(self) -> dict[str, Weight]:
        """Every distinct weight by the name that `ModelSpec.weights` gives it, in that order."""
        return dict(self._weights)


def _run_mixer(
    layer: DecoderLayer,
    index: int,
    normed: Tensor,
    batch: ForwardBatch,
    metadata: AttentionMetadata,
    cache: KVCache,
    lora: LayerLoRA | None,
) -> Tensor:
    """Mixer output [T, hidden] of layer `index` from its normed input [T, hidden]."""
    assert layer.mixer is not None
    if isinstance(layer.mixer, RecurrentMixer):
        assert batch.state_rows is not None
        return layer.mixer.forward(normed, batch.state_rows, cache.states(index), lora)
    y = layer.mixer.forward(normed, metadata, cache.pages(layer.kv_layer), lora)
    if layer.parallel_state_space is None:
        return y
    assert batch.state_rows is not None
    return layer.parallel_state_space.combine(y, normed, batch.state_rows, cache.states(index), lora)
