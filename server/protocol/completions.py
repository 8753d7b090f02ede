"""Body and answer of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, RootModel
from pydantic_core import PydanticCustomError

from windlass.server.protocol.answers import ErrorAnswer, FinishReason, PromptLogprobs, Rotary, Usage
from windlass.server.protocol.base import StrictModel
from windlass.server.protocol.generation_request import GenerationRequest


def _prompt(value: Any) -> Any:
    """Shape only: what is inside long lists is looked at once their length is known to fit."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("type", "should be a string, a list of strings, token ids or lists of token ids")
    if not value:
        raise PydanticCustomError("empty", "should not be an empty list")
    if not isinstance(value[0], str | list | int) or isinstance(value[0], bool):
        raise PydanticCustomError("type", "should hold strings, token ids or lists of token ids")
    return value


_TOKEN = {"type": "integer", "minimum": 0}


class CompletionRequest(GenerationRequest):
    """`prompt`: a string, a list of strings, token ids, or a list of token-id lists."""

    hints: ClassVar[dict[str, str]] = GenerationRequest.hints | {
        "messages": "it belongs to /v1/chat/completions; this is /v1/completions, which takes prompt",
        "top_logprobs": "it belongs to /v1/chat/completions; here logprobs is the number of alternatives",
        "tools": "it belongs to /v1/chat/completions",
        "n_probs": "it is called logprobs here",
    }

    prompt: Annotated[
        Any,
        AfterValidator(_prompt),
        Field(
            json_schema_extra={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"type": "array", "items": _TOKEN, "minItems": 1},
                    {"type": "array", "items": {"type": "array", "items": _TOKEN, "minItems": 1}, "minItems": 1},
                ]
            }
        ),
    ]
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
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    rotary: Rotary | None = None


class Completion(StrictModel):
    """The answers to all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    rotary: Rotary | None = None


class CompletionChunkChoice(StrictModel):
    """A piece of one answer. Its first one has what was asked of the prompt, its last one how it ended."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunk(StrictModel):
    """A chunk of a stream. `usage`: where `stream_options` asks for it, else absent."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    rotary: Rotary | None = None


class CompletionEvent(RootModel[CompletionChunk | ErrorAnswer]):
    """The JSON of an event of a stream: a chunk, or the error that ended it. The last event is `[DONE]`."""
