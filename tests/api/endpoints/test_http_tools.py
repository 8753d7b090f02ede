"""Tools over HTTP with a scripted engine, also through the openai package: offered, called, answered, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from helpers.chat_chunks import assembled
from helpers.live_server import Live, live_server, server_fixture
from pydantic_core import to_jsonable_python

from windlass.server.config.server_options import TOOL_CALL_PARSERS
from windlass.server.schemas.messages import CustomTool, function_definitions
from windlass.server.text.tool_parsers.formats import FORMATS, detect

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for tool in tools or [] %}({{ tool | tojson }}){% endfor %}{% for message in messages %}[{{ message.role }}]"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FIND = {"type": "function", "function": {"name": "find"}}
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ROME}}}\n</tool_call>'
MARKERS = ("<tool_call>", "</tool_call>")  # special tokens are not part of the text
SERVER: dict[str, Any] = {"tokens": MARKERS, "model": {"max_model_len": 4096}}
shared = server_fixture(template=TEMPLATE, **SERVER)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """The choice among these functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def ask(live: Live, **fields: Any) -> dict[str, Any]:
    """The choice of a complete answer, which the stream must equal except for ids of calls."""
    body = {"messages": USER, "max_tokens": 400, **fields}
    choice: dict[str, Any] = live.request(PATH, **body)["choices"][0]
    streamed = assembled(live.stream(PATH, body)[:-1])
    assert anonymous(streamed["message"]) == anonymous(choice["message"])
    assert streamed["finish_reason"] == choice["finish_reason"]
    return choice


def anonymous(message: dict[str, Any]) -> dict[str, Any]:
    return message | (
        {"tool_calls": [{**call, "id": ""} for call in calls]} if (calls := message.get("tool_calls")) else {}
    )


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_call_is_parsed_from_the_text(live: Live, at_once: int) -> None:
    live.generate(f"Wait.\n{CALL}\n{CALL}")
    live.engine.tokens_per_output = at_once
    choice = ask(live, tools=[LOOK, FIND])
    assert choice["finish_reason"] == "tool_calls"
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function" and first["function"] == second["function"] == {
        "name": "look",
        "arguments": ROME,
    }
    assert first["id"] != second["id"] and first["id"].startswith("call_") and choice["message"]["content"] == "Wait."


def test_lone_surrogate_in_a_call(live: Live) -> None:
    live.generate(r'<tool_call>{"name": "a\ud83d", "arguments": "{\"city\": \"\ude00 \ud83d\ude00\"}"}</tool_call>')
    call = {"name": "a\ufffd", "arguments": '{"city": "\ufffd \U0001f600"}'}
    assert ask(live, tools=[LOOK])["message"]["tool_calls"][0]["function"] == call
    tool = {"type": "function", "name": "look"}
    (item,) = live.post("/v1/responses", {"input": "hello", "tools": [tool]}).json()["output"]
    assert {name: item[name] for name in call} == call
    tool = {"name": "look", "input_schema": {"type": "object"}}
    (block,) = live.post("/v1/messages", {"messages": USER, "max_tokens": 400, "tools": [tool]}).json()["content"]
    assert (block["name"], block["input"]) == (call["name"], json.loads(call["arguments"]))


def test_content_of_a_call_without_text_is_null(live: Live) -> None:
    live.generate(CALL)
    assert ask(live, tools=[LOOK])["message"]["content"] is None
    live.generate("Hello.")
    assert ask(live, tools=[LOOK])["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}


def test_the_template_shows_the_tools(live: Live) -> None:
    ask(live, tools=[LOOK, FIND | {"function": {"name": "find", "strict": True, "description": None}}])
    assert live.prompt.startswith(f"({json.dumps(LOOK)})({json.dumps(FIND)})[user]hello")
    counted = live.post("/tokenize", {"messages": USER, "tools": [LOOK, FIND]}).json()["tokens"]
    assert counted == live.engine.requests[-1].prompt_token_ids


def test_tool_choice_none_shows_tools_without_parsing_calls(live: Live) -> None:
    live.generate(CALL)
    choice = ask(live, tools=[LOOK], tool_choice="none")
    assert "look" in live.prompt
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == CALL.replace("<tool_call>", "").replace("</tool_call>", "")  # special tokens


def test_parallel_calls_disabled(live: Live) -> None:
    live.generate(CALL * 3)
    assert len(ask(live, tools=[LOOK], parallel_tool_calls=False)["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(live: Live, mode: str) -> None:
    """A text that names another function is not a call, if no grammar prevents it."""
    live.generate(f'{CALL.replace("look", "find")}{CALL}<tool_call>{{"name": "made up"}}</tool_call>')
    choice = ask(live, tools=[LOOK, FIND], tool_choice=allowed(mode, "look"))
    assert live.prompt.startswith(f"({json.dumps(LOOK)})({json.dumps(FIND)})")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look", "made up"]
    assert (live.engine.requests[-1].sampling.grammar is not None) is (mode == "required")
    if mode == "auto":
        assert choice["message"]["content"] == CALL.replace("look", "find")
    live.generate(CALL + CALL.replace("look", "find"))
    choice = ask(live, tools=[LOOK, FIND], tool_choice=allowed(mode, "find", "look", "look"))
    assert len(choice["message"]["tool_calls"]) == 2 and choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("path", "tool", "kinds"),
    [
        (PATH, {"type": "custom", "custom": {"name": "x"}}, "function"),
        (PATH, {"type": "web_search"}, "function"),
        ("/v1/responses", {"type": "functoin", "name": "x"}, "function, custom and namespace"),
    ],
)
def test_unsupported_kind_of_tool_is_named(live: Live, path: str, tool: dict[str, Any], kinds: str) -> None:
    error = live.refuse(path, {"messages" if path == PATH else "input": USER, "tools": [tool]})
    assert error["code"] == "unsupported_field"
    assert error["message"].endswith(f"{tool['type']!r} is not among the tools that are supported: {kinds}")


def test_many_tools(live: Live) -> None:
    tools = [{"type": "function", "function": {"name": f"look_{number}"}} for number in range(1025)]
    template = "{{ tools | length }} {{ tools[0].function.name }} {{ messages[0].content }}{# <tool_call> #}"
    with live_server(template=template, tokens=("<tool_call>", "</tool_call>")) as counting:
        counting.generate('<tool_call>\n{"name": "look_1023", "arguments": {}}\n</tool_call>')
        choice = ask(counting, tools=tools[:1024], tool_choice="required")
        assert (
            counting.prompt == "1024 look_0 hello"
            and choice["message"]["tool_calls"][0]["function"]["name"] == "look_1023"
        )
    assert live.refusal(PATH, {"messages": USER, "tools": tools}) == ("tools", "invalid_value")


def test_a_pattern_with_look_ahead(live: Live) -> None:
    """It is ignored, unless the function is strict and a call of it is required."""
    name = {"type": "string", "pattern": "^(?!x)[a-z]+$"}
    function = {"name": "look", "parameters": {"type": "object", "properties": {"city": name}, "required": ["city"]}}
    loose = [{"type": "function", "function": function}]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    live.generate(CALL)
    for tools, choice in ((loose, "auto"), (loose, "required"), (strict, "auto")):
        assert ask(live, tools=tools, tool_choice=choice)["message"]["tool_calls"][0]["function"]["arguments"] == ROME
    error = live.refuse(PATH, {"messages": USER, "tools": strict, "tool_choice": "required"})
    assert error["code"] == "invalid_grammar" and "'look'" in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_results_that_are_not_text_become_notes(live: Live, kind: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ROME}}
    parts = [{"type": "text", "text": "a view"}, {"type": kind, kind: {"url": "data:,"}}]
    turns = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": parts},
    ]
    ask(live, messages=turns, tools=[LOOK])
    assert "a view\n[" in live.prompt and "omitted: this model reads only text]" in live.prompt
    assert live.refusal(PATH, {"messages": [{"role": "user", "content": parts}]})[0] == "messages[0].content"


def test_older_form_of_calls(live: Live) -> None:
    live.generate(CALL)
    choice = ask(live, functions=[LOOK["function"]], function_call="auto")
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "look", "arguments": ROME}
    assert "tool_calls" not in choice["message"]


def test_a_call_cut_short_ends_with_length(live: Live) -> None:
    live.generate(CALL)
    choice = ask(live, tools=[LOOK], max_tokens=len(CALL) - 40)
    assert choice["finish_reason"] == "length"


@pytest.mark.slow
def test_stop_string_in_a_call_ends_it(live: Live) -> None:
    live.generate(CALL)
    for stop, arguments in (("Ro", '{"city": "'), ("city", '{"')):
        choice = ask(live, tools=[LOOK], stop=[stop])
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
        older = ask(live, functions=[LOOK["function"]], stop=[stop])
        assert older["finish_reason"] == "stop" and older["message"]["function_call"]["arguments"] == arguments
    live.generate(f"{CALL} Done")
    assert ask(live, tools=[LOOK], stop=["Done"])["finish_reason"] == "tool_calls"
    live.generate(CALL + CALL.replace("Rome", "Oslo"))
    first, second = (both := ask(live, tools=[LOOK], stop=["slo"]))["message"]["tool_calls"]
    assert both["finish_reason"] == "stop" and first["function"]["arguments"] == ROME
    assert second["function"]["arguments"] == '{"city": "O'
    live.generate(CALL.replace(ROME, '{"city": Rome}'))  # the model's own fault
    for stop in (None, ["\n</tool"]):
        assert ask(live, tools=[LOOK], stop=stop)["finish_reason"] == "tool_calls"
    live.generate(CALL.replace('"Rome"', "[" * 3000))
    assert ask(live, tools=[LOOK], stop=["\n</tool"], max_tokens=3900)["finish_reason"] == "stop"


@pytest.mark.parametrize("required", [False, True])
def test_a_stop_string_before_the_arguments_of_a_second_call(live: Live, required: bool) -> None:
    """The first call is complete; the start of the second one stays in the text if content is permitted."""
    live.generate(CALL + CALL.replace("look", "find"))
    choice = ask(live, tools=[LOOK, FIND], stop=['find"'], tool_choice="required" if required else "auto")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": ROME}
    assert choice["message"]["content"] == (None if required else '<tool_call>\n{"name": "')
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", 'find"')


def test_each_choice_has_its_own_calls(live: Live) -> None:
    live.generate(CALL)
    body = {"messages": USER, "max_tokens": 400, "tools": [LOOK], "n": 3}
    choices = live.post(PATH, body).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1, 1]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3
    chunks = live.stream(PATH, body)[:-1]
    for index in range(3):
        assert anonymous(assembled(chunks, index)["message"]) == anonymous(choices[0]["message"])


def test_a_round_trip(live: Live) -> None:
    live.generate(CALL)
    message = ask(live, tools=[LOOK])["message"] | {"parsed": {"as": "the openai package leaves it"}}
    message["tool_calls"][0]["function"]["parsed_arguments"] = {"city": "Rome"}
    result = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": [{"type": "text", "text": "sun"}],
    }
    live.generate("Sunny.")
    assert ask(live, tools=[LOOK], messages=[*USER, message, result])["message"]["content"] == "Sunny."
    assert live.prompt.endswith(f'<tool_call>{{"name": "look", "arguments": {ROME}}}</tool_call>[tool]sun')


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("arguments", ['{"a":', "Rome", "[1]", "[" * 10_000, '{"a": NaN}', '{"a": 1e301}'])
def test_arguments_other_than_objects_are_shown_as_text(live: Live, arguments: str) -> None:
    """Any output of a model must be accepted, or the conversation could not continue."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "a", "content": "no"}
    live.engine.info = replace(live.engine.info, max_model_len=20_000)
    for made, answer in (
        ({"tool_calls": [call]}, result),
        ({"function_call": call["function"]}, {"role": "function", "name": "look", "content": "no"}),
    ):
        ask(live, messages=[*USER, {"role": "assistant", **made}, answer])
        shown = json.dumps({"name": "look", "arguments": {"arguments": arguments}}, ensure_ascii=False)
        assert live.prompt.endswith(f"<tool_call>{shown}</tool_call>[{answer['role'].replace('function', 'tool')}]no")


def test_chat_accepts_the_tools_of_messages(live: Live) -> None:
    """`windlass replay` sends recorded messages with tools as chats."""
    (offered,) = function_definitions([CustomTool(name="x" * 128, input_schema={})])
    live.generate("Hello.")
    assert ask(live, tools=[to_jsonable_python(offered, exclude_none=True)])["message"]["content"] == "Hello."
    assert "x" * 128 in live.prompt


def test_server_without_call_parser() -> None:
    with live_server(template=TEMPLATE, tool_call_parser="none", **SERVER) as live:
        live.generate("x " + CALL)
        assert "tool_calls" not in ask(live, tools=[LOOK])["message"]
        assert (
            live.refuse(PATH, {"messages": USER, "tools": [LOOK], "tool_choice": "required"})["param"] == "tool_choice"
        )


def test_the_openai_package_reads_calls(live: Live) -> None:
    live.generate(f"Wait. {CALL}")
    offer: dict[str, Any] = {"model": "toy", "messages": USER, "tools": [LOOK], "max_tokens": 400}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**offer)
        with client.chat.completions.stream(**offer) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
    assert answer.choices[0].message.tool_calls[0].function.arguments == ROME
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls" and final.message.content == "Wait."
    assert final.message.tool_calls[0].function.arguments == ROME


def test_a_template_of_single_calls_gets_one() -> None:
    refusal = "{{ raise_exception('This model only supports single tool-calls at once!') }}"
    template = TEMPLATE.replace("[{{", "{% if message.tool_calls | length > 1 %}" + refusal + "{% endif %}[{{")
    with live_server(template=template, **SERVER) as live:
        live.generate(CALL * 2)
        assert len(ask(live, tools=[LOOK])["message"]["tool_calls"]) == 1


def test_call_within_open_thinking() -> None:
    template = TEMPLATE + "<think>\n{# <tool_call> #}"
    with live_server(template=template, tokens=(*MARKERS, "<think>", "</think>"), model=SERVER["model"]) as live:
        live.generate(f"I look.\n{CALL}\n</think>\n\n")
        choice = ask(live, tools=[LOOK])
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning"] == "I look."
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ROME and not choice["message"]["content"]
        live.generate(f"I look.\n{CALL}\n</think>\n\nHi.")  # without tools nothing is a call
        message = ask(live)["message"]
        assert message["content"] == "Hi." and message["reasoning"].startswith("I look.")


def test_special_tokens_around_calls_are_no_text() -> None:
    markers = FORMATS["kimi_k2"].markers
    begin, middle = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    with live_server(template=TEMPLATE + f"{{# {begin} #}}", tokens=sorted(markers), model=SERVER["model"]) as live:
        live.generate(
            f"Wait.<|tool_calls_section_begin|>{begin}functions.look:0{middle}{ROME}<|tool_call_end|><|tool_calls_section_end|>"
        )
        message = ask(live, tools=[LOOK])["message"]
        assert message["content"] == "Wait."
        assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": ROME}


TEMPLATES = {
    "hermes": "<tools></tools> return a json object within <tool_call></tool_call> XML tags",
    "qwen3_coder": "<tool_call>\n<function=x>\n<parameter=y>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}',
    "lfm2": 'ns.system_prompt + "List of tools: <|tool_list_start|>["',
    "pythonic": "<|python_start|>[func_name1(params_name1=params_value1)]",
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "mistral_args": "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>x\n```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>",
    "gemma4": "<|tool_call>call:{{ name }}{<tool_call|>",
    "granite": "<|tool_call|>[…]",
    "plain_json": "{{ messages }}",
}


def test_call_format_is_detected_from_the_template() -> None:
    assert {name: detect(text).name for name, text in TEMPLATES.items()} == {name: name for name in TEMPLATES}
    assert set(TOOL_CALL_PARSERS) == set(FORMATS)
    assert detect(None).name == "plain_json"
    for text in ('"List of tools: ["', "List of tools: {{ tools | tojson }} <|tool_call_start|>["):  # of later LFMs
        assert detect(text).name == "lfm2"
    assert len(FORMATS["mistral"].new_id()) == 9 and FORMATS["mistral"].new_id().isalnum()
