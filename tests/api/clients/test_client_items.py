"""`responses` and `messages` of both clients: streams equal whole responses, tool calls, incomplete streams."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from api_helpers.any_client import any_client, scripted_client
from helpers.live_server import Live, server_fixture
from helpers.scripted_http import events

from windlass.clients import BadRequestError, Message, NotFoundError, Response, StreamError
from windlass.engine.errors import EngineDeadError

pytestmark = pytest.mark.anyio
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.reasoning %}<{{ message.reasoning }}>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{# <think> </think> #}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
LOOK = {"type": "function", "name": "look", "parameters": SCHEMA}
USE = {"name": "look", "input_schema": SCHEMA}
TEXT = '<think>so</think>Wait. <tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
USER = [{"role": "user", "content": "hi"}]
shared = server_fixture(
    template=TEMPLATE, tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"), model={"max_model_len": 4096}
)


@pytest.fixture
def live(live: Live) -> Live:
    live.generate(TEXT)
    return live


def lasting(whole: Response | Message) -> Any:
    """The response without ids and times."""
    if isinstance(whole, Message):
        blocks = tuple(dataclasses.replace(block, id=None) for block in whole.content)
        return dataclasses.replace(whole, id="", request_id=None, content=blocks)
    items = tuple(dataclasses.replace(item, id=None, call_id=None) for item in whole.output)
    return dataclasses.replace(whole, id="", request_id=None, created_at=0, output=items)


async def test_response_equals_its_stream(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        whole = await client.responses("hi", tools=[LOOK], max_output_tokens=300, request_id="mine")
        assert (whole.text, whole.reasoning, whole.status, whole.request_id) == ("Wait.", "so", "completed", "mine")
        (call,) = whole.calls
        assert (call.name, call.values) == ("look", {"city": "Rome"}) and whole.usage.output_tokens > 20
        async with await client.responses("hi", tools=[LOOK], max_output_tokens=300, stream=True) as stream:
            text = "".join([event.text async for event in stream])
            final = await stream.get_final()
            assert (text, stream.text, stream.reasoning) == ("Wait.", "Wait.", "so")
            assert [call.function.values for call in stream.tool_calls] == [{"city": "Rome"}]
            assert stream.finish_reasons == {0: "completed"}
            assert stream.usage.total_tokens == final.usage.total_tokens == whole.usage.total_tokens
    assert lasting(final) == lasting(whole)


async def test_custom_tools(live: Live, kind: str) -> None:
    live.generate('<tool_call>\n{"name": "files__patch", "arguments": {"input": "a b"}}\n</tool_call>')
    tools = [{"type": "namespace", "name": "files", "tools": [{"type": "custom", "name": "patch"}]}]
    async with any_client(kind, live.url) as client:
        first = await client.responses("hi", tools=tools)
        (call,) = first.calls
        assert (call.type, call.namespace, call.name, call.input) == ("custom_tool_call", "files", "patch", "a b")
        await client.responses([*USER, *first.output, call.reply("done")], tools=tools, max_output_tokens=1)
    assert '<tool_call>{"name": "files__patch", "arguments": {"input": "a b"}}</tool_call>[tool]done' in live.prompt


async def test_conversation_of_responses(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        first = await client.responses("hi", tools=[LOOK], max_output_tokens=300)
        result = first.calls[0].reply("sun")
        second = await client.responses([result], previous_response_id=first.id, tools=[LOOK], max_output_tokens=9)
        kept = live.prompt
        counted = await client.count_input([result], previous_response_id=first.id, tools=[LOOK])
        assert counted == len(live.engine.requests[-1].prompt_token_ids)
        assert await client.count_input(previous_response_id=second.id, tools=[LOOK]) > counted
        again = await client.responses([*USER, *first.output, result], tools=[LOOK], max_output_tokens=9)
        assert live.prompt == kept and kept.endswith("[tool]sun") and "<so>Wait.<tool_call>" in kept
        assert again.status == "incomplete" and again.incomplete_details == {"reason": "max_output_tokens"}
        assert lasting(await client.response(first.id)) == lasting(first)
        page = await client.response_items(again.id, order="asc", limit=2)
        assert [item.type for item in page.data] == ["message", "reasoning"] and page.has_more
        rest = await client.response_items(again.id, order="asc", after=page.last_id)
        assert [item.type for item in rest.data] == ["message", "function_call", "function_call_output"]
        assert rest.data[-1].output == "sun" and not rest.has_more
        assert await client.delete_response(first.id)
        with pytest.raises(NotFoundError):
            await client.response(first.id)
        with pytest.raises(NotFoundError) as caught:
            await client.responses("a", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


async def test_message_equals_its_stream(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        whole = await client.messages(USER, 300, tools=[USE], system="Be kind.")
        assert (whole.text, whole.reasoning, whole.stop_reason) == ("Wait.", "so", "tool_use")
        assert whole.calls[0].input == {"city": "Rome"}
        counted = await client.count_tokens(USER, tools=[USE], system="Be kind.")
        assert counted == len(live.engine.requests[-1].prompt_token_ids) == whole.usage.input_tokens
        async with await client.messages(USER, 300, tools=[USE], system="Be kind.", stream=True) as stream:
            text = "".join([event.text async for event in stream])
            final = await stream.get_final()
            assert (text, stream.text, stream.reasoning) == ("Wait.", "Wait.", "so")
            assert stream.finish_reasons == {0: "tool_use"} and stream.tool_calls[0].name == "look"
            assert stream.usage.completion_tokens == whole.usage.output_tokens
        assert lasting(final) == lasting(whole)
        result = {"role": "user", "content": [final.calls[0].reply("no", is_error=True)]}
        await client.messages([*USER, final, result], 5, tools=[USE])
    assert "<so>Wait.<tool_call>" in live.prompt and live.prompt.endswith("[tool]Error: no")


async def test_failures(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        with pytest.raises(BadRequestError) as refused:
            await client.messages(USER, 0)
        assert (refused.value.param, refused.value.type) == ("max_tokens", "invalid_request_error")
        live.engine.fail_after = (2, EngineDeadError("gone"))
        for call in (client.responses("a", stream=True), client.messages(USER, 9, stream=True)):
            async with await call as stream:
                with pytest.raises(StreamError, match="gone"):
                    await stream.until_done()
                with pytest.raises(StreamError, match="incomplete"):
                    await stream.get_final()


CUT: list[tuple[str, list[dict[str, Any]], str]] = [
    ("responses", [{"type": "response.created"}, {"type": "response.output_text.delta", "delta": "a"}],
     "ended without response.completed"),
    ("responses", [{"type": "error", "message": "no", "code": "x"}], "^no"),
    ("responses", [{"type": "response.completed"}], "ended without"),
    ("messages", [{"type": "message_start", "message": {"id": "m"}}], "ended without message_stop"),
    ("messages", [{"type": "message_start", "message": {"id": "m"}}, {"type": "message_stop"}], "without a finish_reason"),
    ("messages", [{"type": "message_stop"}], "without a finish_reason"),
    ("messages", [{"type": "error", "error": {"type": "api_error", "message": "no"}}], "^no"),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "sent", "said"), CUT)
async def test_incomplete_stream_of_events_raises(
    kind: str, endpoint: str, sent: list[dict[str, Any]], said: str
) -> None:
    async with scripted_client(kind, events(*sent)) as (_, client):
        call = client.responses("a", stream=True) if endpoint == "responses" else client.messages(USER, 5, stream=True)
        async with await call as stream:
            with pytest.raises(StreamError, match=said):
                await stream.get_final()
