"""Family: one architecture's names and defaults in config.json, its switches and its tensor names.

Each family is an instance in a file of its own; `registry` lists them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.model.classification_head import ClassificationHeadNames, HeadPooling
from windlass.engine.model.config_json.config_rules import Config, ConfigRules, read_flag
from windlass.engine.model.families.moe_rules import MoERules
from windlass.engine.model.feed_forward.mlp import GatedMLPNames, PlainMLPNames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms, ModelSpec, OuterNames
from windlass.engine.model.norm import NormSpec

_NORMS_HEADS = frozenset({"use_qk_norm", "qk_layernorm"})  # keys that say that queries and keys are normed


@dataclass(frozen=True, slots=True)
class ConfigFlag:
    """A switch that config.json sets under `key`."""

    key: str
    default: bool = False


def is_set(config: Config, switch: bool | ConfigFlag) -> bool:
    return read_flag(config, switch.key, switch.default) if isinstance(switch, ConfigFlag) else switch


ATTENTION_BIAS = ConfigFlag("attention_bias")

MLP_BIAS = ConfigFlag("mlp_bias")


@dataclass(frozen=True, slots=True)
class SoftCaps:
    """Where config.json says nothing of them."""

    attention: float | None = None
    logits: float | None = None


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of latent attention where config.json says nothing, under its names; that of the rotated part is in the rules.

    q_lora_rank None: queries are made of the hidden state. v_head_dim None: hidden_size / num_attention_heads.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    v_head_dim: int | None


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The keys under which config.json has them; what it leaves out is 1. attention: multiplies q·k.

    residual: what a layer's parts add to the stream. logits_divided_by, logits: of the head's. depth: what parts add is
    multiplied by it over the root of the number of layers. base_width: logits are divided by hidden_size over it. Both
    are as good as absent where config.json says null.
    """

    embedding: str | None = None
    residual: str | None = None
    attention: str | None = None
    logits_divided_by: str | None = None
    logits: str | None = None
    logits_default: float = 1.0
    embedding_default: float = 1.0
    depth: str | None = None
    depth_default: float = 1.0
    base_width: str | None = None
    base_width_default: float = 1.0

    @property
    def keys(self) -> frozenset[str]:
        found = (self.embedding, self.residual, self.attention, self.logits_divided_by, self.logits)
        return frozenset(key for key in found if key is not None)


@dataclass(frozen=True, slots=True)
class FamilyClassificationHead:
    """A classification head as the checkpoints of a family have it; see `ClassificationHeadSpec`.

    pooling: where config.json has no `pooling_key`, whose words for it `poolings` lists. A bias is there always, never, or where
    config.json says so. activation: of the dense layer where config.json names none under `activation_key`.
    A norm behind it has the form of the family's.
    """

    names: ClassificationHeadNames = field(default_factory=ClassificationHeadNames)
    pooling: HeadPooling = "last"
    pooling_key: str | None = None
    poolings: Mapping[str, HeadPooling] = field(default_factory=dict)
    out_bias: bool | ConfigFlag = False
    dense_bias: bool | ConfigFlag = False
    activation: str = "gelu"
    activation_key: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture as it differs from the plain decoder: Llama's norms and names, a silu-gated feed-forward, no biases.

    architecture, model_type: as config.json has them. text_part: what the names of its classifiers say beside that.
    A bias is there always, never, or where config.json says so.
    activation: of the feed-forward where config.json names none under `activation_key`. norm_offset: norms multiply by
    (offset + weight). scaled_embeddings: by the root of hidden_size. query_pre_attn_scalar: the default of the number
    whose inverse root scales q·k; None: the head's dimension. soft_caps: what config.json says of them holds.
    multipliers: and those of Granite. gelu_by_tanh: "gelu" in config.json means the approximation. interleaved:
    checkpoints hold rotated pairs as (2j, 2j + 1). norms: where there are norms, with their names. feed_forward_names:
    those of a feed-forward with a gate or without. parallel_norms: where there are norms if `parallel` is set.
    swapped: checkpoints hold rotated pairs as (j + d/2, j). unit_head: rows of the head are brought to the length 1.
    norm_eps_key None: it is always the default. clip_key: of the number that limits queries, keys and values. variant: what
    the family is where config.json says so, from itself and the config; raises LoadError. reads: further keys that it looks
    at. experts: of layers whose feed-forward they are. sinks: attention has learned sink logits. unused:
    beginnings of names of tensors that predict further tokens. other_names: of the architecture in config.json.
    latent: its attention is latent. other_model_types: what config.json may have as well.
    causal: tokens see none behind them; the others are encoders, which generate nothing. first_norms: of the first layer, where
    they are others. text_head, token_head: of its models that tell the classes of texts, and of tokens. token_types: kinds of
    tokens have embeddings of their own. positions: what tells them apart. unused_heads: as unused, of heads that tell no classes.
    title: what people call its models, where that is another name. chunked: windows are chunks, see `AttentionSpec`.
    refine: what its models have besides, put into the spec that the rest makes, from the config; raises LoadError.
    norms_rotated: `qk_norm` is that of layers that rotate; the others have none. unrotated_temperature: see `ModelSpec`, from the
    config; raises LoadError.
    """

    architecture: str
    model_type: str
    rules: ConfigRules
    qkv_bias: bool | ConfigFlag = False
    out_bias: bool | ConfigFlag = False
    feed_forward_bias: bool | ConfigFlag = False
    qk_norm: Literal["before", "after", "all heads", "by head"] | None = None
    qk_norm_form: NormSpec = field(default_factory=NormSpec)
    clip_key: str | None = None
    embedding_norm: NormSpec | None = None
    swapped: bool = False
    unit_head: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"
    activation_key: str = "hidden_act"
    scaled_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    soft_caps: SoftCaps | None = None
    multipliers: Multipliers | None = None
    gelu_by_tanh: bool = False
    interleaved: bool | ConfigFlag = False
    latent: LatentSizes | None = None
    other_model_types: tuple[str, ...] = ()
    attention_names: AttentionNames = field(default_factory=AttentionNames)
    feed_forward_names: GatedMLPNames | PlainMLPNames = field(default_factory=GatedMLPNames)
    norms: LayerNorms = field(default_factory=LayerNorms)
    parallel: ConfigFlag | None = None
    parallel_norms: LayerNorms | None = None
    norm_eps_key: str | None = "rms_norm_eps"
    outer_names: OuterNames = field(default_factory=OuterNames)
    head_bias: bool | ConfigFlag = False
    text_part: str = ""
    title: str = ""
    other_names: tuple[str, ...] = ()
    experts: MoERules | None = None
    sinks: bool = False
    unused_tensors: tuple[str, ...] = ()
    unused_heads: tuple[str, ...] = ()
    variant: Callable[[Family, Config], Family] | None = None
    extra_keys: frozenset[str] = frozenset()
    causal: bool = True
    first_norms: LayerNorms | None = None
    text_head: FamilyClassificationHead = field(default_factory=FamilyClassificationHead)
    token_head: FamilyClassificationHead = field(
        default_factory=lambda: FamilyClassificationHead(out_bias=ConfigFlag("token_classification_bias", default=True))
    )
    token_types: bool = False
    positions: Literal["rotary", "learned", "alibi", "states"] = "rotary"
    scaled_alibi: bool = False
    chunked: bool = False
    norms_rotated: bool = False
    unrotated_temperature: Callable[[Config], tuple[float, int] | None] | None = None
    refine: Callable[[ModelSpec, Config], ModelSpec] | None = None

    @property
    def own_keys(self) -> frozenset[str]:
        """Keys of config.json that it reads and other families do not, or that say of it what always holds."""
        multipliers = frozenset[str]() if self.multipliers is None else self.multipliers.keys
        always = frozenset[str]() if self.qk_norm is None else _NORMS_HEADS
        return self.extra_keys | multipliers | always | (frozenset() if self.experts is None else self.experts.keys)

    @property
    def models(self) -> str:
        """What its models are called in tables."""
        return self.title or self.stem

    @property
    def names(self) -> tuple[str, ...]:
        """What config.json may call a model that has no head of classes."""
        return self.architecture, *self.other_names

    @property
    def stem(self) -> str:
        """What all names of its models begin with."""
        for end in ("ForCausalLM", "LMHeadModel", "Model"):
            if self.architecture.endswith(end):
                return self.architecture.removesuffix(end)
        return self.architecture

    @property
    def headless(self) -> str:
        """The architecture of its models that were saved without a head."""
        return f"{self.stem}{self.text_part}Model"

    @property
    def classifier(self) -> str:
        """The architecture of its models that tell the class of a text."""
        return f"{self.stem}{self.text_part}ForSequenceClassification"

    @property
    def token_classifier(self) -> str:
        """The architecture of its models that tell the class of each token."""
        return f"{self.stem}{self.text_part}ForTokenClassification"
