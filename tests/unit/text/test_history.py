"""Histories with calls: their order, their form for templates, and templates without calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from windlass.server.errors import ApiError
from windlass.server.schemas.chat import ChatMessage
from windlass.server.text import chat_messages as history
from windlass.server.text.chat_messages import prepare_history
from windlass.server.text.chat_template import ChatTemplate
from windlass.server.text.template_probes import probe_template



def with_calls(arguments: str) -> str:
    """A template that shows the arguments of calls by this expression."""
    return (
        "{{ tools }}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}" + arguments + "{% endfor %}{% endfor %}"
    )


OBJECTS = with_calls("{{ call.function.arguments | tojson }}")
TEXTS = with_calls("{{ '<' + call['function']['arguments'] + '>' }}")
EITHER = with_calls(
    "{% if call.function.arguments is string %}{{ '<' + call.function.arguments + '>' }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
)
NO_CALLS = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def call(call_id: str = "call_1", name: str = "look", arguments: Any = '{"city": "Rome"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def result(call_id: str | None = "call_1", content: Any = "sunny") -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


USER = {"role": "user", "content": "hi"}


def prepare(source: str, *messages: dict[str, Any], tools: Any = None) -> list[dict[str, Any]]:
    capabilities = probe_template(ChatTemplate(source))
    return prepare_history([ChatMessage(**message) for message in messages], tools, capabilities, "<form>").messages


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_reach_the_template_with_arguments_as_objects(content: dict[str, Any]) -> None:
    assert prepare(OBJECTS, USER, calling(call(), **content), result()) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments={"city": "Rome"})]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        (TEXTS, '{"a":  1}', '{"a":  1}'),
        (TEXTS, {"a": "é"}, '{"a": "é"}'),
        (TEXTS, "", "{}"),
        (EITHER, '{"a":  1}', {"a": 1}),
        (OBJECTS, "", {}),
        (OBJECTS, None, {}),
        (OBJECTS, {"a": 1}, {"a": 1}),
        ("{{ tool_call.arguments | items }} tool_calls", '{"a": 1}', {"a": 1}),
        ("{% for k in call.function.arguments.items() %} tool_calls", '{"a": 1}', {"a": 1}),
        ("{{ tool_call.arguments }} tool_calls", '{"a": 1}', '{"a": 1}'),
    ],
)
def test_arguments_have_the_form_that_the_template_reads(source: str, arguments: Any, expected: Any) -> None:
    message = prepare(source, calling(call(arguments=arguments)), result())[0]
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_content_stays_null_if_the_template_tests_for_it() -> None:
    asked = "{% for message in messages %}{% if message.content is not none %}{{ '<' + message.content }}{% endif %}{% endfor %}"
    assert (
        ChatTemplate(asked).render(prepare(asked + "{# tool_calls #}", USER, calling(call()), result())) == "<hi<sunny"
    )
    source = (
        "{% for message in messages %}{% if message['content'] is none %}{{ message['tool_calls'] | length }} calls"
        "{% else %}{{ message['content'] }}{% endif %};{% endfor %}"
    )
    messages = prepare(source, USER, calling(call()), result(), calling(content="said"))
    assert messages[1]["content"] is None
    assert ChatTemplate(source).render(messages) == "hi;1 calls;sunny;said;"


@pytest.mark.parametrize("test", ["!= 9", "< 9"])
def test_ids_are_shortened_for_templates_that_require_it(test: str) -> None:
    source = f"{{% if call.id|length {test} %}}{{{{ raise_exception('x') }}}}{{% endif %}} tool_calls"
    made, answered = prepare(
        source, calling(call("call_abc"), call("aB3456789")), result("call_abc"), result("aB3456789")
    )[:2]
    assert made["tool_calls"][0]["id"] == answered["tool_call_id"] and len(answered["tool_call_id"]) == 9
    assert made["tool_calls"][1]["id"] == "aB3456789"


def test_the_older_form_becomes_calls() -> None:
    older = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    made, answered = prepare(OBJECTS, older, {"role": "function", "name": "look", "content": "sunny"})
    assert made["tool_calls"] == [call("call_look", arguments={})]
    assert answered == {"role": "tool", "content": "sunny", "tool_call_id": "call_look", "name": "look"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, calling(call())], "messages[1].tool_calls"),
        ([USER, calling(call()), USER], "messages[1].tool_calls"),
        ([calling(call(), call("call_2")), result()], "messages[0].tool_calls"),
        ([calling(call(), call()), result()], "messages[0].tool_calls"),
        ([USER, result()], "messages[1].tool_call_id"),
        ([calling(call()), result("call_2")], "messages[1].tool_call_id"),
        ([calling(call()), result(), result()], "messages[2].tool_call_id"),
        ([calling(call()), result(None)], "messages[1].tool_call_id"),
    ],
)
def test_calls_without_results_and_results_without_calls_are_refused(
    messages: list[dict[str, Any]], param: str
) -> None:
    for source in (OBJECTS, NO_CALLS):
        with pytest.raises(ApiError) as caught:
            prepare(source, *messages)
        assert caught.value.status == 400 and caught.value.param == param and param in caught.value.message
    assert prepare(OBJECTS, calling(call(), call("call_2")), result("call_2"), result(), USER)


def test_templates_without_calls_get_text() -> None:
    history = [
        {"role": "system", "content": "Be kind."},
        USER,
        calling(call(), call("call_2", "find", "{}"), content="Looking."),
        result(),
        result("call_2", "two"),
        {"role": "assistant", "content": "Done."},
    ]
    messages = prepare(NO_CALLS, *history, tools=TOOLS)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"].startswith("Be kind.\n\n") and '{"name": "look"' in messages[0]["content"]
    assert "\n<form>\n" in messages[0]["content"]
    assert messages[2]["content"] == (
        'Looking.\n[{"name": "look", "arguments": {"city": "Rome"}}, {"name": "find", "arguments": {}}]'
    )
    assert messages[3]["content"] == "Result of look:\nsunny\n\nResult of find:\ntwo"
    assert prepare(NO_CALLS, USER, tools=TOOLS)[0]["role"] == "system"
    assert prepare(OBJECTS, USER, tools=TOOLS) == [USER]
    assert all("tool_calls" not in message for message in messages)


def test_the_values_of_all_calls_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has its own limit, but a body may have many, whose arguments were not counted as its structure."""
    monkeypatch.setattr(history, "MAX_ARGUMENT_VALUES", 100)
    several = [
        calling(call("a", arguments='{"a": [1, 2, [3]]}'), call("b", arguments={"b": [0] * 40})),
        result("a"),
        result("b"),
    ]
    assert len(prepare(OBJECTS, *several, *several)) == 6  # (7 + 43) * 2 = 100
    for source in (OBJECTS, NO_CALLS):
        with pytest.raises(ApiError) as caught:
            prepare(source, *several, *several, calling(call(arguments='{"a": 1}')), result())
        assert caught.value.param == "messages[6].tool_calls" and "100" in caught.value.message
    with pytest.raises(ApiError) as caught:
        prepare(OBJECTS, {"role": "assistant", "function_call": {"name": "f", "arguments": {"b": [0] * 100}}})
    assert caught.value.param == "messages[0].function_call"
    many = calling(call(arguments='{"a": [' + "0," * 200 + "0]}"))
    assert prepare(TEXTS, many, result())[0]["tool_calls"]  # a text is one value


SLIPS = {"usr": "user", "User": "user", "users": "user", "usre": "user", "sytem": "system", "assitant": "assistant",
         "assisstant": "assistant", "tol": "tool", "tools": "tool", "funtion": "function", "xuser": "user"}  # fmt: skip


@pytest.mark.parametrize(("role", "meant"), SLIPS.items())
def test_a_misspelt_role_is_refused_unless_the_template_has_it(role: str, meant: str) -> None:
    with pytest.raises(ApiError, match=rf"messages\[1\].role is '{role}': did you mean '{meant}'\?"):
        prepare(NO_CALLS, USER, {"role": role, "content": "x"})
    for quote in "'\"":
        knowing = f"{{% if message.role == {quote}{role}{quote} %}}{NO_CALLS}"
        assert prepare(knowing, USER, {"role": role, "content": "x"})[1]["role"] == role


@pytest.mark.parametrize(
    "role", ["critic", "ipython", "model", "usser2", "us", "usresr", "uesrs", "tool_call", "resu", "x"]
)
def test_other_roles_are_passed_to_the_template(role: str) -> None:
    assert prepare(NO_CALLS, USER, {"role": role, "content": "x"})[1]["role"] == role


def test_templates_receive_exact_json_types() -> None:
    """The sandbox knows the methods of these types only, and the text worker does not convert messages again."""
    given = [USER, calling(call(arguments={"a": ["x", 1, 2.5, None, True]}), content="c", reasoning="r"), result()]
    messages = [ChatMessage.model_validate_json(json.dumps(message)) for message in given]
    for source in (OBJECTS, TEXTS, NO_CALLS):
        stack: list[Any] = [prepare_history(messages, TOOLS, TemplateCapabilities.from_source(source), "<form>")]
        while stack:
            item = stack.pop()
            assert item is None or type(item) in (dict, list, str, int, float, bool), type(item)
            if isinstance(item, dict):
                stack += [*item, *item.values()]
            elif isinstance(item, list):
                stack += item
