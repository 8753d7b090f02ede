"""Loaded model as plain data: sizes, dtypes, rotary groups, heads and adapters.

Enough for the server to validate requests and to describe itself. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.rotary.auto_scaling import AutoScalingThresholds
from windlass.engine.rotary.rope_scaling import RotaryGroup


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """The draft model beside it, or its own prediction layer, which has no path.

    num_tokens: what it proposes for a stream per step, at most; the rest as in `ModelInfo`.
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
    """How embeddings are made where a request does not say.

    declared: the model's files say so. refusal: what they ask for that is not offered; then requests have to say.
    """

    kind: PoolingKind = "last"
    normalize: bool = True
    declared: bool = False
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine loaded: enough for the server to validate requests and to describe itself."""

    path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    trained_len: int  # M: the model's own context length
    dtype: str  # compute dtype: float32 | bfloat16 | float16
    weight_dtype: str
    kv_cache_dtype: str
    quantization: str | None  # of the weights, with the forms of their blocks: "int8 (q8_0)", "GGUF Q4_1, Q8_0"
    device: str
    num_parameters: int
    num_layers: int
    block_size: int
    num_kv_blocks: tuple[int, ...]  # per KV group
    kv_cache_bytes: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    rotary_groups: tuple[RotaryGroup, ...]  # under this server's default scaling
    model_rotary_groups: tuple[RotaryGroup, ...]  # under the model's own
    weight_bytes: int
    load_seconds: float
    rotary_ladder: AutoScalingThresholds | None = None  # what a scaling is chosen from by length
    rotary_auto: bool = False  # it is for requests that ask for nothing else
    shift_context: int = 0  # tokens that a sequence holds at once where its oldest are dropped
    max_total_tokens: int | None = None  # prompt and output of such a sequence together
    shift_refusal: str | None = None  # why no sequence of this model may drop tokens
    reuse_refusal: str | None = None  # why none may take up passages that stood elsewhere
    window_refusal: str | None = None  # why none may have an attention window
    sinks_refusal: str | None = None  # why none may have sinks in front of it
    num_states: int = 0  # blocks of what layers carry from token to token
    state_bytes: int = 0  # of such a block
    draft_model: DraftInfo | None = None
    fingerprint: str = ""  # of the weights and of all that changes what is computed from them
    adapters: tuple[AdapterInfo, ...] = ()  # those loaded at the start
    hidden_size: int = 0  # of the vectors that its states are
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)
    classifier: ClassifierInfo | None = None  # of a model that classifies and generates nothing
    generates: bool = True
    is_bidirectional: bool = False  # its tokens see those behind them: a text is computed in one step
    replicas: int = 1  # engines that this is said of, each with a cache of its own; they share the weights
    ranks: int = 1  # processes that each hold a part of every layer; sizes are of all of them together
    notices: tuple[str, ...] = ()  # one-line remarks for the person who started the server


# How the states behind the final norm become one row: the last token's, the mean of all, the first token's. "all": a row for
# each token. "classify": what the model's classification head makes of the text; "classify tokens": of each token. "answer": how
# much likelier the model goes on with one token than with another.
PoolingKind = Literal["last", "mean", "first", "all", "classify", "classify tokens", "answer"]

POOLING_KINDS: tuple[PoolingKind, ...] = ("last", "mean", "first", "all", "classify", "classify tokens", "answer")

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True)
class ClassifierInfo:
    """labels: in the order of the head's rows. activation: makes probabilities of what the head gives. per_token: it tells the
    class of each token, not of the text."""

    labels: tuple[str, ...]
    activation: Activation
    per_token: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to load. adapter_id: of this load alone, never used again: what the cache holds under it is its own.

    path: a directory as PEFT writes it. required: an engine does not start without it.
    """

    adapter_id: int
    name: str
    path: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter. rank: the largest of its matrices. targets: kinds of layers it changes, such as "q_proj".

    digest: of all that it adds to the model. num_bytes: of memory.
    """

    adapter_id: int
    name: str
    path: str
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    digest: str
