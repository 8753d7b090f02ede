"""Objects that permit only the members they name: all except those that could become unsatisfiable."""

from __future__ import annotations

import json
from typing import Any

import pytest
from unit_helpers.grammar_draws import takes

from windlass.server.text.schema_rewriting import enforced_schema

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
TO_A = {"$ref": "#/$defs/A"}
DEFINED = {"$defs": {"A": A}}
NODE = {"properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/N"}}}}
PLAIN, MORE = {"a": 1}, {"a": 1, "x": 1}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, PLAIN, MORE),
        ({**A, "unevaluatedProperties": False}, PLAIN, MORE),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, {"b": 1}, {}),
        ({**A, "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, {"a": 1, "c": 1}, PLAIN),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, PLAIN, {"a": 1, "b": 1}),
        ({"properties": {"o": A}}, {"o": PLAIN}, {"o": MORE}),
        ({"type": "array", "items": A}, [PLAIN], [PLAIN, MORE]),
        ({"type": "array", "prefixItems": [{}, A]}, [1, PLAIN], [1, MORE]),
        ({"type": "object", "additionalProperties": A}, {"o": PLAIN}, {"o": MORE}),
        ({**A, "additionalProperties": B}, {"a": 1, "o": {"b": 1}}, {"a": 1, "o": {"c": 1}}),
        ({"anyOf": [A, B, {"type": "null"}]}, PLAIN, {"a": 1, "b": 1}),
        ({"oneOf": [A, {"type": "null"}], "title": "T"}, PLAIN, MORE),
        ({"allOf": [A], "description": "one alone, as older pydantic writes it"}, PLAIN, MORE),
        ({**TO_A, **DEFINED, "default": {}}, PLAIN, MORE),
        ({"properties": {"o": {"anyOf": [TO_A, {"type": "null"}], "default": None}}, **DEFINED}, {"o": PLAIN}, {"o": MORE}),
        ({"$ref": "#/definitions/A", "definitions": {"A": A}}, PLAIN, MORE),
        ({"$ref": "#/$defs/N", "$defs": {"N": NODE}}, {"v": 1, "kids": [{"v": 2}]}, {"v": 1, "kids": [{"w": 2}]}),
        ({"properties": {"properties": A, "$ref": A}}, {"properties": PLAIN}, {"$ref": MORE}),
    ],
)  # fmt: skip
def test_closed_objects(schema: dict[str, Any], good: Any, bad: Any) -> None:
    assert takes(schema, good) and not takes(schema, bad)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        # Explicitly open.
        ({**A, "additionalProperties": True}, MORE),
        ({**A, "additionalProperties": {"type": "integer"}}, MORE),
        ({**A, "patternProperties": {"^x": {}}}, MORE),
        ({**A, "unevaluatedProperties": True}, MORE),
        ({**A, "propertyNames": {"minLength": 1}}, MORE),
        ({**A, "required": ["a", "x"]}, MORE),
        ({**A, "minProperties": 2}, MORE),
        ({"type": "object"}, MORE),
        ({"type": "object", "properties": {}}, MORE),
        ({}, MORE),
        # Several schemas of one value.
        ({"allOf": [A, B]}, {"a": 1, "b": 2}),
        ({"allOf": [A, {"properties": {"b": {}, "o": A}}]}, {"a": 1, "b": 2, "o": MORE}),
        ({"allOf": [TO_A, B], **DEFINED}, {"a": 1, "b": 2}),
        ({"properties": {"o": {"allOf": [TO_A, B]}, "p": TO_A}, **DEFINED}, {"o": {"a": 1, "b": 2}, "p": MORE}),
        ({**TO_A, "properties": {"b": {}}, **DEFINED}, {"a": 1, "b": 2}),
        ({**TO_A, "required": ["b"], **DEFINED}, {"a": 1, "b": 2}),
        ({"anyOf": [A, B], "properties": {"c": {}}}, {"a": 1, "c": 2}),
        ({"anyOf": [A, B], "required": ["c"]}, {"a": 1, "c": 2}),
        ({"anyOf": [A, B], "oneOf": [{"required": ["c"]}]}, {"a": 1, "c": 2}),
        ({"type": "array", "items": {"anyOf": [A, B], "required": ["c"]}}, [{"a": 1, "c": 2}]),
        ({"type": "array", "items": TO_A, "allOf": [{"items": B}], **DEFINED}, [{"a": 1, "b": 2}]),
        ({"properties": {"xa": A}, "patternProperties": {"^x": B}}, {"xa": {"a": 1}}),
        ({"allOf": [{"properties": {"o": {"$ref": "#/$defs/W"}}}, {"properties": {"o": B}}],
          "$defs": {"W": {"properties": {"w": {}}}}}, {"o": {"w": 1, "b": 1}}),
        # References to another document, or to an anchor in this one.
        ({"$ref": "#here", "$defs": {"A": {**A, "$anchor": "here"}}}, MORE),
        ({"properties": {"o": {"$id": "http://a/b", **A}}}, {"o": MORE}),
    ],
)  # fmt: skip
def test_open_objects(schema: dict[str, Any], value: Any) -> None:
    assert takes(schema, value)


@pytest.mark.parametrize("names", [{}, {"type": "string"}])
def test_property_names_that_permit_any_name_are_removed(names: dict[str, Any]) -> None:
    """Libraries write them for every record type; llguidance refuses `propertyNames` in strict schemas."""
    record = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}}
    assert enforced_schema({"properties": {"r": record}}, strict=True)["properties"]["r"] == {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
    }
    assert enforced_schema({**A, "propertyNames": names}, strict=True)["additionalProperties"] is False
    assert "propertyNames" in enforced_schema({**A, "propertyNames": {"minLength": 2}}, strict=True)


def test_schema_is_not_modified() -> None:
    schema = {"properties": {"o": A, "p": {"type": "string", "format": "path"}}}
    before = json.dumps(schema)
    found = enforced_schema(schema, strict=False)
    assert json.dumps(schema) == before
    assert found["additionalProperties"] is found["properties"]["o"]["additionalProperties"] is False
    assert "format" not in found["properties"]["p"]


def test_schemas_are_visited_once() -> None:
    """Visiting every path would take 2**60 steps."""
    doubled = {f"{i}": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}
    found = enforced_schema({"$ref": "#/$defs/0", "$defs": {**doubled, "60": A}}, strict=True)
    assert found["$defs"]["60"]["additionalProperties"] is False
    deep: dict[str, Any] = A
    for _ in range(150):
        deep = {"properties": {"o": deep}}
    assert json.dumps(enforced_schema(deep, strict=False)).count("additionalProperties") == 151
