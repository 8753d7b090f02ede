"""Call grammars: random texts sampled under them are parsed as calls whose arguments match the schemas."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from helpers.toy_tokenizers import byte_level
from llguidance import LLMatcher, LLTokenizer
from unit_helpers.grammar_draws import demo_compiler

from windlass.engine.errors import RequestError
from windlass.server.text.stream_parser import CallArguments, CallOptions, CallStart, Content, Event
from windlass.server.text.tool_parsers.call_grammars import MAX_GRAMMAR_CALLS, MAX_MEMBERS, CallGrammarOptions
from windlass.server.text.tool_parsers.formats import FORMATS, PLAIN_JSON, ToolFormat

EOS = "<|the end|>"
SCHEMAS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["C", "F", None, True]},
            "at": {"$ref": "#/$defs/place"},
        },
        "required": ["days"],
        "$defs": {"place": {"type": "array", "items": {"type": "number", "multipleOf": 1}, "maxItems": 2}},
    },
    "find-it": {},
    "all": {"type": "object", "properties": {"x": {"type": "object", "properties": {"a b": {"const": '"]}'}}}}},
}


PYTHON = ("pythonic", "lfm2", "olmo3", "minicpm3")
SINGLE = ("harmony", "gigachat3", "internlm")  # one call per answer


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(byte_level().to_str())
    made.add_special_tokens([EOS, *sorted({marker for each in FORMATS.values() for marker in each.markers})])
    return made


@pytest.fixture(scope="module")
def vocabulary(backend: tokenizers.Tokenizer) -> LLTokenizer:
    return LLTokenizer(backend.to_str(), eos_token=backend.token_to_id(EOS))


def draw(grammar: str, backend: tokenizers.Tokenizer, vocabulary: LLTokenizer, seed: int) -> str:
    """Sample a random text that the grammar permits."""
    chance = random.Random(seed)
    matcher = LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    eos = backend.token_to_id(EOS)
    ids: list[int] = []
    while len(ids) < 4000:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        markers = [token_id for token_id in allowed if token_id > eos]
        token_id = chance.choice(markers if markers and chance.random() < 0.3 else allowed)
        if token_id == eos:
            break
        ids.append(token_id)
        assert matcher.consume_token(token_id)
    else:
        raise AssertionError("the text does not end")
    return backend.decode(ids, skip_special_tokens=False)


def calls_in(text: str, form: ToolFormat, schemas: dict[str, Any] = SCHEMAS) -> list[tuple[str, Any]]:
    ids = itertools.count()
    parser = form.parser(CallOptions(schemas=schemas, new_id=lambda: str(next(ids))))
    events: list[Event] = []
    for character in text:
        events += parser.feed(character)
    events += parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        assert not isinstance(event, Content), (text, event)
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_sampled_texts_are_calls(
    name: str, parallel: bool, backend: tokenizers.Tokenizer, vocabulary: LLTokenizer
) -> None:
    form = FORMATS[name]
    schemas = {key: SCHEMAS[key] for key in SCHEMAS if name not in PYTHON or key != "all" or parallel}
    grammar = form.grammar(CallGrammarOptions(schemas, parallel, lambda marker: f"<[{backend.token_to_id(marker)}]>"))
    assert grammar is not None
    counts = set()
    for seed in range(20):
        calls = calls_in(draw(grammar, backend, vocabulary, seed), form)
        counts.add(len(calls))
        for called, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[called] | {"type": "object"})
            assert set(arguments) <= set(SCHEMAS[called].get("properties", ()))
    if parallel and name not in SINGLE:
        assert max(counts) > 1 and max(counts) <= MAX_GRAMMAR_CALLS
    else:
        assert counts == {1}


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])  # whose end marker ends the turn
def test_an_answer_may_end_after_a_call_and_a_newline(
    name: str, parallel: bool, backend: tokenizers.Tokenizer, vocabulary: LLTokenizer
) -> None:
    """Otherwise a model that always writes a newline is forced to invent calls."""
    form = FORMATS[name]
    options = CallGrammarOptions(
        {"look": SCHEMAS["look"]}, parallel, lambda marker: f"<[{backend.token_to_id(marker)}]>"
    )
    grammar = form.grammar(options)
    assert grammar is not None
    for seed in range(4):
        text = draw(grammar, backend, vocabulary, seed).rstrip() + "\n"
        matcher = LLMatcher(vocabulary, grammar)
        assert matcher.consume_tokens(backend.encode(text, add_special_tokens=False).ids)
        assert matcher.is_accepting(), text
        assert calls_in(text, form)


@pytest.mark.quick_cases(27)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("with_schema", [False, True])
@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        ({"type": "string", "pattern": "(?=x)y"}, "look-a"),
        ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
    ],
)
def test_errors_name_the_function(name: str, with_schema: bool, parameter: dict[str, Any], reason: str) -> None:
    """Messages do not quote the generated grammar."""
    schemas = {
        "look": SCHEMAS["look"],
        "find": {"type": "object", "properties": {"x": parameter}},
        "all": SCHEMAS["all"],
    }
    options = CallGrammarOptions(schemas, True, json.dumps, ["find"])
    grammar = FORMATS[name].grammar(options) or PLAIN_JSON.grammar(options)  # as forced calls are compiled
    assert grammar is not None
    with pytest.raises(RequestError) as refused:
        demo_compiler().compile(*(("json_object", "", grammar) if with_schema else ("lark", grammar)))
    message = refused.value.message
    assert message.startswith("the schema in the parameters of 'find' cannot be followed: ") and reason in message
    assert "arguments_" not in message and "start:" not in message


@pytest.mark.parametrize("name", FORMATS)
def test_example_is_a_call(name: str) -> None:
    text = FORMATS[name].example.replace("the function's name", "look").replace("an argument's name", "city")
    ((called, arguments),) = calls_in(text.replace("=its value", "='its value'"), FORMATS[name])
    assert (called, arguments) == ("look", {"city": "its value"})


PLAIN: dict[str, Any] = {
    "properties": {
        "Zeta": {"type": "string", "minLength": 1, "maxLength": 8, "description": "a"},
        "alpha": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "kind": {"enum": ["C", "", 'a"{', None, 1, True]},
        "fixed": {"type": "string", "const": "x"},
        "tree": {"$ref": "#/$defs/tree"},
        "all": {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 3},
        "one": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 1},
        "none": {"type": "array", "items": {"type": "string"}, "maxItems": 0},
        "object": {
            "type": "object",
            "properties": {"a b": {"type": "integer", "minimum": 0, "maximum": 9}, "x:y": {"type": "boolean"}},
            "required": ["a b"],
        },
        "text": {"type": "string"},
    },
    "required": ["Zeta", "all"],
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "boolean"},
                "more": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
            },
            "required": ["leaf"],
        }
    },
}
FURTHER: dict[str, Any] = {
    "properties": {
        "day": {"type": "string", "format": "date"},
        "any": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 0, "maximum": 9}]},
        "number": {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 1},
        "marked": {"enum": ['<|"|>', "<tool_call|>", 0.5]},
        "pair": {"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False, "minItems": 2},
        "ref": {"$ref": "#/$defs/any"},
    },
    "required": ["day", "marked"],
    "$defs": {"any": {"anyOf": [{"const": "d"}, {"type": "null"}]}},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("schema", [PLAIN, FURTHER, {**PLAIN, "$id": "elsewhere"}], ids=["own", "json", "all json"])
def test_gemma4_values(schema: dict[str, Any], backend: tokenizers.Tokenizer, vocabulary: LLTokenizer) -> None:
    """Values are in Gemma's notation and alphabetical order where that supports the schema, otherwise in JSON."""
    options = CallGrammarOptions({"look": schema}, False, lambda marker: f"<[{backend.token_to_id(marker)}]>")
    grammar = FORMATS["gemma4"].grammar(options)
    assert grammar is not None
    seen = set()
    for seed in range(40):
        text = draw(grammar, backend, vocabulary, seed)
        ((_, arguments),) = calls_in(text, FORMATS["gemma4"])
        jsonschema.validate(arguments, {**schema, "additionalProperties": False})
        seen |= set(arguments)
        if schema is PLAIN:
            assert list(arguments) == sorted(arguments, key=str.lower) and 'Zeta:<|"|>' in text
        elif schema is not FURTHER:
            assert '"Zeta":"' in text
    assert seen == set(schema["properties"])


RAW = (
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "minimax_m3",
    "deepseek_v32",
    "deepseek_v4",
    "minicpm5",
    "glm45",
    "glm47",
    "longcat",
)
VALUES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 5},
        "optional": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "choice": {"enum": ["x", "", "y\n", None]},
        "pattern": {"type": "string", "pattern": "^(ab|cd)[0-9]{1,3}$"},
        "part": {"type": "string", "pattern": "q/", "maxLength": 6},
        "ref": {"$ref": "#/$defs/short"},
        "object": {
            "type": "object",
            "properties": {
                "item": {"type": "string", "maxLength": 4},
                "texts": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            },
            "required": ["item"],
        },
        "objects": {
            "type": "array",
            "items": {"type": "object", "properties": {"k": {"type": "boolean"}}},
            "maxItems": 2,
        },
        "mixed": {"type": ["string", "integer"], "maxLength": 4, "minimum": 0, "maximum": 99},
        "one": {"type": "object", "properties": {"item": {"type": "string", "maxLength": 3}}},
        "word": {"const": "null"},
        "null": {"type": "null"},
        "nulls": {"type": "array", "items": {"type": ["null", "string"], "maxLength": 2}, "maxItems": 3},
    },
    "required": ["text", "optional"],
    "$defs": {"short": {"type": "string", "minLength": 2, "maxLength": 4}},
}


@pytest.fixture(scope="module")
def plain_backend() -> tokenizers.Tokenizer:
    """Vocabulary without special tokens for markers."""
    made = tokenizers.Tokenizer.from_str(byte_level().to_str())
    made.add_special_tokens([EOS])
    return made


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", RAW)
def test_values_between_tags_follow_their_schemas(
    name: str, plain: bool, backend: tokenizers.Tokenizer, plain_backend: tokenizers.Tokenizer
) -> None:
    """Every sampled text is read back as arguments that the schema permits. plain: no marker is a token."""
    used = plain_backend if plain else backend
    token = json.dumps if plain else (lambda marker: f"<[{backend.token_to_id(marker)}]>")
    grammar = FORMATS[name].grammar(CallGrammarOptions({"look": VALUES}, True, token, ["look"]))
    assert grammar is not None
    own = LLTokenizer(used.to_str(), eos_token=used.token_to_id(EOS))
    seen = set[str]()
    for seed in range(12):
        for _, arguments in calls_in(draw(grammar, used, own, seed), FORMATS[name], {"look": VALUES}):
            jsonschema.validate(arguments, VALUES)
            seen |= set(arguments)
    assert len(seen) > 5


@pytest.mark.parametrize("name", RAW)
def test_texts_that_a_grammar_cannot_express(name: str) -> None:
    """A strict function is then called in plain JSON, which enforces its schema; otherwise the text is free."""
    for schema in ({"type": "string", "pattern": "(?=a)b"}, {"type": "string", "format": "date"}):
        parameters = {"properties": {"a": schema}, "required": ["a"]}
        strict, lenient = (
            CallGrammarOptions({"look": parameters}, False, json.dumps, names) for names in (["look"], [])
        )
        assert FORMATS[name].grammar(strict) is None and FORMATS[name].grammar(lenient) is not None
    for parameters in ({"properties": {"a b": {}}}, {"properties": {"a": {}}, "anyOf": []}):
        assert FORMATS[name].grammar(CallGrammarOptions({"look": parameters}, False, json.dumps)) is None


def test_gemma4_strings_do_not_contain_markers(backend: tokenizers.Tokenizer, vocabulary: LLTokenizer) -> None:
    schema = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    grammar = FORMATS["gemma4"].grammar(
        CallGrammarOptions({"x": schema}, False, lambda one: f"<[{backend.token_to_id(one)}]>")
    )
    assert grammar is not None
    for parts, accepted in ((["Ro<", "|me|>"], True), (["<tool_", "call|>"], False), (["<", '|"|>'], False)):
        ids = [
            backend.encode(part, add_special_tokens=False).ids
            for part in ('<|tool_call>call:x{city:<|"|>', *parts, '<|"|>}<tool_call|>')
        ]
        together = list(itertools.chain(*ids))
        assert (LLMatcher(vocabulary, grammar).try_consume_tokens(together) == len(together)) is accepted


@pytest.mark.parametrize("name", ["pythonic", "lfm2", "gemma4"])
def test_functions_with_many_arguments(name: str) -> None:
    """Larger functions have no rule per member: llguidance recurses from each to the next until its stack is full."""

    def grammar(count: int, inner: int = 0) -> str | None:
        texts, within = (
            {f"{key}{i}": {"type": "boolean"} for i in range(n)} for key, n in (("p", count), ("q", inner))
        )
        schema = {"properties": {**texts, "x": {"type": "object", "properties": within}}}
        return FORMATS[name].grammar(CallGrammarOptions({"look": schema}, False, json.dumps))

    most = grammar(MAX_MEMBERS - 2, 1)
    assert most is not None and "first_" in most
    demo_compiler().compile("lark", most)
    assert "first_" not in (grammar(MAX_MEMBERS) or "")
    if name == "gemma4":
        nested = grammar(MAX_MEMBERS - 2, 2)
        assert nested is not None and "first_" not in nested


def test_plain_text_markers() -> None:
    grammar = FORMATS["hermes"].grammar(CallGrammarOptions({"look": {}}, False, json.dumps))
    assert grammar is not None and '"<tool_call>" "\\n{' in grammar


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "object"}]},
        {"type": "object", "properties": {"two words": {}}},
        {"type": "object", "properties": {"x": {}}, "patternProperties": {"y": {}}},
        {
            "properties": {f"x{i}": {} for i in range(4000)},
            "$defs": {"long": {"description": "x" * 60_000}},
        },  # 240 MB of text
    ],
)
def test_schemas_without_a_pythonic_grammar(schema: dict[str, Any]) -> None:
    assert FORMATS["pythonic"].grammar(CallGrammarOptions({"look": schema}, False, json.dumps)) is None


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", FORMATS)
def test_unnamed_members_are_not_permitted(name: str, backend: tokenizers.Tokenizer, vocabulary: LLTokenizer) -> None:
    """Unsupported keywords are ignored, because the function is not strict."""
    place = {"type": "object", "properties": {"x": {"type": "boolean"}}}
    at = {"type": "array", "items": {"$ref": "#/$defs/place"}, "uniqueItems": True, "maxItems": 3}
    schema = {"properties": {"at": at, "to": {**place, "not": {}}}, "required": ["at"], "$defs": {"place": place}}
    grammar = FORMATS[name].grammar(
        CallGrammarOptions({"look": schema}, False, lambda one: f"<[{backend.token_to_id(one)}]>")
    )
    assert grammar is not None
    seen = set()
    for seed in range(24):
        ((_, arguments),) = calls_in(draw(grammar, backend, vocabulary, seed), FORMATS[name])
        assert set(arguments) <= {"at", "to"}
        seen |= {key for each in arguments["at"] for key in each}
    assert seen == {"x"}


def test_required_member_without_a_name_leaves_the_function_open() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}
    grammar = FORMATS["plain_json"].grammar(CallGrammarOptions({"look": schema}, False, json.dumps))
    assert grammar is not None
    demo_compiler().compile("lark", grammar)
