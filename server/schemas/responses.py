"""Requests, responses, items and events of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, RootModel, Tag, ValidationError
from pydantic_core import PydanticCustomError, to_json

from windlass.server.schemas.base import (
    INT32_MAX,
    OTHER_TAG,
    AcceptsString,
    StopStrings,
    StrictModel,
    TemplateVariables,
    UnsupportedKind,
    discriminate_by_type,
    text_or_parts,
    without_nulls,
)
from windlass.server.schemas.chat import ChatTokenLogprob, Effort
from windlass.server.schemas.generation import PROMPT_CACHE_FIELDS, SharedRequest, only_empty
from windlass.server.schemas.response_parts import RotaryField
from windlass.server.schemas.tools import (
    ALLOWED_TOOLS,
    MAX_ARGUMENTS,
    MAX_TOOLS,
    FunctionDefinition,
    OtherTool,
    allowed_names,
    check_arguments,
    check_functions,
)

MAX_ITEMS = 16384

MAX_PARTS = 4096

Id = Annotated[str, Field(max_length=256)]

CallId = Annotated[str, Field(min_length=1, max_length=256)]

INCOMPLETE = "incomplete"

_OUTPUT_ONLY_FIELDS = frozenset({"status", "created_by", "caller"})


class TextPart(StrictModel):
    """Text. What answers have beside it may come back, without effect."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "logprobs", "parsed", "prompt_cache_breakpoint", "cache_control"}
    )

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(StrictModel):
    """What another model said in place of an answer; it counts as text."""

    type: Literal["refusal"]
    refusal: str


_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class _OtherPart(UnsupportedKind):
    kind_plural = "parts"
    supported_kinds = "input_text, output_text and refusal"


Part = Annotated[
    Annotated[TextPart, Tag("[input_text]")]
    | Annotated[TextPart, Tag("[output_text]")]
    | Annotated[TextPart, Tag("[text]")]
    | Annotated[TextPart, Tag("[summary_text]")]
    | Annotated[TextPart, Tag("[reasoning_text]")]
    | Annotated[RefusalPart, Tag("[refusal]")]
    | Annotated[_OtherPart, Tag(OTHER_TAG)],
    discriminate_by_type((*_TEXTS, "refusal")),
]

Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), text_or_parts("input_text")]


def text_of(parts: list[Any]) -> str:
    """The text of parts, which are joined by line breaks as those of a chat's messages are."""
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in parts)


class MessageItem(StrictModel):
    """What somebody said. `content`: a string or parts."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS | {"phase"}

    type: Literal["message"] = "message"
    id: Id | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


def _arguments_text(value: str) -> str:
    """The same as JSON text, as items of answers have it; it is bounded as they are."""
    whole = check_arguments(value)
    return whole if isinstance(whole, str) else str(check_arguments(to_json(whole).decode()))


class CallItem(StrictModel):
    """A call that the assistant made. `arguments`: the JSON text of an object; other text becomes `{"arguments": "the text"}`.
    One that is `incomplete` was cut short; it has no effect, unless there is a result of it.
    """

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS - {"status"} | {"parsed_arguments", "async"}

    type: Literal["function_call"] = "function_call"
    id: Id | None = None
    status: Any = None
    call_id: CallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, AfterValidator(_arguments_text)] = Field(default="", max_length=MAX_ARGUMENTS)
    namespace: Annotated[str | None, only_empty("namespaces are")] = None


class CallOutputItem(StrictModel):
    """The result of a call: a string, or parts of text."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS | {"name", "namespace"}

    type: Literal["function_call_output"] = "function_call_output"
    id: Id | None = None
    call_id: CallId
    output: Parts


class ReasoningItem(StrictModel):
    """The thinking of an earlier turn. `encrypted_content` has no effect: this server encrypts none."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS | {"encrypted_content"}

    type: Literal["reasoning"] = "reasoning"
    id: Id | None = None
    summary: Parts = Field(default_factory=list)
    content: Parts | None = None


class ItemReference(StrictModel):
    """An item of a response that is kept, by its id."""

    type: Literal["item_reference"]
    id: Id


def _kind(item: dict[str, Any]) -> str:
    return "message" if "role" in item else ""


class _OtherItem(UnsupportedKind):
    kind_plural = "items"
    supported_kinds = "message, function_call, function_call_output, reasoning and item_reference"


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem

InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[item_reference]")]
    | Annotated[_OtherItem, Tag(OTHER_TAG)],
    discriminate_by_type(("message", "function_call", "function_call_output", "reasoning", "item_reference"), _kind),
]


def as_items(items: list[InputItem]) -> list[Item]:
    """The same: one of another kind has not been accepted, and what references name stands in their place."""
    return cast(list[Item], items)


_KINDS: dict[str, type[MessageItem] | type[CallItem] | type[ReasoningItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "reasoning": ReasoningItem,
}


def input_items_of_output(output: Sequence[dict[str, Any]]) -> list[Item]:
    """The items of an answer, made into those of a later request's input.

    A call that was cut short is left out, and one that no request could send back: its arguments are too long.
    """
    found = [
        _input_item_of_output(item)
        for item in output
        if item["type"] != "function_call" or item["status"] == "completed"
    ]
    return [item for item in found if item is not None]


def _input_item_of_output(item: dict[str, Any]) -> Item | None:
    try:
        return _KINDS[item["type"]].model_validate(item)
    except ValidationError:
        return None


LOGPROBS = "message.output_text.logprobs"

MAX_METADATA = 16


class FunctionTool(FunctionDefinition):
    """A function on offer, as `/v1/responses` writes it."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "output_schema"})
    # Calls come from the model itself, and their results with a later request.
    neutral: ClassVar[Mapping[str, Any]] = {"allowed_callers": ["direct"], "async": False}
    hints: ClassVar[dict[str, str]] = {
        "function": "name, description and parameters stand beside type here",
        "allowed_callers": "only ['direct'] is supported",
        "async": "only false is supported",
    }

    type: Literal["function"]
    defer_loading: Annotated[bool | None, only_empty("defer_loading is")] = None


_Tool = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[OtherTool, Tag(OTHER_TAG)],
    discriminate_by_type(("function",)),
]


def _check_tools(value: list[FunctionTool]) -> list[FunctionTool]:
    check_functions(value)
    return value


def _check_tool_choice(value: Any) -> Any:
    if value in (None, "none", "auto", "required"):
        return value
    given = without_nulls(value) if isinstance(value, dict) else {}
    if (name := _function_name(given)) is not None:
        return _function_choice(name)
    if given.pop("type", None) == ALLOWED_TOOLS:
        mode, names = allowed_names(given, _function_name)
        return {"type": ALLOWED_TOOLS, "mode": mode, "tools": list(map(_function_choice, names))}
    raise PydanticCustomError(
        "type",
        "should be 'none', 'auto', 'required', {'type': 'function', 'name': '…'} or "
        "{'type': 'allowed_tools', 'mode': '…', 'tools': […]}",
    )


def _function_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


def _function_name(value: Any) -> str | None:
    """The function that {'type': 'function', 'name': '…'} names, None where it is no such object."""
    given = without_nulls(value) if isinstance(value, dict) else {}
    named = given.get("type") == "function" and set(given) == {"type", "name"} and isinstance(given["name"], str)
    return given["name"] if named else None


def _items_from_string(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _limit_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:  # before they are looked at, one by one
        raise PydanticCustomError("too_many", "should have at most {most} entries", {"most": MAX_METADATA})
    return without_nulls(value) if isinstance(value, dict) else value


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        raise PydanticCustomError("too_long", "should have keys of at most 64 characters and values of at most 512")
    return value


class ReasoningChoice(StrictModel):
    """`summary` has no effect: answers have the thinking itself, and no summary of it. Nor have `context` and `mode`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Effort | None = None


class TextConfig(StrictModel):
    """The form of the answer's text. `verbosity` has no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: Annotated[
        dict[str, Any] | None,
        Field(description="`{type: text}`, `{type: json_object}` or `{type: json_schema, name, schema}`."),
    ] = None


class ResponseStreamOptions(StrictModel):
    """`include_obfuscation` has no effect: events are never padded."""

    include_obfuscation: bool | None = None


class ResponseRequest(SharedRequest):
    """`input` behind `instructions` goes through the model's chat template, after the conversation that
    `previous_response_id` names."""

    hints: ClassVar[dict[str, str]] = SharedRequest.hints | {
        "messages": "it belongs to /v1/chat/completions; this is /v1/responses, which takes input",
        "max_tokens": "it is called max_output_tokens here",
        "max_completion_tokens": "it is called max_output_tokens here",
        "response_format": "it is called text.format here",
        "reasoning_effort": "it is called reasoning.effort here",
        "logprobs": f"ask for top_logprobs, or include {LOGPROBS!r}",
        "n": "a response is one answer",
        "n_predict": "it is called max_output_tokens here",
        "num_predict": "it is called max_output_tokens here",
    }
    ignored: ClassVar[frozenset[str]] = PROMPT_CACHE_FIELDS | {"client_metadata", "max_tool_calls", "verbosity"}

    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
        AcceptsString(_items_from_string),
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    stop: StopStrings | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_check_tools)] | None = (
        None
    )
    tool_choice: Annotated[
        Any,
        AfterValidator(_check_tool_choice),
        Field(
            description="`none`, `auto`, `required`, `{type: function, name}` or `{type: allowed_tools, mode, tools}`."
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningChoice | None = None
    include: (
        Annotated[
            list[
                Literal[
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "web_search_call.action.sources",
                    "web_search_call.results",
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                    "file_search_call.results",
                    "message.input_image.image_url",
                ]
            ],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[
            dict[str, str], Field(max_length=MAX_METADATA), BeforeValidator(_limit_entries), AfterValidator(_metadata)
        ]
        | None
    ) = None
    stream_options: ResponseStreamOptions | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    chat_template_kwargs: TemplateVariables = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None

    # What only OpenAI's own service does
    background: Annotated[bool | None, only_empty("background responses are")] = None
    conversation: Annotated[Any, only_empty("conversations are")] = None
    prompt: Annotated[Any, only_empty("stored prompts are")] = None
    context_management: Annotated[Any, only_empty("context_management is")] = None
    moderation: Annotated[Any, only_empty("moderation is")] = None
    access_programs: Annotated[Any, only_empty("access_programs are")] = None


class CountInputRequest(ResponseRequest):
    """What the input of a response comes to in tokens, the chat template's own included. It takes a response's fields; those that
    say nothing of the input have no effect.
    """

    input: Annotated[
        list[InputItem],
        Field(max_length=MAX_ITEMS, fail_fast=True),
        AcceptsString(_items_from_string),
    ] = Field(default_factory=list)


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(StrictModel):
    """Of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: Annotated[int, Field(description="Always 0: no cache is paid for.")]


class OutputTokensDetails(StrictModel):
    """Of the tokens that were generated."""

    reasoning_tokens: int


class ResponseUsage(StrictModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(StrictModel):
    """Text of a message. `logprobs`: of its tokens, where they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0, description="Always empty.")]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(StrictModel):
    """Text of the thinking."""

    type: Literal["reasoning_text"]
    text: str


class _OutputItem(StrictModel):
    id: str
    type: str
    status: ItemStatus


class OutputMessage(_OutputItem):
    """What the model said."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(_OutputItem):
    """What the model thought."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0, description="Always empty: `content` has the thinking itself.")]
    content: list[ReasoningText]
    encrypted_content: Annotated[None, Field(description="Always null: this server encrypts none.")]


class OutputCall(_OutputItem):
    """A call that the model made. `arguments`: JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class ResponseFailure(StrictModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str
    param: str | None
    type: str


class IncompleteDetails(StrictModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ReasoningShown(StrictModel):
    """What was asked for of the thinking."""

    effort: Effort | None
    summary: None


class TextShown(StrictModel):
    """The form that was asked for."""

    format: Annotated[
        dict[str, Any], Field(description="`text`, `json_object` or `json_schema` under `type`, as asked.")
    ]


class ToolShown(StrictModel):
    """A function that was on offer."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="The JSON schema of its arguments.")]
    strict: bool | None


class NamedFunction(StrictModel):
    """The function that the model had to call."""

    type: Literal["function"]
    name: str


class AllowedFunctions(StrictModel):
    """The functions that the model might call (`auto`) or had to call one of (`required`)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class ResponseAnswer(StrictModel):
    """The answer. `output`: items in the order they were written.

    `status`: `completed`, `incomplete` (then `incomplete_details.reason` says why) or, in a stream, `in_progress` and `failed`.
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextShown
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions
    tools: list[ToolShown]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    rotary: RotaryField = None


class InputTokens(StrictModel):
    """The tokens of an input, the chat template's own included."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(StrictModel):
    """What became of a response."""

    id: str
    object: Literal["response"]
    deleted: bool


class ListedMessage(_OutputItem):
    """A message of an input."""

    type: Literal["message"]
    status: Literal["completed"]
    role: Literal["user", "assistant", "system", "developer"]
    content: list[TextPart | RefusalPart]


class ListedCall(OutputCall):
    """A call of an input."""

    status: Literal["completed"]


class ListedCallOutput(_OutputItem):
    """The result of a call, in one string."""

    type: Literal["function_call_output"]
    status: Literal["completed"]
    call_id: str
    output: str


class ListedReasoning(_OutputItem):
    """The thinking of an earlier turn."""

    type: Literal["reasoning"]
    status: Literal["completed"]
    summary: list[TextPart | RefusalPart]
    content: list[TextPart | RefusalPart] | None = None


ListedItem = Annotated[ListedMessage | ListedCall | ListedCallOutput | ListedReasoning, Field(discriminator="type")]


class ItemList(StrictModel):
    """A page of items."""

    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _EventBase(StrictModel):
    sequence_number: int


class _ItemEventBase(_EventBase):
    item_id: str
    output_index: int


class _PartEventBase(_ItemEventBase):
    content_index: int


class StateEvent(_EventBase):
    """The response begins, or has ended: the last event of a stream is one of `completed`, `incomplete` and `failed`."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseAnswer


class ItemEvent(_EventBase):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(_PartEventBase):
    """A part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDeltaEvent(_PartEventBase):
    """More text of a message."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(_PartEventBase):
    """The text of a message is whole."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDeltaEvent(_PartEventBase):
    """More of the thinking."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(_PartEventBase):
    """The thinking is whole."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(_ItemEventBase):
    """More of the JSON text of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_ItemEventBase):
    """The arguments of a call are whole."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class FailedEvent(_EventBase):
    """The request failed before its response was created."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        Annotated[
            StateEvent
            | ItemEvent
            | PartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ReasoningDeltaEvent
            | ReasoningDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent
            | FailedEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """The JSON of an event of a stream; `event:` repeats its `type`."""
