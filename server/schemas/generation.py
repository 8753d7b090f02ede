"""Fields of all requests that generate."""

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
    StopField,
    StrictModel,
    TokenId,
    optional,
    without_nulls,
)


def unsupported_field(what: str, details: dict[str, Any] | None = None) -> PydanticCustomError:
    context = {"what": what} if details is None else {"what": what, "details": details}
    return PydanticCustomError("unsupported_field", "{what} not supported by this server: leave it out", context)


def _reject_zero_top_p(value: Any) -> Any:
    if type(value) in (int, float) and value == 0:  # common mistake of clients that want greedy decoding
        advice = "set temperature to 0 for greedy decoding"
        raise PydanticCustomError("no_share", "should be greater than 0: {advice}", {"advice": advice})
    return value


@dataclass(frozen=True, slots=True)
class _OnlyEmpty(AfterValidator):
    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "enum": [None, False, "", [], {}]}


def only_empty(what: str, details: dict[str, Any] | None = None) -> AfterValidator:
    """Validator of an unsupported field, which accepts null, false, 0, "", [], {} and an object of nulls.

    details: of the error, as in `ApiError`.
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
    """Additional contents of a stream."""

    include_usage: bool | None = optional("Whether a last chunk has the token counts. Default: false.")
    continuous_usage_stats: bool | None = optional(
        "With `include_usage`: whether every chunk has the token counts so far. Default: false."
    )
    include_obfuscation: bool | None = optional("No effect.")


class PassageSpan(StrictModel):
    """A span of prompt tokens."""

    start: Annotated[int, Field(ge=0, le=INT32_MAX)] = Field(description="Index of the first token, from 0.")
    end: Annotated[int, Field(ge=1, le=INT32_MAX)] = Field(description="Index after the last token.")


class SharedRequest(EngineRequestFields):
    """Sampling and context fields of every endpoint that generates. None means that the field was not given."""

    hints: ClassVar[dict[str, str]] = UNKNOWN_FIELD_HINTS
    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_VALUES

    # OpenAI's fields
    temperature: Annotated[float, Field(ge=0, le=100)] | None = optional(
        "Sampling temperature. 0, and any value below 0.000001, selects the most likely token. Default: the "
        "model's `sampling_defaults`."
    )
    top_p: Annotated[float, Field(gt=0, le=1), BeforeValidator(_reject_zero_top_p)] | None = optional(
        "Nucleus sampling: only the most likely tokens whose probabilities add up to this value are "
        "sampled. Default: the model's `sampling_defaults`."
    )
    stream: bool | None = optional("Whether the answer is streamed as server-sent events. Default: false.")
    seed: Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)] | None = optional(
        "Seed of the random numbers. Equal requests get equal answers under "
        "`--deterministic` and one `system_fingerprint`. Default: random."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = optional(
        "Subtracted from the logits of tokens that were already generated. Default: 0."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = optional(
        "Subtracted from the logits of generated tokens once for each occurrence. Default: 0."
    )
    logit_bias: LogitBias | None = optional(
        "Values added to logits, by token id in decimal; at most 1,024 entries. Default: none."
    )

    # Further sampling parameters
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = optional(
        "Only this many of the most likely tokens are sampled. 0 or -1: all tokens. Default: the "
        "model's `sampling_defaults`."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = optional(
        "Only tokens with at least this share of the highest probability are sampled. 0: all "
        "tokens. Default: the model's `sampling_defaults`."
    )
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = optional(
        "Locally typical sampling: as `top_p`, with the most typical tokens. 1: all tokens. Default: "
        "the model's `sampling_defaults`."
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = optional(
        "Divides positive logits of tokens that occur in the prompt or the answer, and multiplies negative ones. 1: "
        "off. Default: the model's `sampling_defaults`."
    )
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = optional(
        "Probability, per token, that the most likely choices are excluded (XTC). Default: 0, never."
    )
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = optional(
        "With `xtc_probability`: minimum probability of an excluded choice. The least likely of "
        "these remains. Default: 0.1."
    )
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = optional(
        "Strength of the penalty on repetitions (DRY): a token that would continue an earlier "
        "sequence of `length` tokens loses `dry_multiplier * dry_base ^ (length - dry_allowed_length)`. "
        "Default: 0, off."
    )
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = optional(
        "Growth of the DRY penalty with each further repeated token. Default: 1.75."
    )
    dry_allowed_length: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "Length of a repetition without a DRY penalty, in tokens. Default: 2."
    )
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=MAX_REPEAT_WINDOW)] | None = optional(
        "Number of most recent tokens of prompt and answer that DRY searches. 0: none; -1: up to 32,768. Default: -1."
    )
    dry_sequence_breakers: SequenceBreakers | None = optional(
        "Strings that end a repetition, as a list or as JSON strings separated by commas. Tokens "
        "that contain one are not penalized. `[]`: none. "
        'Default: line break, `:`, `"` and `*`.'
    )
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "Minimum number of generated tokens, at most `max_tokens`. No end-of-sequence or stop token or "
        "stop string ends the answer before. Default: 0."
    )
    ignore_eos: bool | None = optional("Whether generation continues after end-of-sequence tokens. Default: false.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = optional(
        "Ids of tokens that end the answer. Default: none."
    )
    include_stop_str_in_output: bool | None = optional(
        "Whether the answer includes the stop string or token that ended it. Default: false."
    )
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=1024, fail_fast=True)]
        | None
    ) = optional("Texts that the answer never completes, at its start or after a space. Default: none.")
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=2**18, fail_fast=True)] | None = (
        optional("Ids of the only tokens that may be generated. Default: all tokens.")
    )
    skip_special_tokens: bool | None = optional("Whether special tokens are omitted from the text. Default: true.")
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "A longer prompt is truncated to this many tokens. Default: no truncation."
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "End at which a longer prompt is truncated: `left` retains its last tokens, `right` its first. Default: `left`."
    )

    # Structured output: at most one of these
    structured_outputs: dict[str, Any] | None = optional(
        "Form of the answer: one of `json` (a schema), `json_object`, `regex`, `choice` (a list) "
        "and `grammar` (Lark or GBNF). Default: any text."
    )
    guided_json: dict[str, Any] | str | None = optional("Older name of `structured_outputs.json`.")
    guided_regex: str | None = optional("Older name of `structured_outputs.regex`.")
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = optional(
        "Older name of `structured_outputs.choice`."
    )
    guided_grammar: str | None = optional("Older name of `structured_outputs.grammar`.")
    grammar: str | None = optional("llama.cpp's name of `structured_outputs.grammar`.")
    json_schema: dict[str, Any] | None = optional("llama.cpp's name of `structured_outputs.json`.")

    # Context overflow
    context_overflow: Literal["error", "stop", "shift", "drop_turns"] | None = optional(
        "If prompt and answer exceed the context: refuse the request (`error`), end the answer "
        "(`stop`), drop the oldest tokens (`shift`), or drop a chat's oldest turns (`drop_turns`). "
        "Default: the model's `context.context_overflow`."
    )
    keep_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "With `shift`: number of leading tokens that are never dropped, rounded up to entire "
        "blocks; at least two blocks must remain. Default: the model's `context.keep_tokens`, else "
        "a chat's system prompt, else 16."
    )

    # Non-prefix KV reuse
    cache_reuse: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "Shortest cached passage, in tokens (at least 32), that is reused at any position of the "
        "prompt. Reuse is not exact. 0: none. Default: the model's `context.cache_reuse`."
    )
    passages: Annotated[list[PassageSpan], Field(min_length=1, max_length=64, fail_fast=True)] | None = optional(
        "Spans of the prompt, without overlap, to search in the cache. Only for completions. Default: none."
    )
    cache_reuse_recompute: Annotated[float, Field(ge=0, le=INT32_MAX)] | None = optional(
        "With `cache_reuse` or `passages`: part at the start of each passage that is recomputed, as "
        "a share below 1 or in tokens. Default: 0.15."
    )


class GenerationRequest(SharedRequest):
    """Fields of completions and chats: OpenAI's older names, several answers, and additional contents of answers."""

    hints: ClassVar[dict[str, str]] = UNKNOWN_FIELD_HINTS | {
        "n_predict": "it is called max_tokens here",
        "num_predict": "it is called max_tokens here",
        "format": "it is called response_format here",
        "max_new_tokens": "it is called max_tokens here",
        "guided_decoding": "it is called structured_outputs here",
    }

    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "Maximum number of generated tokens; reduced to what the context leaves. 0: only score the "
        "prompt (`echo`, `prompt_logprobs`). Default: 16 for a completion; `--default-max-tokens` for a "
        "chat, else what the context leaves (with `rope_scaling` `auto` at most 4,096)."
    )
    max_completion_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "Newer name of `max_tokens`. If both are given, they must be equal."
    )
    n: Annotated[int, Field(ge=1, le=64)] | None = optional(
        "Number of answers per prompt, which is computed once. Default: 1."
    )
    best_of: Annotated[int, Field(ge=1, le=64)] | None = optional(
        "Answers generated per prompt, of which the `n` with the highest mean log-probability are "
        "returned. More than `n` excludes `stream`. Default: `n`."
    )
    stream_options: StreamOptions | None = optional("Additional contents of a stream.")
    return_progress: bool | None = optional(
        "With `stream`: whether chunks with `prompt_progress` report how much of the prompt is computed, until the "
        "first token. Default: false."
    )
    stop: StopField = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = optional(
        "Alternatives per prompt token whose log-probabilities are returned. 0: only the tokens' "
        "own. Uses no cached prefix. Default: none are returned."
    )
    return_token_ids: bool | None = optional("Whether the answer has the token ids of prompt and text. Default: false.")
    return_tokens_as_token_ids: bool | None = optional(
        "Whether log-probabilities name tokens by id, as in `token_id:17`, instead of by text. Default: false."
    )
    response_format: Annotated[dict[str, Any] | None, AfterValidator(_response_format)] = optional(
        "`{type: text}`, `{type: json_object}` or `{type: json_schema, json_schema: {name, "
        "schema}}`. Default: any text."
    )
