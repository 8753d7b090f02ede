"""Prompts and answers longer than the context: shifts, windows, dropped turns, and a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.live_server import Live, live_server, server_fixture
from helpers.real_server import RealServer, serve
from helpers.scripted_engine import ScriptedEngine, model_info

from windlass.clients import Client
from windlass.engine.interface.context import ContextReport, ContextRule
from windlass.engine.rotary.rotary_policy import RotaryReport

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
shared = server_fixture(default_max_tokens=20)


def asked(live: Live, **fields: Any) -> ContextRule:
    live.complete("a b c", max_tokens=3, **fields)
    return live.engine.requests[-1].context


def test_fields_reach_the_engine(live: Live) -> None:
    assert asked(live) == ContextRule()
    assert asked(live, context_overflow="shift") == ContextRule("shift", 16)
    assert asked(live, context_overflow="shift", keep_tokens=0) == ContextRule("shift", 0)
    assert asked(live, attention_window=40, attention_sinks=4) == ContextRule("stop", 16, 40, 4)
    both = asked(live, context_overflow="shift", attention_window=40)
    assert both == ContextRule("shift", 16, 40, 0)


@pytest.mark.slow
def test_max_tokens_may_exceed_the_context_only_with_shift(live: Live) -> None:
    most = live.http.get("/v1/models").json()["data"][0]["max_model_len"]
    live.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 10**4, "context_overflow": "stop"})
    assert live.engine.requests[-1].sampling.max_tokens < most
    live.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 10**4, "context_overflow": "shift"})
    assert live.engine.requests[-1].sampling.max_tokens == 10**4
    error = live.refuse(COMPLETIONS, {"prompt": [5] * (most + 1), "context_overflow": "shift"})
    assert error["code"] == "context_length_exceeded"


def test_model_object_has_the_context_defaults() -> None:
    info = model_info(max_model_len=4096, shift_context=1024, max_total_tokens=10**6)
    defaults: dict[str, Any] = {"context_overflow": "shift", "keep_tokens": 32, "cache_reuse": 64}
    with live_server(ScriptedEngine(info=info), attention_window=512, attention_sinks=4, **defaults) as live:
        context = live.http.get("/v1/models").json()["data"][0]["context"]
        assert context == defaults | {
            "attention_window": 512,
            "attention_sinks": 4,
            "shift_context": 1024,
            "max_total_tokens": 10**6,
            "shift_refusal": None,
            "reuse_refusal": None,
        }
        with Client(live.url) as client:
            assert client.models()[0].context == context
        live.engine.info = model_info(shift_refusal="its layers see chunks of 64 tokens")
        assert "chunks" in live.http.get("/v1/models/toy").json()["context"]["shift_refusal"]


def test_model_without_shift_explains_the_refusal() -> None:
    learned = "its positions are learned"
    engine = ScriptedEngine(info=model_info(shift_refusal=learned, window_refusal=learned))
    with live_server(engine) as live:
        for fields in ({"context_overflow": "shift"}, {"attention_window": 8}):
            error = live.refuse(COMPLETIONS, {"prompt": "a", **fields})
            assert "its positions are learned" in error["message"] and error["param"] == next(iter(fields))


def test_system_prompt_of_a_chat_is_retained(live: Live) -> None:
    system = {"role": "system", "content": "be kind " * 10}
    live.chat(messages=[system, {"role": "user", "content": "hello"}], max_tokens=3, context_overflow="shift")
    request = live.engine.requests[-1]
    kept = live.tokenizer.decode(request.prompt_token_ids[: request.context.keep_tokens], skip_special_tokens=False)
    assert "be kind be kind" in kept and "hello" not in kept
    live.chat("hello", max_tokens=3, context_overflow="shift")
    assert live.engine.requests[-1].context.keep_tokens == 16
    messages = [system, {"role": "user", "content": "hello"}]
    live.chat(messages=messages, max_tokens=3, context_overflow="shift", keep_tokens=32)
    assert live.engine.requests[-1].context.keep_tokens == 32


def test_operator_defaults_apply_to_requests_without_the_fields() -> None:
    settings = {"context_overflow": "shift", "keep_tokens": 32, "attention_window": 48, "attention_sinks": 2}
    with live_server(**settings) as live:
        assert asked(live) == ContextRule("shift", 32, 48, 2)
        assert asked(live, context_overflow="stop", attention_window=9) == ContextRule("stop", 32, 9, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_report_the_context(live: Live, stream: bool) -> None:
    live.engine.report = lambda request: RotaryReport("default", {}, "frozen", None, "f", 0)
    live.engine.context = ContextReport(64, 16, 48, 3)
    body = {"prompt": "a", "max_tokens": 3, "context_overflow": "shift"}
    if stream:
        (rotary,) = [event["rotary"] for event in live.stream(COMPLETIONS, body)[:-1] if event.get("rotary")]
    else:
        rotary = live.complete(**body)["rotary"]
    assert rotary["context"] == {"window": 64, "kept_tokens": 16, "dropped_tokens": 48, "shifts": 3}


# -- a real engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--max-model-len", "128", WINDLASS_SHIFT_CONTEXT="64", WINDLASS_MAX_TOTAL_TOKENS="600") as server:
        server.wait_ready()
        yield server


@pytest.mark.slow
def test_stream_far_longer_than_its_context(server: RealServer) -> None:
    with Client(f"{server.url}") as client:
        answer = client.completions(
            "Once upon a time", max_tokens=300, ignore_eos=True, context_overflow="shift", seed=1
        )
    assert answer.usage.completion_tokens == 300 and answer.choices[0].finish_reason == "length"
    context = answer.rotary.context
    computed = answer.usage.prompt_tokens + 299
    assert (context.window, context.kept_tokens) == (64, 16)
    assert context.shifts == -(-(computed - 64) // 16) and context.dropped_tokens == 16 * context.shifts
    assert server.metric("windlass_dropped_tokens_total") >= context.dropped_tokens
    assert server.metric("windlass_num_requests_running") == 0


@pytest.mark.slow
def test_stop_string_ends_a_stream_with_the_same_report(server: RealServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 1, "seed": 4}
    body |= {"context_overflow": "shift"}
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    text = whole["choices"][0]["text"]
    stop = next(text[i : i + 12] for i in range(2 * len(text) // 3, len(text)) if text.find(text[i : i + 12]) == i)
    ended = httpx.post(f"{server.url}/v1/completions", json={**body, "stop": [stop]}, timeout=60).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["rotary"]["context"]["window"] == 64
    tokens = ended["usage"]["prompt_tokens"] + ended["usage"]["completion_tokens"] - 1
    assert 100 < tokens < 200
    assert ended["rotary"]["context"]["shifts"] == -(-(tokens - 64) // 16)


@pytest.mark.slow
def test_stream_ends_at_the_operator_limit(server: RealServer) -> None:
    body = {"prompt": "Once", "max_tokens": 5000, "ignore_eos": True, "context_overflow": "shift"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["total_tokens"] == 600 and answer["choices"][0]["finish_reason"] == "length"
    window = {**body, "max_tokens": 400, "attention_window": 32, "attention_sinks": 4, "prompt": "a b c d " * 60}
    answer = httpx.post(f"{server.url}/v1/completions", json=window, timeout=60).json()
    assert answer["rotary"]["context"] == {"attention_window": 32, "attention_sinks": 4}
    assert answer["usage"]["prompt_tokens"] > 128


# ---- dropped turns ----------------------------------------------------------------------------------------------------
REPORT = RotaryReport("default", {"rope_theta": 1e4}, "frozen", None, "f", 0)


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
    live.engine.report = lambda request: REPORT
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
    live.engine.report = lambda request: REPORT
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


def test_results_that_name_no_call_are_refused_in_dropped_turns(live: Live) -> None:
    messages = long_chat(live)
    messages.insert(2, {"role": "tool", "content": "x"})
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


def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    """Also where answers that the context would cut are refused."""
    for overflow in ("error", "stop", "shift", "drop_turns"):
        with live_server(context_overflow=overflow) as live:
            live.chat()
            request = live.engine.requests[-1]
            assert live.info is not None
            left = live.info.max_model_len - len(request.prompt_token_ids)
            assert request.sampling.max_tokens == (live.info.shift_context if overflow == "shift" else left)
