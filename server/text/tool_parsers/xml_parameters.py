"""Tool calls of Qwen3-Coder: XML tags for functions and parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.server.text.schema_rewriting import resolve_reference
from windlass.server.text.stream_parser import MAX_NAME, ParserSteps, StreamParser, as_json

MAX_SCHEMAS = 100  # visited for the types of one parameter: references may be cyclic or point to long lists
MAX_VALUES = 1000  # in an `enum` or a list of types; longer ones are ignored
ANY_TYPE = frozenset({"string", "null", "boolean", "number", "object", "array"})
_NAME = re.compile(r"[^<>\s=]")
_CONSTANTS = {"True": True, "False": False, "None": None}
_TEXT = frozenset({"string", "null"})
_TYPE_NAMES = {str: "string", type(None): "null", bool: "boolean", int: "number", float: "number", dict: "object"}


class XmlParametersParser(StreamParser):
    """Parser of Qwen3-Coder's calls.

    A value is text if the schema permits only text, or text and null (written `null`). Otherwise it is parsed as JSON,
    and is text if it is not valid JSON.
    """

    def run(self) -> ParserSteps:
        known_types: dict[str, dict[str, frozenset[str]]] = {}  # by function and parameter, for parameters read so far
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
        """Take a name and `>`; return an empty string if there is none."""
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
    """Return the JSON types that a schema of arguments permits for one parameter."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return _schema_types(found, schema, _Budget())


def _schema_types(schema: Any, root: Mapping[str, Any], budget: _Budget) -> frozenset[str]:
    """Return the JSON types that a schema permits, or all types once the budget is spent. Integers count as numbers."""
    if not budget.left:
        return ANY_TYPE
    budget.left -= 1  # also for items that are not schemas: lists of those can be long too
    if not isinstance(schema, Mapping):
        return ANY_TYPE
    types = ANY_TYPE
    if isinstance(reference := schema.get("$ref"), str):
        types &= _schema_types(resolve_reference(root, reference), root, budget)
    if isinstance(named := schema.get("type"), str | list):
        names = [named] if isinstance(named, str) else named
        if len(names) <= MAX_VALUES:
            types &= {"number" if each == "integer" else each for each in names if isinstance(each, str)}
    if "const" in schema:
        types &= {_TYPE_NAMES.get(type(schema["const"]), "array")}
    if isinstance(values := schema.get("enum"), list) and len(values) <= MAX_VALUES:
        types &= {_TYPE_NAMES.get(kind, "array") for kind in set(map(type, values))}
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            types &= frozenset[str]().union(*_types_of_each(branches, root, budget))
    if isinstance(parts := schema.get("allOf"), list):
        types = types.intersection(*_types_of_each(parts, root, budget))
    return types


def _types_of_each(schemas: Sequence[Any], root: Mapping[str, Any], budget: _Budget) -> Iterator[frozenset[str]]:
    """Yield the types of each schema. Once the budget is spent, all types represent the rest."""
    for schema in schemas:
        yield _schema_types(schema, root, budget)
        if not budget.left:
            yield ANY_TYPE
            return


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written without quotes; `types` are those that its schema permits."""
    if not types or not types <= _TEXT:
        try:
            return as_json(_CONSTANTS[text] if text in _CONSTANTS else json.loads(text, strict=False))
        except (ValueError, RecursionError):
            pass
    return text if text == "null" and "null" in types else json.dumps(text)
