"""`client.responses` of the unmodified `openai` package: streams, tools, formats, stored responses and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from helpers.live_server import MODEL, Live, server_fixture

from windlass.engine.errors import EngineDeadError

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{# <think> </think> <tool_call> #}"
TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = '<think>so</think>Wait. <tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
shared = server_fixture(
    template=TEMPLATE, tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"), model={"max_model_len": 4096}
)


class Animal(pydantic.BaseModel):
    legs: int


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_tool_call_loop(live: Live, client: openai.OpenAI) -> None:
    live.generate(CALL)
    history: list[Any] = [{"role": "user", "content": "hi"}]
    first = client.responses.create(model=MODEL, input=history, tools=[TOOL], max_output_tokens=300)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == "Wait." and first.output[0].content[0].text == "so"
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    live.generate("Sunny.")
    again = client.responses.create(model=MODEL, input=[*history, *first.output, result], tools=[TOOL])
    kept = client.responses.create(model=MODEL, input=[result], previous_response_id=first.id, tools=[TOOL])
    assert again.output_text == kept.output_text == "Sunny."
    assert live.engine.requests[-1].prompt_token_ids == live.engine.requests[-2].prompt_token_ids
    assert (
        again.usage.output_tokens_details.reasoning_tokens == 0 and again.usage.input_tokens_details.cached_tokens == 0
    )


def test_response_stream_helper(live: Live, client: openai.OpenAI) -> None:
    live.generate(CALL)
    asked: Any = {"model": MODEL, "input": "hi", "tools": [TOOL], "max_output_tokens": 300}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and final.output_text == "Wait."
    assert final.output[-1].arguments == '{"city": "Rome"}' and final.output[-1].name == "look"
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ['{"city": "Rome"}']
    raw = [event.type for event in client.responses.create(**asked, stream=True)]
    assert raw == [event.type for event in events]


def test_input_token_count(live: Live, client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hi", instructions="Be kind.")
    counted = client.responses.input_tokens.count(model=MODEL, input="hi", instructions="Be kind.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)


def test_parsed_response(live: Live, client: openai.OpenAI) -> None:
    live.generate('{"legs": 4}')
    answer = client.responses.parse(model=MODEL, input="hi", text_format=Animal)
    assert answer.output_parsed == Animal(legs=4) and live.engine.requests[-1].sampling.grammar is not None


def test_stored_responses(live: Live, client: openai.OpenAI) -> None:
    live.generate("Hello.")
    answer = client.responses.create(model=MODEL, input="hi", metadata={"a": "b"})
    assert client.responses.retrieve(answer.id).output_text == "Hello."
    (item,) = client.responses.input_items.list(answer.id, order="asc")
    assert item.content[0].text == "hi"
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="hi", previous_response_id=answer.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_invalid_tool_and_failed_stream(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="hi", tools=[{"type": "nothing"}])
    assert caught.value.param == "tools[0].type" and "'nothing'" in caught.value.message
    live.engine.fail_after = (2, EngineDeadError("gone"))
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.message == "gone"
