"""Thinking over HTTP with a scripted engine: separated in complete and streamed answers, counted, selected by requests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.chat_chunks import assembled
from helpers.live_server import TEMPLATE, Live, live_server, server_fixture

from windlass.engine.interface.request import ThinkingBudget
from windlass.engine.sampling.logits_processor import forced_token

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
SWITCHED = (
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ reasoning_effort }}"
    + TEMPLATE.replace(
        "[{{ message.role }}]", "[{{ message.role }}]{% if message.reasoning %}({{ message.reasoning }}){% endif %}"
    )
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
shared = server_fixture(template=SWITCHED, tokens=("<think>", "</think>"))  # special tokens are not part of the text


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "text, thinking, content",
    [
        ("<think>\nlet me see\n</think>\n\nIt is 4.", "let me see", "It is 4."),
        ("Just 4.", None, "Just 4."),
        ("<think>\nthe answer is cut", "the answer is cut", ""),
    ],
)
def test_thinking_is_separated(live: Live, text: str, thinking: str | None, content: str, at_once: int) -> None:
    """Complete and streamed, whatever the number of tokens per delta; counted up to the end marker."""
    live.engine.tokens_per_output = at_once
    ids = live.generate(text)
    answer = live.chat(max_tokens=100)
    message = answer["choices"][0]["message"]
    assert message["content"] == content
    assert message.get("reasoning_content") == message.get("reasoning") == thinking
    close = live.tokenizer.encode("</think>", add_special_tokens=False)[0]
    counted = 0 if thinking is None else ids.index(close) + 1 if close in ids else len(ids) + 1  # + 1: the end
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}

    events = live.stream(PATH, {"messages": USER, "max_tokens": 100, "stream_options": {"include_usage": True}})
    streamed = assembled(events[:-1])["message"]
    assert (streamed["content"] or "") == content
    assert streamed.get("reasoning_content") == streamed.get("reasoning") == thinking
    assert events[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
    assert "think>" not in str(events)


def test_continued_usage_never_counts_down(live: Live) -> None:
    live.generate(" \n\nfour")  # may start the thinking, but does not
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.stream(PATH, {"messages": USER, "stream_options": options})
    counts = {event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events[:-1]}
    assert counts == {0}


def test_each_choice_has_its_own_thinking(live: Live) -> None:
    ids = live.generate("<think>a</think>b")
    answer = live.chat(n=3)
    assert [choice["message"]["reasoning"] for choice in answer["choices"]] == ["a"] * 3
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * (len(ids) - 1)


def test_a_prompt_that_closes_the_thinking(live: Live) -> None:
    """Without thinking, a template may close it immediately: the answer has none."""
    live.generate("<think>x</think>")
    message = live.chat(chat_template_kwargs={"enable_thinking": False})["choices"][0]["message"]
    assert live.prompt.endswith("<think>\n\n</think>\n\n")
    assert message["content"] == "<think>x</think>" and "reasoning" not in message


def test_a_message_continued_inside_its_thinking(live: Live) -> None:
    live.generate(" more</think>done")
    messages = [*USER, {"role": "assistant", "content": "<think>some"}]
    message = live.chat(messages=messages, continue_final_message=True)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("more", "done")


@pytest.mark.parametrize(
    "fields, begin",
    [
        ({"reasoning_effort": "low"}, "Truelow<"),
        ({"reasoning_effort": "none"}, "Falsenone<"),
        ({"reasoning_effort": "max"}, "Truemax<"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "Falsehigh<"),
        ({"chat_template_kwargs": {"reasoning_effort": "odd"}}, "odd<"),
        ({"reasoning_effort": None}, "<"),
    ],
)
def test_the_effort_reaches_the_template(live: Live, fields: dict[str, Any], begin: str) -> None:
    live.chat(**fields)
    assert live.prompt.startswith(begin)


def test_unknown_effort_is_refused(live: Live) -> None:
    error = live.refuse(PATH, {"messages": USER, "reasoning_effort": "extreme"})
    assert error["param"] == "reasoning_effort"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_thinking_reaches_the_template(live: Live, name: str) -> None:
    live.chat(messages=[*USER, {"role": "assistant", "content": "4", name: "two and two"}, *USER])
    assert "[assistant](two and two)4" in live.prompt


def test_a_model_without_thinking() -> None:
    with live_server() as live:
        live.generate("<think>a</think>b")
        answer = live.chat()
        assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"
        assert "completion_tokens_details" not in answer["usage"]
        live.chat(reasoning_effort="none")  # no budget is requested
        live.chat(reasoning_effort="low")  # no effect: the header names it


def test_a_parser_that_the_operator_names() -> None:
    with live_server(reasoning_parser="deepseek_r1") as live:
        live.generate("a</think>b")  # text markers: the toy tokenizer has no tokens for them
        message = live.chat()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("a", "b")


@pytest.mark.parametrize(
    "fields, opening",
    [
        ({}, "<think>"),
        ({"messages": [*USER, {"role": "assistant", "content": "<think>a"}], "continue_final_message": True}, ""),
    ],
)
def test_a_budget_reaches_the_engine(live: Live, fields: dict[str, Any], opening: str) -> None:
    live.chat(thinking_budget=7, **fields)
    close = live.tokenizer.encode("</think>", add_special_tokens=False)
    opens = (tuple(live.tokenizer.encode(opening, add_special_tokens=False)),) if opening else ()
    assert live.engine.requests[-1].sampling.thinking == ThinkingBudget(7, tuple(close), opens)


def test_a_budget_whose_markers_are_words() -> None:
    """They are forced in the template's spelling; every other spelling also starts or ends the thinking."""
    with live_server(reasoning_parser="granite", template=TEMPLATE + "{# Here is my response: #}") as live:
        live.chat(thinking_budget=7)
        budget = live.engine.requests[-1].sampling.thinking

        def ids(text: str) -> tuple[int, ...]:
            return tuple(live.tokenizer.encode(text, add_special_tokens=False))

        assert budget is not None and (budget.tokens, budget.close) == (7, ids("Here is my response:"))
        assert len(budget.close) > 1
        for answer in ("</think>", "so.\n\nHere's my response:\n\n17", "so. Here is my response: 17"):
            output = ids("Here is my thought process:\n")[: len(ids("Here is my thought process:"))]
            thought = ids(answer)
            limits = replace(budget, tokens=len(thought))
            assert forced_token(limits, [*output, *thought], 0) is None, answer
            assert forced_token(replace(budget, tokens=2), [*output, *ids("so it")[:2]], 0) == budget.close[0]


@pytest.mark.parametrize("finished", [True, False])
def test_a_budget_ends_the_thinking_after_an_open_call(finished: bool) -> None:
    """The forced marker would be a part of the call's arguments."""
    template = SWITCHED + "{# <tool_call></tool_call> #}"
    tokens = "<think>", "</think>", "<tool_call>", "</tool_call>"
    with live_server(template=template, tokens=tokens, model={"max_model_len": 2048}) as live:
        tools = [
            {
                "type": "function",
                "function": {"name": "look", "parameters": {"properties": {"city": {"type": "string"}}}},
            }
        ]
        arguments = json.dumps({"city": "a city with a long name"})
        text = f'<think>I look.\n<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>\nDone.'
        tokens_inside = live.tokenizer.encode(
            text.partition("<think>")[2].partition("with")[0], add_special_tokens=False
        )
        live.chat(thinking_budget=len(tokens_inside), tools=tools)
        budget = live.engine.requests[-1].sampling.thinking
        assert budget is not None
        budget = budget if finished else replace(budget, call_opens=())
        output: list[int] = []
        for token in live.tokenizer.encode(text, add_special_tokens=False):
            while (forced := forced_token(budget, output, 0)) is not None:
                output.append(forced)
            output.append(token)
        live.generate(live.tokenizer.decode(output, skip_special_tokens=False))
        message = live.chat(max_tokens=200, tools=tools)["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["arguments"] == arguments) is finished
        assert (message["reasoning_content"], message["content"]) == ("I look.", "Done.")


def test_efforts_of_gpt_oss() -> None:
    """Its template knows three levels: the nearest one is used, and the header names the change."""
    harmony = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{{ reasoning_effort }}<|channel|><|message|>"
    )
    levels = {
        "none": "low",
        "minimal": "low",
        "low": "low",
        "medium": "medium",
        "high": "high",
        "xhigh": "high",
        "max": "high",
    }
    with live_server(template=harmony) as gpt:
        for effort, level in levels.items():
            response = gpt.post(PATH, {"messages": USER, "reasoning_effort": effort})
            assert response.status_code == 200, response.text
            assert response.headers.get("x-windlass-template-changes") == (
                None if level == effort else "effort-changed"
            )
            assert gpt.prompt.startswith(f"hello{level}<")
        assert gpt.refuse(PATH, {"messages": USER, "reasoning_effort": "extreme"})["param"] == "reasoning_effort"


def test_budget_without_thinking(live: Live) -> None:
    live.chat(thinking_budget=7, chat_template_kwargs={"enable_thinking": False})
    assert live.engine.requests[-1].sampling.thinking is None
    live.chat()
    assert live.engine.requests[-1].sampling.thinking is None
    assert live.refuse(PATH, {"messages": USER, "thinking_budget": -1})["param"] == "thinking_budget"


@pytest.mark.parametrize("parser, reason", [("none", "does not separate thinking")])
def test_unenforceable_budget_is_refused(parser: str, reason: str) -> None:
    with live_server(reasoning_parser=parser) as live:
        error = live.refuse(PATH, {"messages": USER, "thinking_budget": 5})
        assert (error["param"], error["code"]) == ("thinking_budget", "unsupported_parameter")
        assert reason in error["message"]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "thinking", "content", "reason"),
    [
        ("<think>\na b stop c\n</think>\n\nFour. stop so", " stop", "a b stop c", "Four.", " stop"),
        ("<think>\na\n\nb\n</think>\n\nFour.\n\nFive", "\n\n", "a\n\nb", "Four.", "\n\n"),
        ("<think>\na\n</think>\n\nFour.", "a\n", "a", "Four.", None),
        ("<think>\na\n</think>stop", "stop", "a", "", "stop"),
        ("<think>\nthe answer is cut", "cut", "the answer is cut", "", None),
        ("Four. stop so", " stop", None, "Four.", " stop"),
        ("\n <Four. stop so", "<Four", None, "\n ", "<Four"),
    ],
)
def test_stop_strings_are_searched_in_the_answer(
    live: Live, text: str, stop: str, thinking: str | None, content: str, reason: str | None, at_once: int
) -> None:
    live.engine.tokens_per_output = at_once
    live.generate(text)
    choice = live.chat(max_tokens=100, stop=[stop])["choices"][0]
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thinking, content)
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (reason or live.tokenizer.eos_token_id)
    streamed = assembled(live.stream(PATH, {"messages": USER, "max_tokens": 100, "stop": [stop]})[:-1])["message"]
    assert (streamed.get("reasoning_content"), streamed["content"] or "") == (thinking, content)


def test_stop_strings_in_channels() -> None:
    """The markup between messages is not searched either."""
    tokens = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>")
    with live_server(template=TEMPLATE + "{# <|channel|><|message|> #}", tokens=tokens) as live:
        for stop, expected in (("assistant", "say assistant"), (" so", "say assistant")):
            live.generate(
                "<|channel|>analysis<|message|>think so<|end|><|start|>assistant<|channel|>final<|message|>say assistant so"
            )
            choice = live.chat(max_tokens=200, stop=[stop])["choices"][0]
            assert choice["message"]["reasoning_content"] == "think so"
            assert choice["message"]["content"] == ("say " if stop == "assistant" else expected)
            assert choice["stop_reason"] == stop
