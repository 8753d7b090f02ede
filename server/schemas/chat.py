"""Request and response of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, RootModel
from pydantic_core import PydanticCustomError

from windlass.server.schemas.base import INT32_MAX, MAX_NAME, StrictModel, TemplateVariables, without_nulls
from windlass.server.schemas.generation import GenerationRequest, only_empty, unsupported_field
from windlass.server.schemas.response_parts import (
    ErrorAnswer,
    GenerationEnvelope,
    PromptLogprobs,
    PromptTokenIds,
    RotaryField,
    StopReasonField,
    TokenIds,
    Usage,
)
from windlass.server.schemas.tools import (
    PROVIDER_FIELDS,
    AnsweredCall,
    AnsweredFunction,
    CallDelta,
    FunctionChoice,
    FunctionDelta,
    Functions,
    MadeFunctionCall,
    MadeToolCall,
    ToolChoice,
    Tools,
)

MAX_MESSAGES = 16384

MAX_CALLS = 128  # in one message

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# What clients keep in histories for themselves, and caches of other servers.
_BOOKKEEPING = frozenset({"cache_control", "id", "timestamp", "weight"})

# Clients that make parts of an answer copy into them what stood beside its text.
_PART_BOOKKEEPING = _BOOKKEEPING | {"name", "prompt_cache_breakpoint", "role", "annotations", "logprobs", "parsed"}


def _text_content(value: Any) -> str | None:
    """Text of a message: a string, or OpenAI's list of text parts (joined by line breaks)."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("type", "should be a string or a list of text parts")
    return "\n".join(_part_text(number, part) for number, part in enumerate(value))


def _part_text(number: int, part: Any) -> str:
    """The text of a part. A refusal is what another model said in place of an answer; it counts as text."""
    known = without_nulls(part) if isinstance(part, dict) else {}
    kind = "refusal" if known.get("type") == "refusal" else "text"
    text = known.get(kind)
    if known.get("type") != kind or not isinstance(text, str):
        raise PydanticCustomError(
            "type",
            "part {number} should be {'type': 'text', 'text': '…'}: only text is supported",
            {"number": number},
        )
    for name in known:
        if name not in _PART_BOOKKEEPING and name not in ("type", kind):
            raise PydanticCustomError(
                "type",
                "part {number} has the unknown field '{name}': remove it",
                {"number": number, "name": name[:MAX_NAME]},
            )
    return text


def _part_schema(kind: str, what: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "type": {"const": kind, "description": "The kind of the part."},
            kind: {"type": "string", "description": what},
        },
        "required": ["type", kind],
    }


_PART = {
    "anyOf": [
        _part_schema("text", "Its text."),
        _part_schema("refusal", "What a model said in place of an answer; it counts as text."),
    ]
}


class ChatMessage(StrictModel):
    """One turn. Fields that clients copy from an earlier answer are accepted where they are empty.

    `type` may say "text" or "message", as some clients send it; it has no effect. Neither have `cache_control`, `id`,
    `timestamp` and `weight`, which clients keep in histories, `parsed`, which the openai package adds, and
    `provider_specific_fields`, which litellm does.
    """

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING | {"parsed", PROVIDER_FIELDS}

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        Any,
        AfterValidator(_text_content),
        Field(
            json_schema_extra={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": _PART},
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[MadeToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    type: Literal["text", "message"] | None = None
    refusal: Annotated[str | None, only_empty("refusal is")] = None
    annotations: Annotated[list[Any] | None, only_empty("annotations are")] = None
    audio: Annotated[Any, only_empty("audio is")] = None
    images: Annotated[Any, only_empty("images are")] = None
    thinking_blocks: Annotated[Any, only_empty("thinking_blocks are")] = None
    reasoning_details: Annotated[Any, only_empty("reasoning_details are")] = None
    function_call: MadeFunctionCall | None = None


def _modalities(value: Any) -> Any:
    if value and value != ["text"]:
        raise unsupported_field("any modality but ['text'] is")
    return value


_Modalities = Annotated[Any, AfterValidator(_modalities), Field(json_schema_extra={"enum": [None, [], ["text"]]})]


class ChatRequest(GenerationRequest):
    """`messages` go through the model's chat template; `chat_template_kwargs` are further variables for it.

    `functions` and `function_call` are the older names of `tools` and `tool_choice`; answers have the older form then.
    """

    hints: ClassVar[dict[str, str]] = GenerationRequest.hints | {
        "prompt": "it belongs to /v1/completions; this is /v1/chat/completions, which takes messages",
        "echo": "it belongs to /v1/completions",
        "suffix": "it belongs to /v1/completions",
        "chat_template": "templates come from the model or the operator, never from a request",
        "n_probs": "ask for logprobs and top_logprobs here",
    }

    # A prediction makes answers quicker at OpenAI, and changes none.
    ignored: ClassVar[frozenset[str]] = GenerationRequest.ignored | {"prediction"}

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Effort | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: FunctionChoice = None
    modalities: _Modalities = None


class ChatTopLogprob(StrictModel):
    """`bytes`: the token's own UTF-8 bytes, as one character may be split over tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    """A generated token and its most likely alternatives."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(StrictModel):
    """One entry per generated token."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatAnswer(StrictModel):
    """The assistant's turn. `reasoning`: `reasoning_content` by another name."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnsweredCall] | None = None
    function_call: AnsweredFunction | None = None


ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(StrictModel):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReasonField
    token_ids: TokenIds = None
    rotary: RotaryField = None


class ChatCompletion(GenerationEnvelope):
    """The answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None
    rotary: RotaryField = None


class ChatDelta(StrictModel):
    """What a chunk adds to the assistant's turn; only the first one of an answer has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChatChunkChoice(StrictModel):
    """A piece of one answer; its last one says how it ended."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReasonField = None
    token_ids: TokenIds = None


class ChatChunk(GenerationEnvelope):
    """A chunk of a stream. `usage`: where `stream_options` asks for it, else absent."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None
    rotary: RotaryField = None


class ChatEvent(RootModel[ChatChunk | ErrorAnswer]):
    """The JSON of an event of a stream: a chunk, or the error that ended it. The last event is `[DONE]`."""
