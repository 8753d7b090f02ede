"""Chat responses from parser events: the message of a response equals the combined chunks of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.chat_chunks import assembled
from helpers.scripted_engine import logprobs_of
from helpers.writer_jobs import writer_job

from windlass.server.api.chat import ChatWriter
from windlass.server.serving.job import Delta, TokenUsage
from windlass.server.text.service import Prompt
from windlass.server.text.stream_parser import CallArguments, CallStart, Content, Event, ParsingPlan, Reasoning

SCRIPTS: dict[str, list[list[Event]]] = {
    "text": [[Content("Hel")], [], [Content("lo"), Content("!")]],
    "nothing": [[], []],
    "a call": [[], [CallStart(0, "call_1", "look")], [CallArguments(0, '{"a":'), CallArguments(0, " 1}")]],
    "all": [
        [Reasoning("let me "), Reasoning("see")],
        [Content("Looking. "), CallStart(0, "call_1", "look"), CallArguments(0, "{}")],
        [CallStart(1, "call_2", "find"), CallArguments(1, '{"x": 2}')],
    ],
}


class Scripted:
    """Parser that returns the n-th entry of a script for the n-th piece, and the rest at the end."""

    in_call = False

    def __init__(self, script: list[list[Event]]) -> None:
        self.script = list(script)

    def feed(self, text: str) -> list[Event]:
        return self.script.pop(0)

    def finish(self) -> list[Event]:
        return [event for events in self.script for event in events]


def write(
    name: str, *, stream: bool, legacy: bool = False, reason: str = "stop", **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the choice of a response, or the combined choice and the chunks of a stream."""
    plan = ParsingPlan(lambda: Scripted(SCRIPTS[name]), legacy_function_call=legacy)
    writer = ChatWriter(writer_job(parsing=plan, stream=stream, **options), [Prompt([1])], TokenUsage())
    count = len(SCRIPTS[name])
    deltas = [
        Delta(0, "x", (65,), (logprobs_of(65, 0),) if options.get("logprobs") is not None else (), None)
        for _ in range(count - 1)
    ]
    deltas.append(Delta(0, "", (), (), reason, None))
    if not stream:
        for delta in deltas:
            writer.add(delta)
        choice: dict[str, Any] = json.loads(b"".join(writer.pieces()))["choices"][0]
        return choice, []
    events = b"".join(writer.event(delta) for delta in deltas)
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in events.split(b"\n\n") if line]
    return assembled(chunks), chunks


@pytest.mark.parametrize("options", [{}, {"logprobs": 0, "return_token_ids": True}])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_stream_equals_response(name: str, legacy: bool, options: dict[str, Any]) -> None:
    if legacy and name == "all":
        pytest.skip("the legacy format permits one call")
    whole, _ = write(name, stream=False, legacy=legacy, **options)
    streamed, chunks = write(name, stream=True, legacy=legacy, **options)
    assert streamed["message"] == whole["message"]
    assert streamed["finish_reason"] == whole["finish_reason"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
    if options:
        assert streamed["token_ids"] == [65] * (len(SCRIPTS[name]) - 1)
        assert len(streamed["logprobs"]) == len(whole["logprobs"]["content"]) == len(SCRIPTS[name]) - 1


def test_response_with_calls() -> None:
    choice, _ = write("a call", stream=False)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}],
    }
    assert write("a call", stream=False, reason="length")[0]["finish_reason"] == "length"
    assert write("text", stream=False)[0]["finish_reason"] == "stop"


def test_legacy_function_call() -> None:
    choice, _ = write("a call", stream=False, legacy=True)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "look", "arguments": '{"a": 1}'}
    assert "tool_calls" not in choice["message"]


def test_deltas_of_a_call() -> None:
    _, chunks = write("a call", stream=True)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": None},
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {},
    ]
    _, chunks = write("text", stream=True)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_pieces_without_events_have_no_chunk() -> None:
    _, chunks = write("text", stream=True)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hel", "lo!", None]
