"""Requests, responses and events of `/v1/messages`."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, RootModel, Tag
from pydantic_core import PydanticCustomError

from windlass.server.schemas.base import (
    HOSTED_TAG,
    INT32_MAX,
    OTHER_TAG,
    FreeForm,
    OmittedPart,
    RequestedModel,
    RequestModel,
    StopStrings,
    StrictModel,
    TemplateVariables,
    UnsupportedKind,
    discriminate_by_type,
    optional,
    text_or_parts,
    without_nulls,
)
from windlass.server.schemas.chat import MAX_MESSAGES, Effort
from windlass.server.schemas.generation import SharedRequest, only_empty, unsupported_field
from windlass.server.schemas.response_parts import RotaryField
from windlass.server.schemas.tools import (
    MAX_TOOLS,
    FunctionName,
    HostedTool,
    ToolDefinition,
    check_functions,
    check_parameters,
    tool_definition,
)

MAX_BLOCKS = 4096

CallId = Annotated[str, Field(min_length=1, max_length=256)]

_IGNORED_IN_BLOCKS = frozenset({"cache_control"})
_KEEPS_ALL = ("all", {"type": "all"})

# These details make the anthropic package's tool runner send the entire conversation each time.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class TextBlock(StrictModel):
    """Text. The `citations` of other servers' answers have no effect."""

    ignored: ClassVar[frozenset[str]] = _IGNORED_IN_BLOCKS | {"citations", "parsed_output"}

    type: Literal["text"]
    text: str = Field(description="The text.")


class ThinkingBlock(StrictModel):
    """Thinking of an earlier turn. `signature` has no effect."""

    ignored: ClassVar[frozenset[str]] = _IGNORED_IN_BLOCKS | {"signature"}

    type: Literal["thinking"]
    thinking: str = Field(description="The thinking.")


class RedactedThinkingBlock(StrictModel):
    """Encrypted thinking of another server, which has no effect."""

    ignored: ClassVar[frozenset[str]] = _IGNORED_IN_BLOCKS

    type: Literal["redacted_thinking"]
    data: str | None = optional("No effect.")


class ToolUseBlock(StrictModel):
    """A call that the assistant made."""

    ignored: ClassVar[frozenset[str]] = _IGNORED_IN_BLOCKS | {"caller", "toolset_name"}

    type: Literal["tool_use"]
    id: CallId = Field(description="Id of the call.")
    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the function.")
    input: FreeForm = Field(description="Arguments of the call.")


class _OtherText(UnsupportedKind):
    kind_plural = "blocks"
    supported_kinds = "text"


_TextBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")] | Annotated[_OtherText, Tag(OTHER_TAG)],
    discriminate_by_type(("text",)),
]

_OMITTED = ("document", "image", "search_result", "tool_reference")

_ResultBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[OmittedPart, Tag("[document]")]
    | Annotated[OmittedPart, Tag("[image]")]
    | Annotated[OmittedPart, Tag("[search_result]")]
    | Annotated[OmittedPart, Tag("[tool_reference]")]
    | Annotated[_OtherText, Tag(OTHER_TAG)],
    discriminate_by_type(("text", *_OMITTED)),
]

Texts = Annotated[list[_TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), text_or_parts("text")]


class ToolResultBlock(StrictModel):
    """Result of a call."""

    ignored: ClassVar[frozenset[str]] = _IGNORED_IN_BLOCKS | {"toolset_name"}

    type: Literal["tool_result"]
    tool_use_id: CallId = Field(description="Id of the call whose result this is.")
    content: (
        Annotated[list[_ResultBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), text_or_parts("text")] | None
    ) = optional("A text or blocks. The model sees a note in place of images.")
    is_error: bool | None = optional("Whether the call failed, which the model sees. Default: false.")


class _OtherBlock(UnsupportedKind):
    kind_plural = "blocks"
    supported_kinds = "text, thinking, tool_use and tool_result"


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[_OtherBlock, Tag(OTHER_TAG)],
    discriminate_by_type(("text", "thinking", "redacted_thinking", "tool_use", "tool_result")),
]


class InputMessage(StrictModel):
    """One turn of a conversation. Answers can be sent back unchanged: their other fields have no effect."""

    ignored: ClassVar[frozenset[str]] = _IGNORED_IN_BLOCKS | {
        *("id", "type", "model", "stop_reason", "stop_sequence", "usage", "rotary"),
        *("container", "context_management", "diagnostics", "input_transformations", "stop_details"),
    }

    role: Literal["user", "assistant", "system"] = Field(description="Author of the message.")
    content: Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True), text_or_parts("text")] = Field(
        description="A text or blocks."
    )


def text_of(blocks: Any) -> str:
    """Text of blocks, joined by line breaks like the parts of a chat message."""
    return "\n".join(block.text for block in blocks)


class CustomTool(StrictModel):
    """A function that the model may call.

    `cache_control` and options of tools that the server would execute have no effect.
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "eager_input_streaming", "input_examples", "allowed_callers"}
    )

    hints: ClassVar[dict[str, str]] = {
        "function": "name, description and input_schema are fields of the tool itself here",
        "parameters": "it is input_schema here",
    }

    type: Literal["custom"] | None = optional("Kind of the tool.")
    name: FunctionName = Field(description="Name of the function.")
    description: str | None = optional("What the function does, for the model.")
    input_schema: Annotated[FreeForm, AfterValidator(check_parameters)] = Field(
        description="JSON schema of the arguments."
    )
    strict: bool | None = optional(
        "Whether a schema that cannot be enforced completely is refused, if calls must follow it. Default: false."
    )
    defer_loading: bool | None = optional("No effect.")


class _OtherMessageTool(UnsupportedKind):
    kind_plural = "tools"
    supported_kinds = "custom, which are functions of the caller"


_HOSTED = re.compile(r"(web_search|web_fetch|code_execution|advisor|tool_search_tool_[a-z0-9]+)_\d{8}|mcp_toolset")

_Tool = Annotated[
    Annotated[CustomTool, Tag("[custom]")]
    | Annotated[HostedTool, Tag(HOSTED_TAG)]
    | Annotated[_OtherMessageTool, Tag(OTHER_TAG)],
    discriminate_by_type(("custom",), lambda _: "custom", hosted=_HOSTED),
]


def function_definitions(tools: Sequence[Any]) -> list[ToolDefinition]:
    """Tools of a request as tools of a chat, without hosted ones."""
    return [tool_definition(tool, tool.input_schema) for tool in tools if isinstance(tool, CustomTool)]


def _check_tools(value: list[Any]) -> list[Any]:
    check_functions([tool.function for tool in function_definitions(value)])
    return value


class MessageToolChoice(StrictModel):
    """Whether the model may or must call functions."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="The model may call (`auto`), must call a function (`any`) or the named one (`tool`), or "
        "makes no calls (`none`)."
    )
    name: str | None = optional("With `tool`: name of the function.")
    disable_parallel_tool_use: bool | None = optional("Whether the model may make only one call. Default: false.")


class Thinking(StrictModel):
    """Thinking mode of the model. `display` has no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="`enabled`: with a token budget; `adaptive`: without one; `disabled`: no thinking."
    )
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = optional(
        "With `enabled`: number of tokens after which the thinking is ended."
    )


def _check_format(value: dict[str, Any]) -> dict[str, Any]:
    given = without_nulls(value)
    if set(given) != {"type", "schema"} or given["type"] != "json_schema" or not isinstance(given["schema"], dict):
        raise PydanticCustomError("type", "should be {'type': 'json_schema', 'schema': {…}}")
    return given


def _keeps_all_thinking(edit: Any) -> bool:
    """Whether an edit has no effect: it clears thinking, but none of it."""
    given = without_nulls(edit) if isinstance(edit, dict) else {}
    kind = given.get("type")
    clears = isinstance(kind, str) and kind.startswith("clear_thinking_")
    return clears and set(given) == {"type", "keep"} and given["keep"] in _KEEPS_ALL


def _context_management(value: Any) -> Any:
    if value:
        given = without_nulls(value) if isinstance(value, dict) else {"": value}
        edits = given.pop("edits", [])
        if given or not isinstance(edits, list) or not all(map(_keeps_all_thinking, edits)):
            raise unsupported_field("context_management that changes the conversation is")
    return value


def _fallbacks(value: Any) -> Any:
    if value and value != "default":
        raise unsupported_field("fallbacks to other models are")
    return value


class OutputConfig(StrictModel):
    """Form of the answer and amount of thinking of the model."""

    effort: Effort | None = optional("Amount of thinking. Default: the chat template's.")
    format: Annotated[dict[str, Any], AfterValidator(_check_format)] | None = optional(
        'Form of the answer: `{"type": "json_schema", "schema": …}`. Default: any text.'
    )


Messages = Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
MessageTools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_check_tools)]


class _MessageInput(RequestModel):
    """Fields of an input except `messages`."""

    system: Texts | None = optional("System prompt: a text or text blocks. Default: none.")
    tools: MessageTools | None = optional("Functions that the model may call. Default: none.")
    tool_choice: MessageToolChoice | None = optional(
        "Whether the model may or must call functions. Default: `auto` if there are tools, else `none`."
    )
    thinking: Thinking | None = optional(
        "Whether the model thinks, and its token budget. Default: the chat template's."
    )
    output_config: OutputConfig | None = optional("Form of the answer and amount of thinking.")
    chat_template_kwargs: TemplateVariables = None
    mcp_servers: Annotated[Any, only_empty("mcp_servers are")] = optional("Not supported.")
    context_management: Annotated[Any, AfterValidator(_context_management)] = optional(
        "Only edits that clear no thinking (`keep` is `all`), without effect."
    )


class CountTokensRequest(_MessageInput):
    """An input whose tokens are counted."""

    ignored: ClassVar[Set[str]] = RequestModel.ignored | {"compaction"}

    model: RequestedModel = None
    messages: Messages = Field(description="Turns of the conversation, oldest first.")


class MessageRequest(_MessageInput, SharedRequest):
    """A conversation, rendered by the model's chat template. If the last message is the assistant's, the answer
    continues it.
    """

    hints: ClassVar[dict[str, str]] = SharedRequest.hints | {
        "stop": "it is called stop_sequences here",
        "max_completion_tokens": "it is called max_tokens here",
        "response_format": "it is called output_config.format here",
        "n": "a message is one answer",
        "n_predict": "it is called max_tokens here",
        "num_predict": "it is called max_tokens here",
    }

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] = Field(description="Maximum number of generated tokens.")
    messages: Messages = Field(description="Turns of the conversation, oldest first.")
    stop_sequences: StopStrings | None = optional("Strings that end the answer. Default: none.")
    container: Annotated[Any, only_empty("containers are")] = optional("Not supported.")
    compaction: Annotated[Any, only_empty("compaction is")] = optional("Not supported.")
    # `default` means those of the model, which has none.
    fallbacks: Annotated[Any, AfterValidator(_fallbacks)] = optional(
        "No fallback models: `default` has no effect.", json_schema_extra={"enum": [None, [], "default"]}
    )
    thread: Annotated[Any, only_empty("threads are", _NO_THREADS)] = optional("Not supported.")


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageTokensDetails(StrictModel):
    """Numbers of generated tokens."""

    thinking_tokens: int = Field(
        description="Number of generated tokens up to the end of the thinking, including its markers."
    )


class MessageUsage(StrictModel):
    """Number of tokens of input and output."""

    input_tokens: int = Field(description="Number of input tokens that were not found in the prefix cache.")
    cache_creation_input_tokens: int = Field(description="Always 0: caching has no price.")
    cache_read_input_tokens: int = Field(description="Number of input tokens that were found in the prefix cache.")
    output_tokens: int = Field(description="Number of generated tokens.")
    output_tokens_details: MessageTokensDetails | None = optional(
        "Details of the generated tokens. Absent if the model's thinking is not recognized."
    )


class AnsweredText(StrictModel):
    """Text of the answer."""

    type: Literal["text"]
    text: str = Field(description="The text.")


class AnsweredThinking(StrictModel):
    """Thinking of the model."""

    type: Literal["thinking"]
    thinking: str = Field(description="The thinking.")
    signature: str = Field(description="Always empty: this server does not sign thinking.")


class AnsweredToolUse(StrictModel):
    """A call that the model makes."""

    type: Literal["tool_use"]
    id: str = Field(description="Id of the call.")
    name: str = Field(description="Name of the function.")
    input: dict[str, Any] = Field(description="Arguments of the call.")


AnsweredBlock = Annotated[AnsweredText | AnsweredThinking | AnsweredToolUse, Field(discriminator="type")]


class _Message(StrictModel):
    id: str = Field(description="Unique id.")
    type: Literal["message"]
    role: Literal["assistant"] = Field(description="Author of the message.")
    model: str = Field(description="Name of the served model or of one of its adapters.")


class MessageAnswer(_Message):
    """The complete answer."""

    content: list[AnsweredBlock] = Field(description="Blocks, in the order in which they were generated.")
    stop_reason: StopReason = Field(description="Why the answer ended.")
    stop_sequence: str | None = Field(description="Stop string that ended the answer, else null.")
    usage: MessageUsage = Field(description="Numbers of tokens.")
    rotary: RotaryField = None


class TokenCount(StrictModel):
    """Number of tokens of an input."""

    input_tokens: int = Field(description="Number of input tokens.")


class MessageErrorDetail(StrictModel):
    """Description of the error. `param` and `code` are those of the other APIs."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "api_error",
    ] = Field(description="Category of the error.")
    message: str = Field(description="What is wrong and what to do.")
    param: str | None = Field(description="Path of the field at fault, else null.")
    code: str = Field(description="Kind of the error, for programs.")
    details: dict[str, Any] | None = optional("Details for Anthropic's clients. Only in few errors.")


class MessageError(StrictModel):
    """An error of these endpoints, also as the event that ends a failed stream."""

    type: Literal["error"]
    error: MessageErrorDetail = Field(description="The error.")
    request_id: str | None = Field(description="Id of the request, as in the header `X-Request-Id`.")


class BegunMessage(_Message):
    """The message at the start of a stream."""

    content: Annotated[list[Any], Field(max_length=0)] = Field(description="Always empty: events add the blocks.")
    stop_reason: None = Field(description="Always null: the message has only begun.")
    stop_sequence: None = Field(description="Always null: the message has only begun.")
    usage: MessageUsage = Field(description="Numbers of tokens.")


class MessageStart(StrictModel):
    """Start of the message."""

    type: Literal["message_start"]
    message: BegunMessage = Field(description="The message, still empty.")


class _BlockEvent(StrictModel):
    type: str
    index: int = Field(description="Index of the block in `content`, from 0.")


class BlockStart(_BlockEvent):
    """Start of a block."""

    type: Literal["content_block_start"]
    content_block: AnsweredBlock = Field(description="The block, still empty.")


class TextDelta(StrictModel):
    """A piece of text."""

    type: Literal["text_delta"]
    text: str = Field(description="The text.")


class ThinkingDelta(StrictModel):
    """A piece of thinking."""

    type: Literal["thinking_delta"]
    thinking: str = Field(description="The thinking.")


class InputDelta(StrictModel):
    """A piece of the JSON text of a call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str = Field(description="A piece of the arguments' JSON text.")


class BlockDelta(_BlockEvent):
    """A piece of a block."""

    type: Literal["content_block_delta"]
    delta: Annotated[TextDelta | ThinkingDelta | InputDelta, Field(discriminator="type")] = Field(
        description="The added part of the block."
    )


class BlockStop(_BlockEvent):
    """End of a block."""

    type: Literal["content_block_stop"]


class MessageEnding(StrictModel):
    """Reason of the end of the message."""

    stop_reason: StopReason = Field(description="Why the answer ended.")
    stop_sequence: str | None = Field(description="Stop string that ended the answer, else null.")


class MessageDelta(StrictModel):
    """End of the message."""

    type: Literal["message_delta"]
    delta: MessageEnding = Field(description="Why the message ended.")
    usage: MessageUsage = Field(description="Numbers of tokens.")
    rotary: RotaryField = None


class MessageSign(StrictModel):
    """`ping`: the connection is alive; `message_stop`: the stream has ended."""

    type: Literal["ping", "message_stop"] = Field(description="Kind of the event.")


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageSign | MessageError,
            Field(discriminator="type"),
        ]
    ]
):
    """JSON of a stream event. `event:` repeats its `type`."""
