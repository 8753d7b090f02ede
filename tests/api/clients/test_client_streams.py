"""Properties of streams: usage, rotary report, finish reasons, text, and the whole response at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from api_helpers.any_client import any_client, scripted_client
from helpers.eventually import eventually
from helpers.live_server import Live, live_server
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_http import Exchange, ScriptedServer, answer, events, scripted_server

from windlass.clients import APIConnectionError, AsyncClient, ChatCompletion, Client, Completion, StreamError, streams
from windlass.engine.rotary.rotary_policy import RotaryReport

pytestmark = pytest.mark.anyio
ENVELOPE = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}
END = {**ENVELOPE, "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
PART = {**ENVELOPE, "choices": [{"index": 0, "text": "part", "finish_reason": None}]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def report(request: Any) -> RotaryReport:
    """A report that depends on the length of the prompt."""
    length = float(len(request.prompt_token_ids))
    return RotaryReport(
        rope_type="dynamic",
        parameters={"factor": 2.0},
        policy="frozen",
        effective_length=length,
        fingerprint=f"f{length}",
        moves=0,
        groups=None,
    )


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(ScriptedEngine(reply=[72, 101, 195, 182, 108, 111], report=report)) as server:
        yield server


def timeless(result: Completion | ChatCompletion) -> Any:
    """The response without the fields that differ between requests."""
    return dataclasses.replace(result, id="", created=0, request_id=None)


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "hello"},
    {"prompt": "hello", "n": 3, "max_tokens": 5},
    {"prompt": ["a", "longer prompt"], "logprobs": 2},
    {"prompt": ["a", "longer prompt"], "n": 2, "return_token_ids": True},
    {"prompt": "hello", "echo": True, "logprobs": 1, "prompt_logprobs": 1},
    {"prompt": "hello", "stop": "lo"},
    {"prompt": [1, 2, 3], "logprobs": 0, "return_token_ids": True, "stream_options": {"continuous_usage_stats": True}},
]


def unstreamed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "stream_options"}


@pytest.mark.parametrize("options", COMPLETIONS, ids=str)
async def test_final_completion_equals_the_one_without_stream(live: Live, kind: str, options: dict[str, Any]) -> None:
    async with any_client(kind, live.url) as client:
        expected = await client.completions(**{"max_tokens": 6, **unstreamed(options)})
        async with await client.completions(**{"max_tokens": 6, **options}, stream=True) as stream:
            final = await stream.get_final()
    assert isinstance(final, Completion) and timeless(final) == timeless(expected)
    assert final.usage is not None and final.rotary is not None
    assert final.id.endswith(str(final.request_id)) and final.request_id == stream.request_id


CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2},
    {"return_token_ids": True, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("options", CHATS, ids=str)
async def test_final_chat_equals_the_one_without_stream(live: Live, kind: str, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with any_client(kind, live.url) as client:
        expected = await client.chat(messages, max_tokens=6, **options)
        final = await (await client.chat(messages, max_tokens=6, stream=True, **options)).get_final()
    assert isinstance(final, ChatCompletion) and timeless(final) == timeless(expected)
    assert final.usage is not None and final.rotary is not None


async def test_properties_of_a_running_stream(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        stream = await client.completions([1, 2, 3, 4, 5], n=2, max_tokens=3, stream=True)
        async with stream:
            assert (stream.text, stream.usage, stream.rotary, stream.finish_reasons) == ("", None, None, {})
            texts = ["", ""]
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                assert stream.text == texts[0]
            assert stream.finish_reasons == {0: "length", 1: "length"}
            assert stream.usage.completion_tokens == 6 and stream.usage.prompt_tokens == 5
            assert stream.rotary.rope_type == "dynamic" and stream.rotary.effective_length == 5.0
            final = await stream.get_final()  # everything was read
            assert [choice.text for choice in final.choices] == texts


async def test_until_done_continues_an_iteration(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        whole = await client.completions("hello", max_tokens=6)
        stream = await client.completions("hello", max_tokens=6, stream=True)
        first = await anext(stream)
        assert whole.text.startswith(first.text) and first.text == stream.text != whole.text
        assert await stream.until_done() is stream
        assert stream.text == whole.text and stream.usage == whole.usage
        assert [chunk async for chunk in stream] == []


async def test_usage_is_requested_by_default(kind: str) -> None:
    script = events(END, "[DONE]")
    asked = [
        ({}, {"include_usage": True}),
        ({"stream_options": {"continuous_usage_stats": True}}, {"include_usage": True, "continuous_usage_stats": True}),
        ({"stream_options": {"include_usage": False}}, {"include_usage": False}),
        ({"extra_body": {"stream_options": {"include_usage": False}}}, {"include_usage": False}),
    ]
    async with scripted_client(kind, script) as (server, client):
        for options, _ in asked:
            stream = await (await client.completions("x", stream=True, **options)).until_done()
            assert stream.usage is None  # this server sends none
    assert [request.json["stream_options"] for request in server.requests] == [sent for _, sent in asked]


async def test_no_stream_options_without_stream(kind: str) -> None:
    async with scripted_client(kind, answer({**ENVELOPE, "choices": []})) as (server, client):
        await client.completions("x")
    assert server.requests[0].json == {"prompt": "x"}


@pytest.mark.parametrize("how", ["closed", "error event", "broken"])
async def test_incomplete_stream_has_no_final_response(kind: str, how: str) -> None:
    error = {"error": {"message": "engine died", "code": "engine_unavailable"}}
    scripts = {
        "closed": events(PART, hang=True),
        "error event": events(PART, error, "[DONE]"),
        "broken": events(PART, end=False),
    }
    async with scripted_client(kind, scripts[how]) as (_, client):
        stream = await client.completions("x", stream=True)
        await anext(stream)
        if how == "closed":
            await stream.aclose()
        else:
            failure = StreamError if how == "error event" else APIConnectionError
            with pytest.raises(failure, match="engine died" if how == "error event" else "broke"):
                await stream.get_final()
        with pytest.raises(StreamError, match="incomplete") as caught:
            await stream.get_final()
        assert stream.text == "part" and caught.value.request_id == "req-1"


async def test_streams_reuse_a_connection(kind: str) -> None:
    async with scripted_client(kind, events(END, "[DONE]")) as (server, client):
        for _ in range(3):
            assert (await (await client.completions("x", stream=True)).get_final()).text == "x"
    assert (len(server.requests), server.connections) == (3, 1)


@pytest.mark.parametrize("how", ["silent", "endless"])
async def test_draining_a_stream_is_bounded(kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_DRAIN_SECONDS", 0.05 if how == "silent" else 600.0)

    async def endless(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await exchange.chunk(b"data: " + json.dumps(END).encode() + b"\n\ndata: [DONE]\n\n")
        while True:
            await exchange.chunk(b": more" * 1000)

    async with scripted_client(kind, events(END, "[DONE]", hang=True) if how == "silent" else endless) as (
        server,
        client,
    ):
        stream = await client.completions("x", stream=True)
        assert [chunk.text async for chunk in stream] == ["x"] and stream.finish_reasons == {0: "stop"}
        assert await asyncio.to_thread(server.disconnects.wait, 30)


@pytest.mark.parametrize("how", ["closed", "error caught"])
async def test_iteration_of_an_interrupted_stream_raises(kind: str, how: str) -> None:
    with scripted_server(events(PART, hang=how != "error caught", end=False)) as server:
        async with any_client(kind, server.url) as client, await client.completions("x", stream=True) as stream:
            assert (await anext(stream)).text == "part"
            if how == "closed":
                await stream.aclose()
            else:
                with pytest.raises(APIConnectionError):
                    await anext(stream)
            for ask in (stream.until_done, stream.get_final):
                with pytest.raises(StreamError, match="incomplete"):
                    await ask()
            with pytest.raises(StreamError, match="incomplete"):
                async for _ in stream:
                    pass
        assert [chunk async for chunk in stream] == []  # after its block


@asynccontextmanager
async def waited_for() -> AsyncIterator[tuple[Any, asyncio.Future[Any], ScriptedServer]]:
    """A stream after its first chunk, a task that waits for the next, and the server that never sends it."""
    with scripted_server(events(PART, hang=True)) as server:
        async with AsyncClient(server.url) as client:
            stream = await client.completions("x", stream=True)
            assert (await anext(stream)).text == "part"
            waiting = asyncio.ensure_future(anext(stream))
            while not stream._chunks.ag_running:
                await asyncio.sleep(0)
            yield stream, waiting, server


async def test_stream_of_a_cancelled_task_is_incomplete() -> None:
    async with waited_for() as (stream, waiting, _):
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(StreamError, match="incomplete"):
            await anext(stream)


async def test_closing_wakes_a_task_that_waits_for_a_chunk() -> None:
    async with waited_for() as (stream, waiting, server):
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(APIConnectionError):
            await asyncio.wait_for(waiting, 10)
        assert await asyncio.to_thread(server.disconnects.wait, 30)


@pytest.mark.parametrize("read", [0, 1])
def test_closing_wakes_a_thread_that_waits_for_a_chunk(read: int) -> None:
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            next(stream)
        except BaseException as error:
            caught.append(error)

    with scripted_server(events(*[PART] * read, hang=True)) as server, Client(server.url) as client:
        stream = client.completions("x", stream=True)
        assert [next(stream).text for _ in range(read)] == ["part"] * read
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        eventually(lambda: stream._chunks.gi_running, 10)
        stream.close()
        stream.close()
        waiting.join(10)
        assert not waiting.is_alive() and server.disconnects.wait(30)
        assert isinstance(caught[0], APIConnectionError)
        with pytest.raises(StreamError, match="incomplete"):
            stream.get_final()


async def test_pieces_of_reasoning_and_of_tool_calls_are_joined(kind: str) -> None:
    def chat_chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
        return {**ENVELOPE, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    def call(index: int, arguments: str, **fields: Any) -> dict[str, Any]:
        function = {"arguments": arguments, **({"name": fields.pop("name")} if "name" in fields else {})}
        return {"index": index, "function": function, **fields}

    payloads = [
        chat_chunk(role="assistant", reasoning_content="Let me "),
        chat_chunk(reasoning_content="see."),
        chat_chunk(tool_calls=[call(0, "", id="c0", type="function", name="look")]),
        chat_chunk(tool_calls=[call(0, '{"x"'), call(1, "{", id="c1", type="function", name="wait")]),
        chat_chunk(tool_calls=[call(1, "}"), call(0, ": 1}")]),
        chat_chunk(finish="tool_calls"),
        {**ENVELOPE, "choices": [], "usage": USAGE},
        "[DONE]",
    ]
    async with scripted_client(kind, events(*payloads)) as (_, client):
        final = await (await client.chat([], stream=True)).get_final()
    message = final.choices[0].message
    assert (message.role, message.content, message.reasoning_content) == ("assistant", None, "Let me see.")
    assert message.to_dict()["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}},
        {"id": "c1", "type": "function", "function": {"name": "wait", "arguments": "{}"}},
    ]
    assert final.choices[0].finish_reason == "tool_calls" and final.usage.total_tokens == 5
