"""Values in tool calls: their types in a schema, and JSON of values that were written in another way."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.server.text.schema_rewriting import resolve_reference
from windlass.server.text.stream_parser import as_json

MAX_SCHEMAS = 100  # visited for the types of one parameter: references may be cyclic or point to long lists
MAX_VALUES = 1000  # in an `enum` or a list of types; longer ones are ignored
ANY_TYPE = frozenset({"string", "null", "boolean", "number", "object", "array"})
MAX_PYTHON = 16384  # characters of a value in Python syntax: parsing longer ones would block the event loop
_CONSTANTS = {"True": True, "False": False, "None": None}
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
TEXT_TYPES = frozenset({"string", "null"})
_TYPE_NAMES = {str: "string", type(None): "null", bool: "boolean", int: "number", float: "number", dict: "object"}
_LEADING_ZEROS = re.compile(r"(-?)0+(\d+(?:\.\d+)?)", re.ASCII)
_LARGE_NUMBER = re.compile(r"\d[eE]\+?\d{3}")
_STRING = re.compile(r"""'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+\"""", re.DOTALL)
_LINE_BREAK = re.compile(r"\\.|[\n\r]", re.DOTALL)
_ESCAPES = {"\n": "\\n", "\r": "\\r"}


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
    if not types or not types <= TEXT_TYPES:
        try:
            return as_json(_CONSTANTS[text] if text in _CONSTANTS else json.loads(text, strict=False))
        except (ValueError, RecursionError):
            pass
        if "number" in types and "string" not in types and (number := decimal_number(text)):
            return number
        if text[:1] in ("{", "[") and (value := literal_json(text)):
            return value
    return text if text == "null" and "null" in types else json.dumps(text)


def decimal_number(text: str) -> str:
    """Return the JSON of a decimal number with leading zeros, empty if the text is not one."""
    found = _LEADING_ZEROS.fullmatch(text)
    return "".join(found.groups()) if found else ""


def literal_json(text: str) -> str | None:
    """Convert a Python value to JSON; return None if it is not a literal."""
    try:
        return as_json(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        pass
    if number := decimal_number(text):
        return number
    if _LARGE_NUMBER.search(text):  # JSON, but infinite as a float
        try:
            json.loads(text, parse_constant=_reject)
            return text
        except (ValueError, RecursionError):
            pass
    if len(text) > MAX_PYTHON and text[:1] not in ("'", '"'):
        return None
    try:
        return as_json(_python_value(ast.parse(_one_line(text), mode="eval").body))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _one_line(text: str) -> str:
    """Escape the line breaks inside string literals, which Python does not permit."""
    return _STRING.sub(lambda found: _LINE_BREAK.sub(lambda each: _ESCAPES.get(each[0], each[0]), found[0]), text)


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        found: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise ValueError("a key is not a constant")
            found[str(key.value)] = _python_value(item)
        return found
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex):
        raise ValueError("not a JSON value")
    return value
