"""Compiled grammars: sampled texts match the constraint, and unsupported constraints are refused with a reason."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from unit_helpers.grammar_draws import demo_compiler, drawn, takes

from windlass.engine.errors import RequestError
from windlass.server.text.schema_rewriting import FORMATS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
TREE = {
    "type": "object",
    "properties": {"value": {"type": "boolean"}, "left": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
}


def texts(kind: str, value: str, count: int = 12) -> list[str]:
    grammar = demo_compiler().compile(kind, value)
    found = [text for seed in range(count) if (text := drawn(grammar, seed)) is not None]
    assert len(found) > count // 2
    return found


@pytest.mark.parametrize(
    "schema", [PERSON, TREE, {"enum": [1, "two", None]}, {"type": "string", "pattern": "^a+$"}, {}]
)
def test_sampled_documents_are_valid(schema: dict[str, Any]) -> None:
    for text in texts("json_schema", json.dumps(schema)):
        jsonschema.validate(json.loads(text), schema)


def test_json_object() -> None:
    for text in texts("json_object", ""):
        assert isinstance(json.loads(text), dict)


def test_white_space_is_bounded() -> None:
    """A model cannot write line breaks endlessly."""
    for text in texts("json_schema", json.dumps(PERSON), 20):
        assert not re.search(r"\n\s*\n|  {33}", re.sub(r'"(\\.|[^"])*"', '""', text))


@pytest.mark.parametrize("pattern", ["[a-c]{3}-[0-9]{2}", "(yes|no)!?", "é+x", "(?i)abc", "^ab$"])
def test_regex_matches_the_entire_text(pattern: str) -> None:
    for text in texts("regex", pattern):
        assert re.fullmatch(pattern, text), text


def test_choice() -> None:
    choices = ["yes", "no", 'with "quotes"', "line\nbreak", "é", "back\\slash", "\u2028", "  "]
    found = set(texts("choice", json.dumps(choices), 60))
    assert found <= set(choices) and len(found) > 2


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "<" digits ">"\ndigits ::= [0-9] [0-9]?', 'start: "<" DIGITS ">"\nDIGITS: /[0-9]{1,2}/'],
)
def test_gbnf_and_lark(grammar: str) -> None:
    for text in texts("grammar", grammar):
        assert re.fullmatch(r"<[0-9]{1,2}>", text)


def test_lark_with_schemas_and_added_tokens() -> None:
    lark = f'start: <[5]> call\ncall: "f " %json {json.dumps(TREE)}'
    for text in texts("lark", lark):
        assert text.startswith("<|assistant|>f {") and "value" in text


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "minLength"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "nsatisfiable"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("strict_json_schema", '{"not": {"type": "string"}}', "not"),
        ("strict_json_schema", '{"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}', "Write anyOf"),
        ("strict_json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "pattern": "("}', "regex"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/schema.json"}', "does not fetch"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", '{"$ref": "#"}', "cannot be followed"),
        ("json_schema", '{"$id": "http://a/b", "$ref": "c"}', "$id"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ("json_schema", "false", "no output satisfies it"),
        ("json_schema", "[]", "object"),
        ("json_schema", "{", "cannot be followed"),
        ("json_schema", '{"a":' * 100_000 + "1" + "}" * 100_000, "recursion"),
        ("json_schema", '{"properties":{"a":' * 200 + "{}" + "}}" * 200, "recursion"),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-a"),
        ("grammar", "root ::= nothing", "nothing"),
        ("grammar", "start: start", "cannot be followed"),
        ("lark", "start: missing", "missing"),
        ("lark", "start: <no_such_token>", "no_such_token"),
    ],
)
def test_error_messages(kind: str, value: str, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        demo_compiler().compile(kind, value)
    assert reason in refused.value.message and "\n" not in refused.value.message
    assert len(refused.value.message) < 500


# Keywords that llguidance ignores if it is lenient. docs/structured-output.md lists all of them.
UNSUPPORTED: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", "uniqueItems": True}, [1, 1]),
    ({"type": "array", "contains": {"type": "integer"}}, []),
    ({"type": "array", "contains": {}, "minContains": 2}, [1]),
    ({"type": "array", "contains": {}, "maxContains": 2}, [1, 2, 3]),
    ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [1, 2]),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, {"b": 1}),
    ({"allOf": [{"type": "object", "properties": {"a": {}}}], "unevaluatedProperties": False}, {"b": 1}),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}, {"a": 1}),
    ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, {"a": 1, "b": 1, "c": 1}),
    ({"properties": {"a": {}}, "additionalProperties": True, "minProperties": 1}, {}),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1}),
    ({"not": {"type": "integer"}}, 1),
    ({"if": {"type": "integer"}, "then": {"minimum": 2}, "else": {"minLength": 2}}, 1),
    ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "ab"),
    ({"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a", "type": "string"}}}, 1),
]


@pytest.mark.parametrize(("schema", "accepted"), UNSUPPORTED)
def test_unsupported_keywords_are_ignored_or_refused(schema: dict[str, Any], accepted: Any) -> None:
    assert takes(schema, accepted)
    with pytest.raises(RequestError, match="cannot be followed"):
        demo_compiler().compile("strict_json_schema", json.dumps(schema))


@pytest.mark.parametrize("kind", ["json_schema", "strict_json_schema"])
def test_unknown_formats_are_annotations(kind: str) -> None:
    named = {"type": "object", "properties": {"format": {"const": {"format": "path"}}, "const": {"format": "regex"}}}
    for schema, good, bad in (
        ({"type": "array", "items": {"type": "string", "format": "path"}}, ["a/b"], [1]),
        ({**named, "required": ["format"]}, {"format": {"format": "path"}, "const": "x"}, {"format": {}}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "format": "binary", "pattern": "^a$"}}}, "a", "b"),
    ):
        assert takes(schema, good, kind) and not takes(schema, bad, kind), schema


def test_formats_equal_those_of_the_library() -> None:
    for name in (*FORMATS, "path", "iri", "regex", "json-pointer", "uri-reference", "idn-email", "password", "byte"):
        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
        error, _ = LLMatcher.validate_grammar_with_warnings(grammar)
        assert error is (name not in FORMATS), name


def test_too_large_schema_is_refused() -> None:
    choices = [[{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(6)] for i in range(6)]
    with pytest.raises(RequestError, match="too large"):
        demo_compiler().compile("json_schema", json.dumps({"allOf": [{"anyOf": choice} for choice in choices]}))
