"""Tool calls of Qwen3-Coder: XML tags for functions and parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.server.text.stream_parser import MAX_NAME, ParserSteps, StreamParser, as_json

_NAME = re.compile(r"[^<>\s=]")

_CONSTANTS = {"True": True, "False": False, "None": None}

MAX_SCHEMAS = 100  # that are looked at for the types of one parameter: references may lead in circles, to long lists

MAX_VALUES = 1000  # of an `enum`, types, or parts of a reference; longer ones say nothing

ANY_TYPE = frozenset({"string", "null", "boolean", "number", "object", "array"})

_TEXT = frozenset({"string", "null"})

_TYPE_NAMES = {str: "string", type(None): "null", bool: "boolean", int: "number", float: "number", dict: "object"}


class XmlParametersParser(StreamParser):
    """A value is text where the schema permits nothing else (or only null, which is `null`), else the JSON it is, and text
    where it is none."""

    def run(self) -> ParserSteps:
        known_types: dict[str, dict[str, frozenset[str]]] = {}  # types of parameters that were written, by function
        while marker := (yield from self.pass_until(("<tool_call>", "<function="), self.emit_content)):
            if marker == "<tool_call>":
                yield from self.skip_space()
                if not (yield from self.take_literal("<function=")):
                    self.emit_taken()
                    continue
            name = yield from self._name()
            if not self.may_call(name):
                self.emit_taken()
                continue
            self.begin_call(name)
            yield from self._parameters(self.options.schemas.get(name, {}), known_types.setdefault(name, {}))
            if not (yield from self.peek()):
                self.discard_taken()  # the answer ended within a tag
            self.emit_taken()

    def _name(self) -> Generator[None, None, str]:
        """A name and the `>` behind it; empty where it is none."""
        name = yield from self.take_while(_NAME)
        return name if len(name) < MAX_NAME and (yield from self.take_literal(">")) else ""

    def _parameters(
        self, schema: Mapping[str, Any], known_types: dict[str, frozenset[str]]
    ) -> Generator[None, None, None]:
        self.emit_arguments("{")
        self.discard_taken()
        written: set[str] = set()
        while True:
            yield from self.skip_space()
            if not (yield from self.take_literal("<parameter=")):
                break
            name = yield from self._name()
            parts: list[str] = []
            if not name:
                return
            if not (yield from self.pass_until(("</parameter>",), parts.append)):
                self.discard_taken()  # the answer ended within a value
                return
            if name not in written:
                before = ", " if written else ""
                written.add(name)
                if name not in known_types:
                    known_types[name] = parameter_types(schema, name)
                value = "".join(parts).removeprefix("\n").removesuffix("\n")
                self.emit_arguments(f"{before}{json.dumps(name)}: {typed_json(value, known_types[name])}")
            self.discard_taken()
        closed = yield from self.take_literal("</function>")
        if not closed and self.take_truncated_tag(("<parameter=", "</function>")):
            return
        self.emit_arguments("}")
        if closed:
            self.end_call()
            yield from self.skip_space()
            yield from self.take_literal("</tool_call>")
            self.discard_taken()


@dataclass(slots=True)
class _Budget:
    left: int = MAX_SCHEMAS


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that a parameter may have."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return _schema_types(found, schema, _Budget())


def _schema_types(schema: Any, root: Mapping[str, Any], budget: _Budget) -> frozenset[str]:
    """The JSON types that a schema permits, as far as it says; all of them once the budget of schemas is spent.

    Integers are numbers here: neither is text.
    """
    if not budget.left:
        return ANY_TYPE
    budget.left -= 1  # for whatever it is: lists are long that hold no schemas, too
    if not isinstance(schema, Mapping):
        return ANY_TYPE
    types = ANY_TYPE
    if isinstance(reference := schema.get("$ref"), str):
        types &= _schema_types(_resolve_reference(root, reference), root, budget)
    if isinstance(named := schema.get("type"), str | list):
        names = [named] if isinstance(named, str) else named
        if len(names) <= MAX_VALUES:
            types &= {"number" if each == "integer" else each for each in names if isinstance(each, str)}
    if "const" in schema:
        types &= {_type_name(type(schema["const"]))}
    if isinstance(values := schema.get("enum"), list) and len(values) <= MAX_VALUES:
        types &= {_type_name(of) for of in set(map(type, values))}
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            types &= frozenset[str]().union(*_types_of_each(branches, root, budget))
    if isinstance(parts := schema.get("allOf"), list):
        types = types.intersection(*_types_of_each(parts, root, budget))
    return types


def _types_of_each(schemas: Sequence[Any], root: Mapping[str, Any], budget: _Budget) -> Iterator[frozenset[str]]:
    """The types of each, until the budget is spent: all types stand for the rest."""
    for schema in schemas:
        yield _schema_types(schema, root, budget)
        if not budget.left:
            yield ANY_TYPE
            return


def _resolve_reference(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference within the schema leads to, None for any other."""
    start, *path = reference.split("/", MAX_VALUES)
    found: Any = root if start == "#" else None
    for part in path:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type_name(of: type) -> str:
    return _TYPE_NAMES.get(of, "array")


def typed_json(text: str, types: frozenset[str]) -> str:
    """The JSON that text is, written without quotes, where these types are permitted."""
    if not types or not types <= _TEXT:
        try:
            return as_json(_CONSTANTS[text] if text in _CONSTANTS else json.loads(text, strict=False))
        except (ValueError, RecursionError):
            pass
    return text if text == "null" and "null" in types else json.dumps(text)


def no_grammar(forced: object) -> None:
    """Values that are text cannot be held to a schema."""
