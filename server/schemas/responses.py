"""Requests, responses, items and events of `/v1/responses`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, RootModel, Tag, ValidationError
from pydantic_core import PydanticCustomError, to_json

from windlass.server.schemas.base import (
    HOSTED_TAG,
    INT32_MAX,
    OTHER_TAG,
    AcceptsString,
    OmittedPart,
    StopField,
    StrictModel,
    TemplateVariables,
    UnsupportedKind,
    discriminate_by_type,
    optional,
    text_or_parts,
    without_nulls,
)
from windlass.server.schemas.chat import ChatTokenLogprob, Effort
from windlass.server.schemas.generation import SharedRequest, only_empty
from windlass.server.schemas.response_parts import RotaryField
from windlass.server.schemas.tools import (
    ALLOWED_TOOLS,
    MAX_ARGUMENTS,
    MAX_SCHEMA_BYTES,
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    HostedTool,
    ToolDefinition,
    allowed_names,
    check_arguments,
    check_functions,
    tool_definition,
)

MAX_ITEMS = 16384
MAX_PARTS = 4096

Id = Annotated[str, Field(max_length=256)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]

INCOMPLETE = "incomplete"
_OUTPUT_ONLY_FIELDS = frozenset({"status", "created_by", "caller"})
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16


class TextPart(StrictModel):
    """Text. Other fields of output parts have no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "logprobs", "parsed", "prompt_cache_breakpoint", "cache_control"}
    )

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"] = Field(
        description="Kind of the part. All of these hold text."
    )
    text: str = Field(description="The text.")


class RefusalPart(StrictModel):
    """Refusal of another model, which counts as text."""

    type: Literal["refusal"]
    refusal: str = Field(description="Text of the refusal.")


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

_OMITTED = ("input_file", "input_image")

_ResultPart = Annotated[
    Annotated[TextPart, Tag("[input_text]")]
    | Annotated[TextPart, Tag("[output_text]")]
    | Annotated[TextPart, Tag("[text]")]
    | Annotated[OmittedPart, Tag("[input_file]")]
    | Annotated[OmittedPart, Tag("[input_image]")]
    | Annotated[RefusalPart, Tag("[refusal]")]
    | Annotated[_OtherPart, Tag(OTHER_TAG)],
    discriminate_by_type(("input_text", "output_text", "text", "refusal", *_OMITTED)),
]

Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), text_or_parts("input_text")]


ResultParts = Annotated[list[_ResultPart], Field(max_length=MAX_PARTS, fail_fast=True), text_or_parts("input_text")]


def text_of(parts: list[Any]) -> str:
    """Text of parts, joined by line breaks like the parts of a chat message."""
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in parts)


class MessageItem(StrictModel):
    """A message."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS | {"phase"}

    type: Literal["message"] = "message"
    id: Id | None = optional("Id of the item. Default: a new one.")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Author of the message.")
    content: Parts = Field(description="A text or text parts.")


def _arguments_text(value: str) -> str:
    """Arguments as JSON text of bounded length, like those of output items."""
    whole = check_arguments(value)
    return whole if isinstance(whole, str) else str(check_arguments(to_json(whole).decode()))


NamespaceOfCall = Annotated[
    Annotated[str, Field(max_length=128)] | None, Field(description="Namespace of the tool. Default: none.")
]

CUSTOM_INPUT = "input"  # the argument of the function that represents a custom tool


def offered_name(namespace: str | None, name: str) -> str:
    """Name of a tool in the chat, which has no namespaces."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class CallItem(StrictModel):
    """A call that the assistant made. Arguments that are not a JSON object become `{"arguments": "the text"}`."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS - {"status"} | {"parsed_arguments", "async"}

    type: Literal["function_call"] = "function_call"
    id: Id | None = optional("Id of the item. Default: a new one.")
    status: Any = optional("An `incomplete` call has no effect unless the input has its result.")
    call_id: CallId = Field(description="Id of the call.")
    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the function.")
    arguments: Annotated[str, AfterValidator(_arguments_text)] = Field(
        default="", max_length=MAX_ARGUMENTS, description="Arguments as JSON text. Default: empty."
    )
    namespace: NamespaceOfCall = None

    @property
    def offered_name(self) -> str:
        """Name of the function in the chat."""
        return offered_name(self.namespace, self.name)


class CustomCallItem(StrictModel):
    """A call of a `custom` tool that the assistant made."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS - {"status"} | {"async"}

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: Id | None = optional("Id of the item. Default: a new one.")
    status: Any = optional("An `incomplete` call has no effect unless the input has its result.")
    call_id: CallId = Field(description="Id of the call.")
    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the tool.")
    input: Annotated[str, Field(max_length=MAX_ARGUMENTS)] = Field(description="Input of the tool.")
    namespace: NamespaceOfCall = None

    @property
    def offered_name(self) -> str:
        """Name of the function in the chat."""
        return offered_name(self.namespace, self.name)

    @property
    def arguments(self) -> str:
        """Arguments of the function in the chat."""
        return to_json({CUSTOM_INPUT: self.input}).decode()


class CallOutputItem(StrictModel):
    """Result of a call."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS | {"name", "namespace"}

    type: Literal["function_call_output"] = "function_call_output"
    id: Id | None = optional("Id of the item. Default: a new one.")
    call_id: CallId = Field(description="Id of the call.")
    output: ResultParts = Field(description="A text or parts. The model sees a note in place of images and files.")


class CustomCallOutputItem(CallOutputItem):
    """Result of a call of a `custom` tool."""

    type: Literal["custom_tool_call_output"] = "custom_tool_call_output"  # type: ignore[assignment]


class ReasoningItem(StrictModel):
    """Thinking of an earlier turn. `encrypted_content` has no effect."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS | {"encrypted_content"}

    type: Literal["reasoning"] = "reasoning"
    id: Id | None = optional("Id of the item. Default: a new one.")
    summary: Parts = Field(default_factory=list, description="Text, used if `content` is absent.")
    content: Parts | None = optional("Text of the thinking.")


class ItemReference(StrictModel):
    """Reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: Id = Field(description="Id of an item of a stored response.")


def _kind(item: dict[str, Any]) -> str:
    return "message" if "role" in item else ""


class _OtherItem(UnsupportedKind):
    kind_plural = "items"
    supported_kinds = (
        "message, function_call, custom_tool_call, the outputs of calls, reasoning, item_reference and additional_tools"
    )


Item = MessageItem | CallItem | CallOutputItem | CustomCallItem | CustomCallOutputItem | ReasoningItem

_KINDS: dict[str, type[MessageItem] | type[CallItem] | type[CustomCallItem] | type[ReasoningItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "custom_tool_call": CustomCallItem,
    "reasoning": ReasoningItem,
}


def input_items_of_output(output: Sequence[dict[str, Any]]) -> list[Item]:
    """The items of an answer as input items of a later request.

    Omits incomplete calls, and calls whose arguments are too long for a request.
    """
    found = [
        _input_item_of_output(item)
        for item in output
        if item["type"] not in ("function_call", "custom_tool_call") or item["status"] == "completed"
    ]
    return [item for item in found if item is not None]


def _input_item_of_output(item: dict[str, Any]) -> Item | None:
    try:
        return _KINDS[item["type"]].model_validate(item)
    except ValidationError:
        return None


class _OtherResponseTool(UnsupportedKind):
    kind_plural = "tools"
    supported_kinds = "function, custom and namespace"


DeferLoading = Annotated[bool | None, Field(description="No effect.")]


class FunctionTool(FunctionDefinition):
    """A function that the model may call, in the form of `/v1/responses`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "output_schema"})
    # Only the model makes calls, and their results arrive with a later request.
    neutral: ClassVar[Mapping[str, Any]] = {"allowed_callers": ["direct"], "async": False}
    hints: ClassVar[dict[str, str]] = {
        "function": "name, description and parameters are fields of the tool itself here",
        "allowed_callers": "only ['direct'] is supported",
        "async": "only false is supported",
    }

    type: Literal["function"]
    defer_loading: DeferLoading = None

    def in_chat(self, namespace: str | None) -> OfferedTool:
        """The tool as a function of a chat."""
        return OfferedTool(
            self.name, namespace, tool_definition(self, self.parameters, offered_name(namespace, self.name))
        )


class CustomInputFormat(StrictModel):
    """Form of the input of a `custom` tool. The model sees it, and nothing enforces it."""

    type: Literal["text", "grammar"] = Field(description="`text`: any text; `grammar`: as `definition` describes.")
    syntax: Literal["lark", "regex"] | None = optional("Syntax of the grammar.")
    definition: Annotated[str, Field(max_length=MAX_SCHEMA_BYTES)] | None = optional("The grammar.")


class FreeformTool(StrictModel):
    """A tool whose input is a text. The model sees a function with one argument, `input`."""

    ignored: ClassVar[frozenset[str]] = FunctionTool.ignored
    neutral: ClassVar[Mapping[str, Any]] = FunctionTool.neutral
    hints: ClassVar[dict[str, str]] = FunctionTool.hints

    type: Literal["custom"]
    name: FunctionName = Field(description="Name of the tool.")
    description: str | None = optional("What the tool does, for the model.")
    format: CustomInputFormat | None = optional("Form of the input. Default: any text.")
    defer_loading: DeferLoading = None

    def in_chat(self, namespace: str | None) -> OfferedTool:
        """The tool as a function of a chat."""
        description = self.description or ""
        if self.format is not None and self.format.definition:
            syntax = "regular expression" if self.format.syntax == "regex" else "Lark grammar"
            description += f"\n\nThe input must follow this {syntax}:\n{self.format.definition}"
        function = FunctionDefinition.model_construct(
            name=offered_name(namespace, self.name),
            description=description.strip() or None,
            parameters=_CUSTOM_PARAMETERS,
        )
        definition = ToolDefinition.model_construct(type="function", function=function)
        return OfferedTool(self.name, namespace, definition, is_custom=True)


_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "Input of the tool, as plain text."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}

_NamespacedTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[FreeformTool, Tag("[custom]")]
    | Annotated[_OtherResponseTool, Tag(OTHER_TAG)],
    discriminate_by_type(("function", "custom")),
]


class ToolNamespace(StrictModel):
    """Tools of the caller with a common prefix."""

    type: Literal["namespace"]
    name: FunctionName = Field(description="Name of the namespace.")
    description: str | None = optional("No effect.")
    tools: Annotated[list[_NamespacedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        description="The tools."
    )


# The tools that OpenAI's service runs, some of them with a date.
_HOSTED = re.compile(
    "(web_search|web_search_preview|computer|computer_use_preview|file_search|code_interpreter|image_generation|mcp|local_shell|"
    r"shell|apply_patch|tool_search|programmatic_tool_calling)(_\d{4}_\d{2}_\d{2})?"
)

_Tool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[FreeformTool, Tag("[custom]")]
    | Annotated[ToolNamespace, Tag("[namespace]")]
    | Annotated[HostedTool, Tag(HOSTED_TAG)]
    | Annotated[_OtherResponseTool, Tag(OTHER_TAG)],
    discriminate_by_type(("function", "custom", "namespace"), hosted=_HOSTED),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of the caller, and the function of the chat that represents it. is_custom: its input is a text."""

    name: str
    namespace: str | None
    definition: ToolDefinition
    is_custom: bool = False


def offered_tools(tools: Sequence[Any]) -> list[OfferedTool]:
    """The tools of a request, those of namespaces included, without hosted ones."""
    found: list[OfferedTool] = []
    for tool in tools:
        if isinstance(tool, ToolNamespace):
            found += [each.in_chat(tool.name) for each in tool.tools if not isinstance(each, _OtherResponseTool)]
        elif isinstance(tool, FunctionTool | FreeformTool):
            found.append(tool.in_chat(None))
    return found


def check_tools(value: list[Any]) -> list[Any]:
    """The tools of a request; raises PydanticCustomError if they are too many or too large, or if a name occurs twice."""
    found = offered_tools(value)
    if len(found) > MAX_TOOLS:
        raise PydanticCustomError(
            "too_many", "should have at most {most} tools, got {count}", {"most": MAX_TOOLS, "count": len(found)}
        )
    check_functions([tool.definition.function for tool in found])
    return value


_Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_tools)]


class AdditionalTools(StrictModel):
    """Further tools of this request. The item is not stored."""

    ignored: ClassVar[frozenset[str]] = _OUTPUT_ONLY_FIELDS

    type: Literal["additional_tools"]
    id: Id | None = optional("No effect.")
    role: Literal["developer", "system"] | None = optional("No effect.")
    tools: _Tools = Field(description="The tools.")


InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[CustomCallItem, Tag("[custom_tool_call]")]
    | Annotated[CustomCallOutputItem, Tag("[custom_tool_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[item_reference]")]
    | Annotated[AdditionalTools, Tag("[additional_tools]")]
    | Annotated[_OtherItem, Tag(OTHER_TAG)],
    discriminate_by_type(
        (
            *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
            *("reasoning", "item_reference", "additional_tools"),
        ),
        _kind,
    ),
]


def as_items(items: list[InputItem]) -> list[Item | AdditionalTools]:
    """Cast the items of an input after validation and after its references have been replaced."""
    return cast(list[Item | AdditionalTools], items)


def _check_tool_choice(value: Any) -> Any:
    if value in (None, "none", "auto", "required"):
        return value
    given = without_nulls(value) if isinstance(value, dict) else {}
    if _chosen_name(given) is not None:
        return given
    if given.pop("type", None) == ALLOWED_TOOLS:
        mode, _ = allowed_names(given, _chosen_name)
        return {"type": ALLOWED_TOOLS, "mode": mode, "tools": list(map(without_nulls, given["tools"]))}
    raise PydanticCustomError(
        "type",
        "should be 'none', 'auto', 'required', {'type': 'function', 'name': '…'}, {'type': 'custom', 'name': '…'} or "
        "{'type': 'allowed_tools', 'mode': '…', 'tools': […]}",
    )


def _chosen_name(value: Any) -> str | None:
    """The name in the chat of {'type': 'function', 'name': '…'}, with `custom` or a `namespace` too; None for any other value."""
    given = without_nulls(value) if isinstance(value, dict) else {}
    named = given.get("type") in ("function", "custom") and set(given) - {"namespace"} == {"type", "name"}
    if not named or not all(isinstance(text, str) for text in given.values()):
        return None
    return offered_name(given.get("namespace"), given["name"])


def _items_from_string(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _limit_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:  # before each entry is checked
        raise PydanticCustomError("too_many", "should have at most {most} entries", {"most": MAX_METADATA})
    return without_nulls(value) if isinstance(value, dict) else value


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        raise PydanticCustomError("too_long", "should have keys of at most 64 characters and values of at most 512")
    return value


class ReasoningChoice(StrictModel):
    """Thinking options. `summary`, `context` and `mode` have no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Effort | None = optional("Amount of thinking. Default: the chat template's.")


class TextConfig(StrictModel):
    """Form of the answer's text. `verbosity` has no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: dict[str, Any] | None = optional(
        "`{type: text}`, `{type: json_object}` or `{type: json_schema, name, schema}`. Default: any text."
    )


class ResponseStreamOptions(StrictModel):
    """Stream options, without effect."""

    include_obfuscation: bool | None = optional("No effect.")


class ResponseRequest(SharedRequest):
    """An input, which continues the conversation of `previous_response_id` and is rendered by the model's chat template."""

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

    input: Annotated[
        list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), AcceptsString(_items_from_string)
    ] = Field(description="A text or items.")
    instructions: str | None = optional("System prompt of this response, not of those that continue it. Default: none.")
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = optional(
        "Id of the stored response whose conversation is continued. Default: none."
    )
    store: bool | None = optional("Whether the response is stored for later requests. Default: true.")
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "Maximum number of generated tokens. Default: `--default-max-tokens`, else what the context leaves."
    )
    stop: StopField = None
    tools: _Tools | None = optional("Tools that the model may call. Hosted tools are ignored. Default: none.")
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = optional(
        "`none`, `auto`, `required`, `{type: function, name}`, `{type: custom, name}` or `{type: allowed_tools, "
        "mode, tools}`. Default: `auto`."
    )
    parallel_tool_calls: bool | None = optional("Whether the model may make several calls in one turn. Default: true.")
    text: TextConfig | None = optional("Form of the answer.")
    reasoning: ReasoningChoice | None = optional("Amount of thinking.")
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
    ) = optional("`message.output_text.logprobs` requests log-probabilities; the others have no effect.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = optional(
        "Alternatives per token whose log-probabilities are returned. Default: 0."
    )
    truncation: Literal["auto", "disabled"] | None = optional(
        "`auto`: the oldest turns are dropped if the input does not fit; `disabled`: such an input "
        "is refused. Default: the server's `context_overflow`."
    )
    metadata: (
        Annotated[
            dict[str, str], Field(max_length=MAX_METADATA), BeforeValidator(_limit_entries), AfterValidator(_metadata)
        ]
        | None
    ) = optional("Strings of at most 512 characters by names of at most 64, which the response repeats.")
    stream_options: ResponseStreamOptions | None = optional("Additional contents of a stream.")
    thinking_budget: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = optional(
        "Maximum number of thinking tokens. Default: unlimited."
    )
    chat_template_kwargs: TemplateVariables = None
    user: Annotated[str, Field(max_length=256)] | None = optional("No effect. Repeated in the response.")
    safety_identifier: Annotated[str, Field(max_length=256)] | None = optional("No effect. Repeated in the response.")
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = optional("No effect. Repeated in the response.")

    # Unsupported features of OpenAI's service
    background: Annotated[bool | None, only_empty("background responses are")] = optional("Not supported.")
    conversation: Annotated[Any, only_empty("conversations are")] = optional("Not supported.")
    prompt: Annotated[Any, only_empty("stored prompts are")] = optional("Not supported.")
    context_management: Annotated[Any, only_empty("context_management is")] = optional("Not supported.")
    moderation: Annotated[Any, only_empty("moderation is")] = optional("Not supported.")
    access_programs: Annotated[Any, only_empty("access_programs are")] = optional("Not supported.")


class CountInputRequest(ResponseRequest):
    """An input whose tokens are counted. Fields of a response that do not affect the input have no effect."""

    input: Annotated[
        list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True), AcceptsString(_items_from_string)
    ] = Field(
        default_factory=list, description="A text or items, as in a response. Optional with `previous_response_id`."
    )


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(StrictModel):
    """Numbers of input tokens."""

    cached_tokens: int = Field(description="Number of these tokens that were found in the prefix cache.")
    cache_write_tokens: int = Field(description="Always 0: caching has no price.")


class OutputTokensDetails(StrictModel):
    """Numbers of generated tokens."""

    reasoning_tokens: int = Field(
        description="Number of generated tokens up to the end of the thinking, including its markers."
    )


class ResponseUsage(StrictModel):
    """Numbers of tokens of input and output."""

    input_tokens: int = Field(description="Number of input tokens.")
    input_tokens_details: InputTokensDetails = Field(description="Details of the input tokens.")
    output_tokens: int = Field(description="Number of generated tokens.")
    output_tokens_details: OutputTokensDetails = Field(description="Details of the generated tokens.")
    total_tokens: int = Field(description="Sum of input and output tokens.")


class OutputText(StrictModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str = Field(description="The text.")
    annotations: Annotated[list[Any], Field(max_length=0, description="Always empty.")]
    logprobs: list[ChatTokenLogprob] = Field(description="Log-probabilities of the tokens, if requested, else empty.")


class ReasoningText(StrictModel):
    """Text of the thinking."""

    type: Literal["reasoning_text"]
    text: str = Field(description="The text.")


class _OutputItem(StrictModel):
    id: str = Field(description="Unique id.")
    type: str
    status: ItemStatus = Field(description="State of the item.")


class OutputMessage(_OutputItem):
    """Message of the model."""

    type: Literal["message"]
    role: Literal["assistant"] = Field(description="Author of the message.")
    content: list[OutputText] = Field(description="Parts of the text: one.")


class OutputReasoning(_OutputItem):
    """Thinking of the model."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0, description="Always empty: `content` has the thinking itself.")]
    content: list[ReasoningText] = Field(description="Parts of the thinking: one.")
    encrypted_content: None = Field(description="Always null: this server does not encrypt thinking.")


class OutputCall(_OutputItem):
    """A call that the model makes."""

    type: Literal["function_call"]
    call_id: str = Field(description="Id of the call.")
    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="Arguments as JSON text.")
    namespace: str | None = optional("Namespace of the function, if it has one.")


class OutputCustomCall(_OutputItem):
    """A call of a `custom` tool that the model makes."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(description="Id of the call.")
    name: str = Field(description="Name of the tool.")
    input: str = Field(description="Input of the tool.")
    namespace: str | None = optional("Namespace of the tool, if it has one.")


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, Field(discriminator="type")]


class ResponseFailure(StrictModel):
    """Error of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded"] = Field(description="Kind of the error, for programs.")
    message: str = Field(description="What is wrong and what to do.")
    param: str | None = Field(description="Path of the field at fault, else null.")
    type: str = Field(description="Category of the error.")


class IncompleteDetails(StrictModel):
    """Reason of an incomplete response."""

    reason: Literal["max_output_tokens"] = Field(description="Why the response is incomplete.")


class ReasoningShown(StrictModel):
    """Thinking options of the request."""

    effort: Effort | None = Field(description="Value of the request, else null.")
    summary: None = Field(description="Always null.")


class TextShown(StrictModel):
    """Form of the answer's text."""

    format: dict[str, Any] = Field(
        description="The requested format, with `text`, `json_object` or `json_schema` as its `type`."
    )


class ToolShown(StrictModel):
    """A function that the request offered."""

    type: Literal["function"]
    name: str = Field(description="Name of the function.")
    description: str | None = optional("What the function does, for the model.")
    parameters: dict[str, Any] | None = Field(description="JSON schema of the function's arguments, else null.")
    strict: bool | None = Field(description="Value of the request, else null.")


class FreeformToolShown(StrictModel):
    """A `custom` tool that the request offered."""

    type: Literal["custom"]
    name: str = Field(description="Name of the tool.")
    description: str | None = optional("What the tool does, for the model.")
    format: CustomInputFormat | None = optional("Form of the input.")


class NamespaceShown(StrictModel):
    """Tools with a common prefix that the request offered."""

    type: Literal["namespace"]
    name: str = Field(description="Name of the namespace.")
    description: str | None = optional("What the tools are for.")
    tools: list[Annotated[ToolShown | FreeformToolShown, Field(discriminator="type")]] = Field(description="The tools.")


class NamedFunction(StrictModel):
    """The tool that the model must call."""

    type: Literal["function", "custom"] = Field(description="Kind of the tool.")
    name: str = Field(description="Name of the tool.")
    namespace: str | None = optional("Namespace of the tool, if it has one.")


class AllowedFunctions(StrictModel):
    """The functions that the model may or must call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = Field(
        description="`auto`: the model may call one of the functions; `required`: it must."
    )
    tools: list[NamedFunction] = Field(description="Functions that the model may call.")


class ResponseAnswer(StrictModel):
    """A response."""

    id: str = Field(description="Unique id.")
    object: Literal["response"]
    created_at: int = Field(description="Start time in Unix seconds.")
    completed_at: int | None = Field(description="End time in Unix seconds. Null before the end.")
    status: Literal["in_progress", "completed", "incomplete", "failed"] = Field(
        description="State of the response: `in_progress` and `failed` occur only in streams."
    )
    background: bool = Field(description="Always false.")
    error: ResponseFailure | None = Field(description="Why the response failed, else null.")
    incomplete_details: IncompleteDetails | None = Field(description="Why the response is incomplete, else null.")
    instructions: str | None = Field(description="Value of the request, else null.")
    max_output_tokens: int | None = Field(description="Value of the request, else null.")
    max_tool_calls: int | None = Field(description="Always null.")
    model: str = Field(description="Name of the served model or of one of its adapters.")
    output: list[OutputItem] = Field(description="Items of the answer.")
    parallel_tool_calls: bool = Field(description="Value of the request, else true.")
    previous_response_id: str | None = Field(description="Value of the request, else null.")
    prompt_cache_key: str | None = Field(description="Value of the request, else null.")
    reasoning: ReasoningShown = Field(description="Thinking options that were requested.")
    safety_identifier: str | None = Field(description="Value of the request, else null.")
    service_tier: str = Field(description="Always `default`.")
    store: bool = Field(description="Whether the response is stored for later requests.")
    temperature: float = Field(description="Sampling temperature. 0 selects the most likely token.")
    text: TextShown = Field(description="Form of the answer that was requested.")
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions = Field(
        description="Value of the request, else `auto`."
    )
    tools: list[Annotated[ToolShown | FreeformToolShown | NamespaceShown, Field(discriminator="type")]] = Field(
        description="Tools that the request offered, without hosted ones."
    )
    top_logprobs: int = Field(description="Value of the request, else 0.")
    top_p: float = Field(
        description="Nucleus sampling: only the most likely tokens whose probabilities add up to this value are "
        "sampled. 1: all tokens."
    )
    truncation: Literal["auto", "disabled"] = Field(description="`auto` if old turns may be dropped, else `disabled`.")
    usage: ResponseUsage | None = Field(description="Numbers of tokens. Null until the response has ended.")
    user: str | None = Field(description="Value of the request, else null.")
    metadata: dict[str, str] = Field(description="Value of the request, else empty.")
    rotary: RotaryField = None


class InputTokens(StrictModel):
    """Number of tokens of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int = Field(description="Number of input tokens.")


class DeletedResponse(StrictModel):
    """Confirmation that a response was deleted."""

    id: str = Field(description="Id of the response.")
    object: Literal["response"]
    deleted: bool = Field(description="Always true.")


class ListedMessage(_OutputItem):
    """A message of an input."""

    type: Literal["message"]
    status: Literal["completed"] = Field(description="State of the item.")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Author of the message.")
    content: list[TextPart | RefusalPart] = Field(description="The text.")


class ListedCall(OutputCall):
    """A call of an input."""

    status: Literal["completed"] = Field(description="State of the item.")


class ListedCustomCall(OutputCustomCall):
    """A call of a `custom` tool of an input."""

    status: Literal["completed"] = Field(description="State of the item.")


class ListedCallOutput(_OutputItem):
    """Result of a call, as one string."""

    type: Literal["function_call_output"]
    status: Literal["completed"] = Field(description="State of the item.")
    call_id: str = Field(description="Id of the call.")
    output: str = Field(description="Result of the call.")


class ListedCustomCallOutput(ListedCallOutput):
    """Result of a call of a `custom` tool, as one string."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class ListedReasoning(_OutputItem):
    """Thinking of an earlier turn."""

    type: Literal["reasoning"]
    status: Literal["completed"] = Field(description="State of the item.")
    summary: list[TextPart | RefusalPart] = Field(description="Text of the thinking.")
    content: list[TextPart | RefusalPart] | None = optional("The text.")


ListedItem = Annotated[
    ListedMessage | ListedCall | ListedCallOutput | ListedCustomCall | ListedCustomCallOutput | ListedReasoning,
    Field(discriminator="type"),
]


class ItemList(StrictModel):
    """A page of items."""

    object: Literal["list"]
    data: list[ListedItem] = Field(description="The entries.")
    first_id: str | None = Field(description="Id of the first entry. Null if there is none.")
    last_id: str | None = Field(description="Id of the last entry. Null if there is none.")
    has_more: bool = Field(description="Whether there are more entries.")


class _EventBase(StrictModel):
    sequence_number: int = Field(description="Number of the event in its stream, from 0.")


class _ItemEventBase(_EventBase):
    item_id: str = Field(description="Id of the item.")
    output_index: int = Field(description="Index of the item in `output`, from 0.")


class _PartEventBase(_ItemEventBase):
    content_index: int = Field(description="Index of the part in the item's `content`, from 0.")


class StateEvent(_EventBase):
    """Start or end of the response. The last event of a stream is `completed`, `incomplete` or `failed`."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ] = Field(description="Kind of the event.")
    response: ResponseAnswer = Field(description="The response at this time.")


class ItemEvent(_EventBase):
    """Start or end of an item."""

    type: Literal["response.output_item.added", "response.output_item.done"] = Field(description="Kind of the event.")
    output_index: int = Field(description="Index of the item in `output`, from 0.")
    item: OutputItem = Field(description="The item.")


class PartEvent(_PartEventBase):
    """Start or end of a part of an item."""

    type: Literal["response.content_part.added", "response.content_part.done"] = Field(description="Kind of the event.")
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")] = Field(description="The part.")


class TextDeltaEvent(_PartEventBase):
    """A piece of the text of a message."""

    type: Literal["response.output_text.delta"]
    delta: str = Field(description="The added text.")
    logprobs: list[ChatTokenLogprob] = Field(description="Log-probabilities of the tokens, if requested, else empty.")


class TextDoneEvent(_PartEventBase):
    """End of the text of a message."""

    type: Literal["response.output_text.done"]
    text: str = Field(description="The text.")
    logprobs: list[ChatTokenLogprob] = Field(description="Log-probabilities of the tokens, if requested, else empty.")


class ReasoningDeltaEvent(_PartEventBase):
    """A piece of the thinking."""

    type: Literal["response.reasoning_text.delta"]
    delta: str = Field(description="The added text.")


class ReasoningDoneEvent(_PartEventBase):
    """End of the thinking."""

    type: Literal["response.reasoning_text.done"]
    text: str = Field(description="The text.")


class ArgumentsDeltaEvent(_ItemEventBase):
    """A piece of the JSON text of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str = Field(description="The added text.")


class ArgumentsDoneEvent(_ItemEventBase):
    """End of the arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="Arguments as JSON text.")


class CustomInputDeltaEvent(_ItemEventBase):
    """The input of a call of a `custom` tool: all of it at once."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str = Field(description="The added text.")


class CustomInputDoneEvent(_ItemEventBase):
    """End of the input of a call of a `custom` tool."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str = Field(description="Input of the tool.")


class FailedEvent(_EventBase):
    """Error before the response was created."""

    type: Literal["error"]
    code: str = Field(description="Kind of the error, for programs.")
    message: str = Field(description="What is wrong and what to do.")
    param: str | None = Field(description="Path of the field at fault, else null.")


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
            | CustomInputDeltaEvent
            | CustomInputDoneEvent
            | FailedEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """JSON of a stream event. `event:` repeats its `type`."""
