"""Requests and responses of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, RootModel, ValidationInfo
from pydantic_core import PydanticCustomError

from windlass.server.schemas.base import (
    INT32_MAX,
    MAX_NAME,
    StrictModel,
    TemplateVariables,
    omitted_part_note,
    optional,
    without_nulls,
)
from windlass.server.schemas.generation import GenerationRequest, only_empty, unsupported_field
from windlass.server.schemas.response_parts import (
    ErrorAnswer,
    GenerationEnvelope,
    PromptLogprobs,
    PromptProgressField,
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

# Fields that clients store in histories, and cache options of other servers.
_BOOKKEEPING = frozenset({"cache_control", "id", "timestamp", "weight"})

# Clients that turn an answer into parts copy its other fields into them.
_PART_BOOKKEEPING = _BOOKKEEPING | {"name", "prompt_cache_breakpoint", "role", "annotations", "logprobs", "parsed"}


# Parts that are not text, which the results of calls may have.
_OMITTED = {"image_url": "image", "image": "image", "input_audio": "audio", "file": "file"}


def _text_content(value: Any, info: ValidationInfo) -> str | None:
    """Text of a message: a string, or OpenAI's list of text parts, joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("type", "should be a string or a list of text parts")
    is_result = info.data.get("role") in ("tool", "function")
    return "\n".join(_part_text(number, part, is_result) for number, part in enumerate(value))


def _part_text(number: int, part: Any, is_result: bool) -> str:
    """Text of a part. The refusal of another model counts as text. is_result: the message is the result of a call."""
    known = without_nulls(part) if isinstance(part, dict) else {}
    if is_result and isinstance(kind := known.get("type"), str) and kind in _OMITTED:
        return omitted_part_note(_OMITTED[kind])
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
            "type": {"const": kind, "description": "Kind of the part."},
            kind: {"type": "string", "description": what},
        },
        "required": ["type", kind],
    }


_PART = {
    "anyOf": [
        _part_schema("text", "The text."),
        _part_schema("refusal", "Refusal of a model, which counts as text."),
        {
            "type": "object",
            "properties": {"type": {"enum": list(_OMITTED), "description": "Only in results of calls."}},
            "required": ["type"],
        },
    ]
}


class ChatMessage(StrictModel):
    """One turn of a conversation. Fields that clients copy from earlier answers are accepted if they are empty.

    `cache_control`, `id`, `timestamp`, `weight`, `parsed` and `provider_specific_fields` are accepted without effect.
    """

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING | {"parsed", PROVIDER_FIELDS}

    role: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="Author of the message.")
    content: Annotated[
        Any,
        AfterValidator(_text_content),
        Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}),
    ] = optional("A text or text parts. In results of calls, the model sees a note in place of other parts.")
    name: Annotated[str, Field(max_length=256)] | None = optional(
        "Name of the participant, for templates that show it."
    )
    tool_calls: Annotated[list[MadeToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = optional(
        "Calls that the assistant made in this turn."
    )
    tool_call_id: Annotated[str, Field(max_length=256)] | None = optional(
        "In a message of role `tool`: id of the call whose result this is."
    )
    reasoning_content: str | None = optional("Thinking of the assistant in this turn.")
    reasoning: str | None = optional("Other name of `reasoning_content`.")
    type: Literal["text", "message"] | None = optional("No effect.")
    refusal: Annotated[str | None, only_empty("refusal is")] = optional("Copied from earlier answers.")
    annotations: Annotated[list[Any] | None, only_empty("annotations are")] = optional("Copied from earlier answers.")
    audio: Annotated[Any, only_empty("audio is")] = optional("Copied from earlier answers.")
    images: Annotated[Any, only_empty("images are")] = optional("Copied from earlier answers.")
    thinking_blocks: Annotated[Any, only_empty("thinking_blocks are")] = optional("Copied from earlier answers.")
    reasoning_details: Annotated[Any, only_empty("reasoning_details are")] = optional("Copied from earlier answers.")
    function_call: MadeFunctionCall | None = optional("The call, in the older form that `functions` requests.")


def _modalities(value: Any) -> Any:
    if value and value != ["text"]:
        raise unsupported_field("any modality but ['text'] is")
    return value


class ChatRequest(GenerationRequest):
    """A conversation, rendered by the model's chat template.

    If the request uses `functions` or `function_call`, answers have the older form of calls.
    """

    hints: ClassVar[dict[str, str]] = GenerationRequest.hints | {
        "prompt": "it belongs to /v1/completions; this is /v1/chat/completions, which takes messages",
        "echo": "it belongs to /v1/completions",
        "suffix": "it belongs to /v1/completions",
        "chat_template": "templates come from the model or the operator, never from a request",
        "n_probs": "ask for logprobs and top_logprobs here",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="Turns of the conversation, oldest first."
    )
    logprobs: bool | None = optional("Whether log-probabilities of the generated tokens are returned. Default: false.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = optional(
        "Alternatives per token whose log-probabilities are returned. Default: 0."
    )
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Effort | None = optional(
        "Amount of thinking, if the chat template supports the choice. Default: the template's."
    )
    thinking_budget: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "Maximum number of thinking tokens. Default: unlimited."
    )
    add_generation_prompt: bool | None = optional("Whether the template opens the assistant's turn. Default: true.")
    continue_final_message: bool | None = optional(
        "Whether the answer continues the last message, which must be the assistant's. Excludes "
        "`add_generation_prompt`. Default: false."
    )
    tools: Tools | None = optional("Functions that the model may call. Default: none.")
    tool_choice: ToolChoice = optional(
        "Whether the model may or must call functions. Default: `auto` if there are tools, else `none`."
    )
    parallel_tool_calls: bool | None = optional("Whether the model may make several calls in one turn. Default: true.")
    functions: Functions | None = optional("Older form of `tools`.")
    function_call: FunctionChoice = optional("Older form of `tool_choice`.")
    modalities: Annotated[Any, AfterValidator(_modalities)] = optional(
        "No effect: answers are text.", json_schema_extra={"enum": [None, [], ["text"]]}
    )


class ChatTopLogprob(StrictModel):
    """A token and its log-probability."""

    token: str = Field(description="Text of the token.")
    logprob: float = Field(description="Log-probability of the token.")
    bytes: list[int] | None = Field(
        description="UTF-8 bytes of the token. One character may be split over several tokens."
    )


class ChatTokenLogprob(ChatTopLogprob):
    """A generated token and its most likely alternatives."""

    top_logprobs: list[ChatTopLogprob] = Field(description="Most likely tokens at this position, most likely first.")


class ChatLogprobs(StrictModel):
    """Log-probabilities of an answer."""

    content: list[ChatTokenLogprob] = Field(description="One entry per generated token.")
    refusal: None = Field(description="Always null.")


class ChatAnswer(StrictModel):
    """Message of the assistant in an answer."""

    role: Literal["assistant"] = Field(description="Author of the message.")
    content: str | None = Field(description="The text. Null if there are calls and no text.")
    refusal: str | None = Field(description="Always null.")
    reasoning_content: str | None = optional("Thinking of the model, separate from the content.")
    reasoning: str | None = optional("Other name of `reasoning_content`.")
    tool_calls: list[AnsweredCall] | None = optional("The calls.")
    function_call: AnsweredFunction | None = optional("The call, in the older form that `functions` requests.")


ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(StrictModel):
    """One answer."""

    index: int = Field(description="Index of the answer, from 0.")
    message: ChatAnswer = Field(description="The assistant's message.")
    logprobs: ChatLogprobs | None = Field(description="Log-probabilities of the tokens, if requested, else null.")
    finish_reason: ChatFinishReason = Field(description="Why the answer ended.")
    stop_reason: StopReasonField
    token_ids: TokenIds = None
    rotary: RotaryField = None


class ChatCompletion(GenerationEnvelope):
    """Answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice] = Field(description="The answers.")
    usage: Usage = Field(description="Numbers of tokens.")
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None
    rotary: RotaryField = None


class ChatDelta(StrictModel):
    """Part of the assistant's message that a chunk adds."""

    role: Literal["assistant"] | None = optional("Author of the message. Only in the first chunk of an answer.")
    content: str | None = optional("The added text. Null in the first chunk of an answer that begins with a call.")
    reasoning_content: str | None = optional("Thinking of the model, separate from the content.")
    reasoning: str | None = optional("Other name of `reasoning_content`.")
    tool_calls: list[CallDelta] | None = optional("The calls.")
    function_call: FunctionDelta | None = optional("The call, in the older form that `functions` requests.")


class ChatChunkChoice(StrictModel):
    """A piece of one answer."""

    index: int = Field(description="Index of the answer, from 0.")
    delta: ChatDelta = Field(description="The added part of the message.")
    logprobs: ChatLogprobs | None = Field(description="Log-probabilities of the tokens, if requested, else null.")
    finish_reason: ChatFinishReason | None = Field(description="Why the answer ended. Null before its last chunk.")
    stop_reason: StopReasonField = None
    token_ids: TokenIds = None


class ChatChunk(GenerationEnvelope):
    """A chunk of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(description="Pieces of answers.")
    usage: Usage | None = optional("Numbers of tokens, if `stream_options` requests them. Null in chunks without.")
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None
    prompt_progress: PromptProgressField = None
    rotary: RotaryField = None


class ChatEvent(RootModel[ChatChunk | ErrorAnswer]):
    """JSON of a stream event: a chunk, or the error that ended the stream. The last event is `[DONE]`."""
