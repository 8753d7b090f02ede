"""What an answer is held to of a caller's JSON schema: its objects take the members that they name, its formats are known ones.

A small model would go on inventing members until its tokens are used up, if objects that say nothing of others took them. Knows
JSON Schema; knows nothing of grammars. What it does is bounded by the size of the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from windlass.server.text.finite import target

# That llguidance holds to. Any other is an annotation, as JSON Schema has it.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)

_DEFINITIONS = ("$defs", "definitions")  # which hold where something refers to them
_MAPS = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "dependencies")
_DATA = ("const", "enum", "default", "example", "examples")
# Schemas of the same value as the one in which they stand, and those of them that may be all that it says.
_BESIDE = ("not", "if", "then", "else", "dependentSchemas", "dependencies", "extends", "$dynamicRef", "$recursiveRef")
_PASSING = ("$ref", "anyOf", "oneOf", "allOf")
_PARTS = ("properties", "additionalProperties", "items", "prefixItems", "additionalItems")
_MORE_MEMBERS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_ANY_NAMES: tuple[dict[str, str], ...] = ({}, {"type": "string"})  # as libraries write of any record: names are texts
_COUNTS = ("minProperties", "maxProperties")
_OF_THE_VALUE = (*_MORE_MEMBERS, *_PARTS, *_COUNTS, *_DATA[:2], "required", "dependentRequired", "contains")


def held(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A copy in which objects that name members take no others, and without formats that nobody knows.

    An object stays open where its schema says so, where it names no member, and where closing it might leave nothing: where
    several schemas speak of one value, and in all that these refer to. strict: llguidance refuses what it cannot hold to.
    """
    found: dict[str, Any] = json.loads(json.dumps(schema))
    for part in _all(found):
        if part.get("propertyNames") in _ANY_NAMES:
            del part["propertyNames"]
    for part in _alone(found):
        if part.get("properties") and names_all(part):
            part["additionalProperties"] = False
    for part in _all(found):
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        if not strict and not _counts(part):
            del part["minProperties"]
    return found


def names_all(schema: Mapping[str, Any]) -> bool:
    """Whether `properties` is all that speaks of an object's members, and has as many as there have to be."""
    if any(schema.get(key, False) is not False for key in (*_BESIDE, *_PASSING, *_MORE_MEMBERS, *_DATA[:2])):
        return False
    properties, required, least = (
        schema.get("properties", {}),
        schema.get("required", []),
        schema.get("minProperties", 0),
    )
    if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(least, int | float):
        return False
    return least <= len(properties) and all(isinstance(name, str) and name in properties for name in required)


def _counts(schema: dict[str, Any]) -> bool:
    """Whether llguidance counts all members for `minProperties`, and not only those that have no name here."""
    properties, required, least = schema.get("properties"), schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(least, int | float):
        return True  # which it refuses
    if all(name in required for name in properties):
        return True
    more = least - len(required)
    return more <= 0 or (more <= 1 and schema.get("additionalProperties") is False)


def _all(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and those inside it."""
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            for key, value in part.items():
                if key not in _DATA:
                    stack += value.values() if key in _MAPS and isinstance(value, dict) else [value]
            yield part


def _alone(root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas that are, wherever they hold, all that is said of a value."""
    alone: dict[int, dict[str, Any]] = {}
    beside: dict[int, dict[str, Any]] = {}
    stack: list[tuple[Any, bool]] = [(root, True)]
    while stack:
        part, by_itself = stack.pop()
        if isinstance(part, list):
            stack += [(one, by_itself) for one in part]
        seen = alone if by_itself else beside
        if not isinstance(part, dict) or id(part) in seen:
            continue
        if part is not root and isinstance(part.get("$id"), str):
            return []  # references inside lead elsewhere than they seem to
        seen[id(part)] = part
        ways = _ways(part) if by_itself else ()
        for key, value in part.items():
            if key == "$ref" and isinstance(value, str):
                referred = target(root, value)
                if referred is None:
                    return []
                stack.append((referred, key in ways))
            elif key not in _DATA and key not in _DEFINITIONS:
                below = [*value.values()] if key in _MAPS and isinstance(value, dict) else [value]
                stack += [(one, key in ways) for one in below]
    return [part for key, part in alone.items() if key not in beside]


def _ways(schema: dict[str, Any]) -> tuple[str, ...]:
    """The keywords of a schema that stands alone under which others do: those of its parts, or the one that says all."""
    combining = [key for key in (*_BESIDE, *_PASSING) if key in schema]
    if not combining:
        return () if "patternProperties" in schema else _PARTS  # which may match what properties name
    if len(combining) > 1 or combining[0] in _BESIDE or any(key in schema for key in _OF_THE_VALUE):
        return ()
    several = combining == ["allOf"] and not (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1)
    return () if several else (combining[0],)
