"""Messages of the assistant in both clients: reasoning, tool calls and answer types, with and without stream."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pydantic
import pytest
from api_helpers.any_client import any_client, scripted_client
from helpers.live_server import live_server
from helpers.scripted_http import answer, events, scripted_server
from jsonschema import Draft202012Validator

from windlass.clients import BadRequestError, ChatCompletion, ChatMessage, FunctionCall, ToolCall, _parse
from windlass.clients._accumulate import MessageAccumulator
from windlass.clients.response_types import ContentBlock, Message, MessageDelta, MessageEvent, ResponseItem

pytestmark = pytest.mark.anyio
ENVELOPE = {"id": "c-1", "created": 5, "model": "m"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1]}'}}


@dataclass
class Place:
    name: str
    kind: Literal["city", "sea"] = "city"


@dataclass
class Trip:
    days: int
    places: list[Place]
    notes: dict[str, str] = field(default_factory=dict)
    cost: float | None = None


@dataclass
class Person:
    name: str
    age: int | None
    mood: Literal["well", None]
    zip: int | None = 5
    room: int = 1


@dataclass
class Group:
    people: list[Person]
    lead: Person | None = field(default_factory=lambda: Person("a", 1, None))


@dataclass
class Price:
    cost: float


class Model(pydantic.BaseModel):
    days: int
    places: list[str] = []


def whole(message: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    return {**ENVELOPE, "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}]}


def streamed(*deltas: dict[str, Any], reason: str = "stop") -> list[Any]:
    chunks = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    chunks.append({"index": 0, "delta": {}, "finish_reason": reason})
    return [*({**ENVELOPE, "choices": [chunk]} for chunk in chunks), "[DONE]"]


async def test_message_with_tool_calls(kind: str) -> None:
    message = {"content": None, "reasoning_content": "hm", "reasoning": "hm", "tool_calls": [CALL]}
    with scripted_server(answer(whole(message, "tool_calls")), answer(whole({"content": "done"}))) as server:
        async with any_client(kind, server.url) as client:
            first = await client.chat([{"role": "user", "content": "go"}], tools=[{"type": "function"}])
            (call,) = first.tool_calls
            assert (call.name, call.function.values, first.reasoning, first.text) == ("look", {"at": [1]}, "hm", "")
            second = await client.chat(
                [{"role": "user", "content": "go"}, first.choices[0].message, call.reply("seen")]
            )
        assert second.text == "done" and second.tool_calls == () and second.parsed is None
    sent = server.requests[1].json["messages"]
    assert sent[1] == {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}
    assert sent[2] == {"role": "tool", "tool_call_id": "call_1", "content": "seen"}


async def test_stream_properties_with_reasoning_and_tool_calls(kind: str) -> None:
    head, *pieces = (
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
            ]
        },
        *({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in ('{"at"', ": [1]}")),
    )
    script = streamed(
        {"role": "assistant", "content": None}, {"reasoning_content": "h"}, {"reasoning": "m", "reasoning_content": "m"},
        {"content": "Let"}, head, *pieces, reason="tool_calls",
    )  # fmt: skip
    seen = []
    async with scripted_client(kind, events(*script)) as (_, client), await client.chat([], stream=True) as stream:
        async for chunk in stream:
            arguments = [call.function.arguments for call in stream.tool_calls]
            seen.append((chunk.reasoning, stream.reasoning, stream.text, arguments, len(chunk.tool_calls)))
        final = await stream.get_final()
    assert seen == [
        ("", "", "", [], 0),
        ("h", "h", "", [], 0),
        ("m", "hm", "", [], 0),
        ("", "hm", "Let", [], 0),
        ("", "hm", "Let", [""], 1),
        ("", "hm", "Let", ['{"at"'], 1),
        ("", "hm", "Let", ['{"at": [1]}'], 1),
        ("", "hm", "Let", ['{"at": [1]}'], 0),
    ]
    call = ToolCall(id="call_1", function=FunctionCall(name="look", arguments='{"at": [1]}'))
    assert final.choices[0].message == ChatMessage(content="Let", reasoning_content="hm", tool_calls=(call,))


async def test_function_calls_in_the_older_form(kind: str) -> None:
    call = {"name": "look", "arguments": "{}"}
    script = streamed({"function_call": {"name": "look", "arguments": ""}}, {"function_call": {"arguments": "{}"}})
    async with scripted_client(kind, answer(whole({"content": None, "function_call": call})), events(*script)) as (
        _,
        client,
    ):
        first = await client.chat([])
        final = await (await client.chat([], stream=True)).get_final()
    for result in (first, final):
        assert result.choices[0].message.to_dict() == {"role": "assistant", "content": None, "function_call": call}


TEXT = '{"days": 2, "places": [{"name": "Oslo"}], "notes": {"a": "b"}, "cost": null}'
WANTED: list[tuple[Any, str, Any]] = [
    (Trip, TEXT, Trip(2, [Place("Oslo")], {"a": "b"})),
    (Model, '{"days": 3, "places": ["a"]}', Model(days=3, places=["a"])),
    ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
]


@pytest.mark.parametrize("wanted, text, value", WANTED, ids=["dataclass", "pydantic", "schema"])
async def test_answer_type(kind: str, wanted: Any, text: str, value: Any) -> None:
    script = streamed({"role": "assistant", "content": ""}, {"content": text[:9]}, {"content": text[9:]})
    async with scripted_client(kind, answer(whole({"content": text})), events(*script)) as (server, client):
        assert (await client.chat([], answer_type=wanted)).parsed == value
        async with await client.chat([], answer_type=wanted, stream=True) as stream:
            early = [(stream.parsed, chunk.text) async for chunk in stream][:-1]
            assert stream.parsed == value and {parsed for parsed, _ in early} == {None}
            final = await stream.get_final()
    assert isinstance(final, ChatCompletion) and final.parsed == value
    for request in server.requests:
        asked = request.json["response_format"]
        assert asked["type"] == "json_schema" and asked["json_schema"]["strict"] is (wanted is not Model)
        Draft202012Validator.check_schema(asked["json_schema"]["schema"])
        Draft202012Validator(asked["json_schema"]["schema"]).validate(json.loads(text))


class Tagged(pydantic.BaseModel):
    tags: Annotated[set[str], pydantic.Field(min_length=2)]


@pytest.mark.quick_cases(1)
async def test_set_is_requested_and_validated_by_its_model(kind: str) -> None:
    """No grammar enforces `uniqueItems`: the server ignores it for a pydantic model, which validates, or refuses it."""
    texts = ['{"tags": ["b", "a", "b"]}', '{"tags": ["b", "b"]}']
    with live_server() as live:
        first, second = (live.tokenizer.encode(text, add_special_tokens=False) for text in texts)
        async with any_client(kind, live.url) as client:
            live.engine.reply = first
            asked = {"messages": [{"role": "user", "content": "go"}], "answer_type": Tagged}
            assert (await client.chat(**asked, max_tokens=len(first))).parsed == Tagged(tags={"a", "b"})
            async with await client.chat(**asked, max_tokens=len(first), stream=True) as stream:
                assert (await stream.get_final()).parsed == Tagged(tags={"a", "b"})
            live.engine.reply = second
            short = await client.chat(**asked, max_tokens=len(second))
            with pytest.raises(ValueError, match="at least 2 items"):
                _ = short.parsed
            with pytest.raises(BadRequestError, match="uniqueItems"):
                await client.chat(**(asked | {"answer_type": Tagged.model_json_schema()}))


NULLS: list[tuple[str, Any]] = [
    ('{"people": [{"name": "a", "age": null, "mood": null, "zip": null}]}', Group([Person("a", None, None, None)])),
    ('{"people": [], "lead": null}', Group([], None)),
    ('{"people": [{"name": "a", "age": 2, "mood": "well"}]}', Group([Person("a", 2, "well", 5)])),
]


@pytest.mark.parametrize("text, value", NULLS)
async def test_allowed_null_is_none(kind: str, text: str, value: Any) -> None:
    """A null that the schema allows is neither an absent key nor the default."""
    async with scripted_client(kind, answer(whole({"content": text}))) as (server, client):
        assert (await client.chat([], answer_type=Group)).parsed == value
    Draft202012Validator(server.requests[0].json["response_format"]["json_schema"]["schema"]).validate(json.loads(text))


@pytest.mark.parametrize("text", ['{"name": "a", "mood": null}', '{"name": null, "age": 1, "mood": null}'])
async def test_required_fields_of_an_answer_type(kind: str, text: str) -> None:
    async with scripted_client(kind, answer(whole({"content": text}))) as (_, client):
        answered = await client.chat([], answer_type=Person)
    with pytest.raises(ValueError, match=r"Person\.(age|name) is missing"):
        _ = answered.parsed


async def test_answer_that_does_not_match_its_type(kind: str) -> None:
    """For example an answer that was cut short."""
    async with scripted_client(kind, answer(whole({"content": '{"days": 2'}, "length"))) as (_, client):
        for wanted in (Trip, Model, {"type": "object"}):
            cut = await client.chat([], answer_type=wanted)
            with pytest.raises(ValueError):
                _ = cut.parsed
    async with scripted_client(kind, answer(whole({"content": '{"days": "two", "places": []}'}))) as (_, client):
        with pytest.raises(ValueError, match="days"):
            _ = (await client.chat([], answer_type=Trip)).parsed


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "wanted, text",
    [
        (Price, '{"cost": ' + "9" * 400 + "}"),
        (Price, '{"cost": ' + DEEP),
        ({"type": "array"}, DEEP),
    ],
    ids=["float", "deep dataclass", "deep schema"],
)
def test_answer_beyond_limits_of_python(wanted: Any, text: str) -> None:
    message = ChatMessage(content=text, _parse_content=_parse.answer_reader(wanted))
    with pytest.raises(ValueError):
        _ = message.parsed


def test_arguments_nested_too_deeply() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        _ = FunctionCall(arguments=DEEP).values
    with pytest.raises(ValueError, match="nested too deeply"):
        _ = ResponseItem(type="function_call", arguments=DEEP).values
    pieces = MessageAccumulator()
    pieces.add(MessageEvent(type="message_start", message=Message(id="m")))
    pieces.add(MessageEvent(type="content_block_start", index=0, content_block=ContentBlock(type="tool_use")))
    pieces.add(MessageEvent(type="content_block_delta", index=0, delta=MessageDelta(partial_json=DEEP)))
    assert pieces.result(None).content[0].input == {}


async def test_unsupported_answer_types(kind: str) -> None:
    @dataclass
    class Odd:
        when: complex

    async with any_client(kind, "http://127.0.0.1:9") as client:
        with pytest.raises(TypeError, match="complex has no JSON Schema here"):
            await client.chat([], answer_type=Odd)
        with pytest.raises(TypeError, match="should be a JSON Schema, a pydantic model or a dataclass"):
            await client.chat([], answer_type=int)
        with pytest.raises(ValueError, match="not both"):
            await client.chat([], answer_type=Trip, response_format={"type": "text"})


def test_parser_of_a_message_is_not_part_of_its_value() -> None:
    assert ChatMessage(content="1", _parse_content=int) == ChatMessage(content="1")
    assert "_parse_content" not in repr(ChatMessage(content="1", _parse_content=int))
    assert dataclasses.replace(ChatMessage(content="1", _parse_content=int), content="2").parsed == 2
