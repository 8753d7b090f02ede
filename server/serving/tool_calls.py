"""Plan of a request's tools: template input, output parser and grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from windlass.server.errors import bad_request
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.tools import ALLOWED_TOOLS, FunctionDefinition, as_tool_definitions
from windlass.server.serving.structured_output import StructuredOutput
from windlass.server.text.stream_parser import MAX_CALLS, CallOptions, ParsingPlan
from windlass.server.text.tool_parsers.call_grammars import CallGrammarOptions
from windlass.server.text.tool_parsers.formats import PLAIN_JSON, format_of

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


INVALID = "invalid_value"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of a request.

    tools: for the template. parsing: None if the output is not searched for calls.
    forced: form of an output of calls only, None if calls are optional.
    calls: Lark of such an output as an alternative to a required form of the text; empty if there is none.
    """

    tools: list[dict[str, Any]] | None = None
    parsing: ParsingPlan | None = None
    forced: StructuredOutput | None = None
    calls: str = ""


NO_TOOLS = ToolPlan()


def tools_for_template(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them, in OpenAI's format."""
    return [_template_tool(tool.function) for tool in as_tool_definitions(tools)] if tools else None


def plan_tools(
    body: ChatRequest, tokenizer: Tokenizer, parser: str, *, single_call: bool = False, has_output_format: bool = False
) -> ToolPlan:
    """See `ToolPlan`; raises ApiError naming the field.

    parser: a format's name, "auto" or "none". single_call: whether the template shows only one call of a message.
    has_output_format: whether a form is required of an output without calls.
    """
    functions, choice, field = _functions(body)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise bad_request(
                f"{field} requires a call, but the request has no {field.replace('_choice', 's')}: add some",
                field,
                INVALID,
            )
        return NO_TOOLS
    tools = [_template_tool(function) for function in functions]
    if choice == "none":
        return ToolPlan(tools)
    names, named = _parse_tool_choice(choice)
    offered = {function.name: function.parameters or {} for function in functions}
    for name in names or ():
        if name not in offered:
            raise bad_request(
                f"{field} names {name[:64]!r}, which is not among the functions of this request", field, INVALID
            )
    schemas = offered if names is None else {name: offered[name] for name in names}
    must_call = named or choice == "required" or (names is not None and choice[ALLOWED_TOOLS]["mode"] == "required")
    if parser == "none":
        if must_call:
            raise bad_request(
                f"{field} cannot require a call: this server runs with --tool-call-parser none", field, INVALID
            )
        return ToolPlan(tools)
    legacy = body.functions is not None
    template = tokenizer.template_for(True) or ""
    once = legacy or named or single_call  # the response cannot have more
    parallel = body.parallel_tool_calls is not False and not once
    known = format_of(parser, template)
    grammar = None
    if must_call or has_output_format:
        strict = [function.name for function in functions if function.strict]
        forced = CallGrammarOptions(schemas, parallel, partial(_marker_lark, tokenizer), strict)
        try:
            grammar = known.grammar(forced)
            if grammar is None:  # these functions have no such form
                known, grammar = PLAIN_JSON, PLAIN_JSON.grammar(forced)
        except ValueError as error:
            where = "functions" if body.functions is not None else "tools"
            raise bad_request(f"{where}: a schema cannot be followed: {error}", where, "invalid_grammar") from None
    options = CallOptions(
        schemas=schemas,
        new_id=known.new_id,
        max_calls=MAX_CALLS if parallel else 1,
        calls_only=must_call,
        disallowed=offered.keys() - schemas.keys(),
    )
    parsing = ParsingPlan(lambda: known.parser(options), known.markers, known.opens, known.closes, legacy)
    if must_call and grammar is not None:
        return ToolPlan(tools, parsing, StructuredOutput("lark", grammar, field))
    return ToolPlan(tools, parsing, calls=grammar or "")


def _parse_tool_choice(choice: Any) -> tuple[list[str] | None, bool]:
    """(names of functions in a choice, None without; whether it requires a call of one of them)."""
    if not isinstance(choice, dict):
        return None, False
    if choice.get("type") == ALLOWED_TOOLS:
        return [tool["function"]["name"] for tool in choice[ALLOWED_TOOLS]["tools"]], False
    return [choice.get("function", choice)["name"]], True


def _marker_lark(tokenizer: Tokenizer, marker: str) -> str:
    """Lark of a marker: its token, or its text if it is not a single added token."""
    token_id = tokenizer.backend.token_to_id(marker)
    added = tokenizer.backend.get_added_tokens_decoder()
    return f"<[{token_id}]>" if token_id is not None and token_id in added else json.dumps(marker)


def _functions(body: ChatRequest) -> tuple[list[FunctionDefinition], Any, str]:
    """(functions on offer, the choice among them, the field of the choice)."""
    if body.functions is None:
        if body.function_call is not None:
            raise bad_request("function_call requires functions", "function_call", INVALID)
        return [tool.function for tool in as_tool_definitions(body.tools or ())], body.tool_choice, "tool_choice"
    if body.tools is not None or body.tool_choice is not None:
        raise bad_request("functions is the older name of tools: give one of them", "functions", INVALID)
    return body.functions, body.function_call, "function_call"


def _template_tool(function: FunctionDefinition) -> dict[str, Any]:
    return {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}
