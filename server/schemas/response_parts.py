"""Parts of responses that several endpoints share, and the error object."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.server.schemas.base import StrictModel


class Envelope(StrictModel):
    """Fields at the beginning of most responses."""

    id: str = Field(description="Unique id.")
    object: str
    created: int = Field(description="Creation time in Unix seconds.")
    model: str = Field(description="Name of the served model or of one of its adapters.")


class GenerationEnvelope(Envelope):
    """Fields at the beginning of the responses and chunks of completions and chats."""

    system_fingerprint: str = Field(
        description="Equal requests with equal seeds get equal answers while this value stays the same."
    )


class PromptTokensDetails(StrictModel):
    """`cached_tokens`: prompt tokens found in the prefix cache."""

    cached_tokens: int = Field(description="Number of these tokens that were found in the prefix cache.")


class CompletionTokensDetails(StrictModel):
    """`reasoning_tokens`: generated tokens up to the end of the thinking, its markers included."""

    reasoning_tokens: int = Field(
        description="Number of generated tokens up to the end of the thinking, including its markers."
    )


class Usage(StrictModel):
    """Token counts. `completion_tokens` counts what was generated, the end-of-sequence token included."""

    prompt_tokens: int = Field(description="Number of prompt tokens.")
    completion_tokens: int = Field(description="Number of generated tokens, including the end-of-sequence token.")
    total_tokens: int = Field(description="Sum of input and output tokens.")
    prompt_tokens_details: PromptTokensDetails = Field(description="Details of the prompt tokens.")
    completion_tokens_details: CompletionTokensDetails | None = Field(
        default=None, description="Details of the generated tokens. Absent if the model's thinking is not recognized."
    )


class TokenLogprob(StrictModel):
    """A log-probability with the token's rank, 1 being the most likely."""

    logprob: float = Field(description="Log-probability of the token.")
    rank: int = Field(description="Rank of the token among all tokens. 1: the most likely.")
    decoded_token: str = Field(description="Text of the token.")


PromptLogprobs = Annotated[
    list[dict[str, TokenLogprob] | None] | None,
    Field(description="Per prompt token, log-probabilities by token id, if requested. Null for the first token."),
]

PromptTokenIds = Annotated[list[int] | None, Field(description="Ids of the prompt's tokens, if requested.")]

TokenIds = Annotated[list[int] | None, Field(description="Ids of the generated tokens, if requested.")]

StopReasonField = Annotated[
    str | int | None, Field(description="Stop string or stop token id that ended the answer, else null.")
]

FinishReason = Literal["stop", "length"]

ScalingValue = float | int | bool | str | list[float]


class ContextUse(StrictModel):
    """What became of an answer's context; of these fields those that apply."""

    window: int | None = Field(
        default=None, description="With `shift`: maximum number of tokens that the sequence holds at once."
    )
    kept_tokens: int | None = Field(
        default=None, description="With `shift`: number of leading tokens that are never dropped, in entire blocks."
    )
    dropped_tokens: int | None = Field(default=None, description="With `shift`: number of tokens dropped so far.")
    shifts: int | None = Field(default=None, description="With `shift`: number of times that tokens were dropped.")
    attention_window: int | None = Field(
        default=None, description="Number of most recent tokens that each token attended to, itself included."
    )
    attention_sinks: int | None = Field(
        default=None, description="Number of leading tokens that each token also attended to."
    )
    dropped_turns: int | None = Field(
        default=None, description="With `drop_turns`: number of oldest turns that were dropped."
    )
    reused_tokens: int | None = Field(
        default=None, description="Number of prompt tokens reused from other positions, after the cached prefix."
    )
    reused_passages: int | None = Field(default=None, description="Number of passages reused from other positions.")


class RotaryOfGroup(StrictModel):
    """What the layers of one group ran under; the fields are those of `Rotary`."""

    rope_type: str = Field(description="Kind of the scaling.")
    parameters: dict[str, ScalingValue] = Field(description="Parameters of the scaling, including `rope_theta`.")
    effective_length: float | None = Field(
        description="Length that the frequencies were computed for, in tokens. Null if they do not depend on "
        "the length."
    )
    fingerprint: str = Field(description="Digest of frequencies and factors. Equal fingerprints mean equal rotations.")


class RotaryChosen(StrictModel):
    """What `auto` chose an answer's scaling by."""

    length: int | None = Field(
        description="Number of tokens that the scaling was chosen for: prompt and maximum output. Null if the "
        "scaling follows the text as it grows."
    )
    up_to: int | None = Field(
        description="Largest number of tokens for which the choice is the same. Null: any longer text."
    )
    profile: str | None = Field(default=None, description="Profile of the step, if the operator's thresholds name one.")


class Rotary(StrictModel):
    """What an answer ran under. `effective_length`: tokens its frequencies were formed for, null for kinds without a
    length. `moves`: times its cached keys were turned. `groups`: the same by group, where layers rotate in two ways.
    `context`: what became of the context, where anything may be dropped."""

    rope_type: str = Field(description="Kind of the scaling.")
    parameters: dict[str, ScalingValue] = Field(description="Parameters of the scaling, including `rope_theta`.")
    policy: RopeUpdate = Field(description="What happens to cached keys when the text grows into other frequencies.")
    effective_length: float | None = Field(
        description="Length that the frequencies were computed for, in tokens. Null if they do not depend on "
        "the length."
    )
    fingerprint: str = Field(description="Digest of frequencies and factors. Equal fingerprints mean equal rotations.")
    moves: int = Field(description="Number of times that cached keys were rotated to other frequencies.")
    groups: dict[str, RotaryOfGroup] | None = Field(
        default=None, description="Values per group of layers. Absent if all layers rotate alike."
    )
    context: ContextUse | None = Field(
        default=None,
        description="What was dropped from the context or reused from other positions. Absent if neither can happen.",
    )
    auto: RotaryChosen | None = Field(default=None, description="With `auto`: how the scaling was chosen.")


RotaryField = Annotated[Rotary | None, Field(description="Rotary scaling under which the answer was generated.")]


class ErrorDetail(StrictModel):
    """What went wrong, in words, and the field at fault."""

    message: str = Field(description="What is wrong and what to do.")
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"] = Field(
        description="Category of the error."
    )
    param: str | None = Field(description="Path of the field at fault, else null.")
    code: str = Field(description="Kind of the error, for programs.")


class ErrorAnswer(StrictModel):
    """Every answer other than success has this shape."""

    error: ErrorDetail = Field(description="The error.")


class ContextSettings(StrictModel):
    """What holds for requests that leave the fields of these names out, and what contexts that drop tokens may hold."""

    context_overflow: Annotated[str, Field(description="`error`, `stop`, `shift` or `drop_turns`.")]
    keep_tokens: int | None = Field(
        default=None,
        description="Number of leading tokens that `shift` never drops. Null: a chat's system prompt, else 16 tokens.",
    )
    attention_window: int | None = Field(
        default=None, description="Number of tokens that each token attends to. Null: all."
    )
    attention_sinks: int | None = Field(
        default=None, description="Number of leading tokens that each token also attends to."
    )
    cache_reuse: int = Field(
        description="Minimum length of passages reused from other positions, in tokens. 0: no reuse."
    )
    shift_context: int | None = Field(
        default=None,
        description="With `shift`: number of tokens that a sequence holds at once. Null until the model has loaded.",
    )
    max_total_tokens: int | None = Field(
        default=None, description="With `shift`: maximum number of tokens of prompt and answer. Null: unlimited."
    )
    shift_refusal: str | None = Field(
        default=None, description="Why this model does not support `shift`. Null: it does."
    )
    reuse_refusal: str | None = Field(
        default=None, description="Why this model does not support `cache_reuse`. Null: it does."
    )


class ModelDraft(StrictModel):
    """The draft model beside a model. num_tokens: what it proposes for a stream per step, at most."""

    architecture: str = Field(description="Architecture of the model.")
    quantization: str | None = Field(description="Quantization of the weights. Null: none.")
    weight_dtype: str = Field(description="Data type of stored weights.")
    num_parameters: int = Field(description="Number of weights.")
    num_tokens: int = Field(description="Maximum number of tokens proposed per stream and step.")


class ModelRotaryGroup(StrictModel):
    """A rotary scaling with the fields of its kind beside these, and the dimensions it works on."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, ScalingValue]

    rope_type: str = Field(description="Kind of the scaling.")
    rotary_dim: int = Field(description="Number of rotated dimensions per head.")
    original_max_position_embeddings: int = Field(description="Original context of the scaling, in tokens.")
    max_position_embeddings: int = Field(description="Context that the model was trained for, in tokens.")


class ModelRotary(ModelRotaryGroup):
    """The main group's scaling, and under `groups` that of every group of layers."""

    groups: dict[str, ModelRotaryGroup] = Field(description="Scaling per group of layers.")


class RotaryStep(StrictModel):
    """One step of what `auto` chooses from."""

    up_to: int | None = Field(description="Maximum number of tokens of prompt and output. Null: unlimited.")
    rope_scaling: dict[str, ScalingValue] = Field(description="Scaling of requests up to this length.")
    effective_length: float | None = Field(
        description="Length that the frequencies were computed for, in tokens. Null if they do not depend on "
        "the length."
    )
    profile: str | None = Field(default=None, description="Profile of the step, if the operator's thresholds name one.")


class RotaryLadderShown(StrictModel):
    """What `rope_scaling` `auto` chooses from, shortest first."""

    default: bool = Field(description="Whether requests that set no scaling use `auto`.")
    steps: list[RotaryStep] = Field(
        description="Steps, shortest first. A request gets the first step that is long enough."
    )


class SamplingSettings(StrictModel):
    """What holds for requests that leave the fields of these names out."""

    temperature: float = Field(description="Sampling temperature. 0 selects the most likely token.")
    top_k: int = Field(description="Only this many of the most likely tokens are sampled. 0 or -1: all tokens.")
    top_p: float = Field(
        description="Nucleus sampling: only the most likely tokens whose probabilities add up to this value are "
        "sampled. 1: all tokens."
    )
    min_p: float = Field(
        description="Only tokens with at least this share of the highest probability are sampled. 0: all tokens."
    )
    typical_p: float = Field(
        description="Locally typical sampling: only the most typical tokens whose probabilities add up to this "
        "value are sampled. 1: all tokens."
    )
    repetition_penalty: float = Field(
        description="Divides positive logits of tokens that already occurred and multiplies negative ones. 1: off."
    )


class AdapterFacts(StrictModel):
    """A LoRA adapter. `rank`: the largest of its matrices; `targets`: the kinds of layers it changes."""

    rank: int = Field(description="Largest rank of its matrices.")
    targets: list[str] = Field(description="Kinds of layers that it changes.")
    num_bytes: int = Field(description="Memory in bytes.")


class EmbeddingFacts(StrictModel):
    """How `/v1/embeddings` makes vectors of the model's states where a request does not say."""

    dimensions: int = Field(description="Number of values of a vector.")
    pooling: Literal["last", "mean", "first"] | None = Field(
        description="Default of `pooling`. Null: requests must set it, because of `refusal`."
    )
    normalize: bool = Field(description="Whether vectors are normalized to length 1.")
    declared: bool = Field(description="Whether the model's files define the pooling.")
    refusal: str | None = Field(description="Pooling of the model's files that is not supported. Null: none.")


class TemplateSupport(StrictModel):
    """What a conversation may hold, as far as the chat template's text tells."""

    tools: bool = Field(description="Whether the template shows offered functions to the model.")
    calls: bool = Field(description="Whether the template renders calls and their results.")
    developer: bool = Field(description="Whether the template distinguishes the role `developer` from `system`.")
    thinking: str | None = Field(description="Format by which thinking is recognized in answers. Null: none.")
    thinking_choices: list[str] = Field(description="Template variables that control the amount of thinking.")


class ClassFacts(StrictModel):
    """The classes of a model that classifies."""

    labels: list[str] = Field(description="Names of the classes, in the order of the probabilities.")
    activation: Literal["softmax", "sigmoid", "none"] = Field(
        description="Function that turns the head's logits into probabilities."
    )
    per_token: bool = Field(description="Whether the model classifies tokens instead of texts.")


class Model(StrictModel):
    """A model as `/v1/models` lists it, or an adapter of it; what the engine knows is null until it has loaded."""

    id: str = Field(description="Name of the model.")
    object: Literal["model"]
    type: Literal["model"]
    display_name: str = Field(description="Same as `id`.")
    created: int = Field(description="Creation time in Unix seconds.")
    created_at: str = Field(description="Creation time in RFC 3339 format.")
    owned_by: str = Field(description="Always `windlass`.")
    max_model_len: int | None = Field(description="Context length in tokens. Null until the model has loaded.")
    dtype: str | None = Field(description="Data type of computations. Null until the model has loaded.")
    weight_dtype: str | None = Field(description="Data type of stored weights. Null until the model has loaded.")
    kv_cache_dtype: str | None = Field(
        description="Data type of cached keys and values. Null until the model has loaded."
    )
    quantization: str | None = Field(description="Quantization of the weights. Null: none.")
    architecture: str | None = Field(description="Architecture of the model. Null until it has loaded.")
    num_parameters: int | None = Field(description="Number of weights. Null until the model has loaded.")
    draft_model: ModelDraft | None = Field(description="Draft model or MTP layer that proposes tokens. Null: none.")
    sampling_defaults: SamplingSettings = Field(description="Sampling parameters of requests that do not set them.")
    recommended_sampling: dict[str, float] | None = Field(
        description="Values of `sampling_defaults` that the model's authors recommend. Null: none."
    )
    context: ContextSettings = Field(description="Context rules of requests that do not set them.")
    rotary: ModelRotary | None = Field(
        description="Rotary scaling of requests that set none. Null until the model has loaded, and for a model "
        "without rotary attention."
    )
    rotary_auto: RotaryLadderShown | None = Field(
        description="Scalings that `rope_scaling: auto` chooses from. Null until the model has loaded, and if "
        "it cannot be scaled."
    )
    tasks: list[Literal["generate", "infill", "embed", "score", "classify", "token_classify"]] | None = Field(
        description="Supported tasks. Null until the model has loaded."
    )
    scored_by: Literal["answer", "head", "vectors"] | None = Field(
        description="Source of scores and rankings: the answer token of the model, a head with one class, or "
        "the cosine of vectors. Null: not supported."
    )
    embedding: EmbeddingFacts | None = Field(
        description="How embeddings are computed. Null until the model has loaded."
    )
    classes: ClassFacts | None = Field(description="Classes of a classification model. Null: it has none.")
    vocab_size: int | None = Field(description="Number of token ids. Null until the model has loaded.")
    trained_len: int | None = Field(
        description="Context that the model was trained for, in tokens, before any scaling. Null until it has loaded."
    )
    special_tokens: dict[str, str] = Field(description="Texts of special tokens by name, such as `bos_token`.")
    template: TemplateSupport | None = Field(description="Capabilities of the chat template. Null: the model has none.")
    parent: str | None = Field(description="Of a LoRA adapter: the model that it changes. Else null.")
    adapter: AdapterFacts | None = Field(
        description="Properties of a LoRA adapter. Null for the model itself and until the model has loaded."
    )


class ModelList(StrictModel):
    """The served model, once for each of its names."""

    object: Literal["list"]
    data: list[Model] = Field(description="The entries.")
    has_more: Literal[False] = Field(description="Always false: the list is complete.")
    first_id: str = Field(description="Id of the first entry. Null if there is none.")
    last_id: str = Field(description="Id of the last entry. Null if there is none.")


class Status(StrictModel):
    """How the server is: `draining` once a shutdown has begun, else how its engine is."""

    status: Literal["starting", "ready", "restarting", "failed", "closed", "draining"] = Field(
        description="State of the server."
    )
    degraded: list[Literal["engine_restarted", "event_loop_stalled", "text_process_lost"]] | None = Field(
        default=None,
        description="Only for `/health`: faults of the last minute from which the server recovered. Absent if "
        "there were none.",
    )
    crash_report: str | None = Field(
        default=None,
        description="Only for `/health`: file name of the last crash report of the engine, in `--crash-dir`. "
        "Absent if there is none.",
    )
    replicas: ReplicaCount | None = Field(
        default=None, description="Only for `/health`: number of engines. Absent if there is one engine."
    )


class ReplicaCount(StrictModel):
    """Where several engines serve the model: how many, and how many of them take requests now."""

    total: int = Field(description="Number of engines that serve the model.")
    ready: int = Field(description="Number of engines that accept requests.")


class Version(StrictModel):
    """The server's version."""

    version: str = Field(description="Version of the server.")
