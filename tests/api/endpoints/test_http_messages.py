"""`/v1/messages` with a scripted engine: complete and streamed answers, blocks, tools, thinking, counts, refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from api_helpers.named_events import named_events
from helpers.live_server import Live, live_server, server_fixture

from windlass.engine.errors import EngineDeadError, QueueFullError
from windlass.engine.rotary.rotary_policy import RotaryReport
from windlass.server.errors import ApiError, error_body

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TEMPLATE = (
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{% for tool in tools or [] %}({{ tool.function.name }})"
    "{% endfor %}{% for message in messages %}[{{ message.role }}]{% if message.reasoning %}<{{ message.reasoning }}>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{# <think> </think> #}"
)
LOOK = {
    "name": "look",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FIND = {"type": "custom", "name": "find", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ROME}}}\n</tool_call>'
shared = server_fixture(
    template=TEMPLATE, tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"), model={"max_model_len": 4096}
)
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def live(live: Live) -> Live:
    live.generate("Hello.")
    return live


def ask(live: Live, messages: Any = USER, **fields: Any) -> dict[str, Any]:
    return live.request(PATH, **{"messages": messages, "max_tokens": 400, **fields})


def stream(live: Live, messages: Any = USER, **fields: Any) -> list[dict[str, Any]]:
    return named_events(live, PATH, {"messages": messages, "max_tokens": 400, **fields})


def refuse(live: Live, path: str, body: Any, status: int = 400, *, details: bool = False) -> dict[str, Any]:
    """Error of a refused request, in Anthropic's form."""
    response = live.post(path, body)
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error", "request_id"} and answer["type"] == "error"
    assert answer["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    error: dict[str, Any] = answer["error"]
    assert error["message"] and set(error) == {"type", "message", "param", "code"} | ({"details"} if details else set())
    return error


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client assembles it."""
    message: dict[str, Any] = {}
    partial: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop":
                if event["index"] in partial:
                    message["content"][event["index"]]["input"] = json.loads(partial[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def lasting(message: dict[str, Any]) -> dict[str, Any]:
    content = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    return {**message, "id": "", "content": content}


def test_plain_answer(live: Live) -> None:
    live.engine.cached_tokens = 2
    answer = ask(live, system="Be kind.", metadata={"user_id": "me"}, model="toy", cache_control={"type": "ephemeral"})
    assert live.prompt == "[system]Be kind.[user]hello[assistant]"
    prompt, generated = len(live.engine.requests[-1].prompt_token_ids), len(live.engine.reply) + 1
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": generated,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_order_of_events(live: Live, at_once: int) -> None:
    live.engine.tokens_per_output = at_once
    names = [event["type"] for event in stream(live)]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"<think>so</think>Wait. {CALL}{CALL}", ["thinking", "text", "tool_use", "tool_use"]),
        (CALL, ["tool_use"]),
        ("<think>only", ["thinking"]),
        ("", ["text"]),
    ],
)
def test_stream_equals_the_complete_answer(live: Live, text: str, kinds: list[str], at_once: int) -> None:
    live.generate(text)
    live.engine.tokens_per_output = at_once
    whole = ask(live, tools=[LOOK])
    assert [block["type"] for block in whole["content"]] == kinds
    assert lasting(built(stream(live, tools=[LOOK]))) == lasting(whole)


def test_contents_of_blocks(live: Live) -> None:
    live.generate(f"<think>so</think>Wait. {CALL}")
    answer = ask(live, tools=[LOOK, FIND])
    thought, text, call = answer["content"]
    assert live.prompt.startswith("(look)(find)")
    assert thought == {"type": "thinking", "thinking": "so", "signature": ""}
    assert text == {"type": "text", "text": "Wait."}
    assert (call["name"], call["input"]) == ("look", {"city": "Rome"}) and call["id"]
    assert answer["stop_reason"] == "tool_use"
    close = live.tokenizer.encode("</think>", add_special_tokens=False)[0]
    thought = live.engine.reply.index(close) + 1
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": thought}


def test_stop_reasons(live: Live) -> None:
    assert ask(live, max_tokens=3)["stop_reason"] == "max_tokens"
    stopped = ask(live, stop_sequences=["lo", "zz"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
    assert stopped["content"][0]["text"] == "Hel"
    live.generate(CALL)
    cut = ask(live, tools=[LOOK], max_tokens=len(live.engine.reply) - 4)
    assert cut["stop_reason"] == "max_tokens" and isinstance(cut["content"][-1].get("input", {}), dict)
    cut = ask(live, tools=[LOOK], stop_sequences=["Ro"])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "Ro")
    ended = stream(live, tools=[LOOK], stop_sequences=["Ro"])[-2]["delta"]
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "Ro")


def test_failure_within_a_stream(live: Live) -> None:
    live.engine.fail_after = (2, EngineDeadError("gone"))
    event = stream(live)[-1]
    assert event["type"] == "error" and event["error"]["type"] == "overloaded_error"


def test_failures_before_the_stream_have_their_own_status(live: Live) -> None:
    body = {"messages": USER, "max_tokens": 5, "stream": True}
    live.engine.refuse = lambda request: QueueFullError("full", 3)
    assert refuse(live, PATH, body, 429)["type"] == "rate_limit_error"
    assert live.post(PATH, body).headers["retry-after"] == "3"
    live.engine.refuse = lambda request: EngineDeadError("gone")
    assert refuse(live, PATH, body, 503)["type"] == "overloaded_error"
    live.engine.refuse = lambda request: None
    assert refuse(live, PATH, {**body, "timeout": 1e-9}, 504)["type"] == "timeout_error"


def test_silence_is_filled_with_pings() -> None:
    with live_server(stream_comment_seconds=0.02) as quick:
        body = {"messages": USER, "max_tokens": 2}
        names = [event["type"] for event in named_events(quick, PATH, body, on_text=quick.let_go("event: ping", 3))]
    assert names[0] == "ping" and names.index("message_start") > 2 and names[-1] == "message_stop"


def test_a_client_that_leaves_ends_the_request(live: Live) -> None:
    live.engine.delay = 0.02
    body = {"messages": USER, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with live.http.stream("POST", PATH, json=body) as response:
        next(response.iter_raw())
    live.wait(lambda: len(live.engine.aborted) == 1)
    live.wait(lambda: live.state.in_flight == 0)


# ---- requests --------------------------------------------------------------------------------------------------------
def test_blocks_become_turns(live: Live) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in "ab"]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "EqQB"},
            {"type": "redacted_thinking", "data": "EmwK"},
            {"type": "text", "text": "Wait.", "citations": None},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "t2", "name": "find", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "sun"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "none"}], "is_error": True},
            {"type": "text", "text": "And?"},
        ]},
    ]  # fmt: skip
    ask(live, messages, system=[{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])
    assert live.prompt == (
        f'[system]x\ny[user]a\nb[assistant]<hm>Wait.<tool_call>{{"name": "look", "arguments": {ROME}}}</tool_call>'
        '<tool_call>{"name": "find", "arguments": {}}</tool_call>[tool]sun[tool]Error: none[user]And?[assistant]'
    )


def test_answer_can_be_sent_back(live: Live) -> None:
    live.generate(f"<think>so</think>Wait. {CALL}")
    live.engine.report = lambda request: RotaryReport("default", {}, "frozen", None, "f", 0)
    answer = ask(live, tools=[LOOK])
    assert answer["rotary"]["rope_type"] == "default"
    answer |= {"diagnostics": None, "context_management": {"applied_edits": []}}  # which Anthropic's have
    result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"]}
    live.generate("Sunny.")
    ask(live, [*USER, answer, {"role": "user", "content": [result]}], tools=[LOOK])
    assert live.prompt.endswith("</tool_call>[tool][assistant]") and "<so>Wait." in live.prompt


def test_partial_answer_is_continued(live: Live) -> None:
    ask(live, [*USER, {"role": "assistant", "content": "The answer is"}])
    assert live.prompt == "[user]hello[assistant]The answer is"


@pytest.mark.parametrize(
    ("choice", "demanded"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "look", "disable_parallel_tool_use": True}, True),
    ],
)
def test_required_call(live: Live, choice: Any, demanded: bool) -> None:
    ask(live, tools=[LOOK, FIND], tool_choice=choice)
    assert (live.engine.requests[-1].sampling.grammar is not None) is demanded


def test_parallel_calls_disabled(live: Live) -> None:
    live.generate(CALL * 3)
    one = ask(live, tools=[LOOK], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(one["content"]) == 1 and len(ask(live, tools=[LOOK])["content"]) == 3


def test_thinking(live: Live) -> None:
    ask(live, thinking={"type": "enabled", "budget_tokens": 7})
    assert live.engine.requests[-1].sampling.thinking.tokens == 7
    assert live.prompt.startswith("True[user]")
    ask(live, thinking={"type": "disabled"})
    assert live.prompt.startswith("False[user]")
    ask(live, thinking={"type": "adaptive"})
    assert live.prompt.startswith("True[user]") and live.engine.requests[-1].sampling.thinking is None


def test_budget_is_a_hint_without_thinking_parser() -> None:
    """Clients enable thinking for every model, and cannot know the operator's options."""
    with live_server() as plain:
        body = {"messages": USER, "max_tokens": 2, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        assert plain.post(PATH, body).status_code == plain.post(COUNT, {**body, "max_tokens": None}).status_code == 200
        assert plain.engine.requests[-1].sampling.thinking is None
        for budget in (0, None, "many"):
            error = refuse(plain, PATH, {**body, "thinking": {"type": "enabled", "budget_tokens": budget}})
            assert error["param"] == "thinking.budget_tokens"


@pytest.mark.slow
def test_an_effort_is_a_hint(live: Live) -> None:
    """Anthropic's clients send an effort to every model."""
    for effort in ("low", "max"):
        ask(live, output_config={"effort": effort})
        assert live.prompt.startswith("True[user]")
    ask(live, output_config={"effort": "high"}, thinking={"type": "disabled"})
    assert live.prompt.startswith("False[user]")
    with live_server() as plain:
        body = {"messages": USER, "max_tokens": 2, "output_config": {"effort": "high"}}
        assert plain.post(PATH, body).status_code == plain.post(COUNT, {**body, "max_tokens": None}).status_code == 200
        assert refuse(plain, PATH, {**body, "output_config": {"effort": "extreme"}})["param"] == "output_config.effort"
    harmony = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{{ reasoning_effort }}<|channel|><|message|>"
    )
    with live_server(template=harmony) as gpt:
        for effort, told in {"minimal": "low", "low": "low", "high": "high", "xhigh": "high", "max": "high"}.items():
            assert gpt.post(PATH, {**body, "output_config": {"effort": effort}}).status_code == 200
            assert told in gpt.prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"fallbacks": []},
        {"fallbacks": "default"},
        {"compaction": None},
        {"thread": None},
        {"billing_policy": {"type": "billing_policy", "bill_to": "self"}},
        {"fallback_credit_token": "abc"},
        {"fallback_credit_token": {"token": "abc", "mode": "best_effort"}},
    ],
)
def test_fields_of_the_service_of_anthropic(live: Live, fields: dict[str, Any]) -> None:
    ask(live, **fields)


def test_toolset_name_has_no_effect(live: Live) -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": [{**USE, "toolset_name": None}, {**USE, "id": "u", "toolset_name": "browser"}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "toolset_name": None},
            {"type": "tool_result", "tool_use_id": "u", "toolset_name": "browser"},
        ]},
    ]  # fmt: skip
    ask(live, messages)


def test_refused_threads_let_a_tool_runner_continue(live: Live) -> None:
    body = {"messages": USER, "max_tokens": 2, "thread": {"type": "create"}}
    error = refuse(live, PATH, body, details=True)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "thread", "unsupported_field")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_strict_tool_is_enforced_completely(live: Live) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "array", "contains": {}}}}
    ask(live, tools=[{**LOOK, "input_schema": schema}], tool_choice={"type": "any"})
    body = {"messages": USER, "max_tokens": 5, "tool_choice": {"type": "any"}}
    error = refuse(live, PATH, {**body, "tools": [{**LOOK, "input_schema": schema, "strict": True}]})
    assert error["param"] == "tool_choice" and "contains" in error["message"]


CLEAR = {"type": "clear_thinking_20251015", "keep": "all"}


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        *((given, True) for given in (None, {}, {"edits": None}, {"edits": []}, {"edits": [CLEAR]})),
        ({"edits": [{**CLEAR, "keep": {"type": "all"}}, {**CLEAR, "more": None}]}, True),
        ({"edits": [{"type": "clear_thinking_20251015"}]}, False),  # which clears all but those of the last turn
        ({"edits": [{**CLEAR, "keep": {"type": "thinking_turns", "value": 2}}]}, False),
        ({"edits": [CLEAR, {"type": "clear_tool_uses_20250919"}]}, False),
        ({"edits": [{**CLEAR, "type": "clear_tool_uses_20250919"}]}, False),
        *((given, False) for given in ({"edits": "all"}, {"edit": []}, {"edits": [5]}, [CLEAR], "all")),
    ],
)
def test_edit_that_clears_nothing_is_accepted(live: Live, given: Any, accepted: bool) -> None:
    body = {"messages": USER, "context_management": given, "mcp_servers": []}
    for path, fields in ((PATH, {"max_tokens": 2}), (COUNT, {})):
        if accepted:
            assert live.post(path, {**body, **fields}).status_code == 200
        else:
            error = refuse(live, path, {**body, **fields})
            assert (error["param"], error["code"]) == ("context_management", "unsupported_field")


def test_tool_names_have_the_limit_of_anthropic(live: Live) -> None:
    name = f"mcp__server__{'x' * 115}"
    live.generate(CALL.replace("look", name))
    answer = ask(live, tools=[{**LOOK, "name": name}], tool_choice={"type": "tool", "name": name})
    assert answer["content"][0]["name"] == name
    error = refuse(live, PATH, {"messages": USER, "max_tokens": 2, "tools": [{**LOOK, "name": name + "x"}]})
    assert error["param"] == "tools[0].name"


def test_output_format(live: Live) -> None:
    ask(live, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert live.engine.requests[-1].sampling.grammar is not None


def test_counting(live: Live) -> None:
    for body in (
        {"messages": USER},
        {"messages": USER, "system": "Be kind.", "tools": [LOOK], "tool_choice": {"type": "any"}},
        {"messages": USER, "thinking": {"type": "enabled", "budget_tokens": 9}},
        {"messages": [*USER, {"role": "assistant", "content": "Well"}]},
    ):
        counted = live.post(COUNT, body).json()
        ask(live, **body)
        assert counted == {"input_tokens": len(live.engine.requests[-1].prompt_token_ids)}
    longer = live.post(COUNT, {"messages": [{"role": "user", "content": "a b " * 9000}]}).json()
    assert longer["input_tokens"] > 4096  # more than the context holds


# ---- refusals --------------------------------------------------------------------------------------------------------
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%%%not base64"}}
USE = {"type": "tool_use", "id": "t", "name": "look", "input": {}}


def test_all_errors_have_the_form_of_the_api(live: Live) -> None:
    assert refuse(live, PATH, {"messages": USER, "max_tokens": 5, "model": "x"}, 404)["type"] == "not_found_error"
    assert refuse(live, f"{PATH}/batches", {}, 404)["type"] == "not_found_error"
    assert live.http.get(PATH).json()["type"] == "error"
    assert live.http.post(PATH, content=b"{").json()["error"]["code"] == "invalid_json"
    assert refuse(live, COUNT, {"messages": [{"role": "user", "content": [IMAGE]}]})["param"]
    assert "error" in live.http.get("/v1/messagesx").json() and "type" not in live.http.get("/v1/messagesx").json()


def test_permission_errors_have_the_form_of_the_api() -> None:
    error = ApiError(403, "no", code="not_an_administrator")
    assert error_body(error, {"path": PATH})["error"]["type"] == "permission_error"


def test_keys_in_either_header() -> None:
    with live_server(api_keys=("k",), max_body_bytes=2000) as live:
        body = {"messages": USER, "max_tokens": 2}
        assert refuse(live, PATH, body, 401)["type"] == "authentication_error"
        for headers in (
            {"x-api-key": "k"},
            {"authorization": "Bearer k"},
            {"x-api-key": "k", "authorization": "Bearer no"},
        ):
            assert live.post(PATH, body, headers=headers).status_code == 200
        for headers in ({"x-api-key": "no"}, {"x-api-key": "Bearer k"}, {"x-api-key": ""}):
            assert live.post(PATH, body, headers=headers).status_code == 401
        live.http.headers["x-api-key"] = "k"
        large = {**body, "system": "x" * 3000}
        assert refuse(live, PATH, large, 413)["type"] == "request_too_large"


# ---- what agents send ------------------------------------------------------------------------------------------------
def billing(version: str) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.197.{version}; cc_entrypoint=cli;"


def test_billing_headers_do_not_enter_the_prompt(live: Live) -> None:
    def prompt(system: Any) -> str:
        ask(live, system=system)
        count = live.request(COUNT, messages=USER, system=system)["input_tokens"]
        assert count == len(live.engine.requests[-1].prompt_token_ids)
        return live.prompt

    rules = {"type": "text", "text": "Be kind."}
    plain = prompt([rules])
    for version in ("aaa", "bbb"):
        assert prompt([{"type": "text", "text": billing(version)}, rules]) == plain
        assert prompt(f"{billing(version)}\n\nBe kind.") == plain
    assert prompt([{"type": "text", "text": billing("aaa")}]) == "[user]hello[assistant]"
    assert billing("aaa") in prompt([rules, {"type": "text", "text": f"Never write {billing('aaa')}"}])


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "tool_reference"])
def test_results_that_are_not_text_become_notes(live: Live, kind: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    content = [{"type": "text", "text": "a view"}, {"type": kind, "source": source}]
    turns = [
        *USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": content}]},
    ]
    ask(live, turns, tools=[LOOK])
    assert f"[tool]a view\n[{kind} omitted: this model reads only text]" in live.prompt
    refuse(live, PATH, {"messages": [{"role": "user", "content": content}], "max_tokens": 4})


def test_a_prompt_that_is_too_long_has_the_words_of_anthropic(live: Live) -> None:
    error = refuse(live, PATH, {"messages": [{"role": "user", "content": "w " * 3000}], "max_tokens": 4})
    assert error["code"] == "context_length_exceeded"
    assert re.fullmatch(r"prompt is too long: 6\d{3} tokens > 4096 maximum", error["message"])
    dropped = {
        "messages": [*USER, USER[0] | {"content": "w " * 3000}],
        "context_overflow": "drop_turns",
        "max_tokens": 4,
    }
    assert refuse(live, PATH, dropped)["message"].startswith("prompt is too long: ")
    other = live.refuse("/v1/chat/completions", {"messages": [{"role": "user", "content": "w " * 3000}]})
    assert other["message"].startswith("this model's context holds 4096 tokens")


def test_hosted_tools_are_ignored_and_named(live: Live) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    body = {"messages": USER, "max_tokens": 9, "tools": [search, LOOK], "metadata": {"user_id": "u"}, "speed": "fast"}
    response = live.post(PATH, body)
    assert response.status_code == 200 and live.prompt.startswith("(look)[user]")
    assert response.headers["x-windlass-ignored"] == "metadata, speed, tools.web_search_20250305"
    assert live.post(PATH, {**body, "tools": [search]}).status_code == 200 and live.prompt.startswith("[user]")
    bash = {
        "type": "bash_20250124",
        "name": "bash",
    }  # it would run at the client, in a form that the model does not know
    assert refuse(live, PATH, {**body, "tools": [bash]})["code"] == "unsupported_field"


def test_thinking_without_effect_is_named() -> None:
    with live_server() as live:
        for fields, name in (
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
            ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ):
            response = live.post(PATH, {"messages": USER, "max_tokens": 4, **fields})
            assert (response.status_code, response.headers["x-windlass-ignored"]) == (200, name)
