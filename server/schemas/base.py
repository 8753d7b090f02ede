"""Base of request and response models: strict types, unknown fields, and types of fields that several models share."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, from_json

from windlass.engine.errors import did_you_mean, nearest
from windlass.engine.rotary.rotary_policy import ROPE_UPDATES, RopeUpdate
from windlass.server.config.settings import UnknownFields

_SCALING = "it is rope_scaling here, an object such as {'rope_type': 'linear', 'factor': 4}"

# Hints by unknown field, of all endpoints that generate.
UNKNOWN_FIELD_HINTS: dict[str, str] = {
    "n_keep": "it is called keep_tokens here",
    "num_keep": "it is called keep_tokens here",
    "rope_freq_scale": _SCALING,
    "rope_freq_base": "it is rope_scaling here, an object such as {'rope_type': 'default', 'rope_theta': 1000000}",
    "repeat_penalty": "it is called repetition_penalty here",
    "repeat_last_n": "repetition_penalty covers the prompt and the answer here: remove it",
    "options": "its members are fields of the request itself here",
    "thinking_token_budget": "it is called thinking_budget here",
}

# Values by unsupported field that have no effect and are accepted. Other values are refused.
NEUTRAL_VALUES: Mapping[str, Any] = {
    # vLLM
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "include_reasoning": True,
    "documents": [],
    "logits_processors": [],
    # llama.cpp
    "mirostat": 0,
    "tfs_z": 1.0,
    "dynatemp_range": 0.0,
    "top_n_sigma": -1.0,
    "n_probs": 0,
}

# Fields of requests that other services define and that change no answer of this server, with their definers. They are accepted
# and named in the header `IGNORED_HEADER`.
IGNORED_FIELDS: Mapping[str, str] = {
    name: definer
    for definer, names in {
        "OpenAI": "audio client_metadata max_tool_calls metadata prediction prompt_cache_key prompt_cache_options "
        "prompt_cache_retention safety_identifier service_tier store user verbosity web_search_options",
        "Anthropic": "billing_policy cache_control diagnostics fallback_credit_token inference_geo speed user_profile_id "
        "workspace_id",
        "vLLM": "data_parallel_rank kv_transfer_params media_io_kwargs mm_processor_kwargs vllm_xargs",
        "llama.cpp": "cache_prompt dynatemp_exponent id_slot min_keep mirostat_eta mirostat_tau n_discard parse_tool_calls "
        "post_sampling_probs reasoning_format return_progress speculative.n_max speculative.n_min speculative.p_min "
        "t_max_prompt_ms thinking_forced_open timings_per_token",
        "Ollama": "keep_alive low_vram main_gpu num_batch num_ctx num_gpu num_thread numa think use_mlock use_mmap",
    }.items()
    for name in names.split()
}
IGNORED_HEADER = "x-windlass-ignored"
MAX_REPORTED = 32  # names in that header
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_FREE_FORM = 100_000  # values inside free-form JSON
MAX_NAME = 64  # characters of an unknown field's name in an error
MAX_BREAKERS, MAX_BREAKER_CHARS = 32, 40
MAX_STOPS, MAX_STOP_CHARS = 64, 256
_TOKEN = {"type": "integer", "minimum": 0}
HOSTED_TAG = "[hosted]"
OTHER_TAG = "[other]"  # tags have brackets, by which errors omit them from field paths


def optional(description: str, **more: Any) -> Any:
    """A field that may be absent, which counts as null. more: of pydantic's `Field`."""
    return Field(default=None, description=description, **more)


def is_neutral(value: Any, neutral: Any) -> bool:
    """Whether a value equals the neutral one: 1 equals 1.0, but 1 does not equal true."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


@dataclass(slots=True)
class FieldReport:
    """Context of a validation. Names of fields without effect are collected in `ignored`, and unknown ones also in `unknown`.

    unknown_fields: whether unknown fields are refused.
    """

    unknown_fields: UnknownFields = "refuse"
    ignored: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)

    def add(self, name: str, *, unknown: bool = False) -> None:
        """Add a name, if there are not too many."""
        for names in (self.ignored, self.unknown) if unknown else (self.ignored,):
            if len(names) < MAX_REPORTED:
                names[name[:MAX_NAME]] = None


class StrictModel(BaseModel):
    """A JSON object. Unknown fields are refused by name, types are not coerced, and null counts as absent.

    The context of a validation may be a `FieldReport`, which may accept unknown fields.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    hints: ClassVar[dict[str, str]] = {}  # hints by unknown field
    ignored: ClassVar[Set[str]] = frozenset()  # fields that are accepted without effect
    reports_ignored: ClassVar[bool] = False  # whether these are named in the response
    neutral: ClassVar[Mapping[str, Any]] = {}  # fields that are accepted without effect if they have this value

    def json_bytes(self) -> bytes:
        """JSON text without the fields that were not set."""
        return self.model_dump_json(exclude_unset=True).encode()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any, info: ValidationInfo) -> Any:
        # Only one error, not one per field: a body may have a million fields.
        if isinstance(data, dict):
            known = cls.model_fields
            report = info.context if isinstance(info.context, FieldReport) else None
            dropped = set()
            for name, value in data.items():
                if value is None:
                    if name not in known or not known[name].is_required():
                        dropped.add(name)
                elif name not in known:
                    if name in cls.ignored:
                        dropped.add(name)
                        if cls.reports_ignored and report is not None:
                            report.add(name)
                        continue
                    if name in cls.neutral and is_neutral(value, cls.neutral[name]):
                        dropped.add(name)
                        continue
                    if report is not None and report.unknown_fields != "refuse":
                        dropped.add(name)
                        report.add(name, unknown=True)
                        continue
                    hint = cls.hints.get(name)
                    if hint is None:
                        meant = nearest(name, known)
                        hint = "remove it" if meant is None else f"did you mean {meant!r}?"
                    raise PydanticCustomError(
                        "unknown_field", "unknown field: {hint}", {"name": name[:MAX_NAME], "hint": hint}
                    )
            if dropped:
                return {name: value for name, value in data.items() if name not in dropped}
        return data


class RequestModel(StrictModel):
    """A request, which may have the fields of other services in `IGNORED_FIELDS`."""

    ignored: ClassVar[Set[str]] = IGNORED_FIELDS.keys()
    reports_ignored: ClassVar[bool] = True

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).setdefault("properties", {})
        for name in sorted(cls.ignored):
            properties.setdefault(
                name, {"description": f"Field of {IGNORED_FIELDS.get(name, 'Anthropic')}, accepted without effect."}
            )
        return described


@dataclass(frozen=True, slots=True)
class AcceptsString(BeforeValidator):
    """A validator that also accepts a string, as the OpenAPI document states."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """An object without its null values, which count as absent."""
    return {name: item for name, item in value.items() if item is not None}


def _list_from_string(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_bias(value: Any) -> Any:
    """Parse `{"id": bias}` with decimal ids, at most 1,024 of them."""
    if not isinstance(value, dict):
        return value
    if len(value) > 1024:
        raise PydanticCustomError(
            "too_many", "logit_bias may have at most 1024 entries, got {count}", {"count": len(value)}
        )
    result: dict[int, Any] = {}
    for key, bias in without_nulls(value).items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise PydanticCustomError(
                "token_id", "keys are token ids written in decimal, got '{key}'", {"key": key[:MAX_NAME]}
            )
        result[int(key)] = bias
    return result


def check_free_form(value: Any, *, numbers: bool = True) -> Any:
    """Refuse free-form JSON with too many values, infinities, or integers of more than 64 bits.

    numbers: whether numbers are checked.
    """
    stack = [value]
    count = 0
    while stack:
        item = stack.pop()
        count += 1
        if count + len(stack) > MAX_FREE_FORM:
            raise PydanticCustomError("too_many", "holds more than {most} values", {"most": MAX_FREE_FORM})
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif numbers and isinstance(item, float) and not -1e300 < item < 1e300:
            raise PydanticCustomError("number", "contains a number that is not finite")
        elif numbers and isinstance(item, int) and abs(item) > INT64_MAX:
            raise PydanticCustomError("number", "contains an integer of more than 64 bits")
    return value


def _rope_scaling(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise PydanticCustomError(
            "type", 'should be an object such as {"rope_type": "yarn", "factor": 4}, "yarn 4", or the name of a profile'
        )
    if isinstance(value, dict):
        groups = {name: without_nulls(part) if isinstance(part, dict) else part for name, part in value.items()}
        value = without_nulls(groups)
    return check_free_form(value, numbers=False)  # the parser of the scaling names the field at fault


def _rope_update(value: Any) -> Any:
    if value is None or isinstance(value, dict):
        return value
    if not isinstance(value, str) or value not in ROPE_UPDATES:
        *others, last = map(repr, ROPE_UPDATES)
        raise PydanticCustomError(
            "type",
            "should be {allowed}{meant}",
            {
                "allowed": f"{', '.join(others)} or {last}, or an object {{'policy': …, 'exact': …}}",
                "meant": did_you_mean(value, ROPE_UPDATES),
            },
        )
    return {"policy": value}


def _breakers_from_string(value: Any) -> Any:
    """A list, or JSON strings separated by commas, as oobabooga writes it."""
    if not isinstance(value, str):
        return value
    try:
        if len(value) > MAX_BREAKERS * 6 * MAX_BREAKER_CHARS:
            raise ValueError
        return from_json(value if value.lstrip().startswith("[") else f"[{value}]")
    except ValueError:
        raise PydanticCustomError(
            "type", 'should be a list of strings, or JSON strings separated by commas such as "\\n", ":"'
        ) from None


SequenceBreakers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)]],
    Field(max_length=MAX_BREAKERS, fail_fast=True),
    AcceptsString(_breakers_from_string),
]

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
FreeForm = Annotated[dict[str, Any], BeforeValidator(check_free_form)]

RequestedModel = Annotated[
    str | None, Field(description="Name of the served model or of one of its adapters. Default: the served model.")
]

AddSpecialTokens = Annotated[
    bool | None,
    Field(
        description="Whether special tokens, such as the beginning-of-sequence token, are added. "
        "Default: true for a text, false for a chat."
    ),
]

TemplateVariables = Annotated[
    FreeForm | None,
    Field(
        description="Variables of the chat template, at most 100,000 values, which override the operator's. "
        "`messages`, `tools` and `add_generation_prompt` are not allowed."
    ),
]

StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    AcceptsString(_list_from_string),
]

StopField = Annotated[
    StopStrings | None,
    Field(
        description="Strings that end the answer and may contain special tokens. Thinking is not searched. Default: none."
    ),
]


def _check_prompt_shape(value: Any) -> Any:
    """Check the outer shape only. The contents of long lists are checked after their length."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("type", "should be a string, a list of strings, token ids or lists of token ids")
    if not value:
        raise PydanticCustomError("empty", "should not be an empty list")
    if not isinstance(value[0], str | list | int) or isinstance(value[0], bool):
        raise PydanticCustomError("type", "should contain strings, token ids or lists of token ids")
    return value


TextsOrTokens = Annotated[
    Any,
    AfterValidator(_check_prompt_shape),
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

LogitBias = Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_token_bias)]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/-]{1,128}$")]


class RopeUpdateObject(StrictModel):
    """Update policy of cached keys."""

    policy: RopeUpdate = Field(
        description="Cached keys keep their frequencies (`frozen`), are computed again (`recompute`) or rotated (`rotate`)."
    )
    exact: bool | None = optional(
        "With `recompute`: frequencies follow every token instead of steps. The operator must allow it. Default: false."
    )

    @field_validator("exact")
    @classmethod
    def _exact_recomputes(cls, exact: bool | None, info: ValidationInfo) -> bool | None:
        if exact and info.data.get("policy", "recompute") != "recompute":  # an invalid policy has its own error
            raise PydanticCustomError("exact", "requires the policy 'recompute': leave it out")
        return exact


RopeScalingField = Annotated[
    Any,
    BeforeValidator(_rope_scaling, json_schema_input_type=dict[str, Any] | str | None),
    Field(
        description='Rotary scaling: an object such as `{"rope_type": "yarn", "factor": 4}`, its short form `yarn 4`, the '
        "name of a profile, or `auto` (the smallest scaling that the length needs). Default: the server's."
    ),
]

_RopeUpdate = Annotated[
    RopeUpdateObject, BeforeValidator(_rope_update, json_schema_input_type=RopeUpdate | RopeUpdateObject)
]

RopeUpdateField = Annotated[
    _RopeUpdate | None,
    Field(
        description="Policy for cached keys when the text grows into other frequencies. Default: the server's, else "
        "that of the scaling."
    ),
]


class EngineRequestFields(RequestModel):
    """Fields of every request that computes prompts. None means that the field was not given."""

    model: RequestedModel = None
    add_special_tokens: AddSpecialTokens = None
    rope_scaling: RopeScalingField = None
    rope_update: RopeUpdateField = None
    attention_window: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Number of most recent tokens that each token attends to, itself included. Default: the "
        "model's `context.attention_window`, else all."
    )
    attention_sinks: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "With `attention_window`: number of leading tokens that each token also attends to. "
        "Default: the model's `context.attention_sinks`, else 0."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = optional(
        "Cached blocks are shared only among requests with equal salts (and, in general, the same API "
        "key). Default: none."
    )
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = optional(
        "Scheduling priority. Lower numbers run first and are preempted last. Default: that of the API key, else 0."
    )
    timeout: Annotated[float, Field(gt=0, le=604800)] | None = optional(
        "Seconds after arrival at which the request fails with status 504, or a stream with an error "
        "event. Default: the server's."
    )
    request_id: RequestId | None = optional(
        "Id of the request, instead of the header `X-Request-Id`; part of the answer's `id`. Default: a random one."
    )


def discriminate_by_type(
    known: Collection[str],
    default: Callable[[dict[str, Any]], str] | None = None,
    *,
    hosted: re.Pattern[str] | None = None,
) -> Discriminator:
    """Discriminator by `type`, whose tags are "[type]", HOSTED_TAG or OTHER_TAG.

    default: type of an object without one. hosted: types with HOSTED_TAG.
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind is None and default is not None and isinstance(value, dict):
            kind = default(value)
        if not isinstance(kind, str):
            return OTHER_TAG
        if kind in known:
            return f"[{kind}]"
        return HOSTED_TAG if hosted is not None and hosted.fullmatch(kind[:MAX_NAME]) else OTHER_TAG

    return Discriminator(tag)


class UnsupportedKind(BaseModel):
    """An object of any other kind, which is always refused.

    kind_plural: noun in the error, such as "items". supported_kinds: the supported ones.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    kind_plural: ClassVar[str]
    supported_kinds: ClassVar[str]

    type: Any

    @field_validator("type")
    @classmethod
    def _refuse(cls, kind: Any) -> Any:
        shown = repr(kind[:MAX_NAME]) if isinstance(kind, str) else "this"
        raise PydanticCustomError(
            "unsupported_field",
            "{shown} is not among the {what} that are supported: {instead}",
            {"shown": shown, "what": cls.kind_plural, "instead": cls.supported_kinds},
        )


class OmittedPart(BaseModel):
    """A part of the result of a call that is not text. The model sees a note instead."""

    type: str = Field(description="Kind of the part.")

    @property
    def text(self) -> str:
        """The note."""
        return omitted_part_note(self.type)


def omitted_part_note(kind: str) -> str:
    """Text in place of a part of a result that is not text."""
    return f"[{kind} omitted: this model reads only text]"


def text_or_parts(kind: str) -> AcceptsString:
    """A list of parts, or a string, which becomes one part of this kind."""
    return AcceptsString(lambda value: [{"type": kind, "text": value}] if isinstance(value, str) else value)
