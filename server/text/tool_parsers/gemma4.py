"""Tool calls of Gemma 4, and the grammar that forces them."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from windlass.engine.interface.validation import MAX_GRAMMAR_CHARACTERS
from windlass.server.text.json_schemas import target
from windlass.server.text.stream_parser import Reading, StreamParser, as_json
from windlass.server.text.tool_parsers.forced_calls import (
    MAX_MEMBERS,
    PARAMETERS_OF,
    Forced,
    definitions,
    members,
    parameters,
    quoted,
    separated,
)
from windlass.server.text.tool_parsers.xml_parameters import ANY_KIND, kinds_of, typed_json

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

MARKERS = frozenset({BEGIN, END, QUOTE})

_NAME = re.compile(r"[^\s{}<]")

_KEY = re.compile(r"[^:,{}\[\]<]")

_QUOTED_KEY = re.compile(r"[^<]")

_CLOSING = {"{": "}", "[": "]"}

_Kinds = dict[str, frozenset[str]]


class Gemma4Parser(StreamParser):
    """`<|tool_call>call:look{city:<|"|>Rome<|"|>,days:3}<tool_call|>` becomes JSON as it comes, strings piece by piece.

    Strings and names in the quotes of JSON are read, too, as models slip into it. What has no quotes is the JSON that it is,
    and text where it is none, or where the schema permits only text. The marker at the end closes all that is open.
    """

    def run(self) -> Reading:
        known: dict[str, _Kinds] = {}  # types of parameters that were written, by function
        while (yield from self.until((BEGIN,), self.say)):
            yield from self.space()
            name = yield from self._name()
            if not self.may_call(name):
                self.give_back()
                continue
            self.begin_call(name)
            yield from self._arguments(self.options.schemas.get(name, {}), known.setdefault(name, {}))

    def _name(self) -> Generator[None, None, str]:
        """A name and the `{` behind it, which is not taken; empty where it is none."""
        if not (yield from self.literal("call:", ":")):
            return ""
        name = yield from self.run_of(_NAME)
        yield from self.space()
        return name if (yield from self.literal("{")) else ""

    def _arguments(self, schema: Mapping[str, Any], known: _Kinds) -> Generator[None, None, None]:
        closing = ["}"]
        before = ""
        self.argue("{")
        self.forget()
        while closing:
            yield from self.space()
            found = yield from self.literal(closing[-1], END)
            if found == END:
                self._close(closing)
                return
            if found:
                self.argue(closing.pop())
                before = ", "
            else:
                depth = len(closing)
                if not (yield from self._member(closing, before, schema, known)):
                    break
                before = "" if len(closing) > depth else ", "
            self.forget()
            if closing:
                yield from self.space()
                yield from self.literal(",")
        if closing and not (yield from self.peek()):  # the answer ended within the call
            self.forget()
            return
        broken = bool(closing)
        self._close(closing)
        if broken:
            self.give_back()
            return
        yield from self.space()
        yield from self.literal(END)
        self.forget()

    def _close(self, closing: list[str]) -> None:
        self.argue("".join(reversed(closing)))
        closing.clear()
        self.end_call()

    def _member(
        self, closing: list[str], before: str, schema: Mapping[str, Any], known: _Kinds
    ) -> Generator[None, None, bool]:
        """Take a member of the object, or of the list, that is open; of one that opens another only its beginning.

        False where there is none, and nothing was passed on; also where the text ends within a string.
        """
        kinds = ANY_KIND
        if closing[-1] == "}":
            name = yield from self._key()
            if name is None:
                return False
            before += f"{json.dumps(name)}: "
            yield from self.space()
            if len(closing) == 1:
                kinds = known[name] if name in known else known.setdefault(name, kinds_of(schema, name))
        found = yield from self.literal(QUOTE, *_CLOSING)
        if found == QUOTE:
            self.argue(f'{before}"')
            end = yield from self.until((QUOTE, END), lambda piece: self.argue(json.dumps(piece)[1:-1]))
            if end:
                self.argue('"')
            if end == END:
                self.put_back(len(END))
            return bool(end)
        if found:
            self.argue(before + found)
            closing.append(_CLOSING[found])
            return True
        value = yield from self._bare(kinds)
        if value:
            self.argue(before + value)
        return bool(value)

    def _key(self) -> Generator[None, None, str | None]:
        """A name and the colon behind it; None where there is none."""
        name: str | None
        if (yield from self.literal(QUOTE)):
            name = yield from self.run_of(_QUOTED_KEY)
            if not (yield from self.literal(QUOTE)):
                return None
        elif (yield from self.peek()) == '"':
            name = yield from self.string()
        else:
            name = (yield from self.run_of(_KEY)).strip() or None
        yield from self.space()
        return name if (yield from self.literal(":")) else None

    def _bare(self, kinds: frozenset[str]) -> Generator[None, None, str]:
        """The JSON of a value without quotes of its own kind; empty where there is none, or it breaks off."""
        if (yield from self.peek()) == '"':
            text = yield from self.string()
            return "" if text is None else as_json(text)
        parts: list[str] = []
        end = yield from self.until((",", "}", "]", QUOTE, END), parts.append)
        if not end:
            return ""
        if end != QUOTE:  # a string that is only closed
            self.put_back(len(end))
        value = "".join(parts).strip()
        return typed_json(value, kinds) if value else ""


MAX_DEPTH = 16  # of a schema; what is deeper is written as JSON

MAX_BOUND = 1 << 20  # of how many there may be

_SPACING = {"item_separator": ",", "key_separator": ":"}

_UNQUOTED_KEY = re.compile(r"[^\s:,{}\[\]<\"]([^:,{}\[\]<]{0,200}[^\s:,{}\[\]<])?")

_ELSEWHERE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)|"\$id"|"\$anchor"|"\$dynamic')

_NOTES = {
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
}

_FORM = {
    "string": {"minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}

_MARKED = rf"(?s:.*)({re.escape(QUOTE)}|{re.escape(END)})(?s:.*)".replace("/", r"\/")


class _Larger(Exception):
    """The rules for a function grow too large."""


def gemma4(forced: Forced) -> str:
    """Calls one behind the other, the arguments of each in the order of the alphabet, as the template shows them."""
    begin, end = forced.token(BEGIN), forced.token(END)
    texts: dict[str, str] = {}
    choices, rules = [], list[str]()
    for number, name in enumerate(forced.schemas):
        function = _Function(forced, number, name, texts)
        choices.append(f"{begin} {quoted(f'call:{name}')} {function.arguments()} {end}")
        rules += function.rules
    return "\n".join([separated(forced, "", "", ""), f"call: {' | '.join(choices)}", *rules, *texts.values()])


class _Function:
    """Makes the rules for the arguments of one function. texts: the terminals of strings, by name, which all of them share."""

    def __init__(self, forced: Forced, number: int, name: str, texts: dict[str, str]) -> None:
        self.rules: list[str] = []
        self._name = name
        self._prefix = f"g{number}"
        self._schema = parameters(forced.schemas[name], strict=name in forced.strict)
        self._shared = definitions(self._schema)
        self._options = {**forced.options(name), **_SPACING}
        self._texts = texts
        self._quote = forced.token(QUOTE)
        self._referred: dict[str, str] = {}
        self._made = self._members = 0
        self._room = MAX_GRAMMAR_CHARACTERS // 2 // len(forced.schemas)

    def arguments(self) -> str:
        """The rule of the arguments."""
        if not _ELSEWHERE.search(json.dumps(self._schema)):
            try:
                return self._value(self._schema, 0)
            except _Larger:
                pass
        self.rules = []
        return self._rule(f"%json {json.dumps({**self._schema, 'x-guidance': self._options})}")

    def _rule(self, text: str, name: str = "") -> str:
        """The name of a new rule. The line above tells the function's to who reads what is wrong with it."""
        name = name or self._next()
        self.rules.append(f"{PARAMETERS_OF}{self._name}\n{name}: {text}")
        return name

    def _next(self) -> str:
        self._made += 1
        return f"{self._prefix}_{self._made}"

    def _value(self, schema: Any, depth: int) -> str:
        """A rule for what the schema permits."""
        form = self._form(schema, depth) if isinstance(schema, dict) and depth < MAX_DEPTH else None
        return self._json(schema) if form is None else form

    def _form(self, schema: dict[str, Any], depth: int) -> str | None:
        """The rule where all that the schema says has a form here."""
        keys = schema.keys() - _NOTES - (self._shared.keys() if schema is self._schema else set())
        kind = schema.get("type")
        if keys == {"$ref"}:
            return self._reference(schema["$ref"], depth)
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
            return self._rule(" | ".join(self._value(each, depth + 1) for each in schema["anyOf"]))
        if keys == {"type"} and isinstance(kind, list) and kind:
            return self._rule(" | ".join(self._value({"type": each}, depth + 1) for each in kind))
        for word in ("enum", "const"):
            if word in keys and keys <= {word, "type"}:
                return self._choice(schema[word] if word == "enum" else [schema[word]], kind)
        if not isinstance(kind, str) or kind not in _FORM or not keys - {"type"} <= _FORM[kind]:
            return None
        if kind == "string":
            return self._string(schema)
        return self._list(schema, depth) if kind == "array" else self._object(schema, depth)

    def _reference(self, reference: Any, depth: int) -> str | None:
        found = target(self._schema, reference) if isinstance(reference, str) else None
        if not isinstance(found, dict) or not isinstance(found.get("type"), str):
            return None  # as it may lead in a circle
        if reference not in self._referred:
            self._referred[reference] = name = self._next()
            self._rule(self._value(found, depth + 1), name)
        return self._referred[reference]

    def _choice(self, values: Any, kind: Any) -> str | None:
        """One of some texts, and of numbers and the like that are no texts."""
        if not isinstance(values, list) or not values or not self._quotes:
            return None
        written = []
        for value in values:
            if isinstance(value, str) and kind in (None, "string") and not (QUOTE in value or END in value):
                text = f" {quoted_as_it_is(value)}" if value else ""
                written.append(f"{self._quote}{text} {self._quote}")
            elif kind is None and (value is None or isinstance(value, bool | int)):
                written.append(quoted(json.dumps(value)))
            else:
                return None
        return self._rule(" | ".join(written))

    @property
    def _quotes(self) -> bool:
        """Whether strings stand between tokens; the text of a mark could be taken for a part of the string."""
        return self._quote.startswith("<[")

    def _string(self, schema: Mapping[str, Any]) -> str | None:
        bounds = _bounds(schema, "minLength", "maxLength")
        if bounds is None or not self._quotes:
            return None
        least, most = bounds
        name = f"TEXT_{least}_{'' if most is None else most}"
        many = f"(?s:.{{{least},{'' if most is None else most}}})"
        self._texts.setdefault(name, f"{name}: /{many}/ & ~/{_MARKED}/")
        return self._rule(f"{self._quote} {name} {self._quote}")

    def _list(self, schema: Mapping[str, Any], depth: int) -> str | None:
        bounds = _bounds(schema, "minItems", "maxItems")
        if bounds is None or not isinstance(schema.get("items"), dict):
            return None
        least, most = bounds
        if most == 0:
            return self._rule('"[" "]"')
        item = self._value(schema["items"], depth + 1)
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}' if most != 1 else ""
        return self._rule(f'"[" ({item} {more}){"" if least else "?"} "]"')

    def _object(self, schema: Mapping[str, Any], depth: int) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return None
        if schema.get("additionalProperties") is not False:
            return None
        if not all(isinstance(name, str) and name in properties for name in required):
            return None
        self._members += len(properties)
        if self._members > MAX_MEMBERS:
            raise _Larger
        suffix = self._next()
        names = sorted(properties, key=str.lower)
        for k, name in enumerate(names):
            key = name if _UNQUOTED_KEY.fullmatch(name) else json.dumps(name)
            self._rule(
                f"{quoted_as_it_is(key + ':')} {self._value(properties[name], depth + 1)}", f"value_{suffix}_{k}"
            )
        self.rules += members(suffix, names, required, ",")
        return self._rule(f'"{{" first_{suffix}_0 "}}"')

    def _json(self, schema: Any) -> str:
        if isinstance(schema, dict):
            shared = self._shared if '"$ref"' in json.dumps(schema) else {}
            schema = {**schema, **shared, "x-guidance": self._options}
        text = json.dumps(schema)
        self._room -= len(text)
        if self._room < 0:
            raise _Larger
        return self._rule(f"%json {text}")


def quoted_as_it_is(text: str) -> str:
    """A Lark string of any characters."""
    return json.dumps(text, ensure_ascii=False)


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None] | None:
    """How many there are at least and at most, None for no end; None where the schema does not say it in whole numbers."""
    low, high = schema.get(least, 0), schema.get(most)
    if type(low) is not int or not 0 <= low <= MAX_BOUND:
        return None
    return (low, high) if high is None or (type(high) is int and low <= high <= MAX_BOUND) else None
