"""What parsers find, laid out as a chat: the message of a whole answer and the chunks of a stream say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.chat_chunks import assembled
from helpers.live_server import toy_tokenizer
from helpers.scripted_engine import logprobs_of

from windlass.server.api.chat import ChatWriter
from windlass.server.serving.deltas import Delta, TokenUsage
from windlass.server.serving.response_writer import ResponseOptions
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
    """Answers the n-th piece with the n-th entry of a script; the last one is what `finish` returns."""

    in_call = False

    def __init__(self, script: list[list[Event]]) -> None:
        self.script = list(script)

    def feed(self, text: str) -> list[Event]:
        return self.script.pop(0)

    def finish(self) -> list[Event]:
        return [event for events in self.script for event in events]


def write(
    name: str, *, stream: bool, older: bool = False, reason: str = "stop", **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of a whole answer or, put together, of a stream; and the stream's chunks."""
    plan = ParsingPlan(lambda: Scripted(SCRIPTS[name]), legacy_function_call=older)
    writer = ChatWriter(
        toy_tokenizer(), [Prompt([1])], TokenUsage(), ResponseOptions(**options), {"id": "x"}, parsing=plan
    )
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
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_put_together_is_the_whole_answer(name: str, older: bool, options: dict[str, Any]) -> None:
    if older and name == "all":
        pytest.skip("the older form has one call at most")
    whole, _ = write(name, stream=False, older=older, **options)
    streamed, chunks = write(name, stream=True, older=older, **options)
    assert streamed["message"] == whole["message"]
    assert streamed["finish_reason"] == whole["finish_reason"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
    if options:
        assert streamed["token_ids"] == [65] * (len(SCRIPTS[name]) - 1)
        assert len(streamed["logprobs"]) == len(whole["logprobs"]["content"]) == len(SCRIPTS[name]) - 1


def test_a_turn_that_calls_ends_with_tool_calls_and_null_content() -> None:
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


def test_the_older_form() -> None:
    choice, _ = write("a call", stream=False, older=True)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "look", "arguments": '{"a": 1}'}
    assert "tool_calls" not in choice["message"]


def test_the_deltas_of_a_call_are_openais() -> None:
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


def test_what_is_held_back_makes_no_chunk() -> None:
    _, chunks = write("text", stream=True)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hel", "lo!", None]
