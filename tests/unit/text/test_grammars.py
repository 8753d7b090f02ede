"""Compiled grammars: sampled texts match the constraint, and unsupported constraints are refused with a reason."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from llguidance import LLMatcher
from unit_helpers.grammar_draws import accepts, demo_compiler, drawn, takes, takes_text

from windlass.engine.errors import RequestError
from windlass.server.text.schema_rewriting import FORMATS, enforced_schema
from windlass.server.text.tool_parsers.call_grammars import CallGrammarOptions
from windlass.server.text.tool_parsers.formats import PLAIN_JSON

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
        ("strict_json_schema", '{"type": "array", "uniqueItems": true, "minItems": 2}', "uniqueItems"),
        ("strict_json_schema", '{"type": "string", "pattern": "("}', "regex"),
        ("json_schema", '{"enum": [9007199254740993]}', "9007199254740993"),
        ("json_schema", '{"type": "integer", "minimum": 9223372036854775808}', "no integer from 9223372036854775808"),
        (
            "json_schema",
            '{"type": "integer", "exclusiveMinimum": 9007199254740992, "maximum": 9007199254740993}',
            "exactly",
        ),
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


# Keywords that llguidance ignores if it is lenient. docs/guides/structured-output.md lists all of them.
UNSUPPORTED: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", "contains": {"type": "integer"}}, []),
    ({"type": "array", "contains": {}, "minContains": 2}, [1]),
    ({"type": "array", "contains": {}, "maxContains": 2}, [1, 2, 3]),
    ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [1, 2]),
    ({"type": "object", "propertyNames": {"minLength": 2}}, {"b": 1}),
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


# Schemas with documents that match their grammar and documents that do not, as JSON text.
BOUNDED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"type": "string", "format": "time"},
        ['"14:30:00Z"', '"14:30:00.25+02:00"'],
        [f'"14:30:00.{"3" * 10}Z"', '"14:30"', '"14:30:60Z"'],
    ),
    ({"type": "string", "format": "date-time"}, ['"2024-05-03T14:30:00.5Z"'], [f'"2024-05-03T14:30:00.{"3" * 10}Z"']),
    ({"type": "string", "format": "duration"}, ['"P1Y2M3DT4H5M6S"', '"P2W"'], [f'"P{"1" * 7}D"']),
    (
        {"type": "string", "format": "email"},
        ['"a.b@mail.example.co.uk"'],
        [f'"{"a" * 65}@b.de"', f'"a@{"b" * 64}.de"', f'"{"a" * 64}@{"b" * 62}.de"'],
    ),
    (
        {"type": "string", "format": "uri"},
        ['"https://example.org/a?b#c"', '"urn:isbn:1"'],
        [f'"{"a" * 33}:b"', f'"a:{"b" * 511}"'],
    ),
    (
        {"type": "string", "format": "time", "pattern": "Z$"},
        ['"14:30:00Z"'],
        ['"14:30:00+02:00"', f'"14:30:00.{"3" * 10}Z"'],
    ),
    ({"type": "number"}, ["0", "-3.75", "5.0", f"0.{'3' * 10}", "9" * 15], [f"0.{'3' * 11}", "9" * 17, "1e400"]),
    ({"type": "number", "minimum": 0, "maximum": 10}, ["0", "10", "3.75"], ["11", "-1", f"3.{'3' * 11}"]),
    ({"type": ["number", "null"]}, ["null", "0.5"], [f"0.{'3' * 11}"]),
    ({"allOf": [{"type": "number"}, {"multipleOf": 0.5}]}, ["2.5"], ["2.25"]),
    ({"type": "number", "minimum": 1e-12, "maximum": 1e-9}, ["0.0000000001"], ["0"]),
    ({"type": "integer"}, ["0", "-5", "9" * 18], ["9" * 20, "1.5"]),
    ({"type": "integer", "exclusiveMinimum": 0}, ["1", "9" * 18], ["0", "9" * 20]),
]
EXACT: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
    ({"exclusiveMaximum": 2**53 + 2}, [str(2**53), "7"], [str(2**53 + 2), str(2**53 + 3)]),
    ({"minimum": -(2**63), "maximum": 2**63 - 1}, [str(2**63 - 1), "-7"], [str(2**63), str(-(2**63) - 1)]),
    ({"minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1)], ["-1", str(2**64)]),
    ({"minimum": 0.5, "maximum": 2.5}, ["1", "2"], ["0", "3"]),
]
NAMED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        ['["b", "a"]', "[]"],
        ['["a", "a"]', '["c"]'],
    ),
    (
        {
            "type": "array",
            "items": {"$ref": "#/$defs/e"},
            "uniqueItems": True,
            "minItems": 2,
            "$defs": {"e": {"enum": [1, 2]}},
        },
        ["[2, 1]"],
        ["[1, 1]", "[1]"],
    ),
    ({"type": "array", "items": {"enum": [*"abcdefgh"]}, "uniqueItems": True}, ['["h"]'], [json.dumps(["a"] * 9)]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ['["h", "g"]'], ["[1]"]),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "boolean"}},
        ["{}", '{"a": true, "b": false}'],
        ['{"c": true}', '{"a": 1}'],
    ),
    (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/k"},
            "additionalProperties": True,
            "$defs": {"k": {"enum": ["a"], "type": "string"}},
        },
        ['{"a": [1]}'],
        ['{"b": 1}'],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x-"}, "additionalProperties": {"type": "boolean"}},
        ['{"x-a": true}'],
        ['{"a": true}', '{"x-a": 1}'],
    ),
]


def test_rewritten_schemas_stay_small() -> None:
    """Many lists and maps that refer to one enumeration, or one large value of many members."""
    names = [f"k{number}" for number in range(500)]
    value = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    maps = {"propertyNames": {"$ref": "#/$defs/k"}, "additionalProperties": value}
    lists = {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True}
    escaped = {"$ref": "#/$defs/a%20b"}
    schema = {
        "properties": {f"p{number}": part for number, part in enumerate([maps] * 20 + [lists] * 500 + [escaped] * 20)},
        "$defs": {"k": {"enum": names}, "e": {"enum": [1, 2, 3, 4, 5]}, "a b": value},
    }
    assert len(json.dumps(enforced_schema(schema, strict=False))) < 2 * len(json.dumps(schema)) + 100_000


ESCAPED = ("a/b", "a~b", "a b", "a<b>", "a%b", "ü", "plain")


def fits(kind: str, schema: Any, text: str) -> bool:
    return accepts(kind, json.dumps(schema), text)


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("kind", ["json_schema", "strict_json_schema"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"), [*BOUNDED, *(({"type": "integer", **more}, *texts) for more, *texts in EXACT), *NAMED]
)
def test_documents_of_rewritten_schemas(kind: str, schema: Any, good: list[str], bad: list[str]) -> None:
    """No value is endless, bounds above 2**53 are exact, and sets and maps with named keys are enforced."""
    assert [text for text in good if not fits(kind, schema, text)] == []
    assert [text for text in bad if fits(kind, schema, text)] == []


@pytest.mark.parametrize("name", ESCAPED)
@pytest.mark.parametrize("quoted", [False, True])
def test_references_with_escapes(name: str, quoted: bool) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1")
    reference = {"$ref": f"#/$defs/{quote(pointer) if quoted else pointer}"}
    item = {"type": "object", "properties": {"k": {"type": "array", "items": reference}}, "required": ["k"]}
    schema = {"type": "object", "properties": {"x": reference}, "required": ["x"], "$defs": {name: item}}
    assert fits("strict_json_schema", schema, '{"x": {"k": [{"k": []}]}}')
    for text in ('{"x": 1}', '{"x": {"k": [1]}}', '{"x": {"k": [], "z": 1}}'):
        assert not fits("strict_json_schema", schema, text)


LOOK_AHEAD = {"type": "string", "pattern": r"^(?!\.)[a-z.]+$", "maxLength": 5}


@pytest.mark.parametrize("pattern", [LOOK_AHEAD["pattern"], r"(a)\1", r"\bword\b", r"\cA", r"\Aabc\Z", "a{,3}"])
def test_unsupported_patterns_are_ignored_unless_strict(pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {**LOOK_AHEAD, "pattern": pattern}, "b": {"pattern": "^b$"}}}
    assert fits("json_schema", schema, '{"a": "?"}') and not fits("json_schema", schema, '{"a": "longer"}')
    assert not fits("json_schema", schema, '{"b": "c"}')
    with pytest.raises(RequestError, match="cannot be followed"):
        demo_compiler().compile("strict_json_schema", json.dumps(schema))


def test_unsupported_patterns_in_calls() -> None:
    def grammar(*strict: str) -> str:
        schema = {"type": "object", "properties": {"to": LOOK_AHEAD}, "required": ["to"]}
        options = CallGrammarOptions({"mail": schema, "ls": {}}, False, json.dumps, strict)
        return demo_compiler().compile("lark", PLAIN_JSON.grammar(options) or "")

    call = '{"name": "mail", "arguments": {"to": "?"}}'
    assert takes_text(grammar(), call) and takes_text(grammar("ls"), call)
    with pytest.raises(RequestError, match=r"'mail'.*look-a"):
        grammar("mail")
    as_alternative = demo_compiler().compile("json_object", "", grammar())
    assert takes_text(as_alternative, call)
