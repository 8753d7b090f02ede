"""Separation of thinking from answers: the result does not depend on how the text is split."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from windlass.server.config.server_options import REASONING_PARSERS
from windlass.server.text.reasoning import (
    COHERE,
    DEEPSEEK_R1,
    FORMATS,
    GEMMA4,
    GRANITE,
    NAMES,
    QWEN3,
    ChannelParser,
    ThinkingFormat,
    ThinkingParser,
    ThinkingPhase,
    format_of_template,
)
from windlass.server.text.stream_parser import Content, Event, ParsingPlan, PlainTextParser, Reasoning

# format, phase at the beginning, text, thinking, answer
CASES: list[tuple[ThinkingFormat, ThinkingPhase, str, str, str]] = [
    (QWEN3, "before", "<think>\nab c\n</think>\n\nHi <b>", "ab c", "Hi <b>"),
    (QWEN3, "before", " \n<think>x</think>y", "x", "y"),
    (QWEN3, "before", "  <thin> y", "", "  <thin> y"),
    (QWEN3, "before", "<thi", "", "<thi"),
    (QWEN3, "before", "no <think>t</think>", "", "no <think>t</think>"),
    (QWEN3, "before", " ", "", " "),
    (QWEN3, "before", "", "", ""),
    (QWEN3, "before", "<think></think>y", "", "y"),
    (QWEN3, "before", "<think>cut <", "cut <", ""),
    (QWEN3, "inside", "a</thin</think>b", "a</thin", "b"),
    (QWEN3, "inside", "<think>a</think> b ", "a", "b "),
    (QWEN3, "inside", "<thaw\n\n a", "<thaw\n\n a", ""),
    (QWEN3, "inside", "a \n</thi", "a \n</thi", ""),
    (QWEN3, "inside", "a \n", "a", ""),
    (QWEN3, "inside", "a</think>b</think>", "a", "b</think>"),
    (QWEN3, "after", " <think>a</think>", "", " <think>a</think>"),
    (DEEPSEEK_R1, "inside", "ok</think>\n", "ok", ""),
    (GRANITE, "before", "Here's my thought process: t\n\nHere is my response: r", "t", "r"),
    (GRANITE, "before", "Here is the answer", "", "Here is the answer"),
    (GRANITE, "before", "<think>t</think>\n<response> r</response>", "t", "r"),
    (GRANITE, "before", "<think>t</think> <respond>", "t", "<respond>"),
    (GRANITE, "inside", "t</think><response>r</resp", "t", "r</resp"),
    (COHERE, "before", "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", "", "Hi."),
    (COHERE, "before", " Hi.", "", " Hi."),
    (COHERE, "before", " <|START_TEXT|> Hi. <|END_TEXT|>", "", "Hi."),
    (COHERE, "after", "<|START_RESP", "", "<|START_RESP"),
    (GEMMA4, "before", "<|channel>thought\nab c\n<channel|>\nHi <b>", "ab c", "Hi <b>"),
    (GEMMA4, "before", " \n<|channel>thought<channel|>\n Hi", "", "Hi"),
    (GEMMA4, "before", " <|chan Hi ", "", " <|chan Hi "),
    (GEMMA4, "before", " \n", "", " \n"),
    (GEMMA4, "before", " <|channel>", "", ""),
    (GEMMA4, "before", "<|channel>thou", "", ""),
    (GEMMA4, "before", "<|channel>other\na <", "other\na <", ""),
    (GEMMA4, "before", "<|channel><|channel>thought\na<channel|><channel|> b", "a", "b"),
    (GEMMA4, "inside", "\na<|channel>thought\nb<channel|>c", "a\nb", "c"),
    (GEMMA4, "inside", "a<|tool_call>call:x{}", "a", "<|tool_call>call:x{}"),
    (GEMMA4, "after", " Hi.\n<|channel>thought\na <channel|> b<|channel>thought\nb\n<channel|>", "a\n\nb", " Hi.\n b"),
    (GEMMA4, "after", "<channel|>a<tool_call|><channel", "", "a<tool_call|><channel"),
]


def read(format: ThinkingFormat, phase: ThinkingPhase, pieces: list[str]) -> tuple[str, str, list[Event]]:
    parser = (ChannelParser if format.may_recur else ThinkingParser)(format, phase, ParsingPlan(PlainTextParser))
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    thinking = "".join(event.text for event in events if isinstance(event, Reasoning))
    answer = "".join(event.text for event in events if isinstance(event, Content))
    return thinking, answer, events


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("format, phase, text, thinking, answer", CASES)
def test_result_does_not_depend_on_the_split(
    format: ThinkingFormat, phase: ThinkingPhase, text: str, thinking: str, answer: str
) -> None:
    assert read(format, phase, [text])[:2] == (thinking, answer)
    assert read(format, phase, list(text))[:2] == (thinking, answer)
    for count in (1, 2):
        for cuts in combinations(range(len(text) + 1), count):
            ends = (0, *cuts, len(text))
            pieces = [text[start:end] for start, end in pairwise(ends)]
            found = read(format, phase, pieces)
            assert found[:2] == (thinking, answer), pieces
            assert all(event.text for event in found[2]), "an event without text"


def test_thinking_is_emitted_at_once() -> None:
    """Only white space and possible markers are held back."""
    parser = ThinkingParser(QWEN3, "inside", ParsingPlan(PlainTextParser))
    assert parser.feed("Well, ") == [Reasoning("Well,")]
    assert parser.feed("yes<") == [Reasoning(" yes")]
    assert parser.feed("3") == [Reasoning("<3")]


def test_white_space_before_a_marker_is_bounded() -> None:
    """An answer of white space must not be buffered, and parsed again, for a possible marker."""
    for pieces in ([" " * 70 + "<think>a"], [" "] * 70 + ["<think>a"]):
        assert read(QWEN3, "before", pieces)[:2] == ("", " " * 70 + "<think>a")
    for pieces in ([" " * 70 + "<|channel>a"], [" "] * 70 + ["<|channel>a"]):
        assert read(GEMMA4, "before", pieces)[:2] == ("a", " " * 70)


def test_thinking_state() -> None:
    """Everything up to the closing marker is thinking, and nothing without an opening marker."""
    parser = ThinkingParser(QWEN3, "before", ParsingPlan(PlainTextParser))
    assert (parser.thinking, parser.has_thought) == (True, False)
    parser.feed("<think>")
    assert (parser.thinking, parser.has_thought) == (True, True)
    parser.feed("a</think")
    assert parser.thinking
    parser.feed(">")
    assert (parser.thinking, parser.has_thought) == (False, True)
    plain = ThinkingParser(QWEN3, "before", ParsingPlan(PlainTextParser))
    plain.feed("a")
    assert (plain.thinking, plain.has_thought) == (False, False)


def test_thinking_state_of_recurring_thoughts() -> None:
    parser = ChannelParser(GEMMA4, "before", ParsingPlan(PlainTextParser))
    found = []
    for piece in (" ", "<|channel>", "thought\n", "a", "<channel|>", "b", "<|channel>", "<channel|>"):
        parser.feed(piece)
        found.append((parser.thinking, parser.has_thought))
    assert found == [(True, False), *[(True, True)] * 3, *[(False, True)] * 2, (True, True), (False, True)]
    plain = ChannelParser(GEMMA4, "before", ParsingPlan(PlainTextParser))
    plain.feed(" a")
    assert (plain.thinking, plain.has_thought) == (False, False)


def test_phase_of_new_messages() -> None:
    assert QWEN3.phase("<|im_start|>assistant\n") == "before"
    assert QWEN3.phase("<|im_start|>assistant\n<think>\n") == "inside"
    assert QWEN3.phase("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "after"
    assert QWEN3.phase("user: what does <think> do?\nassistant: ") == "before"
    assert GEMMA4.phase("<|turn>model\n") == GEMMA4.phase("<tool_response|>") == "before"
    assert GEMMA4.phase("<tool_response|><|channel>thought\n") == "inside"
    assert GEMMA4.phase("<|turn>model\n<|channel>thought\n<channel|>") == "after"
    assert DEEPSEEK_R1.phase("<｜Assistant｜>") == "inside"
    assert DEEPSEEK_R1.phase("<｜Assistant｜></think>") == "after"


def test_phase_of_continued_messages() -> None:
    assert QWEN3.phase("assistant: <think>so", "<think>so") == "inside"
    assert QWEN3.phase("assistant: <think>so</think>The", "<think>so</think>The") == "after"
    assert DEEPSEEK_R1.phase("assistant: The", "The") == "after"
    assert GEMMA4.phase("model\n<|channel>thought\nso", "<|channel>thought\nso") == "inside"


TEMPLATES = {
    "{{ messages }}": "none",
    "{%- if enable_thinking is defined %}<think>\n\n</think>\n\n{%- endif %}": "qwen3",
    "{{ '<｜Assistant｜><think>\\n' }}": "deepseek_r1",
    "Write your thought process after 'Here is my thought process:'": "granite",
    "thoughts between <think></think> and your response between <response></response>": "granite",
    "<|start|>assistant<|channel|>analysis<|message|>": "gpt_oss",
    "{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}": "gemma4",
}


@pytest.mark.parametrize("template, name", TEMPLATES.items())
def test_format_of_template(template: str, name: str) -> None:
    assert format_of_template(template) == name
    assert format_of_template(None) == "none"


def test_formats_equal_the_option_values() -> None:
    assert NAMES == REASONING_PARSERS


def test_special_tokens_reach_the_parser() -> None:
    for format in FORMATS.values():
        assert {*format.opens, *format.closes} <= format.markers
