"""Rewriting of a request's JSON schemas and patterns for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# String formats that llguidance enforces. Others are annotations, as JSON Schema permits.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
MAX_REFERENCE_PARTS = 1000
_INDEX = re.compile("[0-9]{1,6}")
_MAX_SCHEMAS = 20_000  # subschemas that are checked for finite documents

# Keywords whose values map names to schemas.
_DEFINITIONS = ("$defs", "definitions")
_SCHEMA_MAP_KEYWORDS = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "dependencies")
# Keywords whose values are not schemas.
_LITERAL_KEYWORDS = ("const", "enum", "default", "example", "examples")
# Keywords with further schemas of the same value. A delegating one may be the only keyword of its schema.
_SAME_VALUE_KEYWORDS = (
    *("not", "if", "then", "else", "dependentSchemas", "dependencies", "extends", "$dynamicRef", "$recursiveRef"),
)
_DELEGATING_KEYWORDS = ("$ref", "anyOf", "oneOf", "allOf")
# Keywords with schemas of members and items.
_CHILD_KEYWORDS = ("properties", "additionalProperties", "items", "prefixItems", "additionalItems")
_OTHER_MEMBER_KEYWORDS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_NESTING_KEYWORDS = frozenset({*_CHILD_KEYWORDS, *_OTHER_MEMBER_KEYWORDS, "anyOf", "oneOf", "allOf"})
_VALUE_KEYWORDS = (
    *_OTHER_MEMBER_KEYWORDS,
    *_CHILD_KEYWORDS,
    *("minProperties", "maxProperties", "const", "enum", "required", "dependentRequired", "contains"),
)
_ANY_NAMES: tuple[dict[str, str], ...] = ({}, {"type": "string"})  # `propertyNames` that permit every name

# ASCII classes by escape. In brackets, because they may be inside another class. White space is escaped: (?x) ignores it.
_DIGITS, _WORD, _SPACES = "0-9", "0-9A-Za-z_", r"\t\n\x0B\f\r\x20"
_ASCII = {
    f"\\{letter if sign == '' else letter.upper()}": f"[{sign}{members}]"
    for letter, members in (("d", _DIGITS), ("w", _WORD), ("s", _SPACES))
    for sign in ("", "^")
}
_ESCAPED = r"\\."
# Inside a class, ranges are matched first: a range that ends with a class is invalid, and llguidance must reject it.
_IN_CLASS = re.compile(rf"(?:\\[^dwsDWS]|[^\\\[\]-])-(?:{_ESCAPED}|[^\\\[\]-])|{_ESCAPED}|\[\^?\]?|.", re.DOTALL)
_OUT_OF_CLASS = re.compile(rf"{_ESCAPED}|\[\^?\]?|.", re.DOTALL)
# Parts of llguidance's Lark that may contain slashes: comments, strings, special tokens and patterns.
LARK_LITERAL = rf'(?:#|//)[^\n]*|"(?:{_ESCAPED}|[^"\\])*"|<[^<>\s]+>|(/(?:{_ESCAPED}|[^/\\])+/)'
_LARK = re.compile(LARK_LITERAL, re.DOTALL)


def enforced_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return a copy in which objects that name members permit no others, without string formats that llguidance rejects.

    An object stays open if its schema says so, if it names no member, and if closing it could make documents impossible:
    where several schemas apply to one value, and in everything that these refer to.
    strict: keep keywords that llguidance cannot enforce, so that it rejects the schema.
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
    """Return whether `properties` is the only keyword about members, and names as many as the schema requires."""
    if any(
        schema.get(key, False) is not False
        for key in (*_SAME_VALUE_KEYWORDS, *_DELEGATING_KEYWORDS, *_OTHER_MEMBER_KEYWORDS, "const", "enum")
    ):
        return False
    if (keywords := _member_keywords(schema)) is None:
        return False
    properties, required, minimum = keywords
    return minimum <= len(properties) and all(isinstance(name, str) and name in properties for name in required)


def _counts_all_members(schema: dict[str, Any]) -> bool:
    """Return whether llguidance counts all members for `minProperties`, not only unnamed ones."""
    if (keywords := _member_keywords(schema)) is None:
        return True  # llguidance rejects it
    properties, required, minimum = keywords
    if all(name in required for name in properties):
        return True
    more = minimum - len(required)
    return more <= 0 or (more <= 1 and schema.get("additionalProperties") is False)


def _member_keywords(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], float] | None:
    """Return `properties`, `required` and `minProperties`, None if one of them has an invalid type."""
    properties, required, minimum = (
        schema.get(key, default) for key, default in (("properties", {}), ("required", []), ("minProperties", 0))
    )
    if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(minimum, int | float):
        return None
    return properties, required, minimum


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema and its subschemas."""
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


def schema_children(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of a schema's members, items and alternatives, in their order."""
    for key, value in schema.items():
        if key not in _NESTING_KEYWORDS:
            continue
        if key in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list):
            yield from value
        else:
            yield value


def _standalone_schemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the subschemas that are, wherever they apply, the only schema of a value."""
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
            return []  # changes the base of references inside
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
    """Return the keywords of a standalone schema whose subschemas are standalone: members and items, or a sole delegate."""
    combining = [key for key in (*_SAME_VALUE_KEYWORDS, *_DELEGATING_KEYWORDS) if key in schema]
    if not combining:
        return () if "patternProperties" in schema else _CHILD_KEYWORDS  # patterns may match named properties
    if len(combining) > 1 or combining[0] in _SAME_VALUE_KEYWORDS or any(key in schema for key in _VALUE_KEYWORDS):
        return ()
    several = combining == ["allOf"] and not (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1)
    return () if several else (combining[0],)


def has_no_finite_document(schema: Any) -> bool:
    """Return whether no finite document can match, judged by required members and items only."""
    nodes: dict[int, Any] = {}
    stack = [schema]
    while stack:  # collect all parts that may be schemas
        part = stack.pop()
        if isinstance(part, dict) and id(part) not in nodes:
            if len(nodes) >= _MAX_SCHEMAS:
                return False
            nodes[id(part)] = part
        if isinstance(part, dict | list):
            stack.extend(part.values() if isinstance(part, dict) else part)
    finite: set[int] = set()
    pending = list(reversed(nodes.values()))  # definitions usually follow what refers to them
    while True:  # least fixed point of the schemas that need only schemas of the set
        before = len(finite)
        for part in pending:
            if _is_finite(part, schema, finite):
                finite.add(id(part))
        if len(finite) == before:
            return isinstance(schema, dict) and id(schema) not in finite
        pending = [part for part in pending if id(part) not in finite]


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


def resolve_reference(root: Mapping[str, Any], reference: str) -> Any:
    """Return the value that a reference within the document points to, None if it points to nothing or elsewhere."""
    start, *path = unquote(reference).split("/", MAX_REFERENCE_PARTS)
    found: Any = root if start == "#" else None
    for name in path:
        if isinstance(found, list):
            found = found[int(name)] if _INDEX.fullmatch(name) and int(name) < len(found) else None
        else:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def expand_ascii_classes(pattern: str) -> str:
    r"""Replace \d, \w and \s in a pattern by their ASCII members."""
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
    r"""Replace \d, \w and \s in the patterns of a Lark grammar by their ASCII members."""
    return _LARK.sub(lambda found: found[0] if found[1] is None else expand_ascii_classes(found[1]), grammar)
