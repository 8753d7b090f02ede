"""Histories with calls: their order, their form for templates, and templates without calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from windlass.server.errors import ApiError
from windlass.server.schemas.chat import ChatMessage
from windlass.server.text import chat_messages as history
from windlass.server.text.chat_messages import prepare_history
from windlass.server.text.chat_template import ChatTemplate, probe_template


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
ITEMS = "{%- for k, v in a.items() -%}{{ k }}={{ v }},{%- endfor -%}"
READ_AS_OBJECT = (
    "{%- set a = call['function']['arguments'] -%}" + ITEMS,
    "{%- set a = call['function']['arguments'] %}" + ITEMS,
    "{%- set a = call.function.arguments -%}{{ a | tojson }}",
    "{%- set a = call.function.arguments -%}{%- if a is mapping -%}{{ a | tojson }}{%- else -%}{{ 1 + '' }}{%- endif -%}",
    "{%- macro show(a) -%}" + ITEMS + "{%- endmacro -%}{{ show(call.function.arguments) }}",
    "{%- macro show(a) -%}{{ a | tojson }}{%- endmacro -%}{{ show(call.function.arguments) | trim }}",
    "{%- for k in call.function.arguments -%}{{ k }}={{ call.function.arguments[k] }},{%- endfor -%}",
    "{%- if call.function.arguments -%}{%- set a = call.function.arguments -%}{{ a | tojson }}{%- endif -%}",
    "{%- for k, v in call.function.arguments | items %}{{ k }}{{ v }}{% endfor %}",
)
READ_AS_TEXT = (
    "<{{ call.function.arguments }}>",
    "{%- set a = call.function.arguments -%}{{ '<' + a + '>' }}",
    "{%- set a = call.function.arguments %}{{ '<' + a + '>' }}",
    "{%- macro show(a) -%}{{ '<' + a + '>' }}{%- endmacro -%}{{ show(call.function.arguments) }}",
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


def render(source: str, *messages: dict[str, Any]) -> str:
    template = ChatTemplate(source)
    capabilities = probe_template(template)
    fitted = prepare_history([ChatMessage(**message) for message in messages], None, capabilities, "<form>")
    return template.render(fitted.messages, null_content=capabilities.null_content)


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
        *((with_calls(source), '{"a": 1}', {"a": 1}) for source in READ_AS_OBJECT),
        *((with_calls(source), '{"a": 1}', '{"a": 1}') for source in READ_AS_TEXT),
    ],
)
def test_arguments_have_the_form_that_the_template_reads(source: str, arguments: Any, expected: Any) -> None:
    message = prepare(source, USER, calling(call(arguments=arguments)), result())[1]
    assert message["tool_calls"][0]["function"]["arguments"] == expected


NULLS = {
    "reads content after a test of the thinking": (
        "{%- if m.reasoning_content is not defined or m.reasoning_content is none %}"
        "{%- if '</think>' in m.content %}x{%- endif %}{%- endif %}{{ m.content }}",
        ("", "", ""),
    ),
    "adds text to content": ("{{ m.content + '!' }}", ("!", "!", "!")),
    "reads content, then tests for null": (
        "{%- set c = m['content'] %}{%- if '</think>' in c %}x{%- endif %}{%- if c is none %}-{%- else %}{{ c }}{%- endif %}",
        ("", "", ""),
    ),
    "tests for null": ("{%- if m['content'] is none %}-{%- else %}{{ m['content'] }}{%- endif %}", ("-", "-", "")),
    "tests for text": ("{%- if m.content is not none %}<{{ m.content }}>{%- endif %}", ("", "", "<>")),
    "prints content": ("{{ m.content }}", ("", "", "")),
}


@pytest.mark.parametrize(("source", "expected"), NULLS.values(), ids=NULLS)
def test_null_content_is_empty_unless_the_template_shows_null_differently(
    source: str, expected: tuple[str, str, str]
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + source + "{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    for content, shown in zip(({"content": None}, {}, {"content": ""}), expected, strict=True):
        assert render(template, USER, calling(call(), **content), result()) == f'hi;{shown}look{{"city": "Rome"}}sunny;'


@pytest.mark.parametrize("test", ["!= 9", "< 9"])
def test_ids_are_shortened_for_templates_that_require_it(test: str) -> None:
    source = with_calls(
        "{{ arguments }}{% if call.id|length "
        + test
        + " %}{{ raise_exception('x') }}{% endif %}{{ call.function.arguments | tojson }}"
    )
    made, answered = prepare(
        source, USER, calling(call("call_abc"), call("aB3456789")), result("call_abc"), result("aB3456789")
    )[1:3]
    assert made["tool_calls"][0]["id"] == answered["tool_call_id"] and len(answered["tool_call_id"]) == 9
    assert made["tool_calls"][1]["id"] == "aB3456789"


def test_results_name_their_function_where_the_template_requires_it() -> None:
    source = with_calls("{{ call.function.arguments | tojson }}") + (
        "{% for m in messages if m.role == 'tool' and m.name is not defined %}{{ raise_exception('no name') }}{% endfor %}"
    )
    assert prepare(source, USER, calling(call()), result())[2]["name"] == "look"
    assert "name" not in prepare(OBJECTS, USER, calling(call()), result())[2]


def test_the_older_form_becomes_calls() -> None:
    older = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    made, answered = prepare(OBJECTS, older, {"role": "function", "name": "look", "content": "sunny"})
    assert made["tool_calls"] == [call("call_look", arguments={})]
    assert answered == {"role": "tool", "content": "sunny", "tool_call_id": "call_look", "name": "look"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([calling(call(), call()), result()], "messages[0].tool_calls"),
        ([calling(call()), result(None)], "messages[1].tool_call_id"),
    ],
)
def test_ambiguous_calls_and_results_are_refused(messages: list[dict[str, Any]], param: str) -> None:
    for source in (OBJECTS, NO_CALLS):
        with pytest.raises(ApiError) as caught:
            prepare(source, *messages)
        assert caught.value.status == 400 and caught.value.param == param and param in caught.value.message


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
        knowing = NO_CALLS.replace("[", f"{{% if message.role in [{quote}{role}{quote}] %}}!{{% endif %}}[")
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
        capabilities = probe_template(ChatTemplate(source))
        stack: list[Any] = [prepare_history(messages, TOOLS, capabilities, "<form>").messages]
        while stack:
            item = stack.pop()
            assert item is None or type(item) in (dict, list, str, int, float, bool), type(item)
            if isinstance(item, dict):
                stack += [*item, *item.values()]
            elif isinstance(item, list):
                stack += item
