"""Parts of responses that several endpoints share, and the error object."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.server.schemas.base import StrictModel


class Envelope(StrictModel):
    """Fields at the beginning of most responses."""

    id: str
    object: str
    created: int
    model: str


class GenerationEnvelope(Envelope):
    """Fields at the beginning of the responses and chunks of completions and chats."""

    system_fingerprint: str


class PromptTokensDetails(StrictModel):
    """`cached_tokens`: prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(StrictModel):
    """`reasoning_tokens`: generated tokens up to the end of the thinking, its markers included."""

    reasoning_tokens: int


class Usage(StrictModel):
    """Token counts. `completion_tokens` counts what was generated, the end-of-sequence token included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TokenLogprob(StrictModel):
    """A log-probability with the token's rank, 1 being the most likely."""

    logprob: float
    rank: int
    decoded_token: str


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

    window: Annotated[
        int | None, Field(description="Under `shift`: tokens that the sequence held at once, at most.")
    ] = None
    kept_tokens: Annotated[
        int | None, Field(description="Under `shift`: leading tokens that are never dropped, in whole blocks.")
    ] = None
    dropped_tokens: Annotated[int | None, Field(description="Under `shift`: oldest tokens dropped so far.")] = None
    shifts: Annotated[int | None, Field(description="Under `shift`: times that any were dropped.")] = None
    attention_window: Annotated[
        int | None, Field(description="The last tokens that each token saw, itself included.")
    ] = None
    attention_sinks: Annotated[int | None, Field(description="Leading tokens that each token saw besides.")] = None
    dropped_turns: Annotated[
        int | None, Field(description="Under `drop_turns`: oldest turns of the chat that were left out.")
    ] = None
    reused_tokens: Annotated[
        int | None,
        Field(description="Prompt tokens taken from passages that stood elsewhere, behind the equal beginning."),
    ] = None
    reused_passages: Annotated[int | None, Field(description="How many passages those were.")] = None


class RotaryOfGroup(StrictModel):
    """What the layers of one group ran under; the fields are those of `Rotary`."""

    rope_type: str
    parameters: dict[str, ScalingValue]
    effective_length: float | None
    fingerprint: str


class RotaryChosen(StrictModel):
    """What `auto` chose an answer's scaling by."""

    length: Annotated[
        int | None,
        Field(
            description="Tokens it was chosen for: prompt and most output; null where it follows the text as that grows."
        ),
    ]
    up_to: Annotated[int | None, Field(description="Tokens for which the choice is the same; null: any longer text.")]
    profile: Annotated[str | None, Field(description="The profile it is, where the operator's ladder names one.")] = (
        None
    )


class Rotary(StrictModel):
    """What an answer ran under. `effective_length`: tokens its frequencies were formed for, null for kinds without a
    length. `moves`: times its cached keys were turned. `groups`: the same by group, where layers rotate in two ways.
    `context`: what became of the context, where anything may be dropped."""

    rope_type: str
    parameters: dict[str, ScalingValue]
    policy: RopeUpdate
    effective_length: float | None
    fingerprint: str
    moves: int
    groups: dict[str, RotaryOfGroup] | None = None
    context: ContextUse | None = None
    auto: Annotated[RotaryChosen | None, Field(description="Under `auto`: what the scaling was chosen by.")] = None


RotaryField = Annotated[Rotary | None, Field(description="Rotary scaling under which the answer was generated.")]


class ErrorDetail(StrictModel):
    """What went wrong, in words, and the field at fault."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorAnswer(StrictModel):
    """Every answer other than success has this shape."""

    error: ErrorDetail


class ContextSettings(StrictModel):
    """What holds for requests that leave the fields of these names out, and what contexts that drop tokens may hold."""

    context_overflow: Annotated[str, Field(description="`error`, `stop`, `shift` or `drop_turns`.")]
    keep_tokens: Annotated[
        int | None,
        Field(description="Leading tokens that `shift` never drops; null: a chat's system prompt, else 16 tokens."),
    ] = None
    attention_window: Annotated[int | None, Field(description="Tokens that each token sees; null: all.")] = None
    attention_sinks: Annotated[int | None, Field(description="Leading tokens that are seen besides.")] = None
    cache_reuse: Annotated[int, Field(description="Tokens of the shortest passage taken from anywhere; 0: none.")]
    shift_context: Annotated[
        int | None,
        Field(description="Tokens that a sequence holds at once under `shift`; null until the model has loaded."),
    ] = None
    max_total_tokens: Annotated[
        int | None, Field(description="Of prompt and answer of a sequence under `shift`; null: without end.")
    ] = None
    shift_refusal: Annotated[
        str | None,
        Field(description="Why no sequence of this model may drop tokens; null where they may."),
    ] = None
    reuse_refusal: Annotated[
        str | None,
        Field(description="Why no sequence of this model may take passages from anywhere; null where they may."),
    ] = None


class ModelDraft(StrictModel):
    """The draft model beside a model. num_tokens: what it proposes for a stream per step, at most."""

    architecture: str
    quantization: str | None
    weight_dtype: str
    num_parameters: int
    num_tokens: int


class ModelRotaryGroup(StrictModel):
    """A rotary scaling with the fields of its kind beside these, and the dimensions it works on."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, ScalingValue]

    rope_type: str
    rotary_dim: int
    original_max_position_embeddings: int
    max_position_embeddings: int


class ModelRotary(ModelRotaryGroup):
    """The main group's scaling, and under `groups` that of every group of layers."""

    groups: dict[str, ModelRotaryGroup]


class RotaryStep(StrictModel):
    """One step of what `auto` chooses from."""

    up_to: Annotated[int | None, Field(description="Tokens of prompt and output that it holds; null: any number.")]
    rope_scaling: Annotated[dict[str, ScalingValue], Field(description="What a request of that length runs under.")]
    effective_length: float | None
    profile: Annotated[str | None, Field(description="Its profile, where the operator's ladder names one.")] = None


class RotaryLadderShown(StrictModel):
    """What `rope_scaling` `auto` chooses from, shortest first."""

    default: Annotated[bool, Field(description="Whether it is for requests that set no scaling.")]
    steps: list[RotaryStep]


class SamplingSettings(StrictModel):
    """What holds for requests that leave the fields of these names out."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float


class AdapterFacts(StrictModel):
    """A LoRA adapter. `rank`: the largest of its matrices; `targets`: the kinds of layers it changes."""

    rank: int
    targets: list[str]
    num_bytes: int


class EmbeddingFacts(StrictModel):
    """How `/v1/embeddings` makes vectors of the model's states where a request does not say."""

    dimensions: Annotated[int, Field(description="Values of a vector.")]
    pooling: Annotated[
        Literal["last", "mean", "first"] | None, Field(description="Null: requests have to say, see `refusal`.")
    ]
    normalize: bool
    declared: Annotated[bool, Field(description="Whether the model's files say so.")]
    refusal: Annotated[str | None, Field(description="What these files ask for that is not offered.")]


class TemplateSupport(StrictModel):
    """What a conversation may hold, as far as the chat template's text tells."""

    tools: Annotated[bool, Field(description="Whether it shows the model which functions there are.")]
    calls: Annotated[bool, Field(description="Whether it renders calls and their results.")]
    developer: Annotated[bool, Field(description="Whether it knows the role `developer` apart from `system`.")]
    thinking: Annotated[
        str | None, Field(description="How thinking is told apart in answers; null: it is not, or there is none.")
    ]
    thinking_choices: Annotated[
        list[str], Field(description="Variables of it by which a request chooses how much the model thinks.")
    ]


class ClassFacts(StrictModel):
    """The classes of a model that classifies."""

    labels: list[str]
    activation: Annotated[
        Literal["softmax", "sigmoid", "none"], Field(description="What makes probabilities of what the head gives.")
    ]
    per_token: Annotated[bool, Field(description="Whether they are told of each token, not of a text.")]


class Model(StrictModel):
    """A model as `/v1/models` lists it, or an adapter of it; what the engine knows is null until it has loaded."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: Annotated[str, Field(description="The id: there is no other name.")]
    created: int
    created_at: Annotated[str, Field(description="The same as RFC 3339.")]
    owned_by: str
    max_model_len: int | None
    dtype: str | None
    weight_dtype: str | None
    kv_cache_dtype: str | None
    quantization: str | None
    architecture: str | None
    num_parameters: int | None
    draft_model: ModelDraft | None
    sampling_defaults: SamplingSettings
    recommended_sampling: Annotated[
        dict[str, float] | None,
        Field(description="Those of `sampling_defaults` that hold since its authors recommend them; null: none do."),
    ]
    context: ContextSettings
    rotary: ModelRotary | None
    rotary_auto: Annotated[
        RotaryLadderShown | None, Field(description="What `rope_scaling` `auto` chooses from, by length.")
    ]
    tasks: Annotated[
        list[Literal["generate", "infill", "embed", "score", "classify", "token_classify"]] | None,
        Field(description="What it can be asked for."),
    ]
    scored_by: Annotated[
        Literal["answer", "head", "vectors"] | None,
        Field(
            description="What scores and rerankings come from: the token that the model answers with, its head of one class, or "
            "the cosine of vectors; null: it gives none."
        ),
    ]
    embedding: EmbeddingFacts | None
    classes: ClassFacts | None
    vocab_size: Annotated[int | None, Field(description="Token ids that the model knows.")]
    trained_len: Annotated[
        int | None, Field(description="The context that it was trained for, in tokens, before any scaling.")
    ]
    special_tokens: Annotated[
        dict[str, str], Field(description="The texts of the tokens with names, such as `bos_token`.")
    ]
    template: Annotated[
        TemplateSupport | None, Field(description="What its chat template can be told; null: it has none.")
    ]
    parent: str | None
    adapter: AdapterFacts | None


class ModelList(StrictModel):
    """The served model, once for each of its names."""

    object: Literal["list"]
    data: list[Model]
    has_more: Annotated[Literal[False], Field(description="Always false: the list is whole.")]
    first_id: str
    last_id: str


class Status(StrictModel):
    """How the server is: `draining` once a shutdown has begun, else how its engine is."""

    status: Literal["starting", "ready", "restarting", "failed", "closed", "draining"]
    degraded: list[Literal["engine_restarted", "event_loop_stalled", "text_process_lost"]] | None = None
    crash_report: str | None = None
    replicas: ReplicaCount | None = None


class ReplicaCount(StrictModel):
    """Where several engines serve the model: how many, and how many of them take requests now."""

    total: Annotated[int, Field(description="Engines that serve the model.")]
    ready: Annotated[int, Field(description="Those of them that take requests now.")]


class Version(StrictModel):
    """The server's version."""

    version: str
