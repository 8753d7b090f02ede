"""Lark grammars that permit only tool calls, one function per call format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.interface.validation import MAX_GRAMMAR_CHARACTERS
from windlass.server.text.schema_rewriting import enforced_schema, names_all_members

MAX_GRAMMAR_CALLS = 16  # per answer, for models that never stop calling
MAX_MEMBERS = 200  # per function with one rule per member: llguidance recurses from each rule to the next
PARAMETERS_OF = "// parameters of "  # comment line before a rule, followed by the function's name
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Models write a newline after a call, before the token that ends the answer. If it could not end there, they would have to call
# again.
_NEWLINES_AFTER = r"(/\n{1,2}/)?"
_UNSUPPORTED_KEYWORDS = ("patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if")


@dataclass(frozen=True, slots=True)
class CallGrammarOptions:
    """Input of a call grammar.

    schemas: parameters of each permitted function, by name. parallel: whether several calls are permitted.
    token: returns the Lark of a marker, which is a special token of the model or plain text.
    strict: functions whose schemas are rejected if they cannot be enforced completely.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool
    token: Callable[[str], str]
    strict: Collection[str] = ()

    def schema_options(self, name: str) -> dict[str, Any]:
        """Return llguidance's options for the schema of a function."""
        return {**_SPACING, "lenient": name not in self.strict}

    def max_more_calls(self) -> int:
        """Return the number of calls permitted after the first."""
        return MAX_GRAMMAR_CALLS - 1 if self.parallel else 0


def tagged(options: CallGrammarOptions) -> str:
    """Hermes: one tagged object per call."""
    begin, end = options.token("<tool_call>"), options.token("</tool_call>")
    head = _json_head("arguments")
    return _grammar(
        options,
        lambda name: f"{begin} {lark_string(chr(10))} {head(name)}",
        f"{lark_string('}' + chr(10))} {end}",
        between=lark_string("\n"),
    )


def json_list(options: CallGrammarOptions, begin: str, end: str = "") -> str:
    """A marker, a list of objects and a marker."""
    return _json_list(options, options.token(begin), options.token(end) if end else "")


def command_r(options: CallGrammarOptions) -> str:
    """Command R: fenced JSON after `Action:`."""
    begin, end = lark_string("Action: ```json\n"), lark_string("\n```")
    return _json_list(options, begin, end, _json_head("parameters", "tool_name"))


def cohere(options: CallGrammarOptions) -> str:
    """Command R7B and A: a list of objects with numbers between markers."""
    begin, end = options.token("<|START_ACTION|>"), options.token("<|END_ACTION|>")
    before = lark_string('{"tool_call_id": "') + " /[0-9]{1,2}/ "
    return _json_list(
        options, begin, end, lambda name: before + lark_string(f'", "tool_name": "{name}", "parameters": ')
    )


def apertus(options: CallGrammarOptions) -> str:
    """Apertus: a list of objects that map a name to arguments."""
    begin, end = options.token("<|tools_prefix|>"), options.token("<|tools_suffix|>")
    return _json_list(options, begin, end, lambda name: lark_string(f'{{"{name}": '))


def granite_20b(options: CallGrammarOptions) -> str:
    """Granite 20B: a marker before each object."""
    begin, head = options.token("<function_call>"), _json_head("arguments")
    return _grammar(options, lambda name: f"{begin} {lark_string(' ')} {head(name)}", lark_string("}"), between='" "')


def internlm(options: CallGrammarOptions) -> str:
    """InternLM: an object between markers."""
    begin = f"{options.token('<|action_start|>')} {options.token('<|plugin|>')} {lark_string(chr(10))}"
    head = _json_head("parameters")
    end = f"{lark_string('}')} {options.token('<|action_end|>')}"
    return _grammar(options, lambda name: f"{begin} {head(name)}", end)


def gigachat3(options: CallGrammarOptions) -> str:
    """GigaChat 3: one message of the role `function call` after an empty one."""
    before = f"{options.token('<|message_sep|>')} {lark_string(chr(10) * 2 + 'function call')}"
    before += f" {options.token('<|role_sep|>')} {lark_string(chr(10))}"
    return _grammar(replace(options, parallel=False), _json_head("arguments"), lark_string("}"), before=before)


def functionary_v31(options: CallGrammarOptions) -> str:
    """Functionary 3.1: arguments between tags of the function."""
    return _grammar(options, lambda name: lark_string(f"<function={name}>"), options.token("</function>"))


def functionary_v32(options: CallGrammarOptions) -> str:
    """Functionary 3.2: name and arguments on lines of their own. The prompt contains the first `>>>`."""
    return _grammar(options, lambda name: lark_string(f"{name}\n"), "", between=lark_string("\n>>>"))


def plain_json(options: CallGrammarOptions) -> str:
    """Bare JSON: a list of objects, or one object if only one call is permitted."""
    if options.parallel:
        return _json_list(options, "")
    return "\n".join(
        [call_sequence(options, "", "", ""), *_call_rules(options, _json_head("arguments"), lark_string("}"))]
    )


def llama3_json(options: CallGrammarOptions) -> str:
    """Llama 3: objects separated by semicolons."""
    return _grammar(options, _json_head("parameters"), lark_string("}"), between=lark_string("; "))


def mistral_args(options: CallGrammarOptions) -> str:
    """Mistral since version 11: marker, name, marker, arguments."""
    begin, middle = options.token("[TOOL_CALLS]"), options.token("[ARGS]")
    return _grammar(options, lambda name: f"{begin} {lark_string(name)} {middle}", "")


def deepseek_v3(options: CallGrammarOptions) -> str:
    """DeepSeek V3: the kind of call, its name, fenced JSON."""
    separator = options.token("<｜tool▁sep｜>")
    return _deepseek(
        options,
        lambda name: f"{lark_string('function')} {separator} {lark_string(name + chr(10) + '```json' + chr(10))}",
        "\n```",
    )


def deepseek_v31(options: CallGrammarOptions) -> str:
    """DeepSeek V3.1: name, JSON."""
    separator = options.token("<｜tool▁sep｜>")
    return _deepseek(options, lambda name: f"{lark_string(name)} {separator}", "")


def kimi_k2(options: CallGrammarOptions) -> str:
    """Kimi K2: numbered names and arguments between markers."""
    token = options.token
    return _grammar(
        options,
        lambda name: (
            f"{token('<|tool_call_begin|>')} {lark_string(f'functions.{name}:')} /[0-9]{{1,2}}/ "
            f"{token('<|tool_call_argument_begin|>')}"
        ),
        token("<|tool_call_end|>"),
        before=token("<|tool_calls_section_begin|>"),
        after=token("<|tool_calls_section_end|>"),
    )


def harmony(options: CallGrammarOptions) -> str:
    """Harmony: optional reasoning, then one message to a function. Its end marker ends the turn."""
    token = options.token
    channel, message = token("<|channel|>"), token("<|message|>")
    json_follows = f"{token('<|constrain|>')} {lark_string('json')} {message}"
    reasoning_ends = f"{token('<|end|>')} {token('<|start|>')} {lark_string('assistant')}"
    reasoning = f"{channel} {lark_string('analysis')} {message} REASONING {reasoning_ends}"
    rules = _call_rules(
        options, lambda name: f"{channel} {lark_string(f'commentary to=functions.{name} ')} {json_follows}", ""
    )
    return "\n".join([f"start: ({reasoning})? call", r"REASONING: /(.|\n)*/", *rules])


def pythonic(options: CallGrammarOptions, begin: str = '"["', end: str = '"]"', between: str = '", "') -> str | None:
    """A Python list of calls with named arguments.

    begin, end, between: Lark before, after and between the calls. Returns None if a schema is not a plain list of
    properties, or if its definitions are too large to be repeated for each argument.
    """
    call_rules = []
    heads = []
    remaining = MAX_GRAMMAR_CHARACTERS
    for number, (name, schema) in enumerate(options.schemas.items()):
        properties = schema.get("properties") or {}
        if (
            any(key in schema for key in _UNSUPPORTED_KEYWORDS)
            or not isinstance(properties, Mapping)
            or len(properties) > MAX_MEMBERS
            or not all(map(_IDENTIFIER.fullmatch, properties))
            or not _IDENTIFIER.fullmatch(name.replace("-", "_"))
        ):
            return None
        remaining -= len(json.dumps(definitions(schema))) * len(properties)
        if remaining < 0:
            return None
        heads.append(f"{lark_string(name + '(')} first_{number}_0 {lark_string(')')}")
        enforced = enforced_schema(schema, strict=name in options.strict)
        call_rules += _keyword_rules(number, enforced, options.schema_options(name))
    start = call_sequence(options, begin, between, end)
    return "\n".join([start, f"call: {' | '.join(heads)}", *call_rules])


def lfm2(options: CallGrammarOptions) -> str | None:
    """LFM2: a Python list of calls between markers."""
    begin, end = options.token("<|tool_call_start|>"), options.token("<|tool_call_end|>")
    return pythonic(options, f'{begin} "["', f'"]" {end}')


def minicpm3(options: CallGrammarOptions) -> str | None:
    """MiniCPM 3: fenced Python between markers, a call per line."""
    begin, end = options.token("<|tool_call_start|>"), options.token("<|tool_call_end|>")
    fence = lark_string("\n```python\n")
    return pythonic(options, f"{begin} {fence}", f"{lark_string(chr(10) + '```' + chr(10))} {end}", lark_string("\n"))


def olmo3(options: CallGrammarOptions) -> str | None:
    """OLMo 3: a call per line between tags."""
    begin, end = options.token("<function_calls>"), options.token("</function_calls>")
    return pythonic(options, begin, end, lark_string("\n"))


# Rules shared by the formats


def lark_string(text: str) -> str:
    """Return a Lark string literal in ASCII."""
    return json.dumps(text)


def call_sequence(options: CallGrammarOptions, before: str, between: str, after: str) -> str:
    """Return the rule `start`: calls with a separator, and newlines at the end."""
    more = options.max_more_calls()
    return f"start: {before} call" + (f" ({between} call){{0,{more}}}" if more else "") + f" {after} {_NEWLINES_AFTER}"


def parameters_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object without unnamed members, unless the schema permits them."""
    enforced = enforced_schema(schema, strict=strict)
    enforced.setdefault("type", "object")
    if names_all_members(enforced):
        enforced = {"properties": {}, **enforced, "additionalProperties": False}
    return enforced


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that references within the schema point to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def member_rules(suffix: str, names: Sequence[str], required: Any, separator: str) -> list[str]:
    """Return the rule `first_SUFFIX_0`: the members `value_SUFFIX_k` in order, where only required ones are mandatory.

    `first_SUFFIX_k` and `rest_SUFFIX_k` are the members from the k-th on, before and after one was written.
    """
    needed = set(required) if isinstance(required, list) else set()
    rules = []
    for k, name in enumerate(names):
        value, rest = f"value_{suffix}_{k}", f"rest_{suffix}_{k + 1}"
        skip_first, skip_rest = ("", "") if name in needed else (f" | first_{suffix}_{k + 1}", f" | {rest}")
        rules.append(f"first_{suffix}_{k}: {value} {rest}{skip_first}")
        rules.append(f"rest_{suffix}_{k}: {lark_string(separator)} {value} {rest}{skip_rest}")
    last = len(names)
    return [*rules, f'first_{suffix}_{last}: ""', f'rest_{suffix}_{last}: ""']


def _grammar(
    options: CallGrammarOptions,
    head: Callable[[str], str],
    tail: str,
    *,
    before: str = "",
    between: str = "",
    after: str = "",
) -> str:
    return "\n".join([call_sequence(options, before, between, after), *_call_rules(options, head, tail)])


def _call_rules(options: CallGrammarOptions, head: Callable[[str], str], tail: str) -> list[str]:
    """Return the rule `call` with one choice per function (`head(name)`, arguments, `tail`) and the argument rules.

    The comment before each argument rule lets `grammars.py` name the function in error messages.
    """
    choices, rules = [], []
    for i, (name, schema) in enumerate(options.schemas.items()):
        choices.append(f"{head(name)} arguments_{i} {tail}")
        parameters = parameters_schema(schema, strict=name in options.strict)
        text = json.dumps({**parameters, "x-guidance": options.schema_options(name)})
        rules.append(f"{PARAMETERS_OF}{name}\narguments_{i}: %json {text}")
    return [f"call: {' | '.join(choices)}", *rules]


def _json_head(arguments: str, key: str = "name") -> Callable[[str], str]:
    return lambda name: lark_string(f'{{"{key}": "{name}", "{arguments}": ')


def _json_list(options: CallGrammarOptions, begin: str, end: str = "", head: Callable[[str], str] | None = None) -> str:
    return _grammar(
        options,
        head or _json_head("arguments"),
        lark_string("}"),
        before=f"{begin} {lark_string('[')}",
        between=lark_string(", "),
        after=f"{lark_string(']')} {end}",
    )


def _deepseek(options: CallGrammarOptions, head: Callable[[str], str], fence: str) -> str:
    token = options.token
    call, end = token("<｜tool▁call▁begin｜>"), token("<｜tool▁call▁end｜>")
    return _grammar(
        options,
        lambda name: f"{call} {head(name)}",
        f"{lark_string(fence)} {end}" if fence else end,
        before=token("<｜tool▁calls▁begin｜>"),
        between=lark_string("\n") if fence else "",
        after=token("<｜tool▁calls▁end｜>"),
    )


def _keyword_rules(number: int, schema: Mapping[str, Any], schema_options: Mapping[str, Any]) -> list[str]:
    """Return rules for the arguments of one function, in the order of its schema; see `member_rules`."""
    properties = schema.get("properties") or {}
    shared = definitions(schema)
    rules = []
    for k, (name, value) in enumerate(properties.items()):
        member = {**value, **shared, "x-guidance": schema_options} if isinstance(value, Mapping) else value
        rules.append(f"value_{number}_{k}: {lark_string(name + '=')} json_{number}_{k}")
        rules.append(f"json_{number}_{k}: %json {json.dumps(member)}")
    return [*rules, *member_rules(str(number), list(properties), schema.get("required"), ", ")]
