"""A model with a separate template for chats with functions, which also determines the format of calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.live_server import TEMPLATE, Live, live_server

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
# Calls in the format of Hermes, which the default template does not contain.
TOOL_USE = (
    "TOOLS {% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>{{ messages[0].content }} tool_calls"
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(template=TEMPLATE, tool_template=TOOL_USE) as running:
        yield running


def prompt_of(live: Live, **fields: Any) -> str:
    live.chat(messages=USER, **fields)
    return live.tokenizer.decode(live.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_tool_template_is_used_with_functions(live: Live) -> None:
    plain = prompt_of(live)
    assert "hello" in plain and "TOOLS" not in plain
    for fields in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {"functions": [TOOL["function"]]}):
        assert prompt_of(live, **fields) == "TOOLS look_up <tool_call>hello tool_calls"
    for fields in ({"tools": []}, {"tools": None}):
        assert prompt_of(live, **fields) == plain


def test_calls_in_the_format_of_the_tool_template(live: Live) -> None:
    said = live.tokenizer.encode(
        '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>', add_special_tokens=False
    )
    live.engine.reply, live.engine.eos_after = said, len(said)
    message = live.chat(messages=USER, tools=[TOOL])["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look_up"]


def test_without_a_default_it_serves_chats_with_functions_only() -> None:
    with live_server(template=None, tool_template=TOOL_USE) as live:
        assert prompt_of(live, tools=[TOOL]).startswith("TOOLS look_up")
        error = live.refuse(PATH, {"messages": USER})
        assert error["code"] == "no_chat_template" and error["message"].endswith("with --chat-template FILE")


def test_invalid_tool_template_is_reported() -> None:
    with live_server(tool_template="{% for %}") as live:
        error = live.refuse(PATH, {"messages": USER, "tools": [TOOL]}, 503)
        assert error["code"] == "text_unavailable" and "does not parse" in error["message"]
