"""Chat templates: the operator's variables, separate templates for functions, and rendering without an answer."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.live_server import TEMPLATE, Live, live_server, server_fixture

from windlass.clients import Client

SWITCHED = (
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    + TEMPLATE
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 16},
}
shared = server_fixture(template=SWITCHED, template_kwargs={"enable_thinking": False, "prefix": "so: "})


def prompt_of(live: Live, path: str, **fields: Any) -> str:
    live.request(path, **{**BODIES[path], **fields})
    return live.prompt


@pytest.mark.parametrize("path", BODIES)
def test_defaults_apply_individually_to_absent_variables(live: Live, path: str) -> None:
    assert prompt_of(live, path).startswith("False<|bos|>so: ")
    assert prompt_of(live, path, chat_template_kwargs={"enable_thinking": True}).startswith("True<|bos|>so: ")
    assert prompt_of(live, path, chat_template_kwargs={"prefix": "no: "}).startswith("False<|bos|>no: ")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "low"}),
        (RESPONSES, {"reasoning": {"effort": "low"}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
    ],
)
def test_request_can_enable_thinking(live: Live, path: str, fields: dict[str, Any]) -> None:
    assert prompt_of(live, path, **fields).startswith("True")


def test_counting_and_rendering_use_the_defaults(live: Live) -> None:
    prompt = prompt_of(live, CHAT)
    count = len(live.engine.requests[-1].prompt_token_ids)
    assert live.post("/apply_template", {"messages": HELLO}).json()["prompt"] == prompt
    assert live.post("/tokenize", {"messages": HELLO}).json()["count"] == count
    assert live.post("/v1/messages/count_tokens", {"messages": HELLO}).json()["input_tokens"] == count


def test_fingerprint_depends_on_the_defaults(live: Live) -> None:
    with live_server(template=SWITCHED) as plain:
        assert plain.chat()["system_fingerprint"] != live.chat()["system_fingerprint"]


# ---- a separate template for chats with functions ---------------------------------------------------------------------
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
# Calls in the format of Hermes, which the default template does not contain.
TOOL_USE = (
    "TOOLS {% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>{{ messages[0].content }} tool_calls"
)
tool_server = server_fixture(template=TEMPLATE, tool_template=TOOL_USE)


def chat_prompt(tool_server: Live, **fields: Any) -> str:
    tool_server.chat(messages=HELLO, **fields)
    return tool_server.prompt


def test_tool_template_is_used_with_functions(tool_server: Live) -> None:
    plain = chat_prompt(tool_server)
    assert "hello" in plain and "TOOLS" not in plain
    for fields in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {"functions": [TOOL["function"]]}):
        assert chat_prompt(tool_server, **fields) == "TOOLS look_up <tool_call>hello tool_calls"
    for fields in ({"tools": []}, {"tools": None}):
        assert chat_prompt(tool_server, **fields) == plain


def test_calls_in_the_format_of_the_tool_template(tool_server: Live) -> None:
    tool_server.generate('<tool_call>{"name": "look_up", "arguments": {}}</tool_call>')
    message = tool_server.chat(messages=HELLO, tools=[TOOL])["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look_up"]


def test_without_a_default_it_serves_chats_with_functions_only() -> None:
    with live_server(template=None, tool_template=TOOL_USE) as tool_server:
        assert chat_prompt(tool_server, tools=[TOOL]).startswith("TOOLS look_up")
        error = tool_server.refuse(CHAT, {"messages": HELLO})
        assert error["code"] == "no_chat_template" and error["message"].endswith("with --chat-template FILE")


def test_invalid_tool_template_is_reported() -> None:
    with live_server(tool_template="{% for %}") as tool_server:
        error = tool_server.refuse(CHAT, {"messages": HELLO, "tools": [TOOL]}, 503)
        assert error["code"] == "text_unavailable" and "does not parse" in error["message"]


# ---- rendered without an answer ---------------------------------------------------------------------------------------
def test_template_is_applied() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with live_server() as live, Client(live.url) as client:
        assert client.apply_template(messages) == "<|bos|>[user]Hi\n[assistant]"
        assert client.apply_template(messages, add_generation_prompt=False) == "<|bos|>[user]Hi\n"
        assert client.apply_template(messages, chat_template_kwargs={"prefix": "P"}).startswith("<|bos|>P[user]")
        ids = live.request("/tokenize", messages=messages)["tokens"]
        text = live.request("/apply_template", messages=messages)["prompt"]
        assert live.tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.slow
def test_invalid_templates_are_named(live: Live) -> None:
    assert live.refuse("/apply_template", {"messages": []})["param"] == "messages"
    assert live.refuse("/apply_template", {"prompt": "a"})["type"] == "invalid_request_error"
    forbidden = {"messages": [{"role": "forbidden", "content": "a"}]}
    assert live.refuse("/apply_template", forbidden)["param"].startswith("messages")
    with live_server(template=None) as bare:
        error = bare.refuse("/apply_template", {"messages": [{"role": "user", "content": "Hi"}]})
        assert error["code"] == "no_chat_template"
    with live_server(max_response_bytes=100) as small:
        messages = [{"role": "user", "content": "x" * 200}]
        assert small.refuse("/apply_template", {"messages": messages})["code"] == "response_too_large"
