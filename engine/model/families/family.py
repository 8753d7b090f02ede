"""Family: one architecture's names and defaults in config.json, its switches and its tensor names.

Each family is an instance in a file of its own; `registry` lists them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, TypeAlias

from windlass.engine.errors import LoadError
from windlass.engine.model.classification_head import ClassificationHeadNames, HeadPooling
from windlass.engine.model.config_json.config_rules import Config, ConfigRules, read_flag, read_number
from windlass.engine.model.families.moe_rules import MoERules
from windlass.engine.model.feed_forward.mlp import GatedMLPNames, PlainMLPNames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms, ModelSpec, OuterNames
from windlass.engine.model.norm import NormSpec
from windlass.engine.rotary.scaling_fields import format_value

_QK_NORM_KEYS = frozenset({"use_qk_norm", "qk_layernorm"})


@dataclass(frozen=True, slots=True)
class ConfigFlag:
    """A switch under `key` in config.json."""

    key: str
    default: bool = False


Switch: TypeAlias = bool | ConfigFlag


def is_set(config: Config, switch: Switch) -> bool:
    return read_flag(config, switch.key, switch.default) if isinstance(switch, ConfigFlag) else switch


def reject_unsupported_values(config: Config, known: Mapping[str, tuple[object, ...] | None]) -> None:
    """Raise LoadError for values that would make it another model. known: supported values by key; None: any."""
    for key, values in known.items():
        found = config.get(key)
        if values is not None and found is not None and found not in values:
            raise LoadError(
                f"config.json sets {key}={format_value(found)}, which changes the model and is not supported"
            )


ATTENTION_BIAS = ConfigFlag("attention_bias")
MLP_BIAS = ConfigFlag("mlp_bias")
TOKEN_HEAD_BIAS = ConfigFlag("token_classification_bias", default=True)


@dataclass(frozen=True, slots=True)
class Biases:
    """Projections with biases. out: of attention; with latent attention, of all projections from and to the hidden state."""

    qkv: Switch = False
    out: Switch = False
    feed_forward: Switch = False

    @classmethod
    def everywhere(cls, switch: Switch) -> Biases:
        return cls(switch, switch, switch)


ATTENTION_BIASES = Biases(ATTENTION_BIAS, ATTENTION_BIAS)
LLAMA_BIASES = Biases(ATTENTION_BIAS, ATTENTION_BIAS, MLP_BIAS)


@dataclass(frozen=True, slots=True)
class SoftCaps:
    """Soft caps that apply if config.json does not set them."""

    attention: float | None = None
    logits: float | None = None


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Default sizes of latent attention, under their names in config.json; the rotated part is in the rules."""

    kv_lora_rank: int
    q_lora_rank: int | None  # None: queries are projected directly from the hidden state
    qk_nope_head_dim: int
    v_head_dim: int | None  # None: hidden_size / num_attention_heads


class ConfigNumber(NamedTuple):
    """A positive number under `key` in config.json."""

    key: str
    default: float = 1.0

    def read(self, config: Config) -> float:
        return read_number(config, self.key) or self.default


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Multipliers in config.json. `depth` and `base_width` are ignored if config.json has null."""

    embedding: ConfigNumber | None = None
    residual: ConfigNumber | None = None  # multiplies the outputs of a layer's parts
    attention: ConfigNumber | None = None  # multiplies q·k
    logits_divided_by: ConfigNumber | None = None
    logits: ConfigNumber | None = None
    depth: ConfigNumber | None = None  # outputs of parts are multiplied by depth / sqrt(layers)
    base_width: ConfigNumber | None = None  # logits are divided by hidden_size / base_width

    @property
    def keys(self) -> frozenset[str]:
        numbers = (getattr(self, field.name) for field in fields(self))
        return frozenset(number.key for number in numbers if number is not None)


@dataclass(frozen=True, slots=True)
class FamilyClassificationHead:
    """A family's classification head; see `ClassificationHeadSpec`. Its norm has the form of the family's norms."""

    names: ClassificationHeadNames = field(default_factory=ClassificationHeadNames)
    pooling: HeadPooling = "last"  # unless config.json has `pooling_key`
    pooling_key: str | None = None
    poolings: Mapping[str, HeadPooling] = field(default_factory=dict)  # by value of `pooling_key`
    out_bias: Switch = False
    dense_bias: Switch = False
    activation: str = "gelu"  # of the dense layer, unless config.json has `activation_key`
    activation_key: str | None = None


CLASSIFIER_HEAD = FamilyClassificationHead(ClassificationHeadNames(out="classifier"), out_bias=True)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, as it differs from the plain decoder: Llama's norms and names, a SiLU-gated feed-forward, no
    biases."""

    architecture: str
    model_type: str
    rules: ConfigRules
    biases: Biases = Biases()
    qk_norm: Literal["before", "after", "all heads", "by head"] | None = None  # see `AttentionSpec`
    qk_norm_flag: ConfigFlag | None = None  # without it, queries and keys are not normed
    qk_norm_form: NormSpec = field(default_factory=NormSpec)
    clip_key: str | None = None  # key of the limit of queries, keys and values
    embedding_norm: NormSpec | None = None
    swapped: bool = False  # rotated pairs are stored as (j + d/2, j)
    unit_head: bool = False  # rows of the head are divided by their length
    norm_offset: float = 0.0  # norms multiply by (offset + weight)
    activation: str = "silu"  # of the feed-forward, unless config.json has `activation_key`
    activation_key: str = "hidden_act"
    scaled_embeddings: bool = False  # by sqrt(hidden_size)
    # Default of the key; its inverse root scales q·k; None: the head's dimension
    query_pre_attn_scalar: float | None = None
    soft_caps: SoftCaps | None = None  # None: soft caps in config.json are not read
    multipliers: Multipliers = Multipliers()
    gelu_by_tanh: bool = False  # "gelu" in config.json means the tanh approximation
    interleaved: Switch = False  # rotated pairs are stored as (2j, 2j + 1)
    latent: LatentSizes | None = None
    other_model_types: tuple[str, ...] = ()
    attention_names: AttentionNames = field(default_factory=AttentionNames)
    feed_forward_names: GatedMLPNames | PlainMLPNames = field(default_factory=GatedMLPNames)
    norms: LayerNorms = field(default_factory=LayerNorms)
    parallel: ConfigFlag | None = None  # replaces `norms` by `parallel_norms`
    parallel_norms: LayerNorms | None = None
    norm_eps_key: str | None = "rms_norm_eps"  # None: always the default
    outer_names: OuterNames = field(default_factory=OuterNames)
    head_bias: Switch = False
    text_part: str = ""  # follows the stem in the architecture names of its classifiers
    title: str = ""  # usual name of its models, if it differs from the stem
    other_names: tuple[str, ...] = ()  # further architecture names
    experts: MoERules | None = None
    sinks: bool = False  # attention has learned sink logits
    unused_tensors: tuple[str, ...] = ()  # name prefixes of tensors that are not loaded, such as an MTP layer's
    unused_heads: tuple[str, ...] = ()  # the same, unless the model has a classification head
    # Values of config.json keys that are supported; None: any. Other values raise LoadError, a missing key is accepted.
    fixed_values: Mapping[str, tuple[object, ...] | None] = field(default_factory=dict)
    variant: Callable[[Family, Config], Family] | None = None  # adapts the family to config.json; raises LoadError
    extra_keys: frozenset[str] = frozenset()  # further config.json keys that it reads
    causal: bool = True  # False: an encoder, which generates nothing
    first_norms: LayerNorms | None = None  # of the first layer, if they differ
    text_head: FamilyClassificationHead = FamilyClassificationHead()
    token_head: FamilyClassificationHead = FamilyClassificationHead(out_bias=TOKEN_HEAD_BIAS)
    token_types: bool = False  # there is a token type embedding
    positions: Literal["rotary", "learned", "alibi", "states"] = "rotary"  # where position information comes from
    scaled_alibi: bool = False  # ALiBi slopes are multiplied by the scale of q·k
    chunked: bool = False  # windows are chunks, see `AttentionSpec`
    norms_rotated: bool = False  # `qk_norm` applies only to layers that rotate
    # Reads `ModelSpec.unrotated_temperature`; raises LoadError.
    unrotated_temperature: Callable[[Config], tuple[float, int] | None] | None = None
    # Adds what the other fields cannot express to the finished spec; raises LoadError.
    refine: Callable[[ModelSpec, Config], ModelSpec] | None = None

    @property
    def own_keys(self) -> frozenset[str]:
        """Keys of config.json that the family reads in addition to the common ones, or whose value is fixed."""
        keys = self.extra_keys | frozenset(self.fixed_values) | self.multipliers.keys
        if self.qk_norm is not None:
            keys |= _QK_NORM_KEYS
        if self.qk_norm_flag is not None:
            keys |= {self.qk_norm_flag.key}
        return keys if self.experts is None else keys | self.experts.keys

    @property
    def models(self) -> str:
        """Name of its models in tables."""
        return self.title or self.stem

    @property
    def names(self) -> tuple[str, ...]:
        """Possible architecture names of a model without a classification head."""
        return self.architecture, *self.other_names

    @property
    def stem(self) -> str:
        """Common prefix of its architecture names."""
        for end in ("ForCausalLM", "LMHeadModel", "Model"):
            if self.architecture.endswith(end):
                return self.architecture.removesuffix(end)
        return self.architecture

    @property
    def headless(self) -> str:
        """Architecture of its models that were saved without a head."""
        return f"{self.stem}{self.text_part}Model"

    @property
    def classifier(self) -> str:
        """Architecture of its sequence classifiers."""
        return f"{self.stem}{self.text_part}ForSequenceClassification"

    @property
    def token_classifier(self) -> str:
        """Architecture of its token classifiers."""
        return f"{self.stem}{self.text_part}ForTokenClassification"
