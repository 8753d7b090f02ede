"""Parsers of all call formats: the result does not depend on how the text is split, and contains no markup."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from helpers.parsed_answers import Made, make, only, put_together, read
from pydantic_core import to_json

from windlass.server.text.stream_parser import MAX_CALLS, CallArguments, CallOptions, Event
from windlass.server.text.tool_parsers.formats import FORMATS

ROME = '{"city": "Rome"}'
LOOK = ("look", ROME)
FIND = ("find", "{}")
H, L, P, M, D, G, X, Y, K, F = (
    *("hermes", "llama3_json", "plain_json", "mistral", "deepseek_v3", "harmony", "qwen3_coder", "pythonic", "gemma4"),
    "lfm2",
)
DS = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n" + ROME + "\n```<｜tool▁call▁end｜>"
CASES: list[tuple[str, str, Made]] = [
    # Hermes, Qwen, Granite
    (H, "Hello.", ("Hello.", "", [])),
    (H, "  \n ", ("  \n ", "", [])),
    (H, f'<tool_call>\n{{"name": "look", "arguments": {ROME}}}\n</tool_call>', only(LOOK)),
    (H, f'On it. \n<tool_call>{{"arguments": {ROME}, "name": "look"}}</tool_call>\n', ("On it.", "", [LOOK])),
    (H, f'<tool_call>{{"name":"look","arguments":{ROME}}}</tool_call>\n<tool_call>\n{{"name": "find"}}\n</tool_call> x',
     ("x", "", [LOOK, FIND])),
    (H, '<tool_call>{"name": "find", "arguments": "{\\"a\\": 1}"}</tool_call>', only(("find", '{"a": 1}'))),
    (H, '<tool_call>{"name": "look", "arguments": {"city": "<b>\\"}]</tool_call>"}}</tool_call>',
     only(("look", '{"city": "<b>\\"}]</tool_call>"}'))),
    (H, f'<tool_call>{{"name": "look", "arguments": {ROME}</tool_call> and so', ("and so", "", [LOOK])),
    (H, f'<|tool_call|>[{{"name": "look", "arguments": {ROME}}}, {{"name": "find", "arguments": {{}}}}]',
     only(LOOK, FIND)),
    (H, "a <tool_call> b </tool_call> c <tool_cal", ("a <tool_call> b </tool_call> c <tool_cal", "", [])),
    (H, '<tool_call>{"name": 5, "arguments": {}}</tool_call>', ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', "", [])),
    (H, "<tool_call>{'name': 'look'}", ("<tool_call>{'name': 'look'}", "", [])),
    (H, '<tool_call>{"name": "look", "arguments": [1]}', ('<tool_call>{"name": "look", "arguments": [1]}', "", [])),
    (H, '<tool_call>{"name": "look", "arguments": {"city": "Ro', only(("look", '{"city": "Ro'))),
    (H, '<tool_call>{"name": "look", "argum', ('<tool_call>{"name": "look", "argum', "", [])),
    (H, '<tool_call>{"name": "a\\ud83d\\ude00b\\ud83d", "arguments": "{\\"c\\": \\"\\ude00\\ud83d\\"}"}</tool_call>',
     only(("a\U0001f600b\ufffd", '{"c": "\ufffd\ufffd"}'))),
    (H, '<tool_call>{"name": "look", "arguments": {"city": "\\ud83d"}}</tool_call>', only(("look", '{"city": "\\ud83d"}'))),
    (H, '<tool_call>{"type": "function", "n": [{"a": "}"}], "name": "find", "arguments": null, "x": 1.5}',
     only(FIND)),
    # Llama 3, plain
    (L, f'{{"name": "look", "parameters": {ROME}}}', only(LOOK)),
    (L, f'<|python_tag|>{{"name": "look", "parameters": {ROME}}}; {{"name": "find", "parameters": {{}}}}',
     only(LOOK, FIND)),
    (L, '{"name": "Bob", "parameters": {"x": 1}}', ('{"name": "Bob", "parameters": {"x": 1}}', "", [])),
    (L, f'I say\n{{"name": "look", "parameters": {ROME}}}', (f'I say\n{{"name": "look", "parameters": {ROME}}}', "", [])),
    (P, f'I say\n{{"name": "look", "arguments": {ROME}}}\nDone', ("I sayDone", "", [LOOK])),
    (P, f'```json\n{{"name": "look", "arguments": {ROME}}}\n```', only(LOOK)),
    (P, f'Sure:\n```json\n[{{"name": "look", "arguments": {ROME}}}]\n```\n', ("Sure:", "", [LOOK])),
    (P, '{"name": "Bob"}\n[1, 2]\n{"a": 3}', ('{"name": "Bob"}\n[1, 2]\n{"a": 3}', "", [])),
    (P, '[{"name": "find", "arguments": {}}, {"nam', (', {"nam', "", [FIND])),
    (P, '[{"name": "find", "arguments": {}}, {"name": "see", "arguments": {}}]',
     (', {"name": "see", "arguments": {}}]', "", [FIND])),
    (P, f'{{"name": "find"}}, {{"name": "look", "arguments": {ROME}}}; {{"name": "see"}}',
     ('{"name": "see"}', "", [FIND, LOOK])),
    (P, "```json\n{}\n```", ("```json\n{}\n```", "", [])),
    # Mistral
    (M, f'[TOOL_CALLS] [{{"name": "look", "arguments": {ROME}}}, {{"name": "find", "arguments": {{}}}}]', only(LOOK, FIND)),
    (M, f"Well [TOOL_CALLS]look[ARGS]{ROME}[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{{}}", ("Well", "", [LOOK, FIND])),
    (M, f"[TOOL_CALLS]look{ROME}", only(LOOK)),
    (M, "[TOOL_CALLS]look at [TOOL", ("[TOOL_CALLS]look at [TOOL", "", [])),
    (M, '[TOOL_CALLS] [{"name": "\\udc00", "arguments": "{\\ud83d\\ude00}"}]', only(("\ufffd", "{\U0001f600}"))),
    # DeepSeek
    (D, f"Hm.<｜tool▁calls▁begin｜>{DS}\n{DS}<｜tool▁calls▁end｜>", ("Hm.", "", [LOOK, LOOK])),
    (D, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>" + ROME + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     only(LOOK)),
    (D, "<｜tool▁calls▁begin｜>no<｜tool▁call▁begin｜>look at", ("<｜tool▁calls▁begin｜>no<｜tool▁call▁begin｜>look at", "", [])),
    # harmony
    (G, "<|channel|>analysis<|message|>Hm, a < b.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
     ("Hello.", "Hm, a < b.", [])),
    (G, "<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
     f"<|constrain|>json<|message|>{ROME}<|call|>", ("Looking.", "", [LOOK])),
    (G, f"<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{ROME}<|start|>assistant"
     "<|channel|>final<|message|>ok<|return|>", ("ok", "", [LOOK])),
    (G, "no channel <|channel|> at all", ("no channel <|channel|> at all", "", [])),
    (G, f" to=functions.look<|channel|>commentary json<|message|>{ROME}<|call|>", only(LOOK)),
    (G, f"to=functions.look <|constrain|>json<|message|>{ROME}<|call|>", only(LOOK)),
    (G, f" to=functions.look<|message|>{ROME}<|end|><|start|>assistant<|channel|>final<|message|>ok", ("ok", "", [LOOK])),
    (G, " to=functions.look, they say", (" to=functions.look, they say", "", [])),
    (G, " to=functions.look<|channel|>commentary", (" to=functions.look<|channel|>commentary", "", [])),
    (G, " to=", (" to=", "", [])),
    (G, f" so to=functions.look<|channel|>final<|message|>{ROME}", (f" so to=functions.look{ROME}", "", [])),
    # Qwen3-Coder
    (X, "Ok.\n<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
     "</function>\n</tool_call>\n<tool_call><function=find></function></tool_call>",
     ("Ok.", "", [("look", '{"city": "Rome", "days": 3}'), FIND])),
    (X, "<function=see><parameter=n>a < b</parameter><parameter=m>True</parameter></function>",
     only(("see", '{"n": "a < b", "m": true}'))),
    (X, "<tool_call>no <function= x", ("<tool_call>no <function= x", "", [])),
    (X, "<function=look><parameter= x", only(("look", "{"))),
    (X, "<function=look><parameter=city>Ro", only(("look", "{"))),
    (X, "<function=look><parameter=city>Rome</parameter>\n<parameter", only(("look", '{"city": "Rome"'))),
    (X, "<function=look><parameter=city>Rome</parameter>\n</func", only(("look", '{"city": "Rome"'))),
    (X, "<function=look><parameter=ci", only(("look", "{"))),
    (X, '<function=look><parameter=days>"\\ud83d \\ud83d\\ude00"</parameter></function>',
     only(("look", r'{"days": "\ufffd \ud83d\ude00"}'))),
    (X, '<function=find><parameter=a>{"b": "c\nd"}</parameter></function>', only(("find", '{"a": {"b": "c\\nd"}}'))),
    # Gemma 4
    (K, 'Hm. <|tool_call>call:look{city:<|"|>Rome<|"|>}<tool_call|>', ("Hm.", "", [LOOK])),
    (K, '<|tool_call>call:look{city:<|"|>a{"}],:\\n\n\u20ac<|"|>,days:3}<tool_call|><|tool_call>call:find{}<tool_call|>\n so',
     ("so", "", [("look", r'{"city": "a{\"}],:\\n\n\u20ac", "days": 3}'), FIND])),
    (K, '<|tool_call>call:see.it{b:true,c:[1,-2.5e3,[],{x:null,y:<|"|><|"|>}],d:{},e:None}<tool_call|>',
     only(("see.it", '{"b": true, "c": [1, -2500.0, [], {"x": null, "y": ""}], "d": {}, "e": null}'))),
    (K, '<|tool_call> call:look { "city" : "Ro\\"me" , <|"|>da ys<|"|>: [ <|"|>a<|"|> <|"|>b<|"|>, ] } <tool_call|>',
     only(("look", r'{"city": "Ro\"me", "da ys": ["a", "b"]}'))),
    (K, "<|tool_call>call:look{city:Rome,days:NaN}<tool_call|>", only(("look", '{"city": "Rome", "days": "NaN"}'))),
    (K, '<|tool_call>call:look{city:Rome<|"|>}<tool_call|>', only(LOOK)),
    (K, "<|tool_call>:look{city:Rome}<tool_call|>", only(LOOK)),
    (K, '<|tool_call>call:look{a:[{city:<|"|>Rome<tool_call|> ok', ("ok", "", [("look", '{"a": [{"city": "Rome"}]}')])),
    (K, "<|tool_call>call:look{a:[1,{b:2<tool_call|> ok", ("ok", "", [("look", '{"a": [1, {"b": 2}]}')])),
    (K, "<|tool_call>call:look{city:Rome, my dear} ok", (", my dear} ok", "", [LOOK])),
    (K, '<|tool_call>call:look{<|"|>city<|"|> is Rome} ok', ('<|"|>city<|"|> is Rome} ok', "", [("look", "{}")])),
    (K, "<|tool_call>call:look{city:Rome] ok", ("] ok", "", [LOOK])),
    (K, "<|tool_call>call:look {city:} ok", ("city:} ok", "", [("look", "{}")])),
    (K, '<|tool_call>call:look{city:"\\d"} ok', ('city:"\\d"} ok', "", [("look", "{}")])),
    (K, '<|tool_call>call:look{city:<|"|>Ro', only(("look", '{"city": "Ro'))),
    (K, "<|tool_call>call:look{city:Ro", only(("look", "{"))),
    (K, "<|tool_call>call:look{ci", only(("look", "{"))),
    (K, '<|tool_call>call:look{city:"Ro', only(("look", "{"))),
    (K, "a <|tool_call> b <tool_call|> <|tool_call>call:look(x) <|tool",
     ("a <|tool_call> b <tool_call|> <|tool_call>call:look(x) <|tool", "", [])),
    (K, "<|tool_call>call:", ("<|tool_call>call:", "", [])),
    # Python
    (Y, '[look(city="a\n\tb", days="")]', only(("look", '{"city": "a\\n\\tb", "days": ""}'))),
    (Y, "[look(city='it\\'s\r\n\"a\"', days=[1,\n 'b\nc',\n \"\\x41\n\"])]",
     only(("look", '{"city": "it\'s\\r\\n\\"a\\"", "days": [1, "b\\nc", "A\\n"]}'))),
    (Y, "[look(city='Rome', days=3), find()]", only(("look", '{"city": "Rome", "days": 3}'), FIND)),
    (Y, '<|python_start|>[look(city="a\\"),]=", days=[1, (2, None), {"k": True}])]<|python_end|>',
     only(("look", '{"city": "a\\"),]=", "days": [1, [2, null], {"k": true}]}'))),
    (Y, "[look('Rome', days = -1.5)]", only(("look", '{"city": "Rome", "days": -1.5}'))),
    (Y, "[look(city=true, days=open('x'))]", ("[look(city=true, days=open('x'))]", "", [])),
    (Y, r"[look(city='\ud83d \ud83d\ude00', days={'\ud83d': '\ude00'})]",
     only(("look", r'{"city": "\ufffd \ud83d\ude00", "days": {"\ufffd": "\ufffd"}}'))),
    (Y, r'[look(city="\ud83d")]', only(("look", r'{"city": "\ufffd"}'))),
    (Y, "[see(city=1)] look", ("[see(city=1)] look", "", [])),
    (Y, "[1, 2]", ("[1, 2]", "", [])),
    (Y, "[look(city='Rome', days=3], x", ("[look(city='Rome', days=3], x", "", [])),
    (Y, "[look(city='Rome', days=3", ("[look(city='Rome', days=3", "", [])),
    (Y, "[look(city='Rome'), find(", only(LOOK)),
    # LFM2
    (F, "<|tool_call_start|>[look(city='Rome'), find()]<|tool_call_end|>Looking.", ("Looking.", "", [LOOK, FIND])),
    (F, 'So: <|tool_call_start|> [ see(n=[1, "]"]) ] <|tool_call_end|>\n<|tool_call_start|>[find()]<|tool_call_end|>',
     ("So:", "", [("see", '{"n": [1, "]"]}'), FIND])),
    (F, f'<|tool_call_start|>[{{"name": "look", "arguments": {ROME}}}, {{"name": "find"}}]<|tool_call_end|> ok',
     ("ok", "", [LOOK, FIND])),
    (F, f'<|tool_call_start|>{{"name": "look", "arguments": {ROME}}}<|tool_call_end|>', only(LOOK)),
    (F, "[find()] is a list", ("[find()] is a list", "", [])),
    (F, "a <|tool_call_start|> find() <|tool_call_end|> b <|tool_call_st", ("ab <|tool_call_st", "", [FIND])),
    (F, "<|tool_call_start|>[1, 2]<|tool_call_end|>", ("<|tool_call_start|>[1, 2]<|tool_call_end|>", "", [])),
    (F, '<|tool_call_start|>[{"n": 1}]', ('<|tool_call_start|>[{"n": 1}]', "", [])),
    (F, "<|tool_call_start|>[look(city='Rome', days=3", ("<|tool_call_start|>[look(city='Rome', days=3", "", [])),
]  # fmt: skip
IDS = [f"{case[0]}-{number}" for number, case in enumerate(CASES)]


OPEN = [
    (H, '<tool_call>{"name": "look", "arguments": {"city": "Ro', True),
    (H, f'<tool_call>{{"name": "look", "arguments": {ROME}', False),
    (H, '<tool_call>{"name": "find", "arguments": "{}"', False),
    (
        H,
        f'<tool_call>{{"name": "look", "arguments": {ROME}}}</tool_call><tool_call>{{"name": "find", "arguments": {{"a',
        True,
    ),
    (H, '<tool_call>{"name": "look", "argum', False),
    (P, "Hello.", False),
    (M, '[TOOL_CALLS]look[ARGS]{"city', True),
    (M, f"[TOOL_CALLS]look[ARGS]{ROME}", False),
    (D, DS.partition('"Rome"')[0], True),
    (D, DS.partition("\n```<")[0], False),
    (G, "<|channel|>commentary to=functions.look<|message|>", True),
    (G, f"<|channel|>commentary to=functions.look<|message|>{ROME}<|call|>", False),
    (X, "<function=look>", True),
    (X, "<function=look><parameter=city>Rome</parameter>\n", True),
    (X, "<function=look><parameter=city>Rome</parameter></function>", False),
    (K, "<|tool_call>call:look{", True),
    (K, '<|tool_call>call:look{city:<|"|>Rome<|"|>', True),
    (K, '<|tool_call>call:look{city:<|"|>Rome<|"|>}', False),
    (K, "<|tool_call>call:look{city:Rome]", False),
    (Y, "[look(city='Rome', days=", False),
    (Y, "[look(city='Rome')", False),
    (F, "<|tool_call_start|>[look(city='Rome', days=", False),
    (F, "<|tool_call_start|>[look(city='Rome')", False),
]


@pytest.mark.parametrize(("kind", "text", "is_open"), OPEN)
def test_in_call_at_the_end_of_a_text(kind: str, text: str, is_open: bool) -> None:
    for pieces in ([text], list(text)):
        parser = make(kind)
        read(parser, *pieces)
        assert parser.in_call is is_open
    if is_open and kind == H:  # False for omitted calls
        assert not (one := make(kind, max_calls=0)).in_call and read(one, text) and not one.in_call


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(("kind", "text", "expected"), CASES, ids=IDS)
def test_result_does_not_depend_on_the_split(kind: str, text: str, expected: Made) -> None:
    assert read(make(kind), text) == expected
    assert read(make(kind), *text) == expected
    for cut in range(1, len(text)):
        assert read(make(kind), text[:cut], text[cut:]) == expected, text[:cut]
    places = range(1, len(text), 1 + len(text) // 40)  # about 40 positions of long texts
    for first, second in itertools.combinations(places, 2):
        assert read(make(kind), text[:first], text[first:second], text[second:]) == expected, (first, second)


@pytest.mark.parametrize(("kind", "text", "expected"), CASES, ids=IDS)
def test_events_are_emitted_early(kind: str, text: str, expected: Made) -> None:
    """A call is emitted before its arguments are complete, and events are never revoked."""
    events: list[Event] = []
    parser = make(kind)
    for character in text:
        events += parser.feed(character)
        content, reasoning, calls = put_together(events)
        assert expected[0].startswith(content) and expected[1].startswith(reasoning)
        for (name, arguments), (whole_name, whole) in zip(calls, expected[2], strict=False):
            assert name == whole_name and whole.startswith(arguments)


@pytest.mark.parametrize("kind", [H, L, P, M, D, G])
def test_long_strings_are_emitted_at_once(kind: str) -> None:
    opening = {
        H: '<tool_call>{"name": "look", "arguments": ',
        L: '{"name": "look", "parameters": ',
        P: '{"name": "look", "arguments": ',
        M: "[TOOL_CALLS]look[ARGS]",
        D: "<｜tool▁call▁begin｜>look<｜tool▁sep｜>",
        G: "<|channel|>commentary to=functions.look<|message|>",
    }[kind]
    parser = make(kind)
    parser.feed(opening + '{"city": "')
    assert parser.feed("Rome and then") == [CallArguments(0, "Rome and then")]


def test_strings_in_gemma_quotes_are_emitted_at_once() -> None:
    parser = make(K)
    parser.feed('<|tool_call>call:look{city:<|"|>')
    assert parser.feed('Rome "and" <') == [CallArguments(0, 'Rome \\"and\\" ')]


@pytest.mark.parametrize("kind", [H, L, P, M, D, G, X, Y, K, F])
@pytest.mark.parametrize("written", ["\\ud83d", "\\ude00\\ud83d", "\\\\ud83d", "\\ud83d\\ude00", "\\ud83d\\u0041"])
def test_events_have_no_lone_surrogates(kind: str, written: str) -> None:
    """A model may write the escape of a surrogate anywhere, and events must be encodable in UTF-8."""
    within = json.dumps(f'{{"city": "{written}"}}')
    for name, value in itertools.product(
        ("look", f"look{written}"), (f'{{"city": "{written}"}}', within, f'"{{{written}"')
    ):
        text = {
            H: f'<tool_call>{{"name": "{name}", "arguments": {value}}}</tool_call>',
            L: f'{{"parameters": {value}, "name": "{name}"}}',
            P: f'{{"name": "{name}", "arguments": {value}}}',
            M: f'[TOOL_CALLS][{{"arguments": {value}, "name": "{name}"}}]',
            D: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{value}<｜tool▁call▁end｜>",
            G: f"<|channel|>commentary to=functions.{name}<|message|>{value}<|call|>",
            X: f"<function={name}><parameter=city>{value}</parameter></function>",
            Y: f"[look(city={value}, days={{'{written}': '{written}'}})]",
            F: f"<|tool_call_start|>[{name}(city={value}, days={{'{written}': '{written}'}})]",
            K: f'<|tool_call>call:{name}{{city:{value},"{written}":<|"|>{written}<|"|>}}<tool_call|>',
        }[kind]
        parser = make(kind)
        for event in parser.feed(text) + parser.finish():
            to_json(event)  # raises for lone surrogates


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFINED = {
    "$defs": {"s": {"type": "string"}, "a/b": {"$ref": "#/$defs/s"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 9}}
}


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string"}, {"02134": '"02134"', "null": '"null"', "True": '"True"'}),
        (
            OPTIONAL,
            {"02134": '"02134"', '{"a": 1}': r'"{\"a\": 1}"', "null": "null", "None": '"None"', '"a"': r'"\"a\""'},
        ),
        ({"oneOf": OPTIONAL["anyOf"]}, {"1.0": '"1.0"', "null": "null"}),
        ({"type": ["string", "null"]}, {"12": '"12"', "null": "null", "[]": '"[]"'}),
        ({"$ref": "#/$defs/s"}, {"12": '"12"', "null": '"null"'}),
        ({"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]}, {"12": '"12"', "null": "null"}),
        ({"allOf": [{"$ref": "#/$defs/s"}, {"description": "a"}]}, {"12": '"12"'}),
        ({"enum": ["1", "2"]}, {"1": '"1"'}),
        ({"enum": ["1", None]}, {"1": '"1"', "null": "null"}),
        ({"const": "true"}, {"true": '"true"'}),
        # values of other types are parsed
        ({}, {"1": "1", "a": '"a"', "null": "null", "True": "true"}),
        ({"type": ["string", "integer"]}, {"1": "1", "a": '"a"'}),
        ({"anyOf": [OPTIONAL, {"type": "object"}]}, {'{"a": 1}': '{"a": 1}', "a": '"a"'}),
        ({"enum": ["1", 1]}, {"1": "1"}),
        ({"$ref": "#/$defs/none"}, {"1": "1"}),
        ({"$ref": "other.json"}, {"1": "1"}),
        ({"$ref": "#/$defs/loop"}, {"1": "1", "a": '"a"'}),
        ({"anyOf": [{"const": str(number)} for number in range(5000)]}, {"1": "1"}),
    ],
)
def test_values_follow_the_types_of_the_schema(schema: dict[str, Any], written: dict[str, str]) -> None:
    parameters = {"properties": {"a": schema}, **DEFINED}
    for text, value in written.items():
        parser = FORMATS[X].parser(CallOptions(schemas={"look": parameters}, new_id=lambda: "call_0"))
        found = read(parser, f"<function=look><parameter=a>\n{text}\n</parameter></function>")
        assert found == only(("look", f'{{"a": {value}}}'))
        if not set(text) & set('{}[]"'):
            parser = FORMATS[K].parser(CallOptions(schemas={"look": parameters}, new_id=lambda: "call_0"))
            assert read(parser, f"<|tool_call>call:look{{a:{text}}}<tool_call|>") == found


@pytest.mark.parametrize(
    ("kind", "text", "content"),
    [
        (H, '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>', None),
        (H, '<tool_call>{"arguments": {}, "name": "NAME"}</tool_call>', None),
        (M, "[TOOL_CALLS]NAME[ARGS]{}", None),
        (M, '[TOOL_CALLS][{"name": "NAME", "arguments": {}}]', None),
        (D, "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{}<｜tool▁call▁end｜>", None),
        (G, "<|channel|>commentary to=functions.NAME<|message|>{}<|call|>", "{}"),
        (X, "<tool_call><function=NAME></function></tool_call>", None),
        (K, "<|tool_call>call:NAME{}<tool_call|>", None),
        (F, "<|tool_call_start|>[NAME()]<|tool_call_end|>", None),
        (F, '<|tool_call_start|>{"name": "NAME"}<|tool_call_end|>', None),
    ],
)
def test_disallowed_function(kind: str, text: str, content: str | None) -> None:
    """Its calls are content, unchanged; calls of unknown functions are emitted."""
    called = text.replace("NAME", "look")
    for pieces in ([called], list(called)):
        assert read(make(kind, disallowed={"look"}), *pieces) == (content or called, "", [])
    assert read(make(kind, disallowed={"look"}), text.replace("NAME", "other")) == only(("other", "{}"))


def test_max_calls() -> None:
    call = f'<tool_call>{{"name": "look", "arguments": {ROME}}}</tool_call>'
    assert read(make(H, max_calls=1), call, call, " end") == ("end", "", [LOOK])
    assert len(read(make(H), call * (MAX_CALLS + 3))[2]) == MAX_CALLS


def test_calls_only_omits_incomplete_calls() -> None:
    text = f'[{{"name": "look", "arguments": {ROME}}}, {{"name": "fi'
    assert read(make(P), *text) == (', {"name": "fi', "", [LOOK])
    assert read(make(P, calls_only=True), *text) == only(LOOK)
    assert read(make(H, calls_only=True), '<tool_call>\n{"na') == only()


LONG = {
    "content": "lorem ipsum " * 500,
    "spaces": " \n" * 2500,
    "markers": "<tool_call>" * 500,
    "openings": '<tool_call>{"name": ' * 312,
    "arguments": '<tool_call>{"name": "look", "arguments": {"city": "' + "Rome " * 1000,
    "arguments first": '<tool_call>{"arguments": {"city": "' + "Rome " * 1000,
    "brackets": '<tool_call>{"name": "look", "arguments": {"city": ' + "[" * 5000,
    "backslashes": '{"' + "\\" * 5000,
    "lists": "[" * 5000,
    "lines": "\n{" * 2500,
    "harmony": "<|channel|>" * 500,
    "names": "[TOOL_CALLS]" + "a" * 5000,
    "python": "[look(city=" + "[1, " * 1250,
    "parameters": "<function=look><parameter=city>" + "x</parameter><parameter=a>" * 375,
    "own quotes": '<|tool_call>call:look{city:<|"|>' + "x{" * 1000 + '<|"|>,days:["a",b' * 125,
    "names of members": "<|tool_call>call:look{" + "x" * 5000,
    "no quotes": "<|tool_call>call:look{a:" + "[" * 2000 + "x " * 1500,
    "python behind a marker": "<|tool_call_start|>[look(city=" + "[1, " * 1250,
    "one string": "[look(city='" + "x" * 5000,
    "tags in a value": "<tool_call><function=look><parameter=city>" + "</function> <parameter=x" * 250,
    "functions": "<tool_call><function=look>" * 200,
    "keys": "<tool_call>look<arg_key>city</arg_key><arg_value>" + "<arg_key>x" * 500,
    "invocations": '<invoke name="look"><parameter name="city">' + "</invoke>x" * 500,
    "elements": ']<]minimax[>[<invoke name="look">' + "]<]minimax[>[<a>" * 300,
    "fences": "```json\n{" * 500,
    "recipients": ">>>look\n{" * 500,
    "objects": '{"name": "look", "arguments": {}}' * 150,
    "Python calls": "<function_calls>" + "look(city='x')\n" * 300,
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("kind", FORMATS)
def test_work_is_linear_in_the_text(kind: str) -> None:
    """Measured in characters buffered at each piece, not in time."""
    for name, text in LONG.items():
        counts = [steps(kind, text[: len(text) // part]) for part in (4, 1)]
        assert counts[1] < 6 * counts[0] + 1000, name


def steps(kind: str, text: str) -> int:
    """Return the characters in the buffer, summed over pieces of 4 characters."""
    parser = make(kind)
    seen = 0
    for at in range(0, len(text), 4):
        source = parser._buffer
        seen += len(source.data) - source.position + 4
        parser.feed(text[at : at + 4])
    parser.finish()
    return seen
