"""Parts of responses that several endpoints share, and errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.server.schemas.base import StrictModel, optional


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


class PromptProgress(StrictModel):
    """How much of a prompt is computed."""

    total: int = Field(description="Number of prompt tokens.")
    cache: int = Field(description="Number of these tokens that were found in the prefix cache.")
    processed: int = Field(description="Number of tokens that are computed or cached.")
    time_ms: int = Field(description="Milliseconds since the request arrived.")
    index: int | None = Field(default=None, description="Index of the prompt, from 0, if there are several.")


PromptProgressField = Annotated[
    PromptProgress | None,
    Field(
        description="Of a chunk without choices, if `return_progress` requests it: how much of the prompt is computed."
    ),
]


class PromptTokensDetails(StrictModel):
    """Numbers of prompt tokens."""

    cached_tokens: int = Field(description="Number of these tokens that were found in the prefix cache.")


class CompletionTokensDetails(StrictModel):
    """Numbers of generated tokens."""

    reasoning_tokens: int = Field(
        description="Number of generated tokens up to the end of the thinking, including its markers."
    )


class Usage(StrictModel):
    """Numbers of tokens of prompts and answers."""

    prompt_tokens: int = Field(description="Number of prompt tokens.")
    completion_tokens: int = Field(description="Number of generated tokens, including the end-of-sequence token.")
    total_tokens: int = Field(description="Sum of input and output tokens.")
    prompt_tokens_details: PromptTokensDetails = Field(description="Details of the prompt tokens.")
    completion_tokens_details: CompletionTokensDetails | None = optional(
        "Details of the generated tokens. Absent if the model's thinking is not recognized."
    )


class TokenLogprob(StrictModel):
    """Log-probability and rank of a token."""

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

EffectiveLength = Annotated[
    float | None,
    Field(
        description="Length that the frequencies were computed for, in tokens. Null if they do not depend on the length."
    ),
]


class ContextUse(StrictModel):
    """Effects of the context rules on an answer. Fields that do not apply are absent."""

    window: int | None = optional("With `shift`: maximum number of tokens that the sequence holds at once.")
    kept_tokens: int | None = optional(
        "With `shift`: number of leading tokens that are never dropped, in entire blocks."
    )
    dropped_tokens: int | None = optional("With `shift`: number of tokens dropped so far.")
    shifts: int | None = optional("With `shift`: number of times that tokens were dropped.")
    attention_window: int | None = optional(
        "Number of most recent tokens that each token attended to, itself included."
    )
    attention_sinks: int | None = optional("Number of leading tokens that each token also attended to.")
    dropped_turns: int | None = optional("With `drop_turns`: number of oldest turns that were dropped.")
    reused_tokens: int | None = optional(
        "Number of prompt tokens reused from other positions, after the cached prefix."
    )
    reused_passages: int | None = optional("Number of passages reused from other positions.")


class RotaryOfGroup(StrictModel):
    """Rotary scaling of one group of layers."""

    rope_type: str = Field(description="Kind of the scaling.")
    parameters: dict[str, ScalingValue] = Field(description="Parameters of the scaling, including `rope_theta`.")
    effective_length: EffectiveLength
    fingerprint: str = Field(description="Digest of frequencies and factors. Equal fingerprints mean equal rotations.")


class RotaryChosen(StrictModel):
    """Choice of a scaling by `auto`."""

    length: int | None = Field(
        description="Number of tokens that the scaling was chosen for: prompt and maximum output. Null if the "
        "scaling follows the text as it grows."
    )
    up_to: int | None = Field(
        description="Largest number of tokens for which the choice is the same. Null: any longer text."
    )
    profile: str | None = optional("Profile of the step, if the operator's thresholds name one.")


class Rotary(StrictModel):
    """Rotary scaling of an answer."""

    rope_type: str = Field(description="Kind of the scaling.")
    parameters: dict[str, ScalingValue] = Field(description="Parameters of the scaling, including `rope_theta`.")
    policy: RopeUpdate = Field(description="What happens to cached keys when the text grows into other frequencies.")
    effective_length: EffectiveLength
    fingerprint: str = Field(description="Digest of frequencies and factors. Equal fingerprints mean equal rotations.")
    moves: int = Field(description="Number of times that cached keys were rotated to other frequencies.")
    groups: dict[str, RotaryOfGroup] | None = optional("Values per group of layers. Absent if all layers rotate alike.")
    context: ContextUse | None = optional(
        "What was dropped from the context or reused from other positions. Absent if neither can happen."
    )
    auto: RotaryChosen | None = optional("With `auto`: how the scaling was chosen.")


RotaryField = Annotated[Rotary | None, Field(description="Rotary scaling under which the answer was generated.")]


class ErrorDetail(StrictModel):
    """Description of the error and the field at fault."""

    message: str = Field(description="What is wrong and what to do.")
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"] = Field(
        description="Category of the error."
    )
    param: str | None = Field(description="Path of the field at fault, else null.")
    code: str = Field(description="Kind of the error, for programs.")


class ErrorAnswer(StrictModel):
    """An error."""

    error: ErrorDetail = Field(description="The error.")
