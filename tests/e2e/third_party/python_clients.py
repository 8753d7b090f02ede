"""Structured answers and tool calls through third-party Python clients of a running server (`checks` has the arguments).

Imports nothing of Windlass. URL: that of any OpenAI-compatible server, http://127.0.0.1:8000/v1 for example.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from checks import check, main
from pydantic import BaseModel

BASE, MODEL = sys.argv[1], sys.argv[2]
KEY = "none"
LENGTH = 300  # tokens: a small model may put many spaces between words
SHORT: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0}
QUESTION = "What is the weather in Rome?"


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Paris", "Oslo"]
    sky: Literal["sunny", "cloudy"]


class City(BaseModel):
    """City of the weather."""

    city: Literal["Rome", "Paris", "Oslo"]


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS},
}
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


def called(name: str, arguments: str | dict[str, Any]) -> str:
    """The city of a call, which must be one of the tool."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "weather" and set(given) == {"city"} and given["city"] in ("Rome", "Paris", "Oslo"), (name, given)
    return str(given["city"])


# --- openai ---------------------------------------------------------------------------------------------------------


def _openai() -> Any:
    import openai

    return openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=120)


@check
def openai_parse() -> None:
    answer = _openai().chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather, **SHORT)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@check
def openai_parse_streamed() -> None:
    with _openai().chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Weather, **SHORT) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    assert kinds.count("content.delta") > 1 and "content.done" in kinds


@check
def openai_tools() -> None:
    client = _openai()
    first = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", **SHORT
    ).choices[0]
    assert first.finish_reason == "tool_calls"
    weather = {call.id: called(call.function.name, call.function.arguments) for call in first.message.tool_calls}
    results = [{"role": "tool", "tool_call_id": call, "content": f"sunny in {city}"} for call, city in weather.items()]
    assert results
    history = [*MESSAGES, first.message, *results]
    second = client.chat.completions.create(
        model=MODEL, messages=history, tools=[TOOL], tool_choice="none", max_tokens=24
    )
    assert second.choices[0].message.content and not second.choices[0].message.tool_calls


@check
def openai_tools_streamed() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    with _openai().chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=named, **SHORT
    ) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    called(call.function.name, call.function.arguments)


# --- LangChain ------------------------------------------------------------------------------------------------------


def _langchain() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=BASE, api_key=KEY, model=MODEL, max_retries=0, timeout=120, **SHORT)


@check
def langchain_structured() -> None:
    for method in ("json_schema", "function_calling"):
        answer = _langchain().with_structured_output(Weather, method=method).invoke(QUESTION)
        assert isinstance(answer, Weather), (method, answer)


@check
def langchain_structured_streamed() -> None:
    pieces = list(_langchain().with_structured_output(Weather, method="json_schema").stream(QUESTION))
    assert isinstance(pieces[-1], Weather)


@check
def langchain_tools() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = _langchain()
    bound = model.bind_tools([TOOL], tool_choice="required")
    whole = bound.invoke(QUESTION)
    streamed = None
    for piece in bound.stream(QUESTION):
        streamed = piece if streamed is None else streamed + piece
    for answer in (whole, streamed):
        results = [
            ToolMessage("sunny in " + called(call["name"], call["args"]), tool_call_id=call["id"])
            for call in answer.tool_calls
        ]
        assert results
        assert model.invoke([HumanMessage(QUESTION), answer, *results]).content


@check
def langchain_agent() -> None:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy

    agent = create_agent(_langchain(), tools=[], response_format=ProviderStrategy(Weather))
    assert isinstance(agent.invoke({"messages": MESSAGES})["structured_response"], Weather)


# --- instructor -----------------------------------------------------------------------------------------------------


@check
def instructor_modes() -> None:
    import instructor

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(_openai(), mode=mode)
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_model=Weather, max_retries=0, **SHORT
        )
        assert isinstance(answer, Weather), mode


@check
def instructor_streamed() -> None:
    import instructor

    client = instructor.from_openai(_openai(), mode=instructor.Mode.TOOLS)
    pieces = list(
        client.chat.completions.create_partial(model=MODEL, messages=MESSAGES, response_model=Weather, **SHORT)
    )
    assert Weather.model_validate(pieces[-1].model_dump())


# --- litellm --------------------------------------------------------------------------------------------------------


def _litellm(messages: list[Any] = MESSAGES, **fields: Any) -> Any:
    import litellm

    server = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY}
    return litellm.completion(**server, messages=messages, num_retries=0, **SHORT, **fields)


@check
def litellm_structured() -> None:
    answer = _litellm(response_format=Weather).choices[0].message.content
    Weather.model_validate_json(answer)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in _litellm(response_format=Weather, stream=True))
    Weather.model_validate_json(streamed)


@check
def litellm_tools() -> None:
    import litellm

    asking = _litellm(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message
    (call,) = asking.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    called(call.function.name, call.function.arguments)
    for answer in (asking, asking.model_dump()):
        answered = _litellm([*MESSAGES, answer, result], tools=[TOOL], tool_choice="none").choices[0].message
        assert answered.content and not answered.tool_calls
    pieces = list(_litellm(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True))
    built = litellm.stream_chunk_builder(pieces)
    (call,) = built.choices[0].message.tool_calls
    called(call.function.name, call.function.arguments)


# --- LlamaIndex -----------------------------------------------------------------------------------------------------


def _llama_index() -> Any:
    from llama_index.llms.openai_like import OpenAILike

    abilities = {"is_chat_model": True, "is_function_calling_model": True}
    return OpenAILike(model=MODEL, api_base=BASE, api_key=KEY, max_retries=0, **abilities, **SHORT)


@check
def llama_index_structured() -> None:
    from llama_index.core.program import FunctionCallingProgram
    from llama_index.core.prompts import PromptTemplate

    llm = _llama_index()
    assert isinstance(llm.structured_predict(Weather, PromptTemplate(QUESTION)), Weather)
    # With stream_structured_predict, the model chooses whether to make a call.
    program = FunctionCallingProgram.from_defaults(
        output_cls=Weather, prompt=PromptTemplate(QUESTION), llm=llm, tool_choice="Weather"
    )
    *_, last = program.stream_call()
    assert Weather.model_validate(last.model_dump())


@check
def llama_index_tools() -> None:
    from llama_index.core.tools import FunctionTool

    asked: list[str] = []

    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"sunny in {city}"

    tool = FunctionTool.from_defaults(weather, fn_schema=City)
    answer = _llama_index().predict_and_call([tool], QUESTION, tool_required=True)
    assert asked and answer.response == f"sunny in {asked[0]}"
    *_, last = _llama_index().stream_chat_with_tools([tool], QUESTION, tool_required=True)
    (call, *_others) = _llama_index().get_tool_calls_from_response(last)
    called(call.tool_name, call.tool_kwargs)


# --- openai-agents --------------------------------------------------------------------------------------------------


def _agents(model: Any, asked: list[str], stop: str = "run_llm_again", **settings: Any) -> tuple[Any, Any]:
    """An agent with a structured answer, and one that must call a tool. asked: cities of its calls."""
    from agents import Agent, ModelSettings, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def weather(city: Literal["Rome", "Paris", "Oslo"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"sunny in {city}"

    structured = Agent(name="a", model=model, output_type=Weather, model_settings=ModelSettings(**SHORT))
    must = ModelSettings(**SHORT, tool_choice="required", **settings)
    return structured, Agent(name="b", model=model, tools=[weather], model_settings=must, tool_use_behavior=stop)


@check
def openai_agents() -> None:
    import openai
    from agents import OpenAIChatCompletionsModel, Runner

    asked: list[str] = []
    client = openai.AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=120)

    async def run() -> None:
        model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        structured, caller = _agents(model, asked, "stop_on_first_tool")
        assert isinstance((await Runner.run(structured, QUESTION)).final_output, Weather)
        assert (await Runner.run(caller, QUESTION)).final_output == f"sunny in {asked[0]}"
        result = Runner.run_streamed(caller, QUESTION)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds and result.final_output == f"sunny in {asked[-1]}"

    asyncio.run(run())
    assert len(asked) >= 2


# --- pydantic-ai ----------------------------------------------------------------------------------------------------


@check
def pydantic_ai() -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    for output in (NativeOutput(Weather), ToolOutput(Weather)):
        agent = Agent(model, output_type=output, model_settings=SHORT, retries=0)
        assert isinstance(agent.run_sync(QUESTION).output, Weather)

        async def streamed(agent: Any = agent) -> None:
            async with agent.run_stream(QUESTION) as result:
                assert isinstance(await result.get_output(), Weather)

        asyncio.run(streamed())


# --- openai and openai-agents with /v1/responses ----------------------------------------------------------------------


@check
def items_openai() -> None:
    client, tool = _openai(), {"type": "function", **TOOL["function"], "strict": True}
    asked: dict[str, Any] = {"model": MODEL, "tools": [tool], "max_output_tokens": LENGTH, "temperature": 0}
    first = client.responses.create(input=QUESTION, tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": f"sunny in {called(call.name, call.arguments)}",
    }
    answered = client.responses.create(input=[result], previous_response_id=first.id, tool_choice="none", **asked)
    assert answered.output_text and answered.usage.input_tokens > first.usage.input_tokens
    chosen = {"type": "function", "name": "weather"}
    with client.responses.stream(input=QUESTION, tool_choice=chosen, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and "response.function_call_arguments.done" in kinds
    assert kinds[-1] == "response.completed" and called(final.output[0].name, final.output[0].arguments)
    parsed = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=LENGTH, temperature=0
    )
    assert isinstance(parsed.output_parsed, Weather)


@check
def items_agents() -> None:
    import openai
    from agents import Runner, set_default_openai_client

    set_default_openai_client(openai.AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=120))
    asked: list[str] = []

    async def run() -> None:
        structured, caller = _agents(MODEL, asked, parallel_tool_calls=False)
        assert isinstance((await Runner.run(structured, QUESTION)).final_output, Weather)
        answered = await Runner.run(caller, QUESTION, max_turns=3)
        assert isinstance(answered.final_output, str) and len(asked) == 1
        streamed = Runner.run_streamed(caller, QUESTION, max_turns=3)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds and "run_item_stream_event" in kinds and len(asked) == 2

    asyncio.run(run())


# --- anthropic ------------------------------------------------------------------------------------------------------


@check
def items_anthropic() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=BASE.removesuffix("/v1"), api_key=KEY, max_retries=0, timeout=120)
    short: dict[str, Any] = {"model": MODEL, "max_tokens": LENGTH, "extra_body": {"temperature": 0}}
    plain = client.messages.create(messages=MESSAGES, system="Be brief.", **short)
    assert plain.type == "message" and plain.content[0].text and plain.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)
    with client.messages.stream(messages=MESSAGES, system="Be brief.", **short) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == plain.content[0].text and final.stop_reason == plain.stop_reason

    tool: Any = {"name": "weather", "description": "The weather in a city.", "input_schema": PARAMETERS}
    offer: dict[str, Any] = {**short, "tools": [tool]}
    one = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    asking = client.messages.create(messages=MESSAGES, tool_choice=one, **offer)
    (call,) = asking.content
    assert asking.stop_reason == "tool_use" and called(call.name, call.input)
    with client.messages.stream(messages=MESSAGES, tool_choice=one, **offer) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_message().content[0].input == call.input and "input_json" in kinds
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*MESSAGES, {"role": "assistant", "content": asking.content}, {"role": "user", "content": [result]}]
    answered = client.messages.create(messages=history, tool_choice={"type": "none"}, **offer)
    assert answered.content[0].type == "text"
    try:
        client.messages.create(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}], **short)
    except anthropic.BadRequestError as error:
        assert error.body["error"]["param"] == "messages[0].content[0].type" and error.request_id
    else:
        raise AssertionError("an image was accepted")


if __name__ == "__main__":
    sys.exit(main())
