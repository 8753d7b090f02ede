"""Specification of a decoder: everything that the one decoder class needs to reproduce a model family.

It holds shapes, switches and numbers, and lists the weights that follow from them. Names in config files belong to
`config_json`, differences between families to `families`. Imports no torch, because the API process reads
specifications.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TypeAlias, TypedDict

from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.engine.interface.model_info import ClassifierInfo
from windlass.engine.model.classification_head import ClassificationHeadSpec
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec, PlainMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec, ParallelExpertsSpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.gated_delta_net import GatedDeltaNetSpec
from windlass.engine.model.mixers.latent_attention import LatentSpec
from windlass.engine.model.mixers.short_convolution import ShortConvolutionSpec
from windlass.engine.model.mixers.state_space import ParallelStateSpaceSpec, StateSpaceSpec
from windlass.engine.model.mtp_input import MTPInputSpec
from windlass.engine.model.norm import NormSpec
from windlass.engine.model.per_layer_embeddings import PerLayerEmbeddingsSpec, PerLayerProjectionSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec
from windlass.engine.rotary.rope_scaling import RotaryGroup

FeedForwardSpec: TypeAlias = GatedMLPSpec | PlainMLPSpec | MoESpec

# Mixers with a recurrent state.
RecurrentMixerSpec: TypeAlias = GatedDeltaNetSpec | ShortConvolutionSpec | StateSpaceSpec


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Norms of a layer, by the checkpoint names of their tensors within the layer; None: no norm at this place."""

    mixer: str | None = "input_layernorm"
    mixer_output: str | None = None
    feed_forward: str | None = "post_attention_layernorm"
    feed_forward_output: str | None = None
    form: NormSpec = field(default_factory=NormSpec)
    # Mixer and feed-forward both read the layer's input; without a norm of its own the feed-forward uses the mixer's (GPT-J).
    parallel: bool = False
    # Post-LN (1706.03762): `feed_forward` norms the sum of input and mixer output, `output` the sum with the feed-forward's.
    output: str | None = None

    @property
    def stored(self) -> dict[str, str]:
        """Stored tensor names by norm, for the norms that exist."""
        names = {
            "mixer_norm": self.mixer,
            "feed_forward_norm": self.feed_forward,
            "mixer_output_norm": self.mixer_output,
            "feed_forward_output_norm": self.feed_forward_output,
            "output_norm": self.output,
        }
        return {name: tensor for name, tensor in names.items() if tensor is not None}

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """All norm weights, in order of first use."""
        return tuple(
            weight for name, tensor in self.stored.items() for weight in self.form.weights(name, tensor, hidden_size)
        )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x + mixer(norm(x)), then the same with the feed-forward.

    If the mixer or the feed-forward is None, the layer consists of the other one after the mixer's norm (Nemotron H).
    """

    mixer: AttentionSpec | LatentSpec | RecurrentMixerSpec | None
    feed_forward: FeedForwardSpec | None
    norms: LayerNorms = LayerNorms()
    parallel_experts: ParallelExpertsSpec | None = None  # in parallel with the feed-forward
    per_layer_projection: PerLayerProjectionSpec | None = None
    output_scale: str | None = None  # tensor name of the number that multiplies the layer's output
    parallel_state_space: ParallelStateSpaceSpec | None = None  # in parallel with attention

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """All weights of the layer, roughly in order of use."""
        norms = self.norms.weights(hidden_size)
        first = [norm for norm in norms if norm.name.removesuffix("_bias") == "mixer_norm"]
        rest = [norm for norm in norms if norm not in first]
        further = tuple(
            weight
            for part in (self.parallel_state_space, self.parallel_experts, self.per_layer_projection)
            if part is not None
            for weight in part.weights(hidden_size)
        )
        if self.output_scale is not None:
            further += (WeightSpec("scalar", "number", (1,), (StoredTensor(self.output_scale, 1),)),)
        mixer = () if self.mixer is None else self.mixer.weights(hidden_size)
        feed_forward = () if self.feed_forward is None else self.feed_forward.weights(hidden_size)
        return *first, *mixer, *rest, *feed_forward, *further


@dataclass(frozen=True, slots=True)
class OuterNames:
    """Checkpoint names of the tensors outside the layers, without ".weight"."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"  # tensors of a layer are called "<layers>.<index>.<name>"
    final_norm: str | None = "model.norm"  # None: the model has no final norm
    head: str = "lm_head"
    embedding_norm: str = ""
    token_types: str = ""  # embedding of the two texts of a pair
    positions: str = ""  # learned position embedding
    first_layer: int = 0  # index of the first layer in tensor names

    def layer(self, index: int) -> str:
        """Prefix of the tensor names of layer `index`."""
        return f"{self.layers}.{self.first_layer + index}."


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Specification of one model, of an MTP layer, or of one rank's shard."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rotary_groups: tuple[RotaryGroup, ...]
    kv_groups: tuple[KVGroupSpec, ...]
    trained_len: int  # the model's own context length M
    norm_eps: float
    norm_offset: float = 0.0  # norms multiply by (offset + weight); 1 for Gemma
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    head_copies_embedding: bool = False  # the head is a second copy of the embedding, rounded in another way
    logit_soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    # (beta, length): the query at position p is multiplied by 1 + beta ln(1 + floor(p / length)).
    temperature: tuple[float, int] | None = None
    unrotated_temperature: tuple[float, int] | None = None  # for layers without rotation; positions count from 1
    head: ClassificationHeadSpec | None = None  # a classification head, in place of the language-model head
    generates: bool = True  # whether there is a language-model head
    notices: tuple[str, ...] = ()
    logit_scale: float = 1.0  # multiplies the logits
    norm: NormSpec = field(default_factory=NormSpec)  # of the hidden state
    head_bias: bool = False
    embedding_norm: NormSpec | None = None
    token_types: int = 0  # rows of the token type embedding; 0: none
    positions: int = 0  # rows of the learned position embedding; 0: none
    unit_head: bool = False  # rows of the head are divided by their length
    names: OuterNames = field(default_factory=OuterNames)
    unused_tensors: tuple[str, ...] = ()  # name prefixes of tensors that are not loaded
    vocabulary: tuple[int, int] | None = None  # of a rank's shard: first token and number of tokens of its logits
    per_layer_embeddings: PerLayerEmbeddingsSpec | None = None
    state_group: StateGroupSpec | None = None  # of the recurrent layers
    has_folded_factors: bool = False  # weights contain unknown factors, which an adapter's changes would lack
    mtp: ModelSpec | None = None  # the MTP layer in the same files, if it can be used
    mtp_input: MTPInputSpec | None = None  # of an MTP layer, which shares the model's embedding and head
    mtp_head: str | None = None  # of an MTP layer: tensor name of its own copy of the head
    own_tensors: tuple[str, ...] = ()  # name prefixes of this model's tensors; empty: all but the unused ones

    def ignores(self, name: str) -> bool:
        """Whether the stored tensor `name` is not loaded."""
        return name.startswith(self.unused_tensors) or (
            bool(self.own_tensors) and not name.startswith(self.own_tensors)
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state."""
        return 0 if self.state_group is None else self.state_group.block_bytes

    @property
    def classifier(self) -> ClassifierInfo | None:
        """The classes of the classification head, if there is one."""
        return None if self.head is None else self.head.classes

    @property
    def _self_attention(self) -> list[AttentionSpec]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec)]

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens attend to later ones, so that a text must be computed in one step."""
        return any(not mixer.causal for mixer in self._self_attention)

    @property
    def norms_follow_rotation(self) -> bool:
        """Whether layers norm queries and keys after the rotation."""
        return any(mixer.qk_norm == "after" for mixer in self._self_attention)

    @property
    def scales_queries(self) -> bool:
        """Whether a step begins by computing its own query scales."""
        temperatures = self.temperature, self.unrotated_temperature
        return self.norms_follow_rotation or any(one is not None for one in temperatures)

    @property
    def attention(self) -> dict[int, AttentionSpec | LatentSpec]:
        """Layers that read cached keys, by index; the others are recurrent or have no mixer."""
        mixers = {index: layer.mixer for index, layer in enumerate(self.layers)}
        return {index: mixer for index, mixer in mixers.items() if isinstance(mixer, AttentionSpec | LatentSpec)}

    @property
    def has_chunked_attention(self) -> bool:
        """Whether layers attend within chunks that begin at multiples of a length."""
        return any(mixer.chunked for mixer in self._self_attention)

    @property
    def uses_alibi(self) -> bool:
        """Whether scores decrease with distance (ALiBi), so that no rotation is needed."""
        return any(mixer.alibi for mixer in self._self_attention)

    @property
    def head_tensors(self) -> tuple[str, ...]:
        """Possible checkpoint names of the head; some checkpoints store it even if it is tied to the embedding."""
        return tuple(dict.fromkeys((f"{self.names.head}.weight", "lm_head.weight")))

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts, as or in parallel with their feed-forward."""
        return any(isinstance(one.feed_forward, MoESpec) or one.parallel_experts is not None for one in self.layers)

    @property
    def first_kv_sharing_layer(self) -> int | None:
        """First of the last layers that all read the keys of earlier ones; None if the last layer has its own keys."""
        result = None
        for index in reversed(range(len(self.layers))):
            mixer = self.layers[index].mixer
            if not isinstance(mixer, AttentionSpec) or mixer.kv_source_layer is None:
                break
            result = index
        return result

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The distinct attention windows of the layers."""
        return tuple(dict.fromkeys(mixer.window for mixer in self.attention.values()))

    @property
    def scores_by_absolute_position(self) -> bool:
        """Whether a score changes when query and key move by the same number of positions."""
        return any(mixer.qk_norm == "after" and mixer.qk_norm_form.weight for mixer in self._self_attention)

    def weights(self) -> tuple[WeightSpec, ...]:
        """All weights of the model, each once, named by layer and field, such as "layers.0.qkv"."""
        return _weights(self)

    def num_parameters(self) -> int:
        """The number of weights. A second copy of the embedding does not count."""
        copied = ("head",) if self.head_copies_embedding else ()
        return sum(prod(weight.shape) for weight in self.weights() if weight.kind not in copied)

    def adapted_parts(self) -> tuple[tuple[str, tuple[WeightSpec, ...]], ...]:
        """Matrices that adapters may change: per layer, then outside the layers, each with its tensor name prefix."""
        layers = [(self.names.layer(i), self._adapted(layer)) for i, layer in enumerate(self.layers)]
        parts = [*layers, ("", self.outer_weights())]
        return tuple((prefix, tuple(one for one in weights if one.kind == "matrix")) for prefix, weights in parts)

    def _adapted(self, layer: LayerSpec) -> tuple[WeightSpec, ...]:
        """Weights of a layer, without those of a mixer that adapters must not change."""
        result = layer.weights(self.hidden_size)
        if not isinstance(layer.mixer, GatedDeltaNetSpec) or not layer.mixer.tiled_heads:
            return result
        own = layer.mixer.weights(self.hidden_size)
        return tuple(weight for weight in result if weight not in own)

    def outer_weights(self) -> tuple[WeightSpec, ...]:
        """Weights outside the layers. A tied head is not listed separately."""
        hidden, vocab, names = self.hidden_size, self.vocab_size, self.names
        final_norm = () if names.final_norm is None else self.norm.weights("final_norm", names.final_norm, hidden)
        if self.mtp_input is not None:
            return *self._mtp_head(), *self.mtp_input.weights(hidden, self.norm), *final_norm
        table = (StoredTensor(f"{self.names.embedding}.weight", vocab),)
        own = (WeightSpec("embedding", "table", (vocab, hidden), table), *self._embedding_extras())
        if not self.generates:
            return *own, *(() if self.head is None else self.head.weights(hidden)), *final_norm
        name = names.head
        rows = vocab if self.vocabulary is None else self.vocabulary[1]
        bias = (WeightSpec("head_bias", "bias", (rows,), (StoredTensor(f"{name}.bias", rows),)),)
        more = (*own[1:], *(bias if self.head_bias else ()), *final_norm)
        if self.tied_embeddings:
            return WeightSpec("embedding", "table and head", (vocab, hidden), table), *more
        head = WeightSpec(
            "head", "head", (rows, hidden), (StoredTensor(f"{name}.weight", rows, unit_rows=self.unit_head),)
        )
        return own[0], head, *more

    def _mtp_head(self) -> tuple[WeightSpec, ...]:
        """An MTP layer's own head. It is an ordinary matrix, as only proposals depend on its precision."""
        if self.mtp_head is None:
            return ()
        stored = StoredTensor(self.mtp_head, self.vocab_size, unit_rows=self.unit_head)
        return (WeightSpec("head", "matrix", (self.vocab_size, self.hidden_size), (stored,)),)

    def _embedding_extras(self) -> tuple[WeightSpec, ...]:
        """Tables that are added to the embedding, and its norm."""
        result: tuple[WeightSpec, ...] = ()
        tables = {
            "token_types": (self.token_types, self.names.token_types),
            "positions": (self.positions, self.names.positions),
        }
        for name, (rows, stored) in tables.items():
            if rows:
                table = (StoredTensor(f"{stored}.weight", rows),)
                result += (WeightSpec(name, "heads", (rows, self.hidden_size), table),)
        if self.per_layer_embeddings is not None:
            result += self.per_layer_embeddings.weights(self.hidden_size, len(self.layers), self.names.embedding)
        if self.embedding_norm is not None:
            result += self.embedding_norm.weights("embedding_norm", self.names.embedding_norm, self.hidden_size)
        return result


@lru_cache(maxsize=4)  # loading calls it ten times, and a model may have thousands of experts
def _weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    return spec.outer_weights() + tuple(
        weight.with_prefix(f"layers.{index}.", spec.names.layer(index))
        for index, layer in enumerate(spec.layers)
        for weight in layer.weights(spec.hidden_size)
    )


_BIDIRECTIONAL = "every token of this model sees the whole text, of which none can be left out"
_CHUNKS = "layers of this model see chunks that begin at fixed positions, so that none of its tokens can move"
_LEARNED = "the positions of this model are learned and part of every key and value, none of which can move"

_SINKS = (
    "scores of this model lose by the distance of their keys, so that it would see nothing of tokens kept from far away"
)

_STATES = (
    "layers of this model carry a state from token to token, which is none of a passage alone: what it has read counts for one "
    "place only"
)


class ContextRefusals(TypedDict):
    """Reasons against changes of the context, under their field names in `ContextSizes` and `ModelInfo`; None: it is
    allowed."""

    shift_refusal: str | None
    reuse_refusal: str | None
    window_refusal: str | None
    sinks_refusal: str | None


def context_refusals(spec: ModelSpec) -> ContextRefusals:
    """Reasons why no sequence of this model may drop tokens, reuse passages from elsewhere, or have an attention window
    or sinks."""
    bidirectional = _BIDIRECTIONAL if spec.is_bidirectional else None
    chunks = _CHUNKS if spec.has_chunked_attention else None
    fixed = bidirectional or chunks or (_LEARNED if spec.positions else None)
    return ContextRefusals(
        shift_refusal=fixed,
        reuse_refusal=fixed or (None if spec.state_group is None else _STATES),
        window_refusal=bidirectional or chunks,
        sinks_refusal=bidirectional or chunks or (_SINKS if spec.uses_alibi else None),
    )
