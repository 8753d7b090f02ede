"""Prompts and answers longer than the context, with a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.live_server import Live, live_server, server_fixture

from windlass.engine.rotary.rotary_policy import RotaryReport

CHAT = "/v1/chat/completions"
shared = server_fixture(default_max_tokens=20)


REPORT = RotaryReport("default", {"rope_theta": 1e4}, "frozen", None, "f", 0)


@pytest.fixture
def live(live: Live) -> Live:
    live.engine.report = lambda request: REPORT
    return live


def context_of(live: Live) -> int:
    return live.http.get("/v1/models").json()["data"][0]["max_model_len"]


def long_chat(live: Live) -> list[dict[str, str]]:
    """More turns than fit into the context, numbered."""
    messages = [{"role": "system", "content": "be kind"}]
    for turn in range(context_of(live) // 20):
        messages += [{"role": "user", "content": f"question {turn} " + "a b c d e f g h"}]
        messages += [{"role": "assistant", "content": f"answer {turn}"}]
    return [*messages, {"role": "user", "content": "the last question"}]


@pytest.mark.parametrize("stream", [False, True])
def test_oldest_turns_are_dropped_and_counted(live: Live, stream: bool) -> None:
    messages = long_chat(live)
    assert live.refuse(CHAT, {"messages": messages, "max_tokens": 30})["code"] == "context_length_exceeded"
    body: dict[str, Any] = {"messages": messages, "max_tokens": 30, "context_overflow": "drop_turns"}
    if stream:
        (report,) = [event["rotary"] for event in live.stream(CHAT, body)[:-1] if event.get("rotary")]
    else:
        report = live.chat(**body)["rotary"]
    dropped = report["context"]["dropped_turns"]
    assert 0 < dropped < len(messages) // 2
    prompt = live.prompt
    assert prompt.startswith("<|bos|>[system]be kind\n[user]question " + f"{dropped} ")
    assert prompt.endswith("[user]the last question\n[assistant]")
    (request,) = live.engine.requests
    assert request.sampling.max_tokens == 30
    assert len(request.prompt_token_ids) + 30 <= context_of(live)
    # With one more turn it would not have fitted.
    kept = [messages[0], *messages[1 + 2 * (dropped - 1) :]]
    live.refuse(CHAT, {"messages": kept, "max_tokens": 30, "context_overflow": "error"})


def test_fitting_chat_is_unchanged(live: Live) -> None:
    answer = live.chat("hello", max_tokens=4, context_overflow="drop_turns")
    assert answer["rotary"]["context"] == {"dropped_turns": 0}
    assert live.prompt == "<|bos|>[user]hello\n[assistant]"
    assert "context" not in live.chat("hello", max_tokens=4)["rotary"]


def test_long_answer_gets_the_space_of_the_shortest_chat(live: Live) -> None:
    live.chat(messages=long_chat(live), max_tokens=10**6, context_overflow="drop_turns")
    (request,) = live.engine.requests
    assert "question 0" not in live.prompt and "the last question" in live.prompt
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == context_of(live)


def test_too_long_required_turns_are_refused(live: Live) -> None:
    messages = [*long_chat(live), {"role": "user", "content": "a b " * context_of(live)}]
    error = live.refuse(CHAT, {"messages": messages, "context_overflow": "drop_turns"})
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "without its older turns" in error["message"] and "truncate" not in error["message"]
    assert live.engine.requests == []


def test_calls_without_results_are_refused_in_dropped_turns(live: Live) -> None:
    messages = long_chat(live)
    messages.insert(2, {"role": "tool", "content": "x", "tool_call_id": "nobody's"})
    error = live.refuse(CHAT, {"messages": messages, "context_overflow": "drop_turns"})
    assert error["param"] == "messages[2].tool_call_id"


def test_error_refuses_an_answer_that_would_be_cut(live: Live) -> None:
    prompt = [5] * 10
    most = context_of(live) - 10
    live.complete(prompt, max_tokens=most, context_overflow="error", ignore_eos=True)
    error = live.refuse("/v1/completions", {"prompt": prompt, "max_tokens": most + 1, "context_overflow": "error"})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert f"at most {most}" in error["message"]
    assert len(live.engine.requests) == 1
    live.complete(prompt, max_tokens=most + 1)  # stop


def test_conflicting_fields_are_refused(live: Live) -> None:
    body = {"messages": long_chat(live), "context_overflow": "drop_turns", "truncate_prompt_tokens": 8}
    assert live.refuse(CHAT, body)["param"] == "truncate_prompt_tokens"
    error = live.refuse("/v1/completions", {"prompt": "a", "context_overflow": "drop_turns"})
    assert error["param"] == "context_overflow"
    assert live.engine.requests == []


def test_server_default_applies_without_the_field() -> None:
    with live_server(default_max_tokens=20, context_overflow="drop_turns") as live:
        live.engine.report = lambda request: REPORT
        assert live.chat(messages=long_chat(live))["rotary"]["context"]["dropped_turns"] > 0
        assert live.refuse(CHAT, {"messages": long_chat(live), "context_overflow": "stop"})
        live.complete("a", max_tokens=10**6)  # has no turns: stops
        assert "context" not in live.chat(messages=long_chat(live), truncate_prompt_tokens=9)["rotary"]
