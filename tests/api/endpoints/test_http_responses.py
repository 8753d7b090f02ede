"""`/v1/responses` with a scripted engine: complete and streamed answers, items, tools, thinking, formats, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from api_helpers.named_events import named_events
from helpers.live_server import Live, live_server, server_fixture

from windlass.engine.errors import EngineDeadError
from windlass.server.schemas import tools
from windlass.server.schemas.responses import input_items_of_output
from windlass.server.schemas.tools import MAX_ARGUMENTS

PATH = "/v1/responses"
TEMPLATE = (
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}{{ reasoning_effort }}{% for message in messages %}"
    "[{{ message.role }}]{% if message.reasoning %}<{{ message.reasoning }}>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
LOOK = {
    "type": "function",
    "name": "look",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
FIND = {"type": "function", "name": "find"}
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ROME}}}\n</tool_call>'
shared = server_fixture(
    template=TEMPLATE + "{# <think> </think> #}",
    tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    model={"max_model_len": 4096},
)


@pytest.fixture
def live(live: Live) -> Live:
    live.generate("Hello.")
    return live


def ask(live: Live, given: Any = "hello", **fields: Any) -> dict[str, Any]:
    return live.request(PATH, input=given, **fields)


def stream(live: Live, given: Any = "hello", **fields: Any) -> list[dict[str, Any]]:
    return named_events(live, PATH, {"input": given, **fields})


CHANGING = {"id", "created_at", "completed_at", "call_id", "item_id"}


def lasting(value: Any) -> Any:
    """Without ids and times."""
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if key not in CHANGING}
    return [lasting(item) for item in value] if isinstance(value, list) else value


def built(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client assembles it from the events of items, parts and pieces."""
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            continue
        if "item_id" not in event:
            continue
        item = output[event["output_index"]]
        assert item["id"] == event["item_id"]
        if kind == "response.content_part.added":
            assert event["content_index"] == len(item["content"]) == 0
            item["content"].append(event["part"])
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "response.custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif kind == "response.custom_tool_call_input.done":
            assert event["input"] == item["input"]
        elif kind.endswith(".delta"):
            part = item["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.setdefault("logprobs", []).extend(event.get("logprobs", []))
        elif kind.endswith("_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == item["content"][0]["text"]
        else:
            assert kind == "response.function_call_arguments.done" and event["arguments"] == item["arguments"]
    return output


def test_plain_answer(live: Live) -> None:
    live.engine.cached_tokens = 2
    answer = ask(live, instructions="Be kind.", metadata={"a": "b"}, user="me", temperature=0.5, max_output_tokens=50)
    assert live.prompt == "[system]Be kind.[user]hello"
    assert live.engine.requests[-1].sampling.max_tokens == 50
    (message,) = answer["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert answer["object"] == "response" and answer["status"] == "completed" and answer["error"] is None
    assert answer["id"].startswith("resp_") and answer["model"] == "toy" and answer["store"] is True
    assert (answer["instructions"], answer["metadata"], answer["temperature"]) == ("Be kind.", {"a": "b"}, 0.5)
    prompt, generated = len(live.engine.requests[-1].prompt_token_ids), len(live.engine.reply) + 1
    assert answer["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_order_of_events(live: Live, at_once: int) -> None:
    live.engine.tokens_per_output = at_once
    events = stream(live)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    head = ["created", "in_progress", "output_item.added", "content_part.added"]
    tail = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert names[:4] == head and names[-4:] == tail
    assert set(names[4:-4]) == {"output_text.delta"}
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == [] and events[0]["response"]["id"] == events[-1]["response"]["id"]
    assert lasting(events[-1]["response"]) == lasting(ask(live))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"<think>so</think>Wait. {CALL}{CALL}", ["reasoning", "message", "function_call", "function_call"]),
        (CALL, ["function_call"]),
        ("<think>only", ["reasoning"]),
        ("", ["message"]),
    ],
)
def test_stream_equals_the_complete_answer(live: Live, text: str, kinds: list[str], at_once: int) -> None:
    live.generate(text)
    live.engine.tokens_per_output = at_once
    whole = ask(live, tools=[LOOK])
    assert [item["type"] for item in whole["output"]] == kinds
    events = stream(live, tools=[LOOK])
    output = events[-1]["response"]["output"]
    assert lasting(output) == lasting(whole["output"])
    for item, made in zip(built(events), output, strict=True):
        for field in ("content", "arguments"):
            assert made.get(field) == item.get(field) or made["type"] == "reasoning"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output


def test_contents_of_items(live: Live) -> None:
    live.generate(f"<think>so</think>Wait. {CALL}")
    thought, message, call = ask(live, tools=[LOOK, FIND])["output"]
    assert live.prompt.startswith("(look)(find)")
    assert thought["content"] == [{"type": "reasoning_text", "text": "so"}] and thought["summary"] == []
    assert message["content"][0]["text"] == "Wait."
    assert (call["name"], call["arguments"], call["status"]) == ("look", ROME, "completed")
    assert call["id"].startswith("fc_") and call["call_id"].startswith("call_")


def test_truncated_answer_is_incomplete(live: Live) -> None:
    for answer in (ask(live, max_output_tokens=3), stream(live, max_output_tokens=3)[-1]["response"]):
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None
    assert stream(live, max_output_tokens=3)[-1]["type"] == "response.incomplete"


def test_incomplete_call_has_no_effect_when_sent_back(live: Live) -> None:
    live.generate(CALL)
    for fields, status in (
        ({"max_output_tokens": len(live.engine.reply) - 5}, "incomplete"),
        ({"stop": ["Ro"]}, "completed"),
    ):
        answer = ask(live, tools=[LOOK], **fields)
        call = answer["output"][-1]
        assert (answer["status"], call["type"], call["status"]) == (status, "function_call", "incomplete")
        question = {"role": "user", "content": "hello"}
        ask(live, [question, *answer["output"], question], tools=[LOOK])
        assert "tool_call" not in live.prompt and live.prompt.count("[user]hello") == 2
        ask(live, tools=[LOOK], previous_response_id=answer["id"])
        assert "tool_call" not in live.prompt
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
        for carried_out in ({**call, "status": "completed"}, call):
            ask(live, [question, carried_out, result, question], tools=[LOOK])
            shown = json.dumps({"name": "look", "arguments": {"arguments": call["arguments"]}})
            assert f"<tool_call>{shown}</tool_call>[tool]x" in live.prompt
        refused = live.post(PATH, {"input": [call], "tools": [LOOK]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
        whole = {**call, "arguments": ROME}  # the call was executed anyway
        ask(live, [question, whole, result, question], tools=[LOOK])
        assert "tool_call" in live.prompt
    events = stream(live, tools=[LOOK], stop=["Ro"])
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"][-1]["status"] == "incomplete"
    live.generate(f"{CALL} and more")
    answer = ask(live, tools=[LOOK], max_output_tokens=len(live.engine.reply) - 10)
    assert answer["status"] == "incomplete" and answer["output"][0]["status"] == "completed"


def test_too_long_call_is_answered_but_not_stored(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ("{" + " " * MAX_ARGUMENTS, '"' * (MAX_ARGUMENTS - 100)):  # the second one only as JSON
        fields = {"type": "function_call", "status": "completed", "call_id": "c", "name": "look"}
        assert input_items_of_output([{**fields, "arguments": arguments}]) == []
    monkeypatch.setattr(tools, "MAX_ARGUMENTS", 10)
    live.generate(f"Wait. {CALL}")
    for answer in (ask(live, tools=[LOOK]), stream(live, tools=[LOOK])[-1]["response"]):
        assert answer["status"] == "completed" and answer["output"][-1]["arguments"] == ROME
        ask(live, tools=[LOOK], previous_response_id=answer["id"])
        assert "Wait." in live.prompt and "tool_call" not in live.prompt


def test_failure_within_a_stream(live: Live) -> None:
    live.engine.fail_after = (2, EngineDeadError("gone"))
    events = stream(live)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (
        response["status"] == "failed" and response["error"]["code"] == "server_error" and response["error"]["message"]
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert live.http.get(f"{PATH}/{response['id']}").status_code == 404


def test_a_failure_before_the_stream_has_its_own_status(live: Live) -> None:
    live.engine.refuse = lambda request: EngineDeadError("gone")
    assert live.refuse(PATH, {"input": "a", "stream": True}, 503)["code"] == "engine_unavailable"


@pytest.mark.slow
def test_silence_before_the_first_item_is_filled_with_events() -> None:
    """Codex leaves a stream that has only comments for five minutes, which a long prompt may take."""
    with live_server(stream_comment_seconds=0.02) as quick:
        quick.generate("Hello.")
        text = quick.stream_text(PATH, {"input": "a"}, quick.let_go("event: response.in_progress", 3))
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    begun = kinds.index("response.output_item.added")
    assert kinds[0] == "response.created" and set(kinds[1:begun]) == {"response.in_progress"} and begun >= 4
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"] == events[begun - 1]["response"] and kinds[-1] == "response.completed"
    assert ": keep-alive" not in text.partition("response.created")[2].partition("response.output_item.added")[0]


def test_a_failure_after_silence_is_an_event(live: Live) -> None:
    """Keep-alive events were sent before, so the status is already 200."""
    with live_server(stream_comment_seconds=0.02) as quick:
        quick.engine.first_delay, quick.engine.fail_after = 0.2, (0, EngineDeadError("gone"))
        *begun, failed = named_events(quick, PATH, {"input": "a"})
    assert begun[0]["type"] == "response.created"
    assert failed["type"] == "response.failed" and failed["sequence_number"] == len(begun)
    assert failed["response"]["error"]["code"] == "server_error" and failed["response"]["output"] == []


def test_a_client_that_leaves_ends_the_request(live: Live) -> None:
    live.engine.delay = 0.02
    with live.http.stream("POST", PATH, json={"input": "a", "stream": True, "ignore_eos": True}) as response:
        next(response.iter_raw())
    live.wait(lambda: len(live.engine.aborted) == 1)
    live.wait(lambda: live.state.in_flight == 0)


# ---- requests --------------------------------------------------------------------------------------------------------
def test_items_become_turns(live: Live) -> None:
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": each} for each in "ab"]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": "commentary",
         "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": ROME, "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "of what"}], "encrypted_content": "gAAAA="},
    ]  # fmt: skip
    ask(live, items)
    assert live.prompt == (
        f'[system]Rules.[user]a\nb[assistant]<hm>Wait.<tool_call>{{"name": "look", "arguments": {ROME}}}</tool_call>'
        '<tool_call>{"name": "find", "arguments": {}}</tool_call>[tool]sun[tool]none[assistant]<of what>'
    )


def test_output_can_be_sent_back(live: Live) -> None:
    """Like clients that store the conversation themselves."""
    live.generate(f"<think>so</think>Wait. {CALL}")
    first = ask(live, tools=[LOOK])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    live.generate("Sunny.")
    ask(live, [{"role": "user", "content": "hello"}, *first["output"], result], tools=[LOOK], store=False)
    sent_back = live.prompt
    ask(live, [result], previous_response_id=first["id"], tools=[LOOK])
    assert live.prompt == sent_back
    assert "<so>Wait.<tool_call>" in sent_back and sent_back.endswith("[tool]sun")


def test_windlass_fields_reach_the_engine(live: Live) -> None:
    ask(live, rope_scaling={"rope_type": "yarn", "factor": 2}, rope_update="recompute", priority=3, cache_salt="s",
        context_overflow="shift", keep_tokens=4)  # fmt: skip
    request = live.engine.requests[-1]
    assert request.rope_scaling.rope_type == "yarn" and (request.priority, request.cache_salt) == (3, "salt s")
    assert request.context.overflow == "shift"


def test_stop_strings(live: Live) -> None:
    assert ask(live, stop="lo")["output"][0]["content"][0]["text"] == "Hel"


def test_log_probabilities(live: Live) -> None:
    live.generate("<think>so</think>Hello.")
    (whole,) = [item for item in ask(live, top_logprobs=1)["output"] if item["type"] == "message"]
    events = stream(live, top_logprobs=1)
    found = whole["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in found] == [1] * len(found)
    assert "".join(entry["token"] for entry in found).endswith("Hello.")
    assert built(events)[1]["content"][0]["logprobs"] == found
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.done"] == [found]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True},
    ],
)
def test_format_reaches_the_engine(live: Live, form: dict[str, Any]) -> None:
    answer = ask(live, text={"format": form, "verbosity": "low"})
    assert live.engine.requests[-1].sampling.grammar is not None
    assert answer["text"]["format"] == form
    ask(live, text={"format": {"type": "text"}})
    assert live.engine.requests[-1].sampling.grammar is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_required_call(live: Live, choice: Any) -> None:
    answer = ask(live, tools=[LOOK, FIND], tool_choice=choice, parallel_tool_calls=False)
    assert live.engine.requests[-1].sampling.grammar is not None
    assert answer["tool_choice"] == choice and answer["parallel_tool_calls"] is False
    assert [tool["name"] for tool in answer["tools"]] == ["look", "find"] and answer["tools"][0] == LOOK


def test_allowed_tools(live: Live) -> None:
    live.generate(CALL + CALL.replace("look", "find"))
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "look"}]}
        answer = ask(live, tools=[LOOK, FIND], tool_choice=choice)
        assert live.prompt.startswith("(look)(find)") and answer["tool_choice"] == choice
        assert [item["name"] for item in answer["output"] if item["type"] == "function_call"] == ["look"]
        assert (live.engine.requests[-1].sampling.grammar is not None) is (mode == "required")


def test_empty_features_of_other_services_are_accepted(live: Live) -> None:
    tool = {**LOOK, "allowed_callers": ["direct"], "async": False, "output_schema": {"type": "object"}}
    ask(live, tools=[LOOK])
    plain = live.prompt
    answer = ask(live, tools=[tool], access_programs=[])
    assert live.prompt == plain and answer["tools"] == [LOOK]


def test_reasoning_effort(live: Live) -> None:
    answer = ask(live, reasoning={"effort": "low", "summary": "auto"})
    assert live.prompt.startswith("low[user]") and answer["reasoning"]["effort"] == "low"


def test_thinking_is_counted(live: Live) -> None:
    live.generate("<think>so</think>Hello.")
    close = live.tokenizer.encode("</think>", add_special_tokens=False)[0]
    expected = live.engine.reply.index(close) + 1
    for answer in (ask(live), stream(live)[-1]["response"]):
        assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}


def test_truncation(live: Live) -> None:
    live.engine.info = replace(live.engine.info, max_model_len=64)
    turns = [
        {"role": role, "content": f"{role} {number} says"} for number in range(8) for role in ("user", "assistant")
    ]
    turns.append({"role": "user", "content": "last"})
    answer = ask(live, turns, truncation="auto", max_output_tokens=8)
    assert live.prompt.endswith("[user]last") and "user 0" not in live.prompt
    assert answer["truncation"] == "auto"
    assert live.refusal(PATH, {"input": turns, "truncation": "disabled"}) == ("input", "context_length_exceeded")
    assert ask(live, truncation="disabled")["truncation"] == "disabled"
    error = live.refuse(PATH, {"input": "a", "truncation": "disabled", "max_output_tokens": 64})
    assert (error["param"], error["code"]) == ("max_output_tokens", "context_length_exceeded")
    assert "max_output_tokens" in error["message"] and "max_tokens" not in error["message"]


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_effort_without_effect() -> None:
    with live_server() as plain:
        response = plain.post(PATH, {"input": "a", "reasoning": {"effort": "low"}})
    assert (response.status_code, response.headers["x-windlass-ignored"]) == (200, "reasoning.effort")


def test_events_are_single_lines(live: Live) -> None:
    live.generate("a\n\nb")
    assert built(stream(live))[0]["content"][0]["text"] == "a\n\nb"
    assert json.loads(json.dumps(ask(live)["output"]))[0]["content"][0]["text"] == "a\n\nb"


# ---- tools of Codex --------------------------------------------------------------------------------------------------
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}}, {**PATCH, "name": "note"}],
}
MANY = [{"type": "function", "name": f"f{number}"} for number in range(600)]
HOSTED = [{"type": kind} for kind in ("web_search", "web_search_2025_08_26", "image_generation", "local_shell", "mcp")]
DIFF = '*** Begin Patch\n+ "quoted" \\ é\n*** End Patch'


def call_of(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_functions_of_a_namespace(live: Live) -> None:
    live.generate(call_of("agents__close", {"id": 7}))
    answer = ask(live, tools=[LOOK, AGENTS])
    assert live.prompt.startswith("(look)(agents__close)(agents__note)")
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "close", "agents")
    assert json.loads(call["arguments"]) == {"id": 7}
    shown = answer["tools"][1]
    assert shown["name"] == "agents" and [tool["name"] for tool in shown["tools"]] == ["close", "note"]
    events = stream(live, tools=[LOOK, AGENTS])
    assert lasting(built(events)) == lasting([{**call, "status": "in_progress"}])
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "close"


@pytest.mark.parametrize("arguments", [{"input": DIFF}, {"input": ""}])
@pytest.mark.parametrize(("tools", "name"), [([PATCH], "apply_patch"), ([AGENTS], "agents__note")])
def test_custom_tools(live: Live, tools: list[Any], name: str, arguments: dict[str, str]) -> None:
    live.generate(call_of(name, arguments))
    answer = ask(live, tools=tools)
    (call,) = answer["output"]
    assert (call["type"], call["input"], call["status"]) == ("custom_tool_call", arguments["input"], "completed")
    assert (call["name"], call.get("namespace")) == (name.removeprefix("agents__"), "agents" if "__" in name else None)
    assert call["id"].startswith("ctc_")
    events = stream(live, tools=tools)
    assert lasting(built(events)) == lasting([{**call, "status": "in_progress"}])
    assert lasting(events[-1]["response"]["output"]) == lasting(answer["output"])


def test_custom_tool_with_arguments_of_another_form(live: Live) -> None:
    live.generate(call_of("apply_patch", {"patch": "x"}))
    assert json.loads(ask(live, tools=[PATCH])["output"][0]["input"]) == {"patch": "x"}


def test_the_model_sees_the_form_of_a_custom_tool(live: Live) -> None:
    with live_server(template="{{ tools | tojson }}", model={"max_model_len": 4096}) as shown:
        shown.request(PATH, input="a", tools=[PATCH], max_output_tokens=1)
        (tool,) = json.loads(shown.prompt)
    function = tool["function"]
    assert function["name"] == "apply_patch" and function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Edit files.") and function["description"].endswith("start: /.+/")


@pytest.mark.parametrize("stored", [True, False])
def test_a_loop_of_custom_and_namespaced_calls(live: Live, stored: bool) -> None:
    """Sent back as items or by id, the calls are what the model wrote."""
    question: list[Any] = [{"type": "message", "role": "user", "content": "hello"}]
    tools = [PATCH, AGENTS]
    live.generate(call_of("apply_patch", {"input": DIFF}) + "\n" + call_of("agents__close", {}))
    first = ask(live, question, tools=tools)
    patch, close = first["output"]
    image = {"type": "input_image", "image_url": "data:,"}
    results = [
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "done"},
        {"type": "function_call_output", "call_id": close["call_id"], "output": [image]},
    ]
    live.generate("Fine.")
    if stored:
        second = ask(live, results, tools=tools, previous_response_id=first["id"])
        items = live.http.get(f"{PATH}/{second['id']}/input_items?order=asc").json()["data"]
        kinds = [item["type"] for item in items]
        assert kinds == [
            "message",
            "custom_tool_call",
            "function_call",
            "custom_tool_call_output",
            "function_call_output",
        ]
        assert (items[1]["input"], items[2]["namespace"], items[3]["output"]) == (DIFF, "agents", "done")
    else:
        ask(live, [*question, patch, close, *results], tools=tools, store=False)
    written = json.dumps({"name": "apply_patch", "arguments": {"input": DIFF}}, ensure_ascii=False)
    assert f"<tool_call>{written}</tool_call>" in live.prompt
    assert '<tool_call>{"name": "agents__close", "arguments": {}}</tool_call>' in live.prompt
    assert live.prompt.endswith("[tool]done[tool][input_image omitted: this model reads only text]")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "close", "namespace": "agents"}, "agents__close"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
            "apply_patch",
        ),
    ],
)
def test_choice_of_a_tool(live: Live, choice: dict[str, Any], name: str) -> None:
    live.generate(call_of(name, {"input": "x"} if name == "apply_patch" else {}))
    answer = ask(live, tools=[LOOK, PATCH, AGENTS], tool_choice=choice)
    assert answer["tool_choice"] == choice
    grammar = str(live.engine.requests[-1].sampling.grammar)
    assert name in grammar and "look" not in grammar


def test_items_with_tools(live: Live) -> None:
    """Newer clients send tools as an item of the input."""
    item = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [AGENTS, HOSTED[0]]}
    live.generate(call_of("agents__note", {"input": DIFF}))
    response = live.post(PATH, {"tools": [LOOK], "input": [item, {"role": "user", "content": "a"}]})
    answer = response.json()
    assert live.prompt == "(look)(agents__close)(agents__note)[user]a"
    assert (answer["output"][0]["name"], answer["output"][0]["input"]) == ("note", DIFF)
    assert [tool["name"] for tool in answer["tools"]] == ["look", "agents"]
    assert response.headers["x-windlass-ignored"] == "tools.web_search"
    items = live.http.get(f"{PATH}/{answer['id']}/input_items").json()["data"]
    assert [each["type"] for each in items] == ["message"]
    count = live.request("/v1/responses/input_tokens", input=[item, {"role": "user", "content": "a"}])
    plain = live.request("/v1/responses/input_tokens", input="a", tools=[AGENTS])
    assert count == plain


@pytest.mark.parametrize(
    ("given", "message"),
    [([[LOOK]], "two functions named 'look'"), ([MANY, [{**FIND, "name": f"g{i}"} for i in range(600)]], "at most")],
)
def test_refused_items_with_tools(live: Live, given: list[Any], message: str) -> None:
    items = [{"type": "additional_tools", "tools": tools} for tools in given]
    error = live.refuse(PATH, {"tools": [LOOK], "input": [*items, {"role": "user", "content": "a"}]})
    assert error["param"] == "tools" and message in error["message"]


def test_hosted_tools_are_ignored_and_named(live: Live) -> None:
    response = live.post(PATH, {"input": "a", "tools": [*HOSTED, LOOK]})
    assert response.status_code == 200 and live.prompt.startswith("(look)[user]")
    assert response.headers["x-windlass-ignored"] == ", ".join(f"tools.{tool['type']}" for tool in HOSTED)
    assert response.json()["tools"] == [LOOK]
    assert live.post(PATH, {"input": "a", "tools": HOSTED[:1]}).json()["tools"] == []


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([AGENTS, {**AGENTS, "tools": AGENTS["tools"][:1]}], "'agents__close'"),
        ([{**AGENTS, "tools": [{"type": "web_search"}]}], "function, custom"),
        ([{**AGENTS, "tools": MANY}, {**AGENTS, "name": "b", "tools": MANY}], "at most 1024"),
        ([{**PATCH, "format": {"type": "grammer"}}], "grammar"),
    ],
)
def test_refused_tools(live: Live, tools: list[Any], reason: str) -> None:
    assert reason in live.refuse(PATH, {"input": "a", "tools": tools})["message"]
