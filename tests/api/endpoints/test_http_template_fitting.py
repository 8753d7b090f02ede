"""Messages fitted to the chat template, in every API: the prompt, the header that lists the changes, and the log."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from helpers.live_server import Live, live_server, server_fixture
from helpers.template_kinds import GEMMA, LLAMA31, QWEN35

from windlass.server.text import service
from windlass.server.text.workers.frames import Limits

HEADER = "x-windlass-template-changes"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM, DEVELOPER, LATE = (
    {"role": role, "content": text} for role, text in (("system", "S"), ("developer", "D"), ("system", "L"))
)
LIMIT = {CHAT: {"max_tokens": 2}, RESPONSES: {"max_output_tokens": 2}, MESSAGES: {"max_tokens": 2}}
shared = server_fixture(template=QWEN35)
gemma = server_fixture(template=GEMMA, model={"max_model_len": 4096})


def ask(live: Live, path: str, **body: Any) -> httpx.Response:
    response = live.post(path, {**LIMIT.get(path, {}), **body})
    assert response.status_code == 200, response.text
    return response


JOINED, FRONT = "system-joined", "<system>S\n\nD\n<user>Q\n<assistant>"
MOVED, LATER = "system-as-user", "<system>S\n<user>Q\n<assistant>A<user>L\n<assistant>"
SYSTEM_CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [SYSTEM, DEVELOPER, USER]}, JOINED, FRONT),
    (RESPONSES, {"instructions": "S", "input": [DEVELOPER, USER]}, JOINED, FRONT),
    (RESPONSES, {"input": [SYSTEM, DEVELOPER, USER]}, JOINED, FRONT),
    (MESSAGES, {"system": "S", "messages": [{"role": "system", "content": "D"}, USER]}, JOINED, FRONT),
    (CHAT, {"messages": [SYSTEM, USER, ANSWER, LATE]}, MOVED, LATER),
    (RESPONSES, {"instructions": "S", "input": [USER, ANSWER, {"role": "developer", "content": "L"}]}, MOVED, LATER),
    (MESSAGES, {"system": "S", "messages": [USER, ANSWER, LATE]}, MOVED, LATER),
]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "changes", "prompt"), SYSTEM_CASES)
def test_system_messages_are_placed(
    live: Live, path: str, body: dict[str, Any], changes: str, prompt: str, stream: bool
) -> None:
    assert ask(live, path, **body, stream=stream).headers[HEADER] == changes
    assert live.prompt == prompt


@pytest.mark.parametrize(("path", "body", "changes", "prompt"), SYSTEM_CASES)
def test_counting_and_rendering_fit_messages_alike(
    live: Live, path: str, body: dict[str, Any], changes: str, prompt: str
) -> None:
    counting = {CHAT: "/tokenize", RESPONSES: "/v1/responses/input_tokens", MESSAGES: "/v1/messages/count_tokens"}[path]
    response = ask(live, counting, **body)
    assert response.headers[HEADER] == changes
    count = len(live.tokenizer.encode(prompt, add_special_tokens=False))
    assert response.json()["count" if path == CHAT else "input_tokens"] == count
    if path == CHAT:
        response = ask(live, "/apply-template", **body)
        assert (response.json()["prompt"], response.headers[HEADER]) == (prompt, changes)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/tokenize", "/apply_template"])
def test_unchanged_messages_have_no_header(live: Live, path: str) -> None:
    assert HEADER not in ask(live, path, **{"input" if path == RESPONSES else "messages": [USER]}).headers


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages"), ("/apply_template", "messages")],
)
def test_turns_of_one_role_are_merged(gemma: Live, path: str, field: str) -> None:
    turns = [USER, {"role": "user", "content": "R"}, ANSWER, {"role": "assistant", "content": "B"}, USER]
    response = ask(gemma, path, **{field: turns})
    assert response.headers[HEADER] == "turns-merged"
    prompt = response.json()["prompt"] if path == "/apply_template" else gemma.prompt
    assert prompt == "<user>Q\n\nR\n<model>A\n\nB\n<user>Q\n<model>"


def test_tools_precede_the_first_message_of_the_user(gemma: Live) -> None:
    offers = {
        CHAT: {"type": "function", "function": {"name": "look"}},
        RESPONSES: {"type": "function", "name": "look", "parameters": None, "strict": False},
        MESSAGES: {"name": "look", "input_schema": {"type": "object", "properties": {}}},
    }
    for path, offer in offers.items():
        response = ask(gemma, path, **{"input" if path == RESPONSES else "messages": [USER], "tools": [offer]})
        assert response.headers[HEADER] == "system-as-user,tools-as-text"
        assert gemma.prompt.startswith('<user>You may call these functions:\n\n{"name": "look"')
        assert gemma.prompt.endswith("next message.\n\nQ\n<model>")


def call(name: str) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}


NAMES = ("look", "find")
HISTORIES: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        *(USER, {"role": "assistant", "content": None, "tool_calls": [call("look"), call("find")]}),
        *({"role": "tool", "tool_call_id": f"call_{name}", "content": name} for name in NAMES),
    ],
    RESPONSES: [
        USER,
        *({"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": "{}"} for name in NAMES),
        *({"type": "function_call_output", "call_id": f"call_{name}", "output": name} for name in NAMES),
    ],
    MESSAGES: [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": name, "name": name, "input": {}} for name in NAMES],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": name} for name in NAMES]},
    ],
}


def test_parallel_calls_become_successive_turns() -> None:
    with live_server(template=LLAMA31) as live:
        for path, history in HISTORIES.items():
            response = ask(live, path, **{"input" if path == RESPONSES else "messages": history})
            assert response.headers[HEADER] == "calls-split"
            assert live.prompt == (
                '<system>\n<user>Q\n<assistant>{"name": "look", "parameters": {}}\n<ipython>look\n'
                '<assistant>{"name": "find", "parameters": {}}\n<ipython>find\n<assistant>'
            )


@pytest.mark.parametrize("path", HISTORIES)
def test_calls_without_results_and_results_without_calls_are_rendered(live: Live, path: str) -> None:
    begin, *rest = HISTORIES[path]
    results = 1 if path == MESSAGES else 2
    for history in ([begin, *rest[:-results], USER], [begin, *rest[-results:], USER]):
        ask(live, path, **{"input" if path == RESPONSES else "messages": history})
        assert ("<call>look" in live.prompt) != ("<result>look" in live.prompt)
        assert live.prompt.endswith("<user>Q\n<assistant>")


def test_each_kind_of_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with live_server(template=QWEN35) as live, caplog.at_level(logging.INFO, "windlass.server"):
        for _ in range(3):
            ask(live, CHAT, messages=[SYSTEM, DEVELOPER, USER, LATE])
        ask(live, CHAT, messages=[SYSTEM, DEVELOPER, USER])
    lines = [
        record.getMessage()
        for record in caplog.records
        if "messages are adapted to the chat template" in record.getMessage()
    ]
    assert len(lines) == 2 and JOINED in lines[0] + lines[1] and MOVED in lines[0] + lines[1]


def test_a_template_that_cannot_be_probed_gets_messages_unchanged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PROBE_LIMITS", Limits(0.5, 512 * 2**20))
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = (
        "{% for message in messages %}{% if message.role != 'user' %}"
        + loop
        + "{% endif %}{{ message.content }}{% endfor %}"
    )
    with live_server(template=template) as live, caplog.at_level(logging.WARNING, "windlass.server"):
        assert HEADER not in ask(live, CHAT, messages=[USER, USER]).headers
        assert live.prompt == "QQ"
    assert "could not be examined" in caplog.text and "0.5 s" in caplog.text
