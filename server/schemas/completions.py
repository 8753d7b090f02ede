"""Requests and responses of `/v1/completions` and `/infill`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, RootModel

from windlass.server.schemas.base import INT32_MAX, StopStrings, StrictModel, TextsOrTokens
from windlass.server.schemas.generation import GenerationRequest, SharedRequest, only_empty
from windlass.server.schemas.response_parts import (
    ErrorAnswer,
    FinishReason,
    GenerationEnvelope,
    PromptLogprobs,
    PromptTokenIds,
    RotaryField,
    StopReasonField,
    TokenIds,
    Usage,
)


class CompletionRequest(GenerationRequest):
    """`prompt`: a string, a list of strings, token ids, or a list of token-id lists."""

    hints: ClassVar[dict[str, str]] = GenerationRequest.hints | {
        "messages": "it belongs to /v1/chat/completions; this is /v1/completions, which takes prompt",
        "top_logprobs": "it belongs to /v1/chat/completions; here logprobs is the number of alternatives",
        "tools": "it belongs to /v1/chat/completions",
        "n_probs": "it is called logprobs here",
    }

    prompt: TextsOrTokens
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None


class CompletionLogprobs(StrictModel):
    """Parallel lists, one entry per token. The first prompt token of an echo has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(StrictModel):
    """One answer. The fields without a value stand there where they were asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReasonField
    token_ids: TokenIds = None
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None
    rotary: RotaryField = None


class Completion(GenerationEnvelope):
    """The answers to all prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    rotary: RotaryField = None


class CompletionChunkChoice(StrictModel):
    """A piece of one answer. Its first one has what was asked of the prompt, its last one how it ended."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReasonField = None
    token_ids: TokenIds = None
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None


class CompletionChunk(GenerationEnvelope):
    """A chunk of a stream. `usage`: where `stream_options` asks for it, else absent."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    rotary: RotaryField = None


class CompletionEvent(RootModel[CompletionChunk | ErrorAnswer]):
    """The JSON of an event of a stream: a chunk, or the error that ended it. The last event is `[DONE]`."""


MAX_PASSAGES = 256

SAMPLERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typical_p",
    "p": "top_p",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "e": "penalties",
    "i": "infill",
    "s": "top_n_sigma",
}


class FilePassage(StrictModel):
    """A passage of another file."""

    filename: Annotated[Annotated[str, Field(max_length=4096)] | None, Field(description="The file's name.")] = None
    text: Annotated[str, Field(description="The passage.")]
    time: Annotated[Any, Field(description="Without effect.")] = None


class InfillRequest(SharedRequest):
    """What stands before a gap and behind it. llama.cpp's names beside ours; what is longer than the context is cut."""

    hints: ClassVar[dict[str, str]] = SharedRequest.hints | {
        "suffix": "it belongs to /v1/completions; here it is input_suffix",
        "max_tokens": "here it is n_predict",
        "repetition_penalty": "here it is repeat_penalty",
        "n": "/infill gives one answer; /v1/completions with suffix gives several",
    }

    input_prefix: Annotated[str, Field(description="What stands before the gap.")]
    input_suffix: Annotated[str, Field(description="What stands behind it.")]
    input_extra: Annotated[
        Annotated[list[FilePassage], Field(max_length=MAX_PASSAGES, fail_fast=True)] | None,
        Field(
            description="Passages of other files, the most important last; those in front are left out where not all fit."
        ),
    ] = None
    prompt: Annotated[
        str | None, Field(description="More of what stands before the gap, as the start of its line.")
    ] = None
    n_predict: Annotated[
        Annotated[int, Field(ge=-1, le=INT32_MAX)] | None,
        Field(description="Most tokens of the answer; 0: the prompt is only read into the cache, -1: as many as fit."),
    ] = None
    stop: StopStrings | None = None
    repeat_penalty: Annotated[
        Annotated[float, Field(gt=0, le=100)] | None, Field(description="`repetition_penalty` as llama.cpp calls it.")
    ] = None
    n_indent: Annotated[
        Annotated[int, Field(ge=0, le=INT32_MAX)] | None,
        Field(description="The answer ends before a line that is indented by fewer characters; 0: it does not."),
    ] = None
    t_max_predict_ms: Annotated[
        Annotated[float, Field(ge=-1, le=1e9)] | None,
        Field(description="Milliseconds after which the answer ends, once it has a whole line; 0 or -1: it does not."),
    ] = None
    samplers: Annotated[
        Annotated[list[str], Field(max_length=64, fail_fast=True)] | Annotated[str, Field(max_length=64)] | None,
        Field(
            description="Which of `dry`, `top_k`, `typical_p`, `top_p`, `min_p`, `xtc`, `temperature` and `penalties` count, by "
            "name or by llama.cpp's letters; in which order has no effect. Default: all."
        ),
    ] = None
    response_fields: Annotated[
        Annotated[list[str], Field(max_length=64, fail_fast=True)] | None,
        Field(description="Which fields the answer has; `timings/prompt_n` is one inside another. Default: all."),
    ] = None
    return_tokens: Annotated[bool | None, Field(description="Whether `tokens` has the answer's token ids.")] = None
    lora: Annotated[
        list[Any] | None, only_empty("lora"), Field(description="Not supported: adapters are asked for by `model`.")
    ] = None

    # llama.cpp's bookkeeping: accepted, without effect
    id_slot: Annotated[Any, Field(description="Without effect.")] = None
    cache_prompt: Annotated[Any, Field(description="Without effect: the cache is always used, and exact.")] = None
    t_max_prompt_ms: Annotated[Any, Field(description="Without effect.")] = None
    timings_per_token: Annotated[Any, Field(description="Without effect.")] = None


class InfillTimings(StrictModel):
    """How long it took, in milliseconds; waiting counts with the prompt."""

    cache_n: Annotated[int, Field(description="Tokens of the prompt that were found in the cache.")]
    prompt_n: Annotated[int, Field(description="Tokens of the prompt that were computed.")]
    prompt_ms: Annotated[float, Field(description="Until the first token.")]
    prompt_per_token_ms: Annotated[float, Field(description="Per token of the prompt that was computed.")]
    prompt_per_second: Annotated[float, Field(description="Tokens of the prompt in a second.")]
    predicted_n: Annotated[int, Field(description="Tokens of the answer.")]
    predicted_ms: Annotated[float, Field(description="From the first token to the last.")]
    predicted_per_token_ms: Annotated[float, Field(description="Per token behind the first.")]
    predicted_per_second: Annotated[float, Field(description="Such tokens in a second.")]


class Infill(StrictModel):
    """What fills the gap. A stream's events have all of it but the last, whose `content` is empty.

    With `response_fields` those alone.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int | float] = Field(init=False)

    index: Annotated[Literal[0] | None, Field(description="Always 0.")] = None
    content: Annotated[str | None, Field(description="The text.")] = None
    tokens: Annotated[list[int] | None, Field(description="Its token ids, where they were asked for, else empty.")] = (
        None
    )
    id_slot: Annotated[Literal[0] | None, Field(description="Always 0.")] = None
    stop: Annotated[bool | None, Field(description="Whether the answer ends here.")] = None
    model: Annotated[str | None, Field(description="What it comes from.")] = None
    tokens_predicted: Annotated[int | None, Field(description="Tokens that were generated.")] = None
    tokens_evaluated: Annotated[int | None, Field(description="Tokens of the prompt.")] = None
    tokens_cached: Annotated[int | None, Field(description="Of the prompt's, tokens found in the cache.")] = None
    has_new_line: Annotated[bool | None, Field(description="Whether the text has one.")] = None
    truncated: Annotated[bool | None, Field(description="Whether any of what was given did not fit.")] = None
    stop_type: Annotated[
        Literal["eos", "word", "limit"] | None,
        Field(description="Ended by the model, by a stop string, or by a limit: of tokens, of time, or `n_indent`."),
    ] = None
    stopping_word: Annotated[str | None, Field(description="The stop string, else empty.")] = None
    timings: Annotated[InfillTimings | None, Field(description="How long it took.")] = None
    rotary: RotaryField = None


class InfillEvent(RootModel[Infill | ErrorAnswer]):
    """The JSON of an event of a stream: a piece of the answer, or the error that ended it."""
