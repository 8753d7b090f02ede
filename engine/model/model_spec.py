"""Specification of a decoder: everything that the one decoder class needs to reproduce a model family.

Shapes, switches and numbers, and the list of weights that follows from them. Names in config files belong to `config_json`,
differences between families to `families`. Imports no torch, because the API process reads specifications.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
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

# What carries a state from token to token.
RecurrentMixerSpec: TypeAlias = GatedDeltaNetSpec | ShortConvolutionSpec | StateSpaceSpec


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Where a layer has norms, by the names of a checkpoint's tensors within it; None where it has none.

    parallel: mixer and feed-forward both see the layer's input, and the feed-forward takes the mixer's norm where it has
    none of its own (GPT-J); otherwise it sees what the mixer made of it.
    output: norms stand behind the sums, and the stream goes on normed (post-LN, 1706.03762): feed_forward norms the sum with
    what the mixer made, output the sum with what the feed-forward made.
    """

    mixer: str | None = "input_layernorm"
    mixer_output: str | None = None
    feed_forward: str | None = "post_attention_layernorm"
    feed_forward_output: str | None = None
    form: NormSpec = field(default_factory=NormSpec)
    parallel: bool = False
    output: str | None = None

    @property
    def stored(self) -> dict[str, str]:
        """The names of the norms that there are, and those of their tensors."""
        names = {
            "mixer_norm": self.mixer,
            "feed_forward_norm": self.feed_forward,
            "mixer_output_norm": self.mixer_output,
            "feed_forward_output_norm": self.feed_forward_output,
            "output_norm": self.output,
        }
        return {name: tensor for name, tensor in names.items() if tensor is not None}

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """Those of the norms, the first in the order in which they are used."""
        return tuple(
            weight for name, tensor in self.stored.items() for weight in self.form.weights(name, tensor, hidden_size)
        )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x + mixer(norm(x)), then the same of the feed-forward. Another kind of either is another spec in its place; where either is
    None, the layer is the other alone, behind the mixer's norm (Nemotron H).

    beside: experts beside the feed-forward. input: what the layer is given beside the stream, None where it is nothing. scalar:
    the name of a tensor of one number by which the stream is multiplied at the end. state: a memory beside attention.
    """

    mixer: AttentionSpec | LatentSpec | RecurrentMixerSpec | None
    feed_forward: FeedForwardSpec | None
    norms: LayerNorms = LayerNorms()
    parallel_experts: ParallelExpertsSpec | None = None
    input: PerLayerProjectionSpec | None = None
    scalar: str | None = None
    state: ParallelStateSpaceSpec | None = None

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """Every weight of the layer, about in the order in which they are used."""
        norms = self.norms.weights(hidden_size)
        first = [norm for norm in norms if norm.name.removesuffix("_bias") == "mixer_norm"]
        rest = [norm for norm in norms if norm not in first]
        further = tuple(
            weight
            for part in (self.state, self.parallel_experts, self.input)
            if part is not None
            for weight in part.weights(hidden_size)
        )
        if self.scalar is not None:
            further += (WeightSpec("scalar", "number", (1,), (StoredTensor(self.scalar, 1),)),)
        mixer = () if self.mixer is None else self.mixer.weights(hidden_size)
        feed_forward = () if self.feed_forward is None else self.feed_forward.weights(hidden_size)
        return *first, *mixer, *rest, *feed_forward, *further


@dataclass(frozen=True, slots=True)
class OuterNames:
    """Of the tensors around the layers. layers: of those in a layer, "<layers>.<index>.<name>", from the index first_layer on.

    final_norm None: there is none. embedding_norm: of the norm of the embedding, where it has weights. token_types: of the
    table that says which of two texts a token belongs to. positions: of that of learned positions.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str | None = "model.norm"
    head: str = "lm_head"
    embedding_norm: str = ""
    token_types: str = ""
    positions: str = ""
    first_layer: int = 0

    def layer(self, index: int) -> str:
        """What the names of the tensors of the layer with this index begin with."""
        return f"{self.layers}.{self.first_layer + index}."


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """norm_offset: norms multiply by (offset + weight), 1 for Gemma. trained_len: the model's own context length M.

    head: of classes, in place of one for a vocabulary. generates: there is one for a vocabulary.
    logit_scale: multiplies the logits. norm: what the norms of the stream are. head_bias: the head adds one.
    embedding_norm: the stream begins normed by such a norm. unit_head: rows of the head have the length 1.
    token_types, positions: kinds of tokens, and positions, that have a row added to their embedding; 0: there are none.
    temperature: (beta, length): the query at position p is multiplied by 1 + beta ln(1 + floor(p / length)).
    unrotated_temperature: the same of layers that do not rotate alone, with positions that count from 1.
    unused: beginnings of names of tensors that predict further tokens, which the model does without.
    vocabulary: of a part of a model that several ranks hold, the first token it forms logits of, and how many; None: of all.
    per_layer_embeddings: what every layer is given of a token beside the stream; None where that is nothing.
    state_group: of the layers that carry a state from token to token; None where none does.
    factored: weights hold factors that nobody tells: what an adapter adds to them would lack these.
    predicting: the layer in the same files that predicts a token further; None where there is none, or none that can be used.
    joined: of such a layer, what it is given; its embedding is the model's, and so is its head.
    mtp_head: of such a layer, the name of the head's tensor, where it has a copy; None: it has none.
    own: beginnings of names of the tensors that are this model's, where the files hold another's too; empty: all but the unused.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rotary_groups: tuple[RotaryGroup, ...]
    kv_groups: tuple[KVGroupSpec, ...]
    trained_len: int
    norm_eps: float
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    logit_soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    temperature: tuple[float, int] | None = None
    unrotated_temperature: tuple[float, int] | None = None
    head: ClassificationHeadSpec | None = None
    generates: bool = True
    notices: tuple[str, ...] = ()
    logit_scale: float = 1.0
    norm: NormSpec = field(default_factory=NormSpec)
    head_bias: bool = False
    embedding_norm: NormSpec | None = None
    token_types: int = 0
    positions: int = 0
    unit_head: bool = False
    names: OuterNames = field(default_factory=OuterNames)
    unused: tuple[str, ...] = ()
    vocabulary: tuple[int, int] | None = None
    per_layer_embeddings: PerLayerEmbeddingsSpec | None = None
    state_group: StateGroupSpec | None = None
    factored: bool = False
    mtp: ModelSpec | None = None
    mtp_input: MTPInputSpec | None = None
    mtp_head: str | None = None
    own: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether the model does without a tensor that its files hold."""
        return name.startswith(self.unused) or (bool(self.own) and not name.startswith(self.own))

    @property
    def state_bytes(self) -> int:
        """Of what a sequence carries from token to token."""
        return 0 if self.state_group is None else self.state_group.block_bytes

    @property
    def classifier(self) -> ClassifierInfo | None:
        """The classes that its head tells, if it has such a head."""
        return None if self.head is None else self.head.classes

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see those behind them too, so that a text has to be computed as one."""
        return any(isinstance(layer.mixer, AttentionSpec) and not layer.mixer.causal for layer in self.layers)

    @property
    def norms_follow_rotation(self) -> bool:
        """Whether layers norm queries and keys behind the rotation."""
        return any(isinstance(layer.mixer, AttentionSpec) and layer.mixer.qk_norm == "after" for layer in self.layers)

    @property
    def scales_queries(self) -> bool:
        """Whether a step begins with numbers of its own for the scales of queries."""
        temperatures = self.temperature, self.unrotated_temperature
        return self.norms_follow_rotation or any(one is not None for one in temperatures)

    @property
    def attention(self) -> dict[int, AttentionSpec | LatentSpec]:
        """Of the layers that read cached keys, by their indices; the others carry a state."""
        mixers = {index: layer.mixer for index, layer in enumerate(self.layers)}
        return {index: mixer for index, mixer in mixers.items() if isinstance(mixer, AttentionSpec | LatentSpec)}

    @property
    def has_chunked_attention(self) -> bool:
        """Whether layers see chunks that begin at multiples of a length."""
        return any(isinstance(layer.mixer, AttentionSpec) and layer.mixer.chunked for layer in self.layers)

    @property
    def uses_alibi(self) -> bool:
        """Whether scores lose by the distance of their keys, which need no rotation for that (ALiBi)."""
        return any(isinstance(layer.mixer, AttentionSpec) and layer.mixer.alibi for layer in self.layers)

    @property
    def head_tensors(self) -> tuple[str, ...]:
        """What checkpoints call the head; some store it although it is the embedding."""
        return tuple(dict.fromkeys((f"{self.names.head}.weight", "lm_head.weight")))

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts, as their feed-forward or beside it."""
        return any(isinstance(one.feed_forward, MoESpec) or one.parallel_experts is not None for one in self.layers)

    @property
    def first_kv_sharing_layer(self) -> int | None:
        """The first of the layers at the end that all read the keys of earlier ones; None where the last has its own."""
        found = None
        for index in reversed(range(len(self.layers))):
            mixer = self.layers[index].mixer
            if not isinstance(mixer, AttentionSpec) or mixer.kv_source_layer is None:
                break
            found = index
        return found

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The kinds of windows that the layers have, each once."""
        return tuple(dict.fromkeys(mixer.window for mixer in self.attention.values()))

    @property
    def scores_by_absolute_position(self) -> bool:
        """Whether a query and a key that move on by as many positions score otherwise than before."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec)]
        return any(mixer.qk_norm == "after" and mixer.qk_norm_form.weight for mixer in mixers)

    def weights(self) -> tuple[WeightSpec, ...]:
        """Every weight of the model, each once. Names are those of a layer's fields behind "layers.0." and so on."""
        return _weights(self)

    def adapted_parts(self) -> tuple[tuple[str, tuple[WeightSpec, ...]], ...]:
        """What adapters may change: the matrices of each layer, then those around them, with the prefix of their tensors."""
        layers = [(self.names.layer(i), self._adapted(layer)) for i, layer in enumerate(self.layers)]
        parts = [*layers, ("", self.outer_weights())]
        return tuple((prefix, tuple(one for one in weights if one.kind == "matrix")) for prefix, weights in parts)

    def _adapted(self, layer: LayerSpec) -> tuple[WeightSpec, ...]:
        """The weights of a layer among which are those that adapters may change."""
        found = layer.weights(self.hidden_size)
        if not isinstance(layer.mixer, GatedDeltaNetSpec) or not layer.mixer.tiled_heads:
            return found
        own = layer.mixer.weights(self.hidden_size)
        return tuple(weight for weight in found if weight not in own)

    def outer_weights(self) -> tuple[WeightSpec, ...]:
        """Those around the layers. A head that is the embedding is not listed beside it."""
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
        """That of a prediction layer, a matrix like any other, as nothing but proposals hangs on its digits."""
        if self.mtp_head is None:
            return ()
        stored = StoredTensor(self.mtp_head, self.vocab_size, unit_rows=self.unit_head)
        return (WeightSpec("head", "matrix", (self.vocab_size, self.hidden_size), (stored,)),)

    def _embedding_extras(self) -> tuple[WeightSpec, ...]:
        """What is added to it, and its norm."""
        found: tuple[WeightSpec, ...] = ()
        tables = {
            "token_types": (self.token_types, self.names.token_types),
            "positions": (self.positions, self.names.positions),
        }
        for name, (rows, stored) in tables.items():
            if rows:
                table = (StoredTensor(f"{stored}.weight", rows),)
                found += (WeightSpec(name, "heads", (rows, self.hidden_size), table),)
        if self.per_layer_embeddings is not None:
            found += self.per_layer_embeddings.weights(self.hidden_size, len(self.layers), self.names.embedding)
        if self.embedding_norm is not None:
            found += self.embedding_norm.weights("embedding_norm", self.names.embedding_norm, self.hidden_size)
        return found


@lru_cache(maxsize=4)  # loading asks ten times, and experts are thousands
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
    """The fields of `ContextSizes` and `ModelInfo` that say so; None where nothing is against it."""

    shift_refusal: str | None
    reuse_refusal: str | None
    window_refusal: str | None
    sinks_refusal: str | None


def context_refusals(spec: ModelSpec) -> ContextRefusals:
    """Why no sequence of this model may drop tokens, take up passages that stood elsewhere, have an attention window, or sinks
    beside it."""
    bidirectional = _BIDIRECTIONAL if spec.is_bidirectional else None
    chunks = _CHUNKS if spec.has_chunked_attention else None
    fixed = bidirectional or chunks or (_LEARNED if spec.positions else None)
    return ContextRefusals(
        shift_refusal=fixed,
        reuse_refusal=fixed or (None if spec.state_group is None else _STATES),
        window_refusal=bidirectional or chunks,
        sinks_refusal=bidirectional or chunks or (_SINKS if spec.uses_alibi else None),
    )
