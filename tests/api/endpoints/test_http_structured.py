"""Structured output over HTTP: every spelling becomes a grammar that accepts exactly the wanted text, or gets a 400."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from helpers.eventually import in_time
from helpers.live_server import Live, server_fixture
from helpers.toy_tokenizers import taught
from llguidance import LLMatcher, LLTokenizer

from windlass.engine.errors import RequestError
from windlass.server.text.workers.frames import Limits
from windlass.server.text.workers.pool import CRASH_SECONDS, MAX_CRASHES, ProcessDiedError, TextProcess
from windlass.server.text.workers.tasks import TextTasks

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
OBJECT = (['{"x": 1}', "{}", '{"a": [1, {"b": null}]}'], ["[1]", "x", '{"a": 1}}'])
POINTS = (['{"x": 1}', '{ "x" : -20}'], ["{}", '{"x": 1.5}', '{"x": 1, "y": 2}', "[]"])
ABS = (["ab", "abab"], ["", "a", "abc"])
PETS = (["cat", 'a "dog"\n😀'], ["ca", "cats", "dog"])
SUMS = (["1+2", "3"], ["1+", "+", "1 2"])
GBNF = 'root ::= num ("+" num)*\nnum ::= [0-9]+'
LARK = 'start: NUM ("+" NUM)*\nNUM: /[0-9]+/'
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if x %}<think>{% endif %}"
)
BACKEND = taught(("<tool_call>", "</tool_call>"))
BACKEND.add_tokens(["<think>", "</think>"])
shared = server_fixture(
    template=TEMPLATE,
    backend=BACKEND,
    model={"vocab_size": BACKEND.get_vocab_size(), "max_model_len": 4096},
    tool_call_parser="hermes",
)


def takes(live: Live, grammar: str | None, text: str) -> bool:
    """Whether the entire text matches the engine's grammar."""
    assert grammar is not None
    known = LLTokenizer(live.tokenizer.backend.to_str(), eos_token=live.tokenizer.eos_token_id)
    matcher = LLMatcher(known, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = live.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def check(live: Live, good: list[str], bad: list[str]) -> None:
    grammar = live.engine.requests[-1].sampling.grammar
    assert [text for text in good if not takes(live, grammar, text)] == []
    assert [text for text in bad if takes(live, grammar, text)] == []


def in_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


SPELLINGS: list[tuple[dict[str, Any], tuple[list[str], list[str]]]] = [  # one per kind of grammar, then the others
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": POINT}}}, POINTS),
    ({"structured_outputs": {"regex": "(ab)+"}}, ABS),
    ({"structured_outputs": {"grammar": GBNF}}, SUMS),
    ({"guided_choice": PETS[0]}, PETS),
    ({"guided_grammar": LARK}, SUMS),
    ({"grammar": GBNF}, SUMS),
    ({"response_format": {"type": "json_object", "schema": POINT}}, POINTS),
    ({"response_format": {"type": "json_schema", "schema": POINT}}, POINTS),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": POINT, "strict": None}}}, POINTS),
    ({"structured_outputs": {"json": POINT}}, POINTS),
    ({"structured_outputs": {"json": json.dumps(POINT), "regex": None}}, POINTS),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"choice": PETS[0]}}, PETS),
    ({"guided_json": POINT}, POINTS),
    ({"guided_json": json.dumps(POINT)}, POINTS),
    ({"guided_regex": "^(ab)+$"}, ABS),
    ({"guided_grammar": GBNF}, SUMS),
    ({"json_schema": POINT}, POINTS),
    ({"json_schema": {}}, (["1", "null", "[]"], ["", "nul"])),
]  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("fields", "texts"), [*SPELLINGS[:7], *(pytest.param(*row, marks=pytest.mark.slow) for row in SPELLINGS[7:])]
)
def test_every_spelling_in_chats_and_completions(
    live: Live, fields: dict[str, Any], texts: tuple[list[str], list[str]]
) -> None:
    live.complete("a", **fields)
    check(live, *texts)
    live.stream(CHAT, {"messages": USER, **fields})
    check(live, *texts)


OPEN = {"type": "object", "properties": {"x": {"type": "integer", "not": {"const": 1}}}, "required": ["x"]}


@pytest.mark.parametrize(
    "fields",
    [
        in_format(OPEN),
        in_format(OPEN, strict=False),
        {"response_format": {"type": "json_object", "schema": OPEN}},
        {"structured_outputs": {"json": OPEN}},
        {"guided_json": json.dumps(OPEN)},
        {"json_schema": OPEN},
    ],
)
def test_lax_schema_is_enforced_partially(live: Live, fields: dict[str, Any]) -> None:
    """Only named members are permitted."""
    live.complete("a", **fields)
    check(live, *POINTS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {
            "response_format": None,
            "structured_outputs": None,
            "guided_json": None,
            "grammar": None,
            "json_schema": None,
        },
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "json": None, "structural_tag": None}},
    ],
)
def test_values_without_effect(live: Live, fields: dict[str, Any]) -> None:
    live.complete("a", **fields)
    assert live.engine.requests[-1].sampling.grammar is None


HOSTILE: list[dict[str, Any]] = [
    {"guided_regex": "(?:(?:a{1,999}){1,999}){1,999}b"},
    {"guided_regex": "(a|aa|aaa)*" * 500 + "[ab]{3000}"},
    {"guided_regex": "(?:x?){9000}x{9000}"},
    {"guided_regex": "(" * 20_000 + ")" * 20_000},
    {"guided_json": {"type": "object", "properties": {f"p{i}": {"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(900)}}},
    {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(9)]} for i in range(20)]}},
    {"guided_json": {"enum": [f"v{i}" for i in range(7_000)]}},
    {"guided_json": {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}}},
    {"guided_json": {"$ref": "#/$defs/0", "$defs": {f"{i}": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}}},
    {"guided_json": {"type": "string", "description": "x" * 10_000_000}},
    {"guided_json": {"anyOf": [{"const": i} for i in range(20_000)]}},
    {"guided_grammar": "\n".join(["start: " + "a " * 3000, *(f'a{i}: "x" | ""' for i in range(3000)), 'a: "x" | ""'])},
    {"grammar": "root ::= " + "(" * 900 + '"a"' + ")*" * 900},
    {"grammar": 'root ::= "a"{1,1000000000}'},
]  # fmt: skip


@pytest.mark.slow
def test_hostile_grammars_time_out_and_delay_no_stream(live: Live) -> None:
    in_time(lambda: longest_gap_beside_hostile_grammars(live), 2)


def longest_gap_beside_hostile_grammars(live: Live) -> float:
    live.engine.reply, live.engine.delay = [65] * 4000, 0.01
    live.state.text._grammars.clear()  # each is compiled
    gaps: list[float] = []
    done: list[bool] = []

    def follow() -> None:
        body = {"prompt": "a", "max_tokens": 4000, "stream": True}
        with live.http.stream("POST", TEXT, json=body) as stream:
            last = time.monotonic()
            for _ in stream.iter_lines():
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
                if done:
                    return

    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(follow)
        try:
            for fields in HOSTILE:
                start = time.monotonic()
                response = live.post(TEXT, {"prompt": "a", "max_tokens": 1, **fields}, timeout=30)
                seconds = time.monotonic() - start
                assert response.status_code in (200, 400), response.text
                if response.status_code == 400:
                    assert response.json()["error"]["param"] == next(iter(fields))
                assert seconds < 15, (seconds, str(fields)[:80])  # the limit is 4, and the machine may be busy
        finally:
            done.append(True)
            following.result()
    return max(gaps)


@pytest.mark.slow
def test_slow_grammars_of_one_caller_do_not_delay_another(live: Live) -> None:
    """Six slow grammars of one address wait. The small one of another address is done before the second of them."""
    order: list[str] = []

    def ask(address: str, members: int) -> None:
        schema = {"type": "object", "properties": {f"{address} {i}": {} for i in range(members)}}
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=120) as client:
            response = client.post(live.url + TEXT, json={"prompt": "a", "max_tokens": 1, "guided_json": schema})
        assert response.status_code in (200, 400), response.text
        order.append(address)

    pool = live.state.text._pool
    with ThreadPoolExecutor(7) as threads:
        many = [threads.submit(ask, "127.0.0.1", 2500 + i) for i in range(6)]
        live.wait(lambda: live.on_loop(lambda: bool(pool.slow_grammars._queues)))  # one runs
        threads.submit(ask, "127.0.0.2", 2).result()
        done = order.index("127.0.0.2")
        for each in many:
            each.result()
    assert done <= 1


def test_callers_whose_grammars_crash_repeatedly_get_429(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> Any:
        raise ProcessDiedError("SIGSEGV")

    body = {"prompt": [65], "guided_regex": "crash+"}
    with monkeypatch.context() as patched:
        patched.setattr(TextProcess, "run", crash)
        for _ in range(MAX_CRASHES):
            assert live.refuse(TEXT, body)["code"] == "grammar_failed"
    response = live.post(TEXT, body)
    assert response.status_code == 429 and 0 < int(response.headers["retry-after"]) <= CRASH_SECONDS
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("too_many_crashes", None) and "wait" in error["message"]
    live.complete("a")  # other requests of the same caller
    live.state.text._pool._crashes.clear()
    live.complete("a", guided_regex="crash+")


def test_compiled_once(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.complete("a", guided_regex="once|twice")

    async def run(task: partial[Any], *limits: Limits, **more: Any) -> Any:
        assert task.func is not TextTasks.compile_grammar, "it is compiled again"
        return await original(task, *limits, **more)

    pool = live.state.text._pool
    original = pool.run
    monkeypatch.setattr(pool, "run", run)
    live.complete("b", guided_regex="once|twice")
    assert len({request.sampling.grammar for request in live.engine.requests}) == 1


def test_grammar_errors_of_the_engine_name_the_field(live: Live) -> None:
    live.engine.refuse = lambda request: RequestError("it grows too large", "grammar", "invalid_grammar")
    error = live.refuse(TEXT, {"prompt": "a", "guided_regex": "x+"})
    assert (error["param"], error["code"]) == ("guided_regex", "invalid_grammar") and "too large" in error["message"]


def test_strict_function_is_enforced_completely(live: Live) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"x": {"not": {}}}}}
    asked = {"messages": USER, "tool_choice": "required"}
    live.chat(**asked | {"tools": [{"type": "function", "function": function}]})
    error = live.refuse(CHAT, {**asked, "tools": [{"type": "function", "function": {**function, "strict": True}}]})
    assert error["param"] == "tool_choice" and "'look'" in error["message"] and "not" in error["message"]


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(arguments: str, name: str = "look") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_required_calls_follow_their_schema(live: Live, choice: Any) -> None:
    live.chat(tools=[LOOK, {"type": "function", "function": {"name": "find"}}], tool_choice=choice)
    good, bad = (
        [call('{"city": "Rome"}')],
        ["Rome", "", call("{}"), call('{"city": 5}'), call('{"city": "Rome"}', "nope")],
    )
    (good if choice == "required" else bad).append(call("{}", "find"))
    check(live, good, bad)


def test_format_permits_optional_calls(live: Live) -> None:
    live.chat(tools=[LOOK], response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}})
    good, bad = [*POINTS[0], call('{"city": "Rome"}')], [*POINTS[1], call("{}"), call('{"city": "Rome"}', "nope")]
    check(live, [*good, "<think>hm</think>" + call('{"city": "Rome"}')], bad)
    live.chat(tools=[LOOK], tool_choice="none", guided_json=POINT)
    check(live, POINTS[0], [call('{"city": "Rome"}')])
    error = live.refuse(CHAT, {"messages": USER, "tools": [LOOK], "tool_choice": "required", "guided_json": POINT})
    assert error["param"] == "guided_json"


def test_format_does_not_apply_to_calls(live: Live) -> None:
    """The format applies to text. Clients with tools send one with every turn; it must still be valid."""
    form = {"name": "p", "schema": POINT}
    for path, body in (
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": form}, "tools": [LOOK],
                "tool_choice": "required"}),
        ("/v1/responses", {"input": USER, "text": {"format": {"type": "json_schema", **form}},
                           "tools": [{"type": "function", **LOOK["function"]}],
                           "tool_choice": {"type": "function", "name": "look"}}),
        ("/v1/messages", {"messages": USER, "max_tokens": 9, "tool_choice": {"type": "any"},
                          "output_config": {"format": {"type": "json_schema", "schema": POINT}},
                          "tools": [{"name": "look", "input_schema": LOOK["function"]["parameters"]}]}),
    ):  # fmt: skip
        assert live.post(path, body).status_code == 200
        check(live, [call('{"city": "Rome"}')], [*POINTS[0], call("{}")])
    wrong = {"messages": USER, "tools": [LOOK], "tool_choice": "required", "response_format": {"type": "xml"}}
    assert live.refuse(CHAT, wrong)["param"] == "response_format"


def test_thinking_may_precede_the_format(live: Live) -> None:
    """It is recognized by the end of the prompt."""
    ask = {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}}
    live.chat(**ask)
    check(
        live,
        ['{"x": 1}', '<think>a {"y": [}</think>\n\n{"x": 1}'],
        ["<think>", '<think>hm</think>{"y": 1}', 'hm {"x": 1}'],
    )
    live.chat(**ask, chat_template_kwargs={"x": True})
    check(live, ['hm</think>{"x": 1}', '{"x": </think>\n{"x": 1}'], ['{"x": 1}', 'hm</think>{"y": 1}'])
