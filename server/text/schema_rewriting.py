"""Rewriting of a request's JSON schemas and patterns for llguidance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any
from urllib.parse import unquote

# String formats that llguidance enforces. Others are annotations, as JSON Schema permits.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
# Bounds of what has no natural end in these formats: pattern and length. Seconds are at most 59, as parsers refuse 60.
_TIME = r"[^.]{6}[0-5][0-9](\.[0-9]{1,9})?(Z|[+-][0-9:]{5})$"
_BOUNDS_OF_FORMATS = {
    "date-time": ("^[^.]{10}T" + _TIME, None),
    "time": ("^" + _TIME, None),
    "duration": ("^[^0-9]*([0-9]{1,6}[^0-9]+)*$", None),
    "email": (r"^[^@]{1,64}@[^.@]{1,63}(\.[^.@]{1,63}){0,8}$", 128),
    "uri": ("^[^:]{1,32}:", 512),
}
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_FRACTION_DIGITS = 10  # of a number: llguidance's limit
_LEAST_BOUND = 1e-6  # a number with a smaller bound may need more digits
_LARGEST_NUMBER = 10**15  # of a number without bounds
_LARGEST_INTEGER = 10**18  # of an integer without bounds
_INT64_MAX = 2**63 - 1
_MAX_ADDED_VALUES = 4000  # to a schema
_MAX_LISTED_VALUES = 5  # of which all lists without repetition are written out: 326
_PLAIN_REFERENCE = re.compile(r"#[A-Za-z0-9_.$/-]*")
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

    An object stays open if its schema requires it, if it names no member, and if closing it could make documents impossible:
    where several schemas apply to one value, and in everything that these refer to.
    Numbers and formats without a natural end are bounded. Raises ValueError for integers that llguidance would round.
    strict: keep keywords that llguidance cannot enforce, so that it rejects the schema.
    """
    found: dict[str, Any] = json.loads(json.dumps(schema))
    _rename_references(found)
    most = _MAX_ADDED_VALUES
    for part in list(_subschemas(found)):
        most -= _name_members(part, found, most)
        most -= _list_unique_items(part, found, most, strict=strict)
    for part in _standalone_schemas(found):
        if part.get("properties") and names_all_members(part):
            part["additionalProperties"] = False
    # llguidance cannot combine multiples of such different numbers.
    bounds_fractions = not any("multipleOf" in part and _is_combined(part) for part in _subschemas(found))
    for part in _subschemas(found):
        if isinstance(part.get("format"), str):
            _bound_format(part)
        _bound_numbers(part, bounds_fractions)
        if not strict and not _counts_all_members(part):
            del part["minProperties"]
    return found


def _rename_references(root: dict[str, Any]) -> None:
    """Move the targets of references with escapes to plain names, as llguidance does not resolve all of these references."""
    found = [
        (part, resolve_reference(root, part["$ref"]))
        for part in _subschemas(root)
        if isinstance(part.get("$ref"), str)
        and part["$ref"].startswith("#/")
        and not _PLAIN_REFERENCE.fullmatch(part["$ref"])
    ]
    targets = {id(target): target for _, target in found if isinstance(target, dict)}
    known = root.setdefault("$defs", {}) if targets else {}
    if not isinstance(known, dict):
        return
    references = {target: {"$ref": f"#/$defs/reference-{number}"} for number, target in enumerate(targets)}
    for part, target in found:
        part.update(references.get(id(target), {}))
    for number, target in enumerate(targets.values()):
        known[f"reference-{number}"] = dict(target)
        target.clear()
        target.update(references[id(target)])


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a mere reference points to, another schema itself."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        return resolve_reference(root, schema["$ref"])
    return schema


def _finite_values(schema: Any, root: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of an enumeration, None for any other schema."""
    schema = _resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [False, True] if schema.get("type") == "boolean" else None


def _name_members(part: dict[str, Any], root: dict[str, Any], most: int) -> int:
    """Replace `propertyNames` by `properties` or `patternProperties`, which llguidance enforces, where that is possible.

    Returns the number of added members, at most `most`.
    """
    if part.get("propertyNames") in _ANY_NAMES:
        del part["propertyNames"]
    names = part.get("propertyNames")
    if names is None or "patternProperties" in part:
        return 0
    others, properties = part.get("additionalProperties", True), part.get("properties", {})
    values = _finite_values(names, root)
    if values is not None and isinstance(properties, dict) and len(values) <= most:
        if isinstance(others, dict) and others and isinstance(known := root.setdefault("$defs", {}), dict):
            name = f"value-{len(known)}"
            known[name], others = others, {"$ref": f"#/$defs/{name}"}  # once, however many members there are
        members = {name: properties.get(name, others) for name in values if isinstance(name, str)}
        part["properties"] = {name: member for name, member in members.items() if member is not False}
    elif not properties and isinstance(names, dict) and isinstance(names.get("pattern"), str):
        if names.keys() - {"pattern", "type", "title", "description"}:
            return 0
        values = []
        part["patternProperties"] = {names["pattern"]: others}
    else:
        return 0
    part["additionalProperties"] = False
    del part["propertyNames"]
    return len(values)


def _list_unique_items(part: dict[str, Any], root: Mapping[str, Any], most: int, *, strict: bool) -> int:
    """Replace `uniqueItems` by the possible lists of a few values. Returns the number of added values, at most `most`.

    With other items it is not enforced. A repeated value does not matter to a set, unless this needs several: then llguidance
    rejects the strict schema.
    """
    if part.get("uniqueItems") is not True:
        part.pop("uniqueItems", None)
        return 0
    values = _finite_values(part.get("items"), root)
    least, longest = part.get("minItems", 0), part.get("maxItems", _MAX_LISTED_VALUES)
    plain = isinstance(least, int) and isinstance(longest, int) and "prefixItems" not in part and "contains" not in part
    if plain and values is not None and len(values) <= _MAX_LISTED_VALUES:
        distinct = [json.loads(text) for text in dict.fromkeys(map(json.dumps, values))]
        lists = [
            list(chosen)
            for count in range(least, min(longest, len(distinct)) + 1)
            for chosen in permutations(distinct, count)
        ]
        if (added := sum(map(len, lists))) <= most and lists:
            for key in ("items", "minItems", "maxItems", "uniqueItems"):
                part.pop(key, None)
            part["enum"] = lists
            return added
    if isinstance(longest, int) and values is not None and "prefixItems" not in part:
        part["maxItems"] = min(part.get("maxItems", len(values)), len(values))
    if not (strict and isinstance(least, int | float) and least > 1):
        del part["uniqueItems"]
    return 0


def _bound_format(part: dict[str, Any]) -> None:
    """Drop a format that llguidance rejects. Bound one whose texts may have no natural end."""
    if part["format"] not in FORMATS:
        del part["format"]
    elif (bounds := _BOUNDS_OF_FORMATS.get(part["format"])) is not None:
        pattern, length = bounds
        if length is not None:
            part.setdefault(
                "maxLength", max(length, least) if isinstance(least := part.get("minLength"), int) else length
            )
        if "pattern" not in part:
            part["pattern"] = pattern
        elif part["pattern"] != pattern and isinstance(others := part.setdefault("allOf", []), list):
            others.append({"pattern": pattern})


def _is_combined(part: Mapping[str, Any]) -> bool:
    """Return whether a schema of a number may apply together with others."""
    return part.get("type") not in ("number", "integer") or any(key in part for key in _DELEGATING_KEYWORDS)


def _bound_numbers(part: dict[str, Any], bounds_fractions: bool) -> None:
    """Bound the digits of numbers, and make the bounds of integers exact: llguidance rounds them to floats.

    bounds_fractions: whether the digits of fractions are bounded, too.
    """
    for value in (*(part.get("enum") or () if isinstance(part.get("enum"), list) else ()), part.get("const")):
        if isinstance(value, int) and not _is_exact(value):
            raise ValueError(f"the integer {value} has too many digits for enum and const")
    if "enum" in part or "const" in part:
        return
    kinds = part.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if any(isinstance(part.get(key), bool) for key in ("exclusiveMinimum", "exclusiveMaximum")):
        return  # of draft 4, where they change the meaning of the other keywords
    bounds = [value for key in _BOUNDS if isinstance(value := part.get(key), int | float)]
    if "number" in kinds:
        if (
            bounds_fractions
            and "multipleOf" not in part
            and all(value == 0 or abs(value) >= _LEAST_BOUND for value in bounds)
        ):
            part["multipleOf"] = 10**-_FRACTION_DIGITS
        if not {"minimum", "exclusiveMinimum"} & part.keys() and all(value > -_LARGEST_NUMBER for value in bounds):
            part["minimum"] = -_LARGEST_NUMBER
        if not {"maximum", "exclusiveMaximum"} & part.keys() and all(value < _LARGEST_NUMBER for value in bounds):
            part["maximum"] = _LARGEST_NUMBER
    elif "integer" in kinds or any(isinstance(value, int) and not _is_exact(value) for value in bounds):
        _bound_integers(part, "integer" in kinds)


def _bound_integers(part: dict[str, Any], only_integers: bool) -> None:
    """Round bounds inwards to numbers that llguidance represents. only_integers: add the missing ones."""
    least = [*_numbers(part, "minimum"), *(value + 1 for value in map(math.floor, _numbers(part, "exclusiveMinimum")))]
    most = [*_numbers(part, "maximum"), *(value - 1 for value in map(math.ceil, _numbers(part, "exclusiveMaximum")))]
    low = max(map(math.ceil, least), default=None)
    high = min(map(math.floor, most), default=None)
    if only_integers and low is None and (high is None or high > -_LARGEST_INTEGER):
        low = -_LARGEST_INTEGER
    if only_integers and high is None and (low is None or low < _LARGEST_INTEGER):
        high = _LARGEST_INTEGER
    least_exact = None if low is None else _at_least(low)
    most_exact = None if high is None else _INT64_MAX if high >= _INT64_MAX else -_at_least(-high)
    if (least_exact is not None and least_exact > (_INT64_MAX if most_exact is None else most_exact)) or (
        most_exact is not None and most_exact < -_INT64_MAX
    ):
        raise ValueError(f"no integer from {low} to {high} can be written exactly")
    for key in _BOUNDS:
        part.pop(key, None)
    part.update({} if least_exact is None else {"minimum": least_exact})
    part.update({} if most_exact is None else {"maximum": most_exact})


def _numbers(part: Mapping[str, Any], key: str) -> list[int | float]:
    value = part.get(key)
    return [value] if isinstance(value, int | float) else []


def _is_exact(value: int) -> bool:
    """Return whether llguidance represents an integer exactly: as a float that is clipped to 64 bits."""
    return value == _INT64_MAX or (abs(value) < _INT64_MAX and int(float(value)) == value)


def _at_least(value: int) -> int:
    """Return the smallest integer that is a float, at least `value`, and above the smallest one of 64 bits."""
    value = max(value, -_INT64_MAX)
    rounded = int(float(value))
    return rounded if rounded >= value and abs(rounded) <= _INT64_MAX else int(math.nextafter(float(value), math.inf))


def without_patterns(schema: dict[str, Any], is_supported: Callable[[str], bool]) -> bool:
    """Remove the patterns that are not supported, in place; return whether there were any."""
    found = [part for part in _subschemas(schema) if isinstance(part.get("pattern"), str)]
    unsupported = [part for part in found if not is_supported(part["pattern"])]
    for part in unsupported:
        del part["pattern"]
    return bool(unsupported)


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
    start, *path = reference.split("/", MAX_REFERENCE_PARTS)
    found: Any = root if start == "#" else None
    for name in path:
        plain = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if _INDEX.fullmatch(name) and int(name) < len(found) else None
        elif isinstance(found, Mapping):
            found = found[plain] if plain in found else found.get(unquote(name).replace("~1", "/").replace("~0", "~"))
        else:
            return None
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
