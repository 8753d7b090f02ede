"""The operator's variables of the chat template: used wherever a chat is rendered, overridden by those of the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.live_server import TEMPLATE, Live, live_server

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


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    defaults = {"enable_thinking": False, "prefix": "so: "}
    with live_server(template=SWITCHED, template_kwargs=defaults) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Live:
    shared.engine.reset()
    return shared


def prompt_of(live: Live, path: str, **fields: Any) -> str:
    answer = live.post(path, {**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return live.tokenizer.decode(live.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


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
