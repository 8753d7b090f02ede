"""Fields that all generating endpoints share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from windlass.engine.interface.request import MAX_REPEAT_WINDOW
from windlass.server.schemas.base import (
    INT32_MAX,
    INT64_MAX,
    NEUTRAL_VALUES,
    UNKNOWN_FIELD_HINTS,
    EngineRequestFields,
    LogitBias,
    SequenceBreakers,
    StopStrings,
    StrictModel,
    TokenId,
    without_nulls,
)

# OpenAI's settings of its own prompt cache
PROMPT_CACHE_FIELDS = frozenset({"prompt_cache_retention", "prompt_cache_options"})


def unsupported_field(what: str, details: dict[str, Any] | None = None) -> PydanticCustomError:
    context = {"what": what} if details is None else {"what": what, "details": details}
    return PydanticCustomError("unsupported_field", "{what} not supported by this server: leave it out", context)


def _reject_zero_top_p(value: Any) -> Any:
    if type(value) in (int, float) and value == 0:  # as some write it who want no chance
        advice = "for the likeliest token alone set temperature to 0"
        raise PydanticCustomError("no_share", "should be greater than 0: {advice}", {"advice": advice})
    return value


@dataclass(frozen=True, slots=True)
class _OnlyEmpty(AfterValidator):
    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "enum": [None, False, "", [], {}]}


def only_empty(what: str, details: dict[str, Any] | None = None) -> AfterValidator:
    """A field that is accepted when it asks for nothing (null, false, 0, "", [], {} or an object of nulls).

    details: of the error, as `ApiError` has them.
    """

    def check(value: Any) -> Any:
        given = without_nulls(value) if isinstance(value, dict) else value
        if given is not None and given not in (False, "", [], {}):
            raise unsupported_field(what, details)
        return value

    return _OnlyEmpty(check)


def _response_format(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("type", "should be an object such as {'type': 'text'}")
    return value


class StreamOptions(StrictModel):
    """`include_usage`: a last chunk with usage. `continuous_usage_stats`: with it, running usage on every chunk.

    `include_obfuscation` has no effect: chunks are never padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class PassageSpan(StrictModel):
    """Tokens start to end - 1 of a prompt."""

    start: Annotated[int, Field(ge=0, le=INT32_MAX, description="Its first token, counted from 0.")]
    end: Annotated[int, Field(ge=1, le=INT32_MAX, description="The token behind its last one.")]


class SharedRequest(EngineRequestFields):
    """Sampling, serving and bookkeeping fields of every endpoint that generates. None always means "not given"."""

    hints: ClassVar[dict[str, str]] = UNKNOWN_FIELD_HINTS
    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_VALUES

    # OpenAI's own
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, BeforeValidator(_reject_zero_top_p), Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None

    # Sampling beyond OpenAI
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=MAX_REPEAT_WINDOW)] | None = None
    dry_sequence_breakers: SequenceBreakers | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=1024, fail_fast=True)]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=2**18, fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    # The form of the answer: one of these
    structured_outputs: Annotated[
        dict[str, Any] | None,
        Field(
            description="One of `json` (a schema), `json_object`, `regex`, `choice` (a list) and `grammar` (Lark or GBNF)."
        ),
    ] = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    # What is longer than the context
    context_overflow: Annotated[
        Literal["error", "stop", "shift", "drop_turns"] | None,
        Field(
            description="What is done where prompt and answer are longer than the context: the request is refused (`error`), the "
            "answer ends there (`stop`), the oldest tokens are dropped and it goes on (`shift`), or a chat's oldest turns are "
            "left out (`drop_turns`). Default: the model's `context.context_overflow`."
        ),
    ] = None
    keep_tokens: Annotated[
        Annotated[int, Field(ge=0, le=INT32_MAX)] | None,
        Field(
            description="With `shift`: leading tokens that are never dropped, rounded up to whole blocks; at least two blocks "
            "must be left. Default: the model's `context.keep_tokens`, else a chat's system prompt, else 16."
        ),
    ] = None

    # What is taken from the cache wherever it stood
    cache_reuse: Annotated[
        Annotated[int, Field(ge=0, le=INT32_MAX)] | None,
        Field(
            description="Cached passages of at least so many tokens, 32 or more, are taken wherever they stand in the prompt and "
            "whatever stood before them: quicker, and not the same as computing them. 0: none. Default: the model's "
            "`context.cache_reuse`."
        ),
    ] = None
    passages: Annotated[
        Annotated[list[PassageSpan], Field(min_length=1, max_length=64, fail_fast=True)] | None,
        Field(
            description="Spans of the prompt that are looked for as they are, in place of a search of all of it; completions "
            "only. They may not overlap."
        ),
    ] = None
    cache_reuse_recompute: Annotated[
        Annotated[float, Field(ge=0, le=INT32_MAX)] | None,
        Field(
            description="With `cache_reuse` or `passages`: how much of the head of each passage is computed anew, as a share "
            "below 1 or in tokens. Default: 0.15."
        ),
    ] = None

    service_tier: str | None = None


class GenerationRequest(SharedRequest):
    """What only completions and chats have: OpenAI's older names, several answers at once, and what answers show."""

    hints: ClassVar[dict[str, str]] = UNKNOWN_FIELD_HINTS | {
        "n_predict": "it is called max_tokens here",
        "num_predict": "it is called max_tokens here",
    }
    ignored: ClassVar[frozenset[str]] = PROMPT_CACHE_FIELDS

    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    best_of: Annotated[int, Field(ge=1, le=64)] | None = None
    stream_options: StreamOptions | None = None
    stop: StopStrings | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Annotated[
        dict[str, Any] | None,
        AfterValidator(_response_format),
        Field(
            description="`{type: text}`, `{type: json_object}` or `{type: json_schema, json_schema: {name, schema}}`."
        ),
    ] = None

    # OpenAI's bookkeeping: accepted, without effect
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    verbosity: str | None = None
