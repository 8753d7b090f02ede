"""Tools that requests offer, and tool calls in histories and answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, Tag
from pydantic_core import PydanticCustomError, from_json, to_json

from windlass.server.schemas.base import (
    OTHER_TAG,
    FreeForm,
    StrictModel,
    UnsupportedKind,
    check_free_form,
    discriminate_by_type,
    optional,
    without_nulls,
)

MAX_TOOLS = 1024
MAX_SCHEMA_BYTES = 128 * 1024  # of one function's parameters
MAX_TOOLS_BYTES = 1024 * 1024  # of all tools of a request
PROVIDER_FIELDS = "provider_specific_fields"  # field that litellm adds to every part of an answer
ALLOWED_TOOLS = "allowed_tools"
MAX_ARGUMENTS = 1024 * 1024  # characters of one call in a history

# An escape in JSON: a surrogate pair, a lone surrogate, or any other.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

# Anthropic's limit, as recorded requests to /v1/messages are replayed as chats. OpenAI's limit is 64.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]

_NAMED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}

_ALLOWED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": ALLOWED_TOOLS},
        ALLOWED_TOOLS: {
            "type": "object",
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED_SCHEMA}},
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", ALLOWED_TOOLS],
}


def check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Check that the parameters of a function are the schema of an object of limited size."""
    if schema and schema.get("type", "object") != "object":
        raise PydanticCustomError("schema", "should be the schema of an object: {'type': 'object', …}")
    if (size := len(to_json(schema))) > MAX_SCHEMA_BYTES:
        raise PydanticCustomError(
            "too_large", "should have at most {most} bytes, got {size}", {"most": MAX_SCHEMA_BYTES, "size": size}
        )
    return schema


def replace_lone_surrogates(text: str) -> str:
    """Replace escapes of lone surrogates in JSON text, which a model may write, by U+FFFD."""
    return _ESCAPE.sub(lambda found: "\\ufffd" if found["half"] else found[0], text)


def parse_arguments(value: Any) -> dict[str, Any]:
    """Parse arguments, which are JSON text or an object. Raises ValueError."""
    if isinstance(value, str):
        value = from_json(replace_lone_surrogates(value), allow_inf_nan=False) if value.strip() else {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def check_arguments(value: Any) -> Any:
    """Check arguments of a call in a history: JSON text of an object, or an object.

    Other text, such as truncated JSON of a model, becomes the value of an object.
    """
    if isinstance(value, str) and len(value) > MAX_ARGUMENTS:
        raise PydanticCustomError("too_long", "should have at most {most} characters", {"most": MAX_ARGUMENTS})
    try:
        check_free_form(parse_arguments(value))
    except ValueError:
        if isinstance(value, str):
            return {"arguments": value}
        raise PydanticCustomError(
            "json", 'should be the JSON text of an object, such as \'{"city": "Rome"}\''
        ) from None
    return value


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: FunctionName = Field(description="Name of the function.")
    description: str | None = optional("What the function does, for the model.")
    parameters: Annotated[FreeForm, AfterValidator(check_parameters)] | None = optional(
        "JSON schema of the function's arguments. Default: no arguments."
    )
    strict: bool | None = optional(
        "Whether a schema that cannot be enforced completely is refused, if calls must follow it. Default: false."
    )


F = TypeVar("F", bound=FunctionDefinition)


class ToolDefinition(StrictModel):
    """A tool that the model may call. `cache_control` has no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["function"]
    function: FunctionDefinition = Field(description="The function.")


class HostedTool(BaseModel):
    """A tool that the service of OpenAI or Anthropic runs itself. It is ignored, and named in the header
    `x-windlass-ignored`.
    """

    type: str = Field(description="Kind of the tool.")


def hosted_names(tools: Sequence[Any]) -> Iterator[str]:
    """Names of the ignored tools for the header of the response."""
    return (f"tools.{tool.type}" for tool in tools if isinstance(tool, HostedTool))


class OtherTool(UnsupportedKind):
    """A tool of an unsupported kind."""

    kind_plural = "tools"
    supported_kinds = "function"


_Tool = Annotated[
    Annotated[ToolDefinition, Tag("[function]")] | Annotated[OtherTool, Tag(OTHER_TAG)],
    discriminate_by_type(("function",)),
]


def as_tool_definitions(tools: Sequence[Any]) -> Sequence[ToolDefinition]:
    """Cast the tools of a request after validation."""
    return cast(Sequence[ToolDefinition], tools)


def tool_definition(tool: Any, parameters: dict[str, Any] | None, name: str | None = None) -> ToolDefinition:
    """A tool in the form of a chat. tool: checked, in the form of another API, with `name`, `description` and `strict`.

    name: in the chat. Default: the tool's own.
    """
    function = FunctionDefinition.model_construct(
        name=name or tool.name, description=tool.description, parameters=parameters, strict=tool.strict
    )
    return ToolDefinition.model_construct(type="function", function=function)


def check_functions(functions: list[F]) -> list[F]:
    """Return the functions; raise if two functions have the same name, or if all are too large together."""
    names: set[str] = set()
    size = 0
    for function in functions:
        if function.name in names:
            raise PydanticCustomError("twice", "has two functions named '{name}'", {"name": function.name})
        names.add(function.name)
        size += len(to_json(function))
    if size > MAX_TOOLS_BYTES:
        raise PydanticCustomError(
            "too_large", "should have at most {most} bytes, got {size}", {"most": MAX_TOOLS_BYTES, "size": size}
        )
    return functions


def _check_tools(value: list[ToolDefinition]) -> list[ToolDefinition]:
    check_functions([tool.function for tool in value])
    return value


def _check_tool_choice(value: Any) -> Any:
    if value in (None, "none", "auto", "required"):
        return value
    given = without_nulls(value) if isinstance(value, dict) else {}
    if (name := _function_name(given)) is not None:
        return named_choice(name)
    if (
        given.get("type") == ALLOWED_TOOLS
        and set(given) == {"type", ALLOWED_TOOLS}
        and isinstance(given[ALLOWED_TOOLS], dict)
    ):
        return allowed_choice(*allowed_names(without_nulls(given[ALLOWED_TOOLS]), _function_name))
    raise PydanticCustomError(
        "type",
        "should be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': '…'}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': '…', 'tools': […]}}",
    )


def named_choice(name: str) -> dict[str, Any]:
    """The choice of one function, in the form of a chat."""
    return {"type": "function", "function": {"name": name}}


def allowed_choice(mode: str, names: list[str]) -> dict[str, Any]:
    """The choice among some functions, in the form of a chat."""
    return {"type": ALLOWED_TOOLS, ALLOWED_TOOLS: {"mode": mode, "tools": list(map(named_choice, names))}}


def allowed_names(given: dict[str, Any], name_of: Callable[[Any], str | None]) -> tuple[str, list[str]]:
    """Mode and names of a choice among some functions; raises if it is invalid.

    given: `mode` and `tools`. name_of: returns the name of a function, or None.
    """
    mode, tools = given.get("mode"), given.get("tools")
    if set(given) != {"mode", "tools"} or mode not in ("auto", "required"):
        raise PydanticCustomError("type", "should have a mode, 'auto' or 'required', and tools, in allowed_tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise PydanticCustomError("type", "should allow 1 to {most} tools, in a list", {"most": MAX_TOOLS})
    names = [name for tool in tools if (name := name_of(tool)) is not None]
    if len(names) < len(tools):
        raise PydanticCustomError("type", "should allow functions, each named as in a choice of one function")
    return mode, names


def _function_name(value: Any) -> str | None:
    """The name in {'type': 'function', 'function': {'name': '…'}}; None for any other value."""
    given = without_nulls(value) if isinstance(value, dict) else {}
    function = given.get("function")
    if given.get("type") != "function" or set(given) != {"type", "function"} or not isinstance(function, dict):
        return None
    function = without_nulls(function)
    return function["name"] if set(function) == {"name"} and isinstance(function["name"], str) else None


def _function_choice(value: Any) -> Any:
    if value in (None, "none", "auto"):
        return value
    if isinstance(value, dict) and set(value := without_nulls(value)) == {"name"} and isinstance(value["name"], str):
        return value
    raise PydanticCustomError("type", "should be 'none', 'auto' or {'name': '…'}")


Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_check_tools)]

Functions = Annotated[
    list[FunctionDefinition], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_functions)
]

ToolChoice = Annotated[
    Any,
    AfterValidator(_check_tool_choice),
    Field(json_schema_extra={"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_SCHEMA, _ALLOWED_SCHEMA]}),
]

FunctionChoice = Annotated[
    Any,
    AfterValidator(_function_choice),
    Field(json_schema_extra={"anyOf": [{"enum": ["none", "auto", None]}, _NAMED_SCHEMA["properties"]["function"]]}),
]


class MadeFunctionCall(StrictModel):
    """Function of a call in a history.

    `parsed_arguments` and `provider_specific_fields` have no effect.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"parsed_arguments", PROVIDER_FIELDS})

    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the function.")
    arguments: Annotated[
        Any,
        AfterValidator(check_arguments),
        Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
    ] = optional("Arguments as JSON text, or as an object. Default: no arguments.")


class MadeToolCall(StrictModel):
    """A call that the assistant made."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "timestamp", "weight", PROVIDER_FIELDS})

    id: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Id of the call.")
    type: Literal["function"] = "function"
    function: MadeFunctionCall = Field(description="The function.")
    index: int | None = optional("No effect.")


class AnsweredFunction(StrictModel):
    """Function of a call in an answer."""

    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="Arguments as JSON text.")


class AnsweredCall(StrictModel):
    """A call in an answer."""

    id: str = Field(description="Id of the call.")
    type: Literal["function"]
    function: AnsweredFunction = Field(description="The function.")


class FunctionDelta(StrictModel):
    """A piece of the function of a call: first its name, then pieces of its arguments."""

    name: str | None = optional("Name of the function. Only in the first piece.")
    arguments: str = Field(description="A piece of the arguments' JSON text.")


class CallDelta(StrictModel):
    """A piece of a call."""

    index: int = Field(description="Index of the call in the message, from 0.")
    id: str | None = optional("Id of the call. Only in the first piece.")
    type: Literal["function"] | None = optional("Kind of the call. Only in the first piece.")
    function: FunctionDelta = Field(description="The function.")
