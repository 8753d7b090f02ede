"""Requests and responses of `/v1/completions` and `/infill`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, RootModel

from windlass.server.schemas.base import INT32_MAX, StopField, StrictModel, TextsOrTokens, optional
from windlass.server.schemas.generation import GenerationRequest, SharedRequest, only_empty
from windlass.server.schemas.response_parts import (
    ErrorAnswer,
    FinishReason,
    GenerationEnvelope,
    PromptLogprobs,
    PromptProgressField,
    PromptTokenIds,
    RotaryField,
    StopReasonField,
    TokenIds,
    Usage,
)

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


CompletionLogprobsField = Annotated[
    Annotated[int, Field(ge=0, le=20)] | None,
    Field(
        description="Number of alternatives per token whose log-probabilities are returned. 0: only the tokens' "
        "own. Default: none are returned.",
    ),
]


class CompletionRequest(GenerationRequest):
    """One or several prompts."""

    hints: ClassVar[dict[str, str]] = GenerationRequest.hints | {
        "messages": "it belongs to /v1/chat/completions; this is /v1/completions, which takes prompt",
        "top_logprobs": "it belongs to /v1/chat/completions; here logprobs is the number of alternatives",
        "tools": "it belongs to /v1/chat/completions",
        "n_probs": "it is called logprobs here",
    }

    prompt: TextsOrTokens = Field(description="Texts or token ids; at most 1,024 prompts.")
    echo: bool | None = optional(
        "Whether answers begin with the prompt, with its log-probabilities if `logprobs` is set. Default: false."
    )
    logprobs: CompletionLogprobsField = None
    suffix: str | None = optional(
        "Text after the gap that the answer fills. Requires a model with fill-in-the-middle tokens. "
        "Excludes `truncate_prompt_tokens`. Default: none."
    )


class CompletionLogprobs(StrictModel):
    """Log-probabilities as parallel lists with one entry per token."""

    tokens: list[str] = Field(description="Texts of the tokens.")
    token_logprobs: list[float | None] = Field(
        description="Log-probabilities of the tokens. Null for the first token of a prompt."
    )
    top_logprobs: list[dict[str, float] | None] = Field(
        description="For each token, the log-probabilities of the most likely tokens at its position, its own "
        "included, by text."
    )
    text_offset: list[int] = Field(description="Start of each token in the text, in characters.")


class CompletionChoice(StrictModel):
    """One answer."""

    index: int = Field(description="Index of the answer over all prompts, from 0.")
    text: str = Field(description="The text.")
    logprobs: CompletionLogprobs | None = Field(description="Log-probabilities of the tokens, if requested, else null.")
    finish_reason: FinishReason = Field(description="Why the answer ended.")
    stop_reason: StopReasonField
    token_ids: TokenIds = None
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None
    rotary: RotaryField = None


class Completion(GenerationEnvelope):
    """Answers to all prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(description="The answers, prompt by prompt.")
    usage: Usage = Field(description="Numbers of tokens.")
    rotary: RotaryField = optional("Rotary scaling of the first answer.")


class CompletionChunkChoice(StrictModel):
    """A piece of one answer. The first piece has the values of the prompt, the last piece the reason of the end."""

    index: int = Field(description="Index of the answer over all prompts, from 0.")
    text: str = Field(description="The text.")
    logprobs: CompletionLogprobs | None = Field(description="Log-probabilities of the tokens, if requested, else null.")
    finish_reason: FinishReason | None = Field(description="Why the answer ended. Null before its last chunk.")
    stop_reason: StopReasonField = None
    token_ids: TokenIds = None
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None


class CompletionChunk(GenerationEnvelope):
    """A chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice] = Field(description="Pieces of answers.")
    usage: Usage | None = optional("Numbers of tokens, if `stream_options` requests them. Null in chunks without.")
    prompt_progress: PromptProgressField = None
    rotary: RotaryField = None


class CompletionEvent(RootModel[CompletionChunk | ErrorAnswer]):
    """JSON of a stream event: a chunk, or the error that ended the stream. The last event is `[DONE]`."""


class FilePassage(StrictModel):
    """A passage of another file."""

    filename: Annotated[str, Field(max_length=4096)] | None = optional("Name of the file. Default: none.")
    text: str = Field(description="Text of the passage.")
    time: Any = optional("No effect.")


class InfillRequest(SharedRequest):
    """The texts before and after a gap, with llama.cpp's names of fields. Text that does not fit into the context is
    cut.
    """

    hints: ClassVar[dict[str, str]] = SharedRequest.hints | {
        "suffix": "it belongs to /v1/completions; here it is input_suffix",
        "max_tokens": "here it is n_predict",
        "repetition_penalty": "here it is repeat_penalty",
        "n": "/infill gives one answer; /v1/completions with suffix gives several",
    }

    input_prefix: str = Field(description="Text before the gap.")
    input_suffix: str = Field(description="Text after the gap.")
    input_extra: Annotated[list[FilePassage], Field(max_length=MAX_PASSAGES, fail_fast=True)] | None = optional(
        "Passages of other files, the most important last; the first are dropped if not all fit. Default: none."
    )
    prompt: str | None = optional("Text between `input_prefix` and the gap. Default: empty.")
    n_predict: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = optional(
        "Maximum number of generated tokens. 0: the prompt is only cached; -1: as many as fit. "
        "Default: `--default-max-tokens`, else 1,024."
    )
    stop: StopField = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = optional("llama.cpp's name of `repetition_penalty`.")
    n_indent: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "The answer ends before a line that is indented by fewer characters. Default: 0, off."
    )
    t_max_predict_ms: Annotated[float, Field(ge=-1, le=1000000000.0)] | None = optional(
        "Milliseconds after which the answer ends, once it has a complete line. 0 (default) or -1: unlimited."
    )
    samplers: (
        Annotated[list[str], Field(max_length=64, fail_fast=True)] | Annotated[str, Field(max_length=64)] | None
    ) = optional(
        "Enabled samplers of `dry`, `top_k`, `typical_p`, `top_p`, `min_p`, `xtc`, `temperature` "
        "and `penalties`, by name or by llama.cpp's letters. Their order has no effect. Default: "
        "all."
    )
    response_fields: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = optional(
        "Fields of the answer; `timings/prompt_n` names a nested field. Default: all."
    )
    return_tokens: bool | None = optional("Whether `tokens` has the ids of the generated tokens. Default: false.")
    lora: Annotated[list[Any] | None, only_empty("lora")] = optional("Not supported: `model` selects an adapter.")


class InfillTimings(StrictModel):
    """Durations in milliseconds."""

    cache_n: int = Field(description="Number of prompt tokens found in the cache.")
    prompt_n: int = Field(description="Number of prompt tokens that were computed.")
    prompt_ms: float = Field(description="Time to the first token, waiting included, in milliseconds.")
    prompt_per_token_ms: float = Field(description="Milliseconds per computed prompt token.")
    prompt_per_second: float = Field(description="Computed prompt tokens per second.")
    predicted_n: int = Field(description="Number of generated tokens.")
    predicted_ms: float = Field(description="Time from the first to the last token, in milliseconds.")
    predicted_per_token_ms: float = Field(description="Milliseconds per token after the first.")
    predicted_per_second: float = Field(description="Tokens per second after the first.")


class Infill(StrictModel):
    """The text for the gap. Events of a stream have the text piece by piece; the last event has all other fields.

    With `response_fields`, only those fields.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int | float] = Field(init=False)

    index: Annotated[Literal[0] | None, Field(description="Always 0.")] = None
    content: str | None = optional("The generated text.")
    tokens: list[int] | None = optional("Ids of the generated tokens, if requested, else empty.")
    id_slot: Annotated[Literal[0] | None, Field(description="Always 0.")] = None
    stop: bool | None = optional("Whether the answer has ended.")
    model: str | None = optional("Name of the model.")
    tokens_predicted: int | None = optional("Number of generated tokens.")
    tokens_evaluated: int | None = optional("Number of prompt tokens.")
    tokens_cached: int | None = optional("Number of prompt tokens found in the cache.")
    has_new_line: bool | None = optional("Whether the text contains a line break.")
    truncated: bool | None = optional("Whether parts of the request did not fit into the context.")
    stop_type: Literal["eos", "word", "limit"] | None = optional(
        "What ended the answer: the model (`eos`), a stop string (`word`), or a limit of tokens, "
        "time or indentation (`limit`)."
    )
    stopping_word: str | None = optional("Stop string that ended the answer, else empty.")
    timings: InfillTimings | None = optional("Durations.")
    rotary: RotaryField = None


class InfillEvent(RootModel[Infill | ErrorAnswer]):
    """JSON of a stream event: a piece of the answer, or the error that ended the stream."""
