"""Tools that requests offer, and tool calls in a history."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError, from_json, to_json

from windlass.server.schemas.base import (
    OTHER_TAG,
    FreeForm,
    StrictModel,
    UnsupportedKind,
    check_free_form,
    discriminate_by_type,
    without_nulls,
)

MAX_TOOLS = 128

MAX_SCHEMA_BYTES = 128 * 1024  # of one function's parameters

MAX_TOOLS_BYTES = 1024 * 1024  # of all tools of a request

PROVIDER_FIELDS = "provider_specific_fields"  # what litellm keeps of any answer, in all its parts

ALLOWED_TOOLS = "allowed_tools"

MAX_ARGUMENTS = 1024 * 1024  # characters of one call in a history

# An escape of JSON: a character of two halves, a half by itself, or any other.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

# Anthropic's may be as long, and a recorded request to /v1/messages is repeated as a chat; OpenAI's have at most 64.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


def check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a function, which are the schema of an object."""
    if schema and schema.get("type", "object") != "object":
        raise PydanticCustomError("schema", "should be the schema of an object: {'type': 'object', …}")
    if (size := len(to_json(schema))) > MAX_SCHEMA_BYTES:
        raise PydanticCustomError(
            "too_large", "should have at most {most} bytes, got {size}", {"most": MAX_SCHEMA_BYTES, "size": size}
        )
    return schema


def replace_lone_surrogates(text: str) -> str:
    """JSON text in which half a character, as a model may write it, stands as U+FFFD: JSON has no other place for it."""
    return _ESCAPE.sub(lambda found: "\\ufffd" if found["half"] else found[0], text)


def parse_arguments(value: Any) -> dict[str, Any]:
    """Arguments as an object: from JSON text, as OpenAI writes them, or as they are. Raises ValueError."""
    if isinstance(value, str):
        value = from_json(replace_lone_surrogates(value), allow_inf_nan=False) if value.strip() else {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def check_arguments(value: Any) -> Any:
    """Arguments of a call as a history has them: JSON text of an object, or an object.

    Text that is none is what a model wrote, or the part of it that came before the end: an object that holds it.
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
    """A function on offer. `parameters`: a JSON schema, absent where it takes none.

    `strict`: where arguments are held to the schema, which is where a call is required, one that cannot be held to as a whole is
    refused.
    """

    name: FunctionName = Field(description="Name of the function.")
    description: str | None = Field(default=None, description="What the function does, for the model.")
    parameters: Annotated[FreeForm, AfterValidator(check_parameters)] | None = Field(
        default=None, description="JSON schema of the function's arguments. Default: no arguments."
    )
    strict: bool | None = Field(
        default=None,
        description="Where calls must follow the schema: whether a schema that cannot be enforced completely is "
        "refused. Default: false.",
    )


class ToolDefinition(StrictModel):
    """A tool on offer: a function. `cache_control` has no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["function"]
    function: FunctionDefinition = Field(description="The function.")


class OtherTool(UnsupportedKind):
    """A tool of a kind that is not supported: it is refused by its name."""

    kind_plural = "tools"
    supported_kinds = "function"


_Tool = Annotated[
    Annotated[ToolDefinition, Tag("[function]")] | Annotated[OtherTool, Tag(OTHER_TAG)],
    discriminate_by_type(("function",)),
]


def as_tool_definitions(tools: Sequence[Any]) -> Sequence[ToolDefinition]:
    """The same: one of another kind has not been accepted."""
    return cast(Sequence[ToolDefinition], tools)


def check_functions(functions: Sequence[FunctionDefinition]) -> None:
    """Raise where two have one name, or where all are too large together."""
    names: set[str] = set()
    size = 0
    for function in functions:
        if function.name in names:
            raise PydanticCustomError("twice", "holds two functions named '{name}'", {"name": function.name})
        names.add(function.name)
        size += len(to_json(function))
    if size > MAX_TOOLS_BYTES:
        raise PydanticCustomError(
            "too_large", "should have at most {most} bytes, got {size}", {"most": MAX_TOOLS_BYTES, "size": size}
        )


def _check_tools(value: list[ToolDefinition]) -> list[ToolDefinition]:
    check_functions([tool.function for tool in value])
    return value


def _check_functions(value: list[FunctionDefinition]) -> list[FunctionDefinition]:
    check_functions(value)
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
    """The choice of one function, as a chat writes it."""
    return {"type": "function", "function": {"name": name}}


def allowed_choice(mode: str, names: list[str]) -> dict[str, Any]:
    """The choice among some functions, as a chat writes it."""
    return {"type": ALLOWED_TOOLS, ALLOWED_TOOLS: {"mode": mode, "tools": list(map(named_choice, names))}}


def allowed_names(given: dict[str, Any], name_of: Callable[[Any], str | None]) -> tuple[str, list[str]]:
    """The mode of a choice among some functions, and their names; raises where it is none.

    given: its `mode` and `tools`. name_of: the function that one of these names, None where it names none.
    """
    mode, tools = given.get("mode"), given.get("tools")
    if set(given) != {"mode", "tools"} or mode not in ("auto", "required"):
        raise PydanticCustomError("type", "should have a mode, 'auto' or 'required', and tools beside allowed_tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise PydanticCustomError("type", "should allow 1 to {most} tools, in a list", {"most": MAX_TOOLS})
    names = [name for tool in tools if (name := name_of(tool)) is not None]
    if len(names) < len(tools):
        raise PydanticCustomError("type", "should allow functions, each named as in a choice of one function")
    return mode, names


def _function_name(value: Any) -> str | None:
    """The function that {'type': 'function', 'function': {'name': '…'}} names, None where it is no such object."""
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

Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_check_tools)]

Functions = Annotated[
    list[FunctionDefinition], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_check_functions)
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
    """The function of a call in a history. `arguments`: the JSON text of an object; an object itself is taken, too, and so is
    other text, such as one that was cut short: the model is shown `{"arguments": "the text"}`.

    `parsed_arguments`, which the openai package adds, has no effect, nor has litellm's `provider_specific_fields`.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"parsed_arguments", PROVIDER_FIELDS})

    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="Name of the function.")
    arguments: Annotated[
        Any,
        AfterValidator(check_arguments),
        Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
    ] = Field(default=None, description="Arguments as JSON text, or as an object. Default: no arguments.")


class MadeToolCall(StrictModel):
    """A call that the assistant made. `index` has no effect: those who put streams together leave it there."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "timestamp", "weight", PROVIDER_FIELDS})

    id: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="Id of the call, which its result repeats."
    )
    type: Literal["function"] = "function"
    function: MadeFunctionCall = Field(description="The function.")
    index: int | None = Field(default=None, description="Accepted without effect.")


class AnsweredFunction(StrictModel):
    """The function of a call in an answer. `arguments`: JSON text."""

    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="Arguments as JSON text.")


class AnsweredCall(StrictModel):
    """A call in an answer."""

    id: str = Field(description="Id of the call, which its result repeats.")
    type: Literal["function"]
    function: AnsweredFunction = Field(description="The function.")


class FunctionDelta(StrictModel):
    """A piece of the function of a call: first its name, then pieces of its arguments' JSON text."""

    name: str | None = Field(default=None, description="Name of the function. Only in the first piece.")
    arguments: str = Field(description="A piece of the arguments' JSON text.")


class CallDelta(StrictModel):
    """A piece of a call. `index` says of which; only its first piece has `id` and `type`."""

    index: int = Field(description="Index of the call in the message, from 0.")
    id: str | None = Field(
        default=None, description="Id of the call, which its result repeats. Only in the first piece."
    )
    type: Literal["function"] | None = Field(default=None, description="Kind of the call. Only in the first piece.")
    function: FunctionDelta = Field(description="The function.")
