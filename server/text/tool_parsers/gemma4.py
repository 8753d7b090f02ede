"""Tool calls of Gemma 4 and FunctionGemma: parser and call grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.engine.interface.validation import MAX_GRAMMAR_CHARACTERS
from windlass.server.text.schema_rewriting import resolve_reference
from windlass.server.text.stream_parser import CallOptions, ParserSteps, StreamParser, as_json
from windlass.server.text.tool_parsers.call_grammars import (
    ANNOTATIONS,
    ANY_TYPE,
    MAX_MEMBERS,
    PARAMETERS_OF,
    CallGrammarOptions,
    CallLayout,
    bounds_of,
    call_sequence,
    decimal_number,
    definitions,
    lark_string,
    member_rules,
    parameter_types,
    parameters_schema,
    typed_json,
)

MAX_DEPTH = 16  # of a schema; deeper values are written as JSON
_NAME = re.compile(r"[^\s{}<]")
_KEY = re.compile(r"[^:,{}\[\]<]")
_QUOTED_KEY = re.compile(r"[^<]")
_UNQUOTED_KEY = re.compile(r"[^\s:,{}\[\]<\"]([^:,{}\[\]<]{0,200}[^\s:,{}\[\]<])?")
_CLOSING = {"{": "}", "[": "]"}
_SPACING = {"item_separator": ",", "key_separator": ":"}
_EXTERNAL_REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)|"\$id"|"\$anchor"|"\$dynamic')
_SUPPORTED_KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_ParameterTypes = dict[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaForm:
    """Markers of a call and of strings."""

    begin: str
    end: str
    quote: str

    @property
    def layout(self) -> CallLayout:
        """Layout of a call with a string."""
        return CallLayout(
            head=f"{self.begin}call:$name{{", argument=f"$key:{self.quote}$value{self.quote}", tail=f"}}{self.end}"
        )


GEMMA4 = GemmaForm(begin="<|tool_call>", end="<tool_call|>", quote='<|"|>')
FUNCTION_GEMMA = GemmaForm(begin="<start_function_call>", end="<end_function_call>", quote="<escape>")


class Gemma4Parser(StreamParser):
    """Incremental conversion of `<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>` to JSON.

    Strings and names in JSON's quotes are accepted too, because models sometimes write them. A value without quotes is
    JSON, or text if it is not valid JSON or the schema permits only text. The end marker closes everything that is open.
    """

    def __init__(self, form: GemmaForm, options: CallOptions) -> None:
        self._form = form
        super().__init__(options)

    def run(self) -> ParserSteps:
        known_types: dict[str, _ParameterTypes] = {}  # by function and parameter, for parameters read so far
        while (yield from self.pass_until((self._form.begin,), self.emit_content)):
            yield from self.skip_space()
            name = yield from self._name()
            if not self.may_call(name):
                self.emit_taken()
                continue
            self.begin_call(name)
            yield from self._arguments(self.options.schemas.get(name, {}), known_types.setdefault(name, {}))

    def _name(self) -> Generator[None, None, str]:
        """Take a function's name and `{`; return an empty string if there is none."""
        if not (yield from self.take_literal("call:", ":")):
            return ""
        name = yield from self.take_while(_NAME)
        yield from self.skip_space()
        return name if (yield from self.take_literal("{")) else ""

    def _arguments(self, schema: Mapping[str, Any], known_types: _ParameterTypes) -> Generator[None, None, None]:
        closing = ["}"]
        before = ""
        self.emit_arguments("{")
        self.discard_taken()
        while closing:
            yield from self.skip_space()
            found = yield from self.take_literal(closing[-1], self._form.end)
            if found == self._form.end:
                self._close(closing)
                return
            if found:
                self.emit_arguments(closing.pop())
                before = ", "
            else:
                depth = len(closing)
                if not (yield from self._member(closing, before, schema, known_types)):
                    break
                before = "" if len(closing) > depth else ", "
            self.discard_taken()
            if closing:
                yield from self.skip_space()
                yield from self.take_literal(",")
        if closing and not (yield from self.peek()):  # the answer ended within the call
            self.discard_taken()
            return
        broken = bool(closing)
        self._close(closing)
        if broken:
            self.emit_taken()
            return
        yield from self.skip_space()
        yield from self.take_literal(self._form.end)
        self.take_truncated_tag((self._form.end,))
        self.discard_taken()

    def _close(self, closing: list[str]) -> None:
        self.emit_arguments("".join(reversed(closing)))
        closing.clear()
        self.end_call()

    def _member(
        self, closing: list[str], before: str, schema: Mapping[str, Any], known_types: _ParameterTypes
    ) -> Generator[None, None, bool]:
        """Take a member of the innermost open object or list; if it is an object or list, only its opening bracket.

        Return False without a member (nothing was emitted) or the text ends within a string.
        """
        types = ANY_TYPE
        if closing[-1] == "}":
            name = yield from self._key()
            if name is None:
                return False
            before += f"{json.dumps(name)}: "
            yield from self.skip_space()
            if len(closing) == 1:
                if name not in known_types:
                    known_types[name] = parameter_types(schema, name)
                types = known_types[name]
        found = yield from self.take_literal(self._form.quote, *_CLOSING)
        if found == self._form.quote:
            parts: list[str] = []
            as_text = "string" in types or not types
            if as_text:
                self.emit_arguments(f'{before}"')
            end = yield from self.pass_until(
                (self._form.quote, self._form.end),
                (lambda piece: self.emit_arguments(json.dumps(piece)[1:-1])) if as_text else parts.append,
                drops_cut=True,
            )
            if end:
                self.emit_arguments('"' if as_text else before + typed_json("".join(parts), types))
            if end == self._form.end:
                self.put_back(len(self._form.end))
            return bool(end)
        if found:
            self.emit_arguments(before + found)
            closing.append(_CLOSING[found])
            return True
        value = yield from self._unquoted(types)
        if value:
            self.emit_arguments(before + value)
        return bool(value)

    def _key(self) -> Generator[None, None, str | None]:
        """Take a name and a colon; return None if there is none."""
        name: str | None
        if (yield from self.take_literal(self._form.quote)):
            name = yield from self.take_while(_QUOTED_KEY)
            if not (yield from self.take_literal(self._form.quote)):
                return None
        elif (yield from self.peek()) == '"':
            name = yield from self.take_string()
        else:
            name = (yield from self.take_while(_KEY)).strip() or None
        yield from self.skip_space()
        return name if (yield from self.take_literal(":")) else None

    def _unquoted(self, types: frozenset[str]) -> Generator[None, None, str]:
        """Take a value without Gemma's quotes and return its JSON, empty if there is none or it is incomplete."""
        if (yield from self.peek()) == '"':
            text = yield from self.take_string()
            return "" if text is None else as_json(text)
        parts: list[str] = []
        end = yield from self.pass_until((",", "}", "]", self._form.quote, self._form.end), parts.append)
        if not end:
            return ""
        if end != self._form.quote:  # a quote here closes a string without an opening quote
            self.put_back(len(end))
        value = "".join(parts).strip()
        number = decimal_number(value) if "number" in types else ""
        return number or (typed_json(value, types) if value else "")


class _TooLargeError(Exception):
    """The rules of a function are too large."""


def gemma_grammar(form: GemmaForm, options: CallGrammarOptions) -> str:
    """Consecutive calls with arguments in alphabetical order, as the chat template writes them."""
    begin, end = options.token(form.begin), options.token(form.end)
    texts: dict[str, str] = {}
    choices, rules = [], list[str]()
    for number, name in enumerate(options.schemas):
        function = _FunctionRules(form, options, number, name, texts)
        choices.append(f"{begin} {lark_string(f'call:{name}')} {function.arguments()} {end}")
        rules += function.rules
    return "\n".join(
        [call_sequence(options.parallel, "", "", ""), f"call: {' | '.join(choices)}", *rules, *texts.values()]
    )


class _FunctionRules:
    """Rules for the arguments of one function. texts: terminals of strings by name, shared by all functions."""

    def __init__(
        self, form: GemmaForm, options: CallGrammarOptions, number: int, name: str, texts: dict[str, str]
    ) -> None:
        self._form = form
        ends = f"{re.escape(form.quote)}|{re.escape(form.end)}"
        self._contains_marker = f"(?s:.*)({ends})(?s:.*)".replace("/", r"\/")
        self.rules: list[str] = []
        self._name = name
        self._prefix = f"g{number}"
        self._schema = parameters_schema(options.schemas[name], strict=name in options.strict)
        self._shared = definitions(self._schema)
        self._options = {**options.schema_options(name), **_SPACING}
        self._texts = texts
        self._quote = options.token(form.quote)
        self._reference_rules: dict[str, str] = {}
        self._num_rules = self._members = 0
        self._remaining = MAX_GRAMMAR_CHARACTERS // 2 // len(options.schemas)

    def arguments(self) -> str:
        """Add the rule of the arguments; return its name."""
        if not _EXTERNAL_REFERENCE.search(json.dumps(self._schema)):
            try:
                return self._value_rule(self._schema, 0)
            except _TooLargeError:
                pass
        self.rules = []
        return self._add_rule(f"%json {json.dumps({**self._schema, 'x-guidance': self._options})}")

    def _add_rule(self, text: str, name: str = "") -> str:
        """Add a rule; return its name. The comment before it lets `grammars.py` name the function in error messages."""
        name = name or self._next()
        self.rules.append(f"{PARAMETERS_OF}{self._name}\n{name}: {text}")
        return name

    def _next(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"

    def _value_rule(self, schema: Any, depth: int) -> str:
        """Add a rule for the values of a schema; return its name."""
        native = self._native_rule(schema, depth) if isinstance(schema, dict) and depth < MAX_DEPTH else None
        return self._json_rule(schema) if native is None else native

    def _native_rule(self, schema: dict[str, Any], depth: int) -> str | None:
        """Add a rule in Gemma's notation; return None if the schema has keywords without one."""
        keys = schema.keys() - ANNOTATIONS - (self._shared.keys() if schema is self._schema else set())
        kind = schema.get("type")
        if keys == {"$ref"}:
            return self._reference_rule(schema["$ref"], depth)
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
            return self._add_rule(" | ".join(self._value_rule(each, depth + 1) for each in schema["anyOf"]))
        if keys == {"type"} and isinstance(kind, list) and kind:
            return self._add_rule(" | ".join(self._value_rule({"type": each}, depth + 1) for each in kind))
        for word in ("enum", "const"):
            if word in keys and keys <= {word, "type"}:
                return self._enum_rule(schema[word] if word == "enum" else [schema[word]], kind)
        if (
            not isinstance(kind, str)
            or kind not in _SUPPORTED_KEYWORDS
            or not keys - {"type"} <= _SUPPORTED_KEYWORDS[kind]
        ):
            return None
        if kind == "string":
            return self._string_rule(schema)
        return self._array_rule(schema, depth) if kind == "array" else self._object_rule(schema, depth)

    def _reference_rule(self, reference: Any, depth: int) -> str | None:
        found = resolve_reference(self._schema, reference) if isinstance(reference, str) else None
        if not isinstance(found, dict) or not isinstance(found.get("type"), str):
            return None  # possibly a cycle
        if reference not in self._reference_rules:
            self._reference_rules[reference] = name = self._next()
            self._add_rule(self._value_rule(found, depth + 1), name)
        return self._reference_rules[reference]

    def _enum_rule(self, values: Any, kind: Any) -> str | None:
        """Add a rule for a choice of texts, integers, booleans and null."""
        if not isinstance(values, list) or not values or not self._quotes:
            return None
        written = []
        for value in values:
            if (
                isinstance(value, str)
                and kind in (None, "string")
                and not (self._form.quote in value or self._form.end in value)
            ):
                text = f" {lark_string_unescaped(value)}" if value else ""
                written.append(f"{self._quote}{text} {self._quote}")
            elif kind is None and (value is None or isinstance(value, bool | int)):
                written.append(lark_string(json.dumps(value)))
            else:
                return None
        return self._add_rule(" | ".join(written))

    @property
    def _quotes(self) -> bool:
        """Whether the quote is a special token. As plain text it could be taken for a part of the string."""
        return self._quote.startswith("<[")

    def _string_rule(self, schema: Mapping[str, Any]) -> str | None:
        bounds = bounds_of(schema, "minLength", "maxLength")
        if bounds is None or not self._quotes:
            return None
        minimum, maximum = bounds[0], "" if bounds[1] is None else bounds[1]
        name = f"TEXT_{minimum}_{maximum}"
        self._texts.setdefault(name, f"{name}: /(?s:.{{{minimum},{maximum}}})/ & ~/{self._contains_marker}/")
        return self._add_rule(f"{self._quote} {name} {self._quote}")

    def _array_rule(self, schema: Mapping[str, Any], depth: int) -> str | None:
        bounds = bounds_of(schema, "minItems", "maxItems")
        if bounds is None or not isinstance(schema.get("items"), dict):
            return None
        minimum, maximum = bounds
        if maximum == 0:
            return self._add_rule('"[" "]"')
        item = self._value_rule(schema["items"], depth + 1)
        most_more = "" if maximum is None else maximum - 1
        more = "" if maximum == 1 else f'("," {item}){{{max(0, minimum - 1)},{most_more}}}'
        return self._add_rule(f'"[" ({item} {more}){"" if minimum else "?"} "]"')

    def _object_rule(self, schema: Mapping[str, Any], depth: int) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return None
        if schema.get("additionalProperties") is not False:
            return None
        if not all(isinstance(name, str) and name in properties for name in required):
            return None
        self._members += len(properties)
        if self._members > MAX_MEMBERS:
            raise _TooLargeError
        suffix = self._next()
        names = sorted(properties, key=str.lower)
        for k, name in enumerate(names):
            key = name if _UNQUOTED_KEY.fullmatch(name) else json.dumps(name)
            self._add_rule(
                f"{lark_string_unescaped(key + ':')} {self._value_rule(properties[name], depth + 1)}",
                f"value_{suffix}_{k}",
            )
        self.rules += member_rules(suffix, names, required, ",")
        return self._add_rule(f'"{{" first_{suffix}_0 "}}"')

    def _json_rule(self, schema: Any) -> str:
        if isinstance(schema, dict):
            shared = self._shared if '"$ref"' in json.dumps(schema) else {}
            schema = {**schema, **shared, "x-guidance": self._options}
        text = json.dumps(schema)
        self._remaining -= len(text)
        if self._remaining < 0:
            raise _TooLargeError
        return self._add_rule(f"%json {text}")


def lark_string_unescaped(text: str) -> str:
    """Return a Lark string literal with characters outside ASCII unescaped."""
    return json.dumps(text, ensure_ascii=False)
