"""Grammars that leave a model nothing to write but tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.engine.interface.validation import MAX_GRAMMAR_CHARACTERS
from windlass.server.text.json_schemas import enforced_schema, names_all_members

MAX_GRAMMAR_CALLS = 16  # that a grammar asks for; a model that does not know when to stop is stopped here

MAX_MEMBERS = 200  # in a function that have rules of their own: llguidance goes down from each to the next

PARAMETERS_OF = "// parameters of "  # and a function's name: the line above the rule that its parameters are

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")

_UNSUPPORTED_KEYWORDS = ("patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if")


@dataclass(frozen=True, slots=True)
class CallGrammarOptions:
    """What a grammar is made from.

    schemas: the parameters of each function that may be called. several: whether more than one call may be made.
    token: the Lark for a marker, which may be a special token of the model or plain text.
    strict: the functions whose schemas are refused where they cannot be held to as a whole.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool
    token: Callable[[str], str]
    strict: Collection[str] = ()

    def options(self, name: str) -> dict[str, Any]:
        """How llguidance is to read the schema of a function."""
        return {**_SPACING, "lenient": name not in self.strict}

    def max_more_calls(self) -> int:
        """Calls that may follow the first."""
        return MAX_GRAMMAR_CALLS - 1 if self.parallel else 0


def lark_string(text: str) -> str:
    """A Lark string."""
    return json.dumps(text)


def parameters_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """The schema of arguments, an object. One that names no members has none: what is unnamed helps no function."""
    found = enforced_schema(schema, strict=strict)
    found.setdefault("type", "object")
    if names_all_members(found):
        found = {"properties": {}, **found, "additionalProperties": False}
    return found


def _argument_rules(forced: CallGrammarOptions) -> list[str]:
    """A rule `arguments_i` for each function, behind a line that tells its name to who reads what is wrong with the rule."""
    rules = []
    for i, (name, schema) in enumerate(forced.schemas.items()):
        found = {**parameters_schema(schema, strict=name in forced.strict), "x-guidance": forced.options(name)}
        rules.append(f"{PARAMETERS_OF}{name}\narguments_{i}: %json {json.dumps(found)}")
    return rules


def _call_rules(forced: CallGrammarOptions, begin: Callable[[str], str], end: str) -> list[str]:
    """A rule `call` of which each choice is a function: what `begin` makes of its name, its arguments, `end`."""
    choices = [f"{begin(name)} arguments_{i} {end}" for i, name in enumerate(forced.schemas)]
    return [f"call: {' | '.join(choices)}", *_argument_rules(forced)]


def _json_head(key: str) -> Callable[[str], str]:
    return lambda name: lark_string(f'{{"name": "{name}", "{key}": ')


def call_sequence(forced: CallGrammarOptions, before: str, between: str, after: str) -> str:
    """The rule `start` of calls with something between them."""
    more = forced.max_more_calls()
    return f"start: {before} call" + (f" ({between} call){{0,{more}}}" if more else "") + f" {after}"


def tagged(forced: CallGrammarOptions) -> str:
    """Hermes: a tagged object for each call."""
    begin, end = forced.token("<tool_call>"), forced.token("</tool_call>")
    head = _json_head("arguments")
    rules = _call_rules(
        forced, lambda name: f"{begin} {lark_string(chr(10))} {head(name)}", f"{lark_string('}' + chr(10))} {end}"
    )
    return "\n".join([call_sequence(forced, "", lark_string("\n"), ""), *rules])


def _json_list(marker: str | None, key: str) -> Callable[[CallGrammarOptions], str]:
    def grammar(forced: CallGrammarOptions) -> str:
        before = "" if marker is None else forced.token(marker)
        return "\n".join(
            [
                call_sequence(forced, f"{before} {lark_string('[')}", lark_string(", "), lark_string("]")),
                *_call_rules(forced, _json_head(key), lark_string("}")),
            ]
        )

    return grammar


granite = _json_list("<|tool_call|>", "arguments")

mistral_list = _json_list("[TOOL_CALLS]", "arguments")


def plain_json(forced: CallGrammarOptions) -> str:
    """An object, or if there may be several a list of them."""
    if forced.parallel:
        return _json_list(None, "arguments")(forced)
    return "\n".join(["start: call", *_call_rules(forced, _json_head("arguments"), lark_string("}"))])


def llama3_json(forced: CallGrammarOptions) -> str:
    """Objects between semicolons."""
    return "\n".join(
        [
            call_sequence(forced, "", lark_string("; "), ""),
            *_call_rules(forced, _json_head("parameters"), lark_string("}")),
        ]
    )


def mistral_args(forced: CallGrammarOptions) -> str:
    """A marker, the name, a marker, the arguments."""
    begin, middle = forced.token("[TOOL_CALLS]"), forced.token("[ARGS]")
    rules = _call_rules(forced, lambda name: f"{begin} {lark_string(name)} {middle}", "")
    return "\n".join([call_sequence(forced, "", "", ""), *rules])


def _deepseek(forced: CallGrammarOptions, begin: Callable[[str], str], fence: str) -> str:
    token = forced.token
    call, end = token("<｜tool▁call▁begin｜>"), token("<｜tool▁call▁end｜>")
    rules = _call_rules(forced, lambda name: f"{call} {begin(name)}", f"{lark_string(fence)} {end}" if fence else end)
    between = lark_string("\n") if fence else ""
    before, after = token("<｜tool▁calls▁begin｜>"), token("<｜tool▁calls▁end｜>")
    return "\n".join([call_sequence(forced, before, between, after), *rules])


def deepseek_v3(forced: CallGrammarOptions) -> str:
    """The kind, the name, fenced JSON."""
    separator = forced.token("<｜tool▁sep｜>")
    return _deepseek(
        forced,
        lambda name: f"{lark_string('function')} {separator} {lark_string(name + chr(10) + '```json' + chr(10))}",
        "\n```",
    )


def deepseek_v31(forced: CallGrammarOptions) -> str:
    """The name, JSON."""
    separator = forced.token("<｜tool▁sep｜>")
    return _deepseek(forced, lambda name: f"{lark_string(name)} {separator}", "")


def harmony(forced: CallGrammarOptions) -> str:
    """Perhaps reasoning, then one message to a function: its end ends the turn."""
    token = forced.token
    channel, message = token("<|channel|>"), token("<|message|>")
    json_follows = f"{token('<|constrain|>')} {lark_string('json')} {message}"
    thought_ends = f"{token('<|end|>')} {token('<|start|>')} {lark_string('assistant')}"
    thought = f"{channel} {lark_string('analysis')} {message} THOUGHT {thought_ends}"
    rules = _call_rules(
        forced, lambda name: f"{channel} {lark_string(f'commentary to=functions.{name} ')} {json_follows}", ""
    )
    return "\n".join([f"start: ({thought})? call", r"THOUGHT: /(.|\n)*/", *rules])


def pythonic(forced: CallGrammarOptions, begin: str = "", end: str = "") -> str | None:
    """A list of calls with named arguments; None where a schema is no plain list of them.

    Nor where the definitions of a schema are too large to stand beside each of its arguments. begin, end: the Lark of what stands
    around the list.
    """
    call_rules = []
    heads = []
    remaining = MAX_GRAMMAR_CHARACTERS
    for number, (name, schema) in enumerate(forced.schemas.items()):
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
        call_rules += _keywords(number, enforced_schema(schema, strict=name in forced.strict), forced.options(name))
    brackets = f"{begin} {lark_string('[')}", f"{lark_string(']')} {end}"
    rules = [
        call_sequence(forced, brackets[0], lark_string(", "), brackets[1]),
        f"call: {' | '.join(heads)}",
        *call_rules,
    ]
    return "\n".join(rules)


def lfm2(forced: CallGrammarOptions) -> str | None:
    """The same between LFM2's markers."""
    return pythonic(forced, forced.token("<|tool_call_start|>"), forced.token("<|tool_call_end|>"))


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references within the schema lead to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _keywords(number: int, schema: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Rules for the arguments of one function, in the order of the schema; see `member_rules`."""
    properties = schema.get("properties") or {}
    shared = definitions(schema)
    rules = []
    for k, (name, value) in enumerate(properties.items()):
        member = {**value, **shared} if isinstance(value, Mapping) else value
        if isinstance(member, dict):
            member["x-guidance"] = options
        rules.append(f"value_{number}_{k}: {lark_string(name + '=')} json_{number}_{k}")
        rules.append(f"json_{number}_{k}: %json {json.dumps(member)}")
    return [*rules, *member_rules(str(number), list(properties), schema.get("required"), ", ")]


def member_rules(suffix: str, names: Sequence[str], required: Any, between: str) -> list[str]:
    """The rule `first_SUFFIX_0`: of members `value_SUFFIX_k`, in this order, those that are required and any of the others.

    first_SUFFIX_k and rest_SUFFIX_k: what may follow from the k-th member on, before and after one was written.
    """
    needed = set(required) if isinstance(required, list) else set()
    rules = []
    for k, name in enumerate(names):
        value, rest = f"value_{suffix}_{k}", f"rest_{suffix}_{k + 1}"
        left_out = "" if name in needed else f" | first_{suffix}_{k + 1}"
        rules.append(f"first_{suffix}_{k}: {value} {rest}{left_out}")
        left_out = "" if name in needed else f" | {rest}"
        rules.append(f"rest_{suffix}_{k}: {lark_string(between)} {value} {rest}{left_out}")
    last = len(names)
    return [*rules, f'first_{suffix}_{last}: ""', f'rest_{suffix}_{last}: ""']
