"""Parts of responses that several endpoints share, and the error object."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
