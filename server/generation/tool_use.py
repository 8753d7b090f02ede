"""From the tools of a request to what the template is told, and to how the answer is parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.server.errors import bad_request
from windlass.server.protocol.chat import ChatRequest
from windlass.server.protocol.tools import FunctionDefinition, ToolDefinition
from windlass.server.text.parsing.events import ParsingPlan
from windlass.server.text.parsing.stream import MAX_CALLS, CallOptions
from windlass.server.text.parsing.tools.forced import Forced
from windlass.server.text.parsing.tools.formats import FORMATS, PLAIN_JSON, ToolFormat, detect
from windlass.server.text.template_facts import TemplateFacts

INVALID = "invalid_value"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the tools of a request come to.

    tools: for the template. parsing: None where the answer is not searched for calls.
    must_call: functions of which at least one has to be called, None where it is up to the model; field: who says so.
    """

    tools: list[dict[str, Any]] | None = None
    parsing: ParsingPlan | None = None
    format: ToolFormat = PLAIN_JSON
    must_call: Mapping[str, Mapping[str, Any]] | None = None
    several: bool = True
    field: str = "tool_choice"


def tools_for_template(tools: Sequence[ToolDefinition] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them, which is as OpenAI writes them."""
    return [_told(tool.function) for tool in tools] if tools else None


def plan_tools(body: ChatRequest, template: str | None, parser: str) -> ToolUse:
    """See `ToolUse`; raises ApiError naming the field. parser: a format's name, "auto" or "none"."""
    functions, choice, field = _functions(body)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise bad_request(
                f"{field} asks for a call, and there are no {field.replace('_choice', 's')} to call", field, INVALID
            )
        return ToolUse()
    tools = [_told(function) for function in functions]
    schemas = {function.name: function.parameters or {} for function in functions}
    if choice == "none":
        return ToolUse(tools)
    must_call: Mapping[str, Mapping[str, Any]] | None = None
    if choice == "required":
        must_call = schemas
    elif isinstance(choice, dict):
        name = choice.get("function", choice)["name"]
        if name not in schemas:
            raise bad_request(f"{field} names {name[:64]!r}, which is not among the functions on offer", field, INVALID)
        must_call = {name: schemas[name]}
    if parser == "none":
        if must_call is not None:
            raise bad_request(
                f"{field} cannot ask for a call: this server runs with --tool-call-parser none", field, INVALID
            )
        return ToolUse(tools)
    older = body.functions is not None
    several = body.parallel_tool_calls is not False and not older and not isinstance(choice, dict)
    known = detect(template) if parser == "auto" else FORMATS[parser]
    if parser == "auto" and not TemplateFacts.of(template or "").tools:
        known = PLAIN_JSON  # it is told what to write by our own words
    options = CallOptions(schemas=schemas, new_id=known.new_id, max_calls=MAX_CALLS if several else 1)
    parsing = ParsingPlan(lambda: known.parser(options), known.markers, older)
    return ToolUse(tools, parsing, known, must_call, several, field)


def forced_calls(use: ToolUse, token: Callable[[str], str]) -> str | None:
    """The Lark of an answer that is nothing but calls; None where it is up to the model. token: see `Forced`."""
    if use.must_call is None:
        return None
    return use.format.grammar(Forced(use.must_call, use.several, token))


def _functions(body: ChatRequest) -> tuple[list[FunctionDefinition], Any, str]:
    """The functions on offer, the choice among them, and the name of its field."""
    if body.functions is None:
        if body.function_call is not None:
            raise bad_request("function_call goes with functions", "function_call", INVALID)
        return [tool.function for tool in body.tools or ()], body.tool_choice, "tool_choice"
    if body.tools is not None or body.tool_choice is not None:
        raise bad_request("functions is the older name of tools: give one of them", "functions", INVALID)
    return body.functions, body.function_call, "function_call"


def _told(function: FunctionDefinition) -> dict[str, Any]:
    return {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}
