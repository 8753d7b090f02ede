"""The form that a request requires of its output: structured output, its grammar after thinking, and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from windlass.server.errors import ApiError, bad_request
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.generation import GenerationRequest
from windlass.server.schemas.tools import ALLOWED_TOOLS, FunctionDefinition, as_tool_definitions
from windlass.server.text.reasoning import HARMONY, ThinkingControl, ThinkingFormat, ThinkingPhase
from windlass.server.text.stream_parser import MAX_CALLS, CallOptions, ParsingPlan
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.tool_parsers.call_grammars import CallGrammarOptions
from windlass.server.text.tool_parsers.formats import PLAIN_JSON, format_of

MAX_CHARACTERS = 128 << 10  # of a schema, pattern or grammar
MAX_VALUES = 50_000  # objects, lists, strings and numbers in a schema
MAX_CHOICES = 4096
_ANSWER = "answer"
# White space allowed before an opening marker from which a budget counts, and after a closing one.
_SPACES = (r"BEFORE: /[ \t\r\n]{0,2}/", r"SPACE: /[ \t\r\n]{0,4}/")

Kind = Literal["json_schema", "strict_json_schema", "json_object", "regex", "choice", "lark", "grammar"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A required form of the output.

    value: JSON text of a schema, a pattern, a JSON list of strings, Lark, or for "grammar" Lark or GBNF. A strict schema is
    refused if it is not supported completely. field: of the request, for errors. alternative: Lark of another allowed output.
    """

    kind: Kind
    value: str
    field: str
    alternative: str = ""


def parse_structured_output(body: GenerationRequest) -> StructuredOutput | None:
    """The form that the body requires, if any. Raises ApiError naming the field."""
    given = [
        ("response_format", _response_format(body.response_format)),
        ("structured_outputs", _structured_outputs(body.structured_outputs)),
        ("guided_json", _parse_form("json_schema", body.guided_json, "guided_json")),
        ("guided_regex", _parse_form("regex", body.guided_regex, "guided_regex")),
        ("guided_choice", _parse_form("choice", body.guided_choice, "guided_choice")),
        ("guided_grammar", _parse_form("grammar", body.guided_grammar, "guided_grammar")),
        ("grammar", _parse_form("grammar", body.grammar, "grammar")),
        ("json_schema", _parse_form("json_schema", body.json_schema, "json_schema")),
    ]
    found = [(field, form) for field, form in given if form is not None]
    if len(found) > 1:
        names = " and ".join(field for field, _ in found[:2])
        raise _grammar_error(f"{names} both set the format of the answer: give one of them", found[1][0])
    return found[0][1] if found else None


def _response_format(value: Any) -> StructuredOutput | None:
    """OpenAI's object, and llama.cpp's with the schema next to its type."""
    if value is None:
        return None
    field = "response_format"
    kind = value.get("type")
    if kind == "text":
        _check_known_fields(value, {"type"}, field)
        return None
    if kind == "json_object":
        _check_known_fields(value, {"type", "schema"}, field)
        schema = value.get("schema")
        return (
            StructuredOutput("json_object", "", field) if schema is None else _parse_form("json_schema", schema, field)
        )
    if kind == "json_schema":
        _check_known_fields(value, {"type", "json_schema", "schema"}, field)
        described = value.get("json_schema")
        if described is None and value.get("schema") is not None:
            return _parse_form("json_schema", value["schema"], field)
        if not isinstance(described, dict):
            raise _grammar_error("response_format of type json_schema needs json_schema: {name, schema}", field)
        _check_known_fields(described, {"name", "schema", "strict", "description"}, f"{field}.json_schema")
        if not isinstance(described.get("strict"), bool | None):
            raise _grammar_error("response_format.json_schema.strict must be true or false", field)
        schema, exact = described.get("schema"), described.get("strict")
        if schema is None:
            return StructuredOutput("json_object", "", field)
        return _parse_form("strict_json_schema" if exact else "json_schema", schema, field)
    raise _grammar_error(
        "response_format.type must be text, json_object or json_schema; structured_outputs has other forms",
        field,
    )


def _structured_outputs(value: dict[str, Any] | None) -> StructuredOutput | None:
    """vLLM's object, which has one of its keys."""
    kinds: dict[str, Kind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    if value is None:
        return None
    field = "structured_outputs"
    _check_known_fields(value, {*kinds, "json_object"}, field)
    given = [key for key, item in value.items() if item is not None and item is not False]
    if not given:
        return None
    if len(given) != 1:
        raise _grammar_error("structured_outputs takes one of json, json_object, regex, choice and grammar", field)
    if given[0] != "json_object":
        return _parse_form(kinds[given[0]], value[given[0]], field)
    if value["json_object"] is not True:
        raise _grammar_error("structured_outputs.json_object must be true or false", field)
    return StructuredOutput("json_object", "", field)


def _parse_form(kind: Kind, value: Any, field: str) -> StructuredOutput | None:
    if value is None:
        return None
    if kind in ("json_schema", "strict_json_schema"):
        return StructuredOutput(kind, _schema(value, field), field)
    if kind == "choice":
        return StructuredOutput(kind, _choices(value, field), field)
    if not isinstance(value, str) or not value:
        raise _grammar_error(
            f"{field}: a {'pattern' if kind == 'regex' else 'grammar'} must be a non-empty string", field
        )
    _check_size(len(value), field)
    return StructuredOutput(kind, value, field)


def _schema(value: Any, field: str) -> str:
    """The JSON text of a schema, given as such or as an object."""
    if isinstance(value, str):
        _check_size(len(value), field)
        return value
    if not isinstance(value, dict | bool):
        raise _grammar_error(f"{field}: a schema must be an object", field)
    values, characters, stack = 0, 0, [value]
    while stack:
        item: Any = stack.pop()
        values += 1
        if isinstance(item, dict):
            characters += sum(map(len, item))
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, str):
            characters += len(item)
        if values + len(stack) > MAX_VALUES:
            raise _grammar_error(f"{field}: the schema holds more than {MAX_VALUES} values", field)
        _check_size(characters, field)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError) as error:
        raise _grammar_error(f"{field}: the schema cannot be written as JSON ({type(error).__name__})", field) from None
    _check_size(len(text), field)
    return text


def _choices(value: Any, field: str) -> str:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise _grammar_error(f"{field}: choices must be a list of 1 to {MAX_CHOICES} strings", field)
    if not all(isinstance(choice, str) and choice for choice in value):
        raise _grammar_error(f"{field}: every choice must be a non-empty string", field)
    _check_size(sum(map(len, value)), field)
    return json.dumps(value)


def _check_known_fields(value: Mapping[str, Any], known: set[str], where: str) -> None:
    for key, item in value.items():
        if key not in known and item is not None:
            name = key[:64]
            raise _grammar_error(
                f"{where}: unknown field {name!r}: use one of {', '.join(sorted(known))}", where.split(".")[0]
            )


def _check_size(characters: int, field: str) -> None:
    if characters > MAX_CHARACTERS:
        raise _grammar_error(f"{field} has more than {MAX_CHARACTERS} characters", field, "grammar_too_large")


def _grammar_error(message: str, field: str, code: str = "invalid_grammar") -> ApiError:
    return bad_request(message, field, code)


def with_thinking_prefix(
    grammar: str, model: ThinkingControl, phase: ThinkingPhase, eos_ids: Collection[int], *, calls: bool = False
) -> str:
    """The grammar of the entire output: thinking, if the model thinks, then the output of `grammar`.

    grammar: a JSON list of grammars, or Lark. phase: where the output begins. eos_ids: not allowed while the model thinks.
    calls: `grammar` is one of calls, which name their Harmony channels themselves.
    """
    if phase == "after" or (calls and model.name == HARMONY):
        return grammar
    if model.name == HARMONY:
        lark = _channel_grammar(model.ids, eos_ids)
    elif model.format is not None:
        lark = _tag_grammar(model.format, phase, model.ids, eos_ids)
    else:
        return grammar
    given: dict[str, Any] = json.loads(grammar) if grammar.lstrip().startswith("{") else {}
    first, *others = given.get("grammars") or [{"lark_grammar": grammar}]
    grammars = [{"lark_grammar": lark}, {**first, "name": _ANSWER}, *others]
    return json.dumps({**given, "grammars": grammars})


def _tag_grammar(
    format: ThinkingFormat, phase: ThinkingPhase, ids: Callable[[str], list[int]], eos_ids: Collection[int]
) -> str:
    closes = _single_token_ids(ids, format.closes)
    if closes:
        others = {*eos_ids, *_single_token_ids(ids, format.interrupts)}
        rules = [f"thought: {_token_complement({*closes, *others})}* {_token_set(closes)}"]
    else:  # the markers are text: the shortest match ends with the first one
        ends = "|".join(_escape_regex(close) for close in format.closes)
        rules = [rf"thought[lazy]: /(.|\n)*({ends})/"]
    opens = [_token_set(found) if len(found := ids(text)) == 1 else json.dumps(text) for text in format.opens]
    label = f"{json.dumps(format.label)} " if format.label else ""
    opened = f"BEFORE ({' | '.join(opens)}) {label}thought"
    begin = "thought" if phase == "inside" else f"({opened})?"
    return "\n".join([f"start: {begin} SPACE @{_ANSWER}", *rules, *(_SPACES[1:] if phase == "inside" else _SPACES)])


def _channel_grammar(ids: Callable[[str], list[int]], eos_ids: Collection[int]) -> str:
    def token(text: str) -> str:
        return _token_set(found) if len(found := ids(text)) == 1 else json.dumps(text)

    channel, message, end = token("<|channel|>"), token("<|message|>"), ids("<|end|>")
    free = f"{_token_complement({*end, *eos_ids})}* {_token_set(end)}" if len(end) == 1 else "unmarked"
    return "\n".join(
        [
            f'start: ({channel} "analysis" {message} thought {token("<|start|>")} "assistant")? '
            f'{channel} "final" {message} @{_ANSWER}',
            f"thought: {free}",
            *(() if len(end) == 1 else (r"unmarked[lazy]: /(.|\n)*<\|end\|>/",)),
        ]
    )


def _single_token_ids(ids: Callable[[str], list[int]], texts: Collection[str]) -> list[int]:
    """Ids of those texts that are a single token."""
    return [found[0] for found in map(ids, texts) if len(found) == 1]


def _token_set(ids: Collection[int]) -> str:
    return f"<[{','.join(map(str, sorted(ids)))}]>"


def _token_complement(ids: Collection[int]) -> str:
    return f"<[^{','.join(map(str, sorted(ids)))}]>"


def _escape_regex(text: str) -> str:
    """Escape a text for use inside `/…/`."""
    return re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", text)


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
