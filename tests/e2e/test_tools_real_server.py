"""Required tool calls of a real server: a model that was not trained for tools makes valid ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from helpers.real_server import serve

USER: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    },
    "time": {"type": "object", "properties": {}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serve() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=USER, **{"tools": TOOLS, "max_tokens": 200, **fields})


def checked(calls: Any) -> list[tuple[str, Any]]:
    found = []
    for call in calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name] | {"additionalProperties": False})
        assert call.type == "function" and call.id.startswith("call_")
        found.append((call.function.name, arguments))
    return found


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_required_call_is_valid(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=1, n=4)
    for each in answer.choices:
        assert each.finish_reason == "tool_calls" and each.message.content is None
        ((name, _),) = checked(each.message.tool_calls)
        assert choice == "required" or name == "weather"


def test_several_calls_are_valid(client: openai.OpenAI) -> None:
    """The small model does not stop by itself, so the last call may be incomplete."""
    choice = ask(client, tool_choice="required", temperature=1, seed=1, max_tokens=150).choices[0]
    calls = choice.message.tool_calls
    assert len(checked(calls if choice.finish_reason == "tool_calls" else calls[:-1])) >= 1
    assert not choice.message.content


def test_stream_has_the_same_calls(client: openai.OpenAI) -> None:
    plain = ask(client, tool_choice="required", temperature=0, parallel_tool_calls=False).choices[0]
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(
        model="demo", messages=USER, temperature=0, max_tokens=200, **options
    ) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert checked(final.message.tool_calls) == checked(plain.message.tool_calls)
    assert len(final.message.tool_calls) == 1 and "tool_calls.function.arguments.done" in names
    assert final.finish_reason == plain.finish_reason == "tool_calls"


class Weather(pydantic.BaseModel):
    """The weather."""

    days: int = pydantic.Field(ge=1, le=9)


def test_openai_package_parses_a_required_call(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    answer = client.chat.completions.parse(
        model="demo", messages=USER, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=100
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_results_of_calls_are_answered(client: openai.OpenAI) -> None:
    made = ask(client, tool_choice=NAMED, temperature=0).choices[0].message
    messages = [*USER, made.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in made.tool_calls]
    answer = client.chat.completions.create(
        model="demo", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_legacy_functions_are_called(client: openai.OpenAI) -> None:
    functions = [tool["function"] for tool in TOOLS]
    answer = client.chat.completions.create(
        model="demo", messages=USER, functions=functions, function_call={"name": "time"}, max_tokens=100
    )
    call = answer.choices[0].message.function_call
    assert (call.name, call.arguments) == ("time", "{}")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}},
        {"type": "object", "properties": {"x": {"$ref": "https://example.org/schema.json"}}},
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}},
        {"type": "object", "properties": {"x": False}, "required": ["x"]},
    ],
)
def test_unsupported_schema_of_a_required_call_is_refused(client: openai.OpenAI, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[tool], tool_choice="required")
    assert caught.value.param == "tool_choice" and caught.value.code
    ask(client, tools=[tool], tool_choice="auto", max_tokens=1)
