"""What becomes a grammar, what is refused and with which reason, and that texts written under one have the form."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from helpers.grammar_draws import demo_compiler, drawn

from windlass.engine.errors import RequestError

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
def test_what_is_written_under_a_schema_is_valid(schema: dict[str, Any]) -> None:
    for text in texts("json_schema", json.dumps(schema)):
        jsonschema.validate(json.loads(text), schema)


def test_a_json_object_is_one() -> None:
    for text in texts("json_object", ""):
        assert isinstance(json.loads(text), dict)


def test_white_space_has_a_bound() -> None:
    """A model that likes line breaks cannot go on writing them."""
    for text in texts("json_schema", json.dumps(PERSON), 20):
        assert not re.search(r"\n\s*\n|  {33}", re.sub(r'"(\\.|[^"])*"', '""', text))


@pytest.mark.parametrize("pattern", ["[a-c]{3}-[0-9]{2}", "(yes|no)!?", "é+x", "(?i)abc", "^ab$"])
def test_a_pattern_is_matched_as_a_whole(pattern: str) -> None:
    for text in texts("regex", pattern):
        assert re.fullmatch(pattern, text), text


def test_one_of_the_choices_is_made() -> None:
    choices = ["yes", "no", 'with "quotes"', "line\nbreak", "é", "back\\slash", "\u2028", "  "]
    found = set(texts("choice", json.dumps(choices), 60))
    assert found <= set(choices) and len(found) > 2


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "<" digits ">"\ndigits ::= [0-9] [0-9]?', 'start: "<" DIGITS ">"\nDIGITS: /[0-9]{1,2}/'],
)
def test_gbnf_and_lark_are_both_read(grammar: str) -> None:
    for text in texts("grammar", grammar):
        assert re.fullmatch(r"<[0-9]{1,2}>", text)


def test_lark_may_hold_schemas_and_name_added_tokens() -> None:
    lark = f'start: <[5]> call\ncall: "f " %json {json.dumps(TREE)}'
    for text in texts("lark", lark):
        assert text.startswith("<|assistant|>f {") and "value" in text


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "minLength"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "nsatisfiable"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}', "Write anyOf"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "format": "no-such"}', "no-such"),
        ("json_schema", '{"type": "string", "pattern": "("}', "regex"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/schema.json"}', "does not fetch"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", '{"$ref": "#"}', "cannot be followed"),
        ("json_schema", '{"$id": "http://a/b", "$ref": "c"}', "$id"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ("json_schema", "false", "nothing"),
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
def test_refusals_say_why(kind: str, value: str, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        demo_compiler().compile(kind, value)
    assert reason in refused.value.message and "\n" not in refused.value.message
    assert len(refused.value.message) < 500


def test_what_is_too_large_is_refused() -> None:
    choices = [[{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(6)] for i in range(6)]
    with pytest.raises(RequestError, match="too large"):
        demo_compiler().compile("json_schema", json.dumps({"allOf": [{"anyOf": choice} for choice in choices]}))
