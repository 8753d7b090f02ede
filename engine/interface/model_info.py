"""Loaded model as plain data: sizes, dtypes, rotary groups, heads and adapters.

Enough for the server to validate requests and to describe itself. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from windlass.engine.interface.context import ContextSizes
from windlass.engine.rotary.auto_scaling import AutoScalingThresholds
from windlass.engine.rotary.rope_scaling import RotaryGroup


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """The draft model, or the model's own MTP layer, which has no path.

    num_tokens: maximum proposed tokens per stream and step. The other fields are as in `ModelInfo`.
    """

    path: str
    architecture: str
    quantization: str | None
    weight_dtype: str
    num_parameters: int
    weight_bytes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """Pooling of embeddings for requests that set none.

    declared: given by the model's files. refusal: an unsupported method that they ask for; requests must then set one.
    """

    kind: PoolingKind = "last"
    normalize: bool = True
    declared: bool = False
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo(ContextSizes):
    """Description of the loaded model, with its context limits. Sizes are totals over all ranks."""

    path: str
    architecture: str
    vocab_size: int
    trained_len: int  # M: the model's own context length
    dtype: str  # compute dtype: float32 | bfloat16 | float16
    weight_dtype: str
    kv_cache_dtype: str
    quantization: str | None  # of the weights, with their block formats: "int8 (q8_0)", "GGUF Q4_1, Q8_0"
    device: str
    num_parameters: int
    num_layers: int
    num_kv_blocks: tuple[int, ...]  # per KV group
    kv_cache_bytes: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    rotary_groups: tuple[RotaryGroup, ...]  # under this server's default scaling
    model_rotary_groups: tuple[RotaryGroup, ...]  # under the model's own scaling
    weight_bytes: int
    load_seconds: float
    rotary_ladder: AutoScalingThresholds | None = None  # automatic scaling thresholds
    rotary_auto: bool = False  # they apply to requests without a scaling of their own
    num_states: int = 0  # blocks of recurrent state
    state_bytes: int = 0  # of one such block
    draft_model: DraftInfo | None = None
    fingerprint: str = ""  # of the weights and of every option that changes computed values
    adapters: tuple[AdapterInfo, ...] = ()  # loaded at start
    hidden_size: int = 0
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)
    classifier: ClassifierInfo | None = None  # of a model that classifies and does not generate
    generates: bool = True
    is_bidirectional: bool = False  # tokens see later ones, so a text is computed in one step
    replicas: int = 1  # engines described by this, each with its own cache; they share the weights
    ranks: int = 1  # processes that each hold a part of every layer
    notices: tuple[str, ...] = ()  # one-line remarks for the operator


# Pooling of the hidden states after the final norm to one row: last token, mean of all, first token. "all": one row per token.
# "classify": output of the classification head for the text; "classify tokens": for each token. "answer": by how much the model
# prefers one token over another as the continuation.
PoolingKind = Literal["last", "mean", "first", "all", "classify", "classify tokens", "answer"]

POOLING_KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True)
class ClassifierInfo:
    """labels: in the order of the head's rows. activation: turns the head's output into probabilities. per_token: classifies
    each token instead of the text."""

    labels: tuple[str, ...]
    activation: Activation
    per_token: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to load.

    adapter_id: unique to this load and never reused, so cached blocks belong to exactly one adapter. path: a directory in
    PEFT's format. required: an engine does not start without it.
    """

    adapter_id: int
    name: str
    path: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter.

    rank: largest rank of its matrices. targets: kinds of layers it changes, such as "q_proj". num_bytes: of memory.
    digest: of all weights that it adds to the model.
    """

    adapter_id: int
    name: str
    path: str
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    digest: str
