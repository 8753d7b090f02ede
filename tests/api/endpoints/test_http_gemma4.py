"""Output of Gemma 4 over HTTP with a scripted engine: thinking and calls in every API, complete and streamed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from helpers.chat_chunks import assembled
from helpers.live_server import Live, server_fixture
from helpers.parsed_answers import numbered, put_together

from windlass.engine.interface.request import ThinkingBudget
from windlass.server.text.chat_template import ChatTemplate
from windlass.server.text.reasoning import GEMMA4, ChannelParser
from windlass.server.text.stream_parser import Event, ParsingPlan
from windlass.server.text.tool_parsers.formats import FORMATS

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
# Google's template, abridged.
TEMPLATE = """
{%- macro value(it) -%}
{%- if it is string %}{{ '<|"|>' ~ it ~ '<|"|>' }}
{%- elif it is boolean %}{{ 'true' if it else 'false' }}
{%- elif it is mapping %}{{ '{' }}{{ members(it) }}{{ '}' }}
{%- elif it is sequence %}{{ '[' }}{% for one in it %}{{ value(one) ~ ('' if loop.last else ',') }}{% endfor %}{{ ']' }}
{%- else %}{{ it }}{% endif -%}
{%- endmacro -%}
{%- macro members(it) -%}
{%- for key, one in it | dictsort %}{{ key ~ ':' ~ value(one) ~ ('' if loop.last else ',') }}{% endfor -%}
{%- endmacro -%}
{{- '<|turn>system\\n' ~ ('<|think|>\\n' if enable_thinking | default(false) else '') -}}
{%- for tool in tools or [] -%}
{{- '<|tool>declaration:' ~ tool['function']['name'] ~ '{' ~ members(tool['function']['parameters'] or {}) ~ '}<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- set last = namespace(role='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- '<|tool_response>response:' ~ message['name'] | default('unknown') ~ '{value:' -}}
{{- value(message['content']) ~ '}<tool_response|>' -}}
{%- else -%}
{{- '' if last.role == 'tool' else '<|turn>' ~ ('model' if message['role'] == 'assistant' else message['role']) ~ '\\n' -}}
{%- if message.get('reasoning') and message['tool_calls'] -%}
{{- '<|channel>thought\\n' ~ message['reasoning'] ~ '\\n<channel|>' -}}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '<|tool_call>call:' ~ call['function']['name'] ~ '{' -}}
{{- members(arguments) if arguments is mapping else arguments -}}
{{- '}<tool_call|>' -}}
{%- endfor -%}
{{- message['content'] or '' -}}
{{- '' if message['tool_calls'] else '<turn|>\\n' -}}
{%- endif -%}
{%- set last.role = message['role'] -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '' if last.role == 'tool' else '<|turn>model\\n' -}}
{{- '<|channel>thought\\n' if last.role == 'tool' and enable_thinking | default(false) else '' -}}
{{- '' if last.role == 'tool' or enable_thinking | default(false) else '<|channel>thought\\n<channel|>' -}}
{%- endif -%}
"""
TOKENS = (
    *("<|turn>", "<turn|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    *("<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = '<|tool_call>call:look{city:<|"|>Rome<|"|>,days:3}<tool_call|>'
ROME = {"city": "Rome", "days": 3}
THOUGHT = "<|channel>thought\nlet me see\n<channel|>"
ON = {"chat_template_kwargs": {"enable_thinking": True}}
shared = server_fixture(template=TEMPLATE, tokens=TOKENS, model={"max_model_len": 4096})


def ask(live: Live, **fields: Any) -> tuple[str | None, str | None, list[tuple[str, Any]], str]:
    """Content, reasoning, calls and finish reason, which a stream must equal."""
    body = {"messages": USER, "max_tokens": 400, "tools": [LOOK], **fields}
    found = []
    for choice in (live.request(PATH, **body)["choices"][0], assembled(live.stream(PATH, body)[:-1])):
        message = choice["message"]
        assert message.get("reasoning") == message.get("reasoning_content")
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        read = [(name, json.loads(text)) for name, text in calls]
        found.append((message["content"] or None, message.get("reasoning"), read, choice["finish_reason"]))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize(
    "text, expected",
    [
        ("Hello.", ("Hello.", None, [], "stop")),
        (THOUGHT + "Hello.", ("Hello.", "let me see", [], "stop")),
        (CALL, (None, None, [("look", ROME)], "tool_calls")),
        (THOUGHT + "Wait." + CALL + CALL, ("Wait.", "let me see", [("look", ROME)] * 2, "tool_calls")),
        ("<|channel>thought\nlet me see" + CALL, (None, "let me see", [("look", ROME)], "tool_calls")),
        ("Wait." + THOUGHT + CALL, ("Wait.", "let me see", [("look", ROME)], "tool_calls")),
        ("Hello.<|channel>thought\n<channel|>", ("Hello.", None, [], "stop")),
        ("<channel|>Hello.", ("Hello.", None, [], "stop")),
        (THOUGHT + "<|tool_call>call:look(Rome) so", ("<|tool_call>call:look(Rome) so", "let me see", [], "stop")),
        ("<|tool_call>call:look{city:Rome]} so", ("]} so", None, [("look", {"city": "Rome"})], "tool_calls")),
    ],
)
def test_thinking_and_calls_are_separated(live: Live, text: str, expected: Any, at_once: int) -> None:
    live.engine.tokens_per_output = at_once
    live.generate(text)
    assert ask(live, **ON) == ask(live) == expected


def test_markers_are_hidden_without_tools(live: Live) -> None:
    live.generate(THOUGHT + "Hello. " + CALL)
    content, reasoning, calls, _ = ask(live, tools=None)
    assert (content, reasoning, calls) == ("Hello. call:look{city:Rome,days:3}", "let me see", [])


def test_messages_of_anthropic(live: Live) -> None:
    live.generate(THOUGHT + "Wait." + CALL)
    tool = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
    body = {"messages": USER, "max_tokens": 400, "tools": [tool]}
    blocks = live.post("/v1/messages", body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"], blocks[2]["input"]) == ("let me see", "Wait.", ROME)
    told = live.stream_text("/v1/messages", body)
    assert '"thinking_delta"' in told and '"input_json_delta"' in told and "channel" not in told and '|"|' not in told
    live.post("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert "<|think|>" in live.prompt


def test_responses(live: Live) -> None:
    live.generate(THOUGHT + "Wait." + CALL)
    body = {"input": "hello", "tools": [{"type": "function", **LOOK["function"]}]}
    answer = live.post("/v1/responses", body).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(answer["output"][2]["arguments"]) == ROME
    assert answer["output"][0]["content"][0]["text"] == "let me see"
    told = live.stream_text("/v1/responses", body)
    assert "response.function_call_arguments.done" in told and "channel" not in told


def test_the_switch_of_the_template(live: Live) -> None:
    live.chat(reasoning_effort="high")
    assert "<|think|>" in live.prompt and live.prompt.endswith("<|turn>model\n")
    for fields in ({}, {"reasoning_effort": "none"}):
        live.chat(**fields)
        assert "<|think|>" not in live.prompt and live.prompt.endswith("<|channel>thought\n<channel|>")


def test_a_round_trip(live: Live) -> None:
    """The model's call is rendered as it was generated, also inside thinking that the template opened."""
    live.generate(THOUGHT + CALL)
    message = live.chat(tools=[LOOK], **ON)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "name": "look", "content": "sunny"}
    live.generate("it shines\n<channel|>Sunny.")
    assert ask(live, messages=[*USER, message, result], **ON) == ("Sunny.", "it shines", [], "stop")
    answered = '<|tool_response>response:look{value:<|"|>sunny<|"|>}<tool_response|><|channel>thought\n'
    assert live.prompt.endswith(THOUGHT + CALL + answered)


def test_budget_starts_after_the_label(live: Live) -> None:
    live.chat(thinking_budget=7, **ON)
    ids = {text: tuple(live.tokenizer.encode(text, add_special_tokens=False)) for text in (THOUGHT[:17], "<channel|>")}
    assert len(ids["<|channel>thought"]) > 1
    budget = live.engine.requests[-1].sampling.thinking
    assert budget == ThinkingBudget(7, ids["<channel|>"], (ids["<|channel>thought"],))


def test_required_call_has_the_format_of_the_model(live: Live) -> None:
    """After the thinking, with the tokens around strings."""
    live.generate(THOUGHT + CALL)
    assert ask(live, tool_choice="required", **ON)[2] == [("look", ROME)]
    grammar = live.engine.requests[-1].sampling.grammar
    quote, opening = (live.tokenizer.backend.token_to_id(text) for text in ('<|"|>', "<|channel>"))
    assert f"<[{quote}]> TEXT_0_8 <[{quote}]>" in grammar and f'<[{opening}]>) \\"thought\\" thought' in grammar


def value_of(chance: random.Random, depth: int = 0) -> Any:
    """A JSON value."""
    kind = chance.randrange(7 if depth < 3 else 5)
    if kind < 2:
        parts = ["a", "{", "}", "]", ",", ":", '"', "\n", "\\u", "€", "😀", "<", "|", " ", "call:", "<|", "<channel|>"]
        return "".join(chance.choices(parts, k=chance.randrange(6)))
    if kind < 5:
        return chance.choice([True, None, 0, -7, 2.5, 1e300, 10**20])
    if kind == 5:
        return [value_of(chance, depth + 1) for _ in range(chance.randrange(4))]
    keys = chance.sample(["a", "b c", "D-e", "ü", "$x", "none"], chance.randrange(4))
    return {key: value_of(chance, depth + 1) for key in keys}


def test_output_of_the_template_is_parsed_back() -> None:
    """Values of any kind, thinking before calls, and pieces of any size."""
    chance, template = random.Random(4), ChatTemplate(TEMPLATE)
    for _ in range(150):
        calls, thoughts, text = list[tuple[str, Any]](), list[str](), ""
        for number in range(chance.randrange(4)):
            calls.append(("look", {f"k{i}": value_of(chance) for i in range(chance.randrange(4))}))
            message: dict[str, Any] = {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "look", "arguments": calls[-1][1]}}],
            }
            if chance.random() < 0.5:
                thoughts.append(f"so {number} {{")
                message["reasoning"] = thoughts[-1]
            text += template.render([message], add_generation_prompt=False).partition("<|turn>model\n")[2]
        parser = ChannelParser(GEMMA4, "before", ParsingPlan(lambda: FORMATS["gemma4"].parser(numbered())))
        text += "the end"
        events: list[Event] = []
        while text:
            size = chance.randrange(1, 9)
            events += parser.feed(text[:size])
            text = text[size:]
        found = put_together(events + parser.finish())
        assert found[:2] == ("the end", "\n\n".join(thoughts))
        assert [(name, json.loads(arguments)) for name, arguments in found[2]] == calls
