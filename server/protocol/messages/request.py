"""Bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from windlass.server.protocol.base import INT32_MAX, FreeForm, StopStrings, StrictModel, without_nulls
from windlass.server.protocol.chat import MAX_MESSAGES, Effort
from windlass.server.protocol.generation_request import SharedRequest, only_empty, unsupported
from windlass.server.protocol.kinds import OTHER, OtherKind, by_type
from windlass.server.protocol.messages.blocks import InputMessage, Texts
from windlass.server.protocol.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    ToolDefinition,
    check_functions,
    check_parameters,
)

# What concerns Anthropic's own caches, machines and accounts.
_BOOKKEEPING = frozenset(
    {
        *("billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "inference_geo", "speed"),
        *("user_profile_id", "workspace_id"),
    }
)
_KEEPS_ALL = ("all", {"type": "all"})


class CustomTool(StrictModel):
    """A tool on offer. `cache_control` and what concerns tools that the server would run have no effect.

    `strict`: where a call is required, a schema that cannot be held to as a whole is refused.
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "eager_input_streaming", "input_examples", "allowed_callers"}
    )

    hints: ClassVar[dict[str, str]] = {
        "function": "name, description and input_schema stand in the tool itself here",
        "parameters": "it is input_schema here",
    }

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Annotated[FreeForm, AfterValidator(check_parameters)]
    strict: bool | None = None
    defer_loading: Annotated[bool | None, only_empty("defer_loading is")] = None


class _OtherMessageTool(OtherKind):
    what = "tools"
    instead = "custom, which are functions of the caller"


_Tool = Annotated[
    Annotated[CustomTool, Tag("[custom]")] | Annotated[_OtherMessageTool, Tag(OTHER)],
    by_type(("custom",), lambda _: "custom"),
]


def definitions(tools: Sequence[Any]) -> list[ToolDefinition]:
    """The tools of a body, which are `CustomTool`s, as a chat offers them."""
    return [
        ToolDefinition.model_construct(
            type="function",
            function=FunctionDefinition.model_construct(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for tool in tools
    ]


def _tools(value: list[CustomTool]) -> list[CustomTool]:
    check_functions([tool.function for tool in definitions(value)])
    return value


class MessageToolChoice(StrictModel):
    """Whether the model may call, or has to. `name` goes with `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """`enabled` with a budget in tokens, `adaptive` (as much as the model likes) or `disabled`. `display` has no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


def _format(value: dict[str, Any]) -> dict[str, Any]:
    given = without_nulls(value)
    if set(given) != {"type", "schema"} or given["type"] != "json_schema" or not isinstance(given["schema"], dict):
        raise PydanticCustomError("type", "should be {'type': 'json_schema', 'schema': {…}}")
    return given


def _keeps_all(edit: Any) -> bool:
    """Whether an edit leaves the conversation as it is: it clears thinking, and none of it."""
    given = without_nulls(edit) if isinstance(edit, dict) else {}
    kind = given.get("type")
    clears = isinstance(kind, str) and kind.startswith("clear_thinking_")
    return clears and set(given) == {"type", "keep"} and given["keep"] in _KEEPS_ALL


def _context_management(value: Any) -> Any:
    if value:
        given = without_nulls(value) if isinstance(value, dict) else {"": value}
        edits = given.pop("edits", [])
        if given or not isinstance(edits, list) or not all(map(_keeps_all, edits)):
            raise unsupported("context_management that changes the conversation is")
    return value


def _fallbacks(value: Any) -> Any:
    if value and value != "default":
        raise unsupported("fallbacks to other models are")
    return value


# What only Anthropic's own service does
McpServers = Annotated[Any, only_empty("mcp_servers are")]
ContextManagement = Annotated[
    Any,
    AfterValidator(_context_management),
    Field(description="Edits that clear no thinking (`keep` is `all`) are accepted, without effect; no others are."),
]
# Those of the model, if it has any, are `default`.
Fallbacks = Annotated[Any, AfterValidator(_fallbacks), Field(json_schema_extra={"enum": [None, [], "default"]})]
# By these details the anthropic package's tool runner finds that it has to send the whole conversation each time.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class OutputConfig(StrictModel):
    """The form of the answer's text, and how much the model shall think."""

    effort: Effort | None = None
    format: Annotated[dict[str, Any], AfterValidator(_format)] | None = None


class MessageMetadata(StrictModel):
    """`user_id` has no effect."""

    user_id: str | None = None


Messages = Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
MessageTools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_tools)]


class CountTokensRequest(StrictModel):
    """What an input comes to in tokens, the chat template's own included."""

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING | {"compaction"}

    model: str | None = None
    messages: Messages
    system: Texts | None = None
    tools: MessageTools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: FreeForm | None = None
    mcp_servers: McpServers = None
    context_management: ContextManagement = None


class MessageRequest(SharedRequest):
    """`messages` behind `system` go through the model's chat template. Where the last message is the assistant's, the answer
    goes on with it."""

    hints: ClassVar[dict[str, str]] = SharedRequest.hints | {
        "stop": "it is called stop_sequences here",
        "max_completion_tokens": "it is called max_tokens here",
        "response_format": "it is called output_config.format here",
        "n": "a message is one answer",
        "n_predict": "it is called max_tokens here",
        "num_predict": "it is called max_tokens here",
    }
    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    messages: Messages
    system: Texts | None = None
    stop_sequences: StopStrings | None = None
    tools: MessageTools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: MessageMetadata | None = None
    chat_template_kwargs: FreeForm | None = None

    container: Annotated[Any, only_empty("containers are")] = None
    mcp_servers: McpServers = None
    context_management: ContextManagement = None
    compaction: Annotated[Any, only_empty("compaction is")] = None
    fallbacks: Fallbacks = None
    thread: Annotated[Any, only_empty("threads are", _NO_THREADS)] = None
