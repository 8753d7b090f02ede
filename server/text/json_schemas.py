"""JSON schemas of a request: supported formats, infinite documents, and ASCII patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# In brackets, which may stand inside those of another class; no white space as itself, which (?x) leaves out of account.
_DIGITS, _WORD, _SPACES = "0-9", "0-9A-Za-z_", r"\t\n\x0B\f\r\x20"

_ASCII = {
    f"\\{letter if sign == '' else letter.upper()}": f"[{sign}{members}]"
    for letter, members in (("d", _DIGITS), ("w", _WORD), ("s", _SPACES))
    for sign in ("", "^")
}

_ESCAPED = r"\\."

# Inside a class a range comes first: one that would end in a class has no meaning, and stays for llguidance to refuse.
_IN_CLASS = re.compile(rf"(?:\\[^dwsDWS]|[^\\\[\]-])-(?:{_ESCAPED}|[^\\\[\]-])|{_ESCAPED}|\[\^?\]?|.", re.DOTALL)

_OUT_OF_CLASS = re.compile(rf"{_ESCAPED}|\[\^?\]?|.", re.DOTALL)

# What llguidance's Lark is made of, as far as slashes may stand in it: comments, strings, special tokens and patterns.
_LARK = re.compile(rf'(?:#|//)[^\n]*|"(?:{_ESCAPED}|[^"\\])*"|<[^<>\s]+>|(/(?:{_ESCAPED}|[^/\\])+/)', re.DOTALL)


def expand_ascii_classes(pattern: str) -> str:
    """The pattern with the classes written out."""
    parts: list[str] = []
    depth = position = 0
    while found := (_IN_CLASS if depth else _OUT_OF_CLASS).match(pattern, position):
        part, position = found[0], found.end()
        parts.append(_ASCII.get(part, part))
        if part.startswith("["):
            depth += 1
        elif part == "]" and depth:
            depth -= 1
    return "".join(parts)


def expand_ascii_classes_in_lark(grammar: str) -> str:
    """The grammar with the classes written out in its patterns."""
    return _LARK.sub(lambda found: found[0] if found[1] is None else expand_ascii_classes(found[1]), grammar)


_MAX_SCHEMAS = 20_000  # schemas inside one schema that are looked at


def has_no_finite_document(schema: Any) -> bool:
    """Whether no finite document can match, by what is required of objects and arrays alone."""
    nodes: dict[int, Any] = {}
    stack = [schema]
    while stack:  # every part that may be a schema
        part = stack.pop()
        if isinstance(part, dict) and id(part) not in nodes:
            if len(nodes) >= _MAX_SCHEMAS:
                return False
            nodes[id(part)] = part
        if isinstance(part, dict | list):
            stack.extend(part.values() if isinstance(part, dict) else part)
    finite: set[int] = set()
    while True:  # the least set that holds every schema which needs only schemas of the set
        more = {key for key, part in nodes.items() if key not in finite and _is_finite(part, schema, finite)}
        if not more:
            return isinstance(schema, dict) and id(schema) not in finite
        finite |= more


def _is_finite(schema: dict[str, Any], root: Any, finite: set[int]) -> bool:
    def known(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in finite

    reference = schema.get("$ref")
    if isinstance(reference, str) and not known(resolve_reference(root, reference)):
        return False
    for key, quantifier in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not quantifier(map(known, parts)):
            return False
    kinds = schema.get("type")
    if kinds == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            return all(known(properties.get(name)) for name in required if isinstance(name, str))
    if kinds == "array":
        prefix, minimum = schema.get("prefixItems"), schema.get("minItems")
        if isinstance(minimum, int | float) and minimum > 0:
            first = prefix[: int(minimum)] if isinstance(prefix, list) else []
            return all(map(known, first)) and (len(first) >= minimum or known(schema.get("items")))
    return True


def resolve_reference(root: Any, reference: str) -> Any:
    """What a reference inside the document points at; None for any other."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


# That llguidance holds to. Any other is an annotation, as JSON Schema has it.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)

_DEFINITIONS = ("$defs", "definitions")  # which hold where something refers to them

_SCHEMA_MAP_KEYWORDS = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "dependencies")

_LITERAL_KEYWORDS = ("const", "enum", "default", "example", "examples")

# Schemas of the same value as the one in which they stand, and those of them that may be all that it says.
_SAME_VALUE_KEYWORDS = (
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "dependencies",
    "extends",
    "$dynamicRef",
    "$recursiveRef",
)

_DELEGATING_KEYWORDS = ("$ref", "anyOf", "oneOf", "allOf")

_CHILD_KEYWORDS = ("properties", "additionalProperties", "items", "prefixItems", "additionalItems")

_OTHER_MEMBER_KEYWORDS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")

_ANY_NAMES: tuple[dict[str, str], ...] = ({}, {"type": "string"})  # as libraries write of any record: names are texts

_COUNTS = ("minProperties", "maxProperties")

_VALUE_KEYWORDS = (
    *_OTHER_MEMBER_KEYWORDS,
    *_CHILD_KEYWORDS,
    *_COUNTS,
    *_LITERAL_KEYWORDS[:2],
    "required",
    "dependentRequired",
    "contains",
)


def enforced_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A copy in which objects that name members take no others, and without formats that nobody knows.

    An object stays open where its schema says so, where it names no member, and where closing it might leave nothing: where
    several schemas speak of one value, and in all that these refer to. strict: llguidance refuses what it cannot hold to.
    """
    found: dict[str, Any] = json.loads(json.dumps(schema))
    for part in _subschemas(found):
        if part.get("propertyNames") in _ANY_NAMES:
            del part["propertyNames"]
    for part in _standalone_schemas(found):
        if part.get("properties") and names_all_members(part):
            part["additionalProperties"] = False
    for part in _subschemas(found):
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        if not strict and not _counts_all_members(part):
            del part["minProperties"]
    return found


def names_all_members(schema: Mapping[str, Any]) -> bool:
    """Whether `properties` is all that speaks of an object's members, and has as many as there have to be."""
    if any(
        schema.get(key, False) is not False
        for key in (*_SAME_VALUE_KEYWORDS, *_DELEGATING_KEYWORDS, *_OTHER_MEMBER_KEYWORDS, *_LITERAL_KEYWORDS[:2])
    ):
        return False
    properties, required, minimum = (
        schema.get("properties", {}),
        schema.get("required", []),
        schema.get("minProperties", 0),
    )
    if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(minimum, int | float):
        return False
    return minimum <= len(properties) and all(isinstance(name, str) and name in properties for name in required)


def _counts_all_members(schema: dict[str, Any]) -> bool:
    """Whether llguidance counts all members for `minProperties`, and not only those that have no name here."""
    properties, required, minimum = schema.get("properties"), schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(minimum, int | float):
        return True  # which it refuses
    if all(name in required for name in properties):
        return True
    more = minimum - len(required)
    return more <= 0 or (more <= 1 and schema.get("additionalProperties") is False)


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and those inside it."""
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            for key, value in part.items():
                if key not in _LITERAL_KEYWORDS:
                    stack += value.values() if key in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict) else [value]
            yield part


def _standalone_schemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas that are, wherever they hold, all that is said of a value."""
    standalone: dict[int, dict[str, Any]] = {}
    shared: dict[int, dict[str, Any]] = {}
    stack: list[tuple[Any, bool]] = [(root, True)]
    while stack:
        part, is_standalone = stack.pop()
        if isinstance(part, list):
            stack += [(one, is_standalone) for one in part]
        visited = standalone if is_standalone else shared
        if not isinstance(part, dict) or id(part) in visited:
            continue
        if part is not root and isinstance(part.get("$id"), str):
            return []  # references inside lead elsewhere than they seem to
        visited[id(part)] = part
        ways = _standalone_keywords(part) if is_standalone else ()
        for key, value in part.items():
            if key == "$ref" and isinstance(value, str):
                referred = resolve_reference(root, value)
                if referred is None:
                    return []
                stack.append((referred, key in ways))
            elif key not in _LITERAL_KEYWORDS and key not in _DEFINITIONS:
                below = [*value.values()] if key in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict) else [value]
                stack += [(one, key in ways) for one in below]
    return [part for key, part in standalone.items() if key not in shared]


def _standalone_keywords(schema: dict[str, Any]) -> tuple[str, ...]:
    """The keywords of a schema that stands alone under which others do: those of its parts, or the one that says all."""
    combining = [key for key in (*_SAME_VALUE_KEYWORDS, *_DELEGATING_KEYWORDS) if key in schema]
    if not combining:
        return () if "patternProperties" in schema else _CHILD_KEYWORDS  # which may match what properties name
    if len(combining) > 1 or combining[0] in _SAME_VALUE_KEYWORDS or any(key in schema for key in _VALUE_KEYWORDS):
        return ()
    several = combining == ["allOf"] and not (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1)
    return () if several else (combining[0],)
