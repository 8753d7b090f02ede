"""Decoder: runs any ModelSpec over a flat ForwardBatch.

It holds the loop: embedding, layers with their norms, head. What a layer computes is in `mixers` and `feed_forward`. It knows
no files, no requests and no scheduling.
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
    """One layer: x + mixer(norm(x)), then the same of the feed-forward; or the sum of both, where they are parallel.

    Where there is no mixer or no feed-forward, the layer is the other alone, behind the mixer's norm. feed_forward_norm None: the
    feed-forward takes what the mixer took (parallel layers only). output_norm: norms stand behind the sums, see `LayerNorms`;
    None: before the parts. pages: the layer whose cached keys and values it reads, itself in most models. beside, input, scalar,
    state: see `LayerSpec`.
    """

    mixer_norm: Norm
    mixer: Attention | LatentAttention | RecurrentMixer | None
    mixer_output_norm: Norm
    feed_forward_norm: Norm | None
    feed_forward: FeedForward | None
    feed_forward_output_norm: Norm
    parallel: bool
    pages: int
    output_norm: Norm | None = None
    parallel_experts: ParallelExperts | None = None
    input: PerLayerProjection | None = None
    scalar: Tensor | None = None  # [1] float32
    state: ParallelStateSpace | None = None


class Decoder:
    """Embedding, layers, final norm and head of one model, on the backend that it is given.

    Matrices may be stored narrower than they are computed with (the plan says how); biases are stored in the compute dtype.
    """

    def __init__(
        self, spec: ModelSpec, backend: Backend, plan: StoragePlan | None = None, base_model: Decoder | None = None
    ) -> None:
        """Allocate uninitialised weights; `weights.load_weights` or `random_weights.randomize_weights` fills them.

        plan: how they are stored; None: all in the backend's weight dtype. base_model: of a prediction layer, the model whose
        embedding and head it shares.
        """
        self.spec, self.backend = spec, backend
        self.plan: StoragePlan = plan or {}
        self.dtype, self.device, self.weight_dtype = backend.dtype, backend.device, backend.weight_dtype
        self._weights = weights = allocate(backend, spec.weights(), self.plan)
        none = Norm(spec.norm, None, None, spec.norm_eps, backend)
        self.embedding: Tensor | BlockWeight
        self.head: Weight
        self._head_bias: Tensor | None  # [V]
        self._mtp_input: MTPInput | None = None
        if base_model is None:
            self.embedding = weights["embedding"]
            self.head = weights["head"] if "head" in weights else self._own_head_rows(self.embedding)
            self._head_bias = weights.get("head_bias")
        else:
            self.embedding, head, self._head_bias = base_model.ends
            self.head = weights.get("head", head)
            self._mtp_input = MTPInput(spec.norm, weights, spec.hidden_size, spec.norm_eps, backend)
        self._classes = None if spec.head is None else ClassificationHead(spec.head, weights, spec.norm_eps, backend)
        self._final_norm = none if spec.names.final_norm is None else self._norm(weights, "final_norm")
        self._embedding_norm = none
        if spec.embedding_norm is not None:
            form, hidden = spec.embedding_norm, spec.hidden_size
            self._embedding_norm = Norm.of(form, weights, "embedding_norm", hidden, spec.norm_eps, backend)
        self._token_types: Tensor | None = weights.get("token_types")  # [kinds, hidden]
        self._positions: Tensor | None = weights.get("positions")  # [most, hidden]
        self.per_layer_embeddings: PerLayerEmbeddings | None = None
        if spec.per_layer_embeddings is not None:
            self.per_layer_embeddings = PerLayerEmbeddings(
                spec.per_layer_embeddings, weights, spec.hidden_size, spec.norm_eps, backend
            )
        self.first_kv_sharing_layer = spec.first_kv_sharing_layer
        rotary_dims = [group.base.rotary_dim for group in spec.rotary_groups]
        self._attention = AttentionMetadataBuilder([mixer.kind for mixer in spec.attention.values()], rotary_dims)
        self._kinds = dict(zip(spec.attention, self._attention.kind_by_layer, strict=True))
        self.layers = [self._layer(index, layer, weights) for index, layer in enumerate(spec.layers)]

    def _own_head_rows(self, embedding: Tensor | BlockWeight) -> Weight:
        """Those of an embedding that is the head too."""
        own = self.spec.vocabulary
        if own is None:
            return embedding
        return embedding.narrow(0, *own) if isinstance(embedding, Tensor) else embedding.panels(*own)

    def _layer(self, index: int, layer: LayerSpec, weights: dict[str, Any]) -> DecoderLayer:
        hidden, backend, prefix, eps = self.spec.hidden_size, self.backend, f"layers.{index}.", self.spec.norm_eps
        norm_weights = select_weights(weights, prefix, layer.norms.weights(hidden))
        none = Norm(self.spec.norm, None, None, eps, backend)
        norms = {name: self._norm(norm_weights, name) for name in layer.norms.stored}
        shares_norm = layer.norms.parallel and layer.norms.feed_forward is None
        parallel_experts = given = state = None
        if layer.state is not None:
            state = ParallelStateSpace(
                layer.state, select_weights(weights, prefix, layer.state.weights(hidden)), backend
            )
        if layer.parallel_experts is not None:
            of_experts = select_weights(weights, prefix, layer.parallel_experts.weights(hidden))
            parallel_experts = ParallelExperts(layer.parallel_experts, of_experts, eps, backend)
        if layer.input is not None:
            given = PerLayerProjection(
                layer.input, select_weights(weights, prefix, layer.input.weights(hidden)), eps, backend
            )
        owner = layer.mixer.kv_source_layer if isinstance(layer.mixer, AttentionSpec) else None
        return DecoderLayer(
            mixer_norm=norms.get("mixer_norm", none),
            mixer=self._mixer(index, layer.mixer, weights),
            mixer_output_norm=norms.get("mixer_output_norm", none),
            feed_forward_norm=None if shares_norm else norms.get("feed_forward_norm", none),
            feed_forward=self._feed_forward(index, layer.feed_forward, weights),
            feed_forward_output_norm=norms.get("feed_forward_output_norm", none),
            parallel=layer.norms.parallel,
            pages=index if owner is None else owner,
            output_norm=norms.get("output_norm"),
            parallel_experts=parallel_experts,
            input=given,
            scalar=None if layer.scalar is None else weights[f"{prefix}scalar"],
            state=state,
        )

    def _mixer(
        self, index: int, spec: AttentionSpec | LatentSpec | RecurrentMixerSpec | None, weights: Mapping[str, Any]
    ) -> Attention | LatentAttention | RecurrentMixer | None:
        if spec is None:
            return None
        weights = select_weights(weights, f"layers.{index}.", spec.weights(self.spec.hidden_size))
        if isinstance(spec, GatedDeltaNetSpec):
            return GatedDeltaNet(spec, weights, self.spec.norm_eps, self.backend)
        if isinstance(spec, ShortConvolutionSpec):
            return ShortConvolution(spec, weights, self.backend)
        if isinstance(spec, StateSpaceSpec):
            return StateSpace(spec, weights, self.backend)
        if isinstance(spec, LatentSpec):
            return LatentAttention(spec, weights, self._kinds[index], self.backend)
        return Attention(spec, weights, self.spec.norm_eps, self._kinds[index], self.backend)

    def _feed_forward(self, index: int, spec: FeedForwardSpec | None, weights: Mapping[str, Any]) -> FeedForward | None:
        if spec is None:
            return None
        weights = select_weights(weights, f"layers.{index}.", spec.weights(self.spec.hidden_size))
        if isinstance(spec, GatedMLPSpec):
            return GatedMLP(spec, weights, self.spec.norm_eps, self.backend)
        if isinstance(spec, MoESpec):
            return MoEFeedForward(spec, weights, self.spec.norm_eps, self.backend)
        return PlainMLP(spec, weights, self.backend)

    def _norm(self, weights: Mapping[str, Any], name: str) -> Norm:
        return Norm.of(self.spec.norm, weights, name, self.spec.hidden_size, self.spec.norm_eps, self.backend)

    @property
    def ends(self) -> tuple[Tensor | BlockWeight, Weight, Tensor | None]:
        """The embedding, the head, and its bias if it has one."""
        return self.embedding, self.head, self._head_bias

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Append the batch's keys and values to `cache` and return the normed hidden states [T, hidden].

        Where the batch asks for the last of each sequence only, others may be zeros: layers at the end that read the keys of
        earlier ones leave nothing behind of them.
        """
        x, batch = self.embed(batch)
        return self.run_layers(x, batch, cache)

    def embed(self, batch: ForwardBatch) -> tuple[Tensor, ForwardBatch]:
        """The first layer's input [T, hidden], in memory of its own, and the batch with the model's temperatures applied and with
        what its layers are given of each token."""
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
        if self.spec.norms_follow_rotation:  # what makes rotated dims longer is applied in front of the norm
            batch = replace(batch, pre_norm_scale=batch.q_scale.sqrt(), q_scale=torch.ones_like(batch.q_scale))
        if self.spec.temperature is not None:
            beta, length = self.spec.temperature
            growth = 1 + beta * self.backend.log1p(batch.context_positions // length)  # [T]
            batch = replace(batch, score_scale=batch.score_scale * growth)
        if self.spec.unrotated_temperature is not None:
            beta, length = self.spec.unrotated_temperature
            growth = 1 + beta * self.backend.log1p((batch.context_positions + 1) // length)  # [T]
            batch = replace(batch, unrotated_score_scale=batch.score_scale * growth)
        return x, batch

    def run_layers(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The rest of `forward`. x: [T, hidden] as `embed` gave it; it is overwritten."""
        metadata = self._attention.metadata(batch)
        given: tuple[Tensor, ...] = ()
        if self.per_layer_embeddings is not None and batch.per_layer_embeddings is not None:
            outer = None if batch.adapters is None else batch.adapters.for_outer_weights(self.backend)
            given = self.per_layer_embeddings.for_layers(x, batch.per_layer_embeddings, outer)
        normed = self.layers[0].mixer_norm(x)
        following = [layer.mixer_norm for layer in self.layers[1:]] + [self._final_norm]
        tokens, ends = (
            x.shape[0],
            batch.ends if batch.only_last_tokens and self.first_kv_sharing_layer is not None else None,
        )
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            if ends is not None and index == self.first_kv_sharing_layer:
                batch = batch.last_tokens_batch()
                metadata = self._attention.metadata(batch)
                x, normed, given = x[ends], normed[ends], tuple([one[ends] for one in given])
            lora = None if batch.adapters is None else batch.adapters.for_layer(index, self.backend)
            if layer.mixer is None:
                assert layer.feed_forward is not None
                normed = next_norm.add_and_norm(x, self._all_reduce(layer.feed_forward.forward(normed, lora)))
                continue
            y = layer.mixer_output_norm(
                self._all_reduce(_run_mixer(layer, index, normed, batch, metadata, cache, lora))
            )
            if layer.feed_forward is None:
                normed = next_norm.add_and_norm(x, y)
                continue
            if layer.output_norm is not None:
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
            if layer.input is not None:
                self.backend.add(x, y)
                y = layer.input.forward(x, given[index], lora)
            if layer.scalar is not None:
                self.backend.add(x, y)
                self.backend.multiply(x, layer.scalar)
                normed = next_norm(x)
                continue
            normed = next_norm.add_and_norm(x, y)
        return normed if ends is None else normed.new_zeros(tokens, normed.shape[1]).index_copy_(0, ends, normed)

    def _all_reduce(self, y: Tensor) -> Tensor:
        """What a part of a layer gives [T, hidden], from what every rank has of it."""
        self.backend.all_reduce(y)
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits, float32 [R, V], of normed hidden states [R, hidden]; a rank but the first has its own alone."""
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

    def num_parameters(self) -> int:
        return sum(t.numel() for t in self.tensors())

    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Weight]:
        """Every distinct weight."""
        return list(self.weights().values())

    def weights(self) -> dict[str, Weight]:
        """Every distinct weight by the name that `ModelSpec.weights` gives it, in that order."""
        return dict(self._weights)


def select_weights(weights: Mapping[str, Any], prefix: str, specs: Iterable[WeightSpec]) -> dict[str, Any]:
    """Those of a layer's part by the names that its own specs have. prefix: of their full names."""
    return {spec.name: weights[prefix + spec.name] for spec in specs}


def _run_mixer(
    layer: DecoderLayer,
    index: int,
    normed: Tensor,
    batch: ForwardBatch,
    metadata: AttentionMetadata,
    cache: KVCache,
    lora: LayerLoRA | None,
) -> Tensor:
    """What the mixer of the layer of this index makes of its input, both [T, hidden]."""
    assert layer.mixer is not None
    if isinstance(layer.mixer, RecurrentMixer):
        rows = batch.state_rows
        assert rows is not None
        return layer.mixer.forward(normed, rows, cache.states(index), lora)
    y = layer.mixer.forward(normed, metadata, cache.pages(layer.pages), lora)
    if layer.state is None:
        return y
    rows = batch.state_rows
    assert rows is not None
    return layer.state.combine(y, normed, rows, cache.states(index), lora)
