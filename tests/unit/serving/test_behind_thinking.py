"""Grammars of an output after thinking, matched token by token."""

from __future__ import annotations

import json

import pytest
import tokenizers
from helpers.engines import greedy, make_core, run
from helpers.toy_tokenizers import byte_level
from llguidance import LLMatcher, LLTokenizer
from unit_helpers.grammar_draws import DEMO, demo_tokenizer

from windlass.server.serving.structured_output import with_thinking_prefix
from windlass.server.text.reasoning import ThinkingControl, ThinkingPhase
from windlass.server.text.tokenizer import Tokenizer

EOS = 421
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
REGEX = LLMatcher.grammar_from_regex("a/b[0-9]{2}")
LARK = 'start: <[422]> x\nx: "{" /[a-z]+/ "}" %json {"type":"integer"}'  # 422: <tool>
THOUGHT = 'hm: {"a": 1} or a/b12?'
MARKERS = (
    *("<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    *("<|channel>", "<channel|>", "<|tool_call>"),
)


def tokenizer(special: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    if special:
        backend.add_special_tokens(list(MARKERS))
    return Tokenizer(backend)


def taken(text: Tokenizer, grammar: str, output: str) -> tuple[int, bool]:
    """(tokens of the output that the matcher rejects, whether it may end after the output)."""
    matcher = LLMatcher(LLTokenizer(text.backend.to_str(), eos_token=EOS), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = text.encode(output, add_special_tokens=False)
    count = matcher.try_consume_tokens(ids)
    return len(ids) - count, count == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "grammar, answer", [(JSON, '{"a": 12}'), (REGEX, "a/b12"), (LARK, "<tool>{ab}3")], ids=["json", "regex", "lark"]
)
def test_an_answer_after_thinking(special: bool, grammar: str, answer: str) -> None:
    text = tokenizer(special)
    model = ThinkingControl("qwen3", text)
    inside = with_thinking_prefix(grammar, model, "inside", (EOS,))
    before = with_thinking_prefix(grammar, model, "before", (EOS,))
    for space in ("", "\n", "\n\n"):
        assert taken(text, inside, f"{THOUGHT}</think>{space}{answer}") == (0, True)
        assert taken(text, before, f"<think>{THOUGHT}</think>{space}{answer}") == (0, True)
        assert taken(text, before, f"{space}{answer}") == (0, True)
    assert taken(text, before, f"\n<think>\n{THOUGHT}\n</think>\n\n{answer}") == (0, True)
    # The answer must match, thinking alone is not enough, and neither may end inside the other.
    assert taken(text, inside, f"{THOUGHT}</think>\nSure!")[0] > 0
    assert taken(text, before, "Sure!")[0] > 0
    assert taken(text, inside, THOUGHT) == (0, False)
    assert taken(text, inside, f"{THOUGHT}<|eos|>")[0] > 0
    assert taken(text, inside, f"{THOUGHT}</think>{answer[:-1]}")[1] is False


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
def test_channels(special: bool) -> None:
    text = tokenizer(special)
    grammar = with_thinking_prefix(JSON, ThinkingControl("gpt_oss", text), "before", (EOS,))
    thought = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a": 12}'
    assert taken(text, grammar, thought + final) == (0, True)
    assert taken(text, grammar, final) == (0, True)
    assert taken(text, grammar, thought + thought)[0] > 0
    assert taken(text, grammar, '{"a": 12}')[0] > 0
    assert with_thinking_prefix(LARK, ThinkingControl("gpt_oss", text), "before", (EOS,), calls=True) is LARK


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
def test_channels_with_a_label(special: bool) -> None:
    text = tokenizer(special)
    before, inside = (
        with_thinking_prefix(JSON, ThinkingControl("gemma4", text), phase, (EOS,)) for phase in ("before", "inside")
    )
    for space in ("", "\n"):
        assert taken(text, before, f'<|channel>thought\n{THOUGHT}\n<channel|>{space}{{"a": 12}}') == (0, True)
        assert taken(text, inside, f'{THOUGHT}\n<channel|>{space}{{"a": 12}}') == (0, True)
    assert taken(text, before, '{"a": 12}') == (0, True)
    assert taken(text, before, f'<|channel>{THOUGHT}<channel|>{{"a": 12}}')[0] > 0
    assert taken(text, before, f"<|channel>thought\n{THOUGHT}\n<channel|>Sure!")[0] > 0
    if special:  # the grammar could not constrain a call
        assert taken(text, inside, f"{THOUGHT}<|tool_call>")[0] > 0


def test_markers_of_granite() -> None:
    text = tokenizer(False)
    grammar = with_thinking_prefix(JSON, ThinkingControl("granite", text), "before", (EOS,))
    for output in (
        'Here is my thought process: hm\n\nHere\'s my response:\n{"a": 12}',
        '<think>hm</think>{"a": 12}',
        '{"a": 12}',
    ):
        assert taken(text, grammar, output) == (0, True), output


@pytest.mark.parametrize("parser, phase", [("none", "before"), ("qwen3", "after"), ("gpt_oss", "after")])
def test_without_thinking_the_grammar_is_unchanged(parser: str, phase: ThinkingPhase) -> None:
    assert with_thinking_prefix(JSON, ThinkingControl(parser, tokenizer(True)), phase, (EOS,)) is JSON


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4])
def test_a_budget_in_words_that_ends_inside_a_character(tokens: int) -> None:
    """The character is completed first, as the closing words could not follow otherwise."""
    text = demo_tokenizer()
    model = ThinkingControl("granite", text)
    budget = model.budget(tokens, "inside", None)
    assert budget is not None and len(budget.close) > 1
    first = [i for i in range(text.vocab_size) if text.token_bytes(i) in (b"\xe2", b"\xc3")]
    request = greedy(
        "x",
        text.encode("It is"),
        max_tokens=60,
        ignore_eos=False,
        thinking=budget,
        grammar=with_thinking_prefix(REGEX, model, "inside", (2,)),
        logit_bias=dict.fromkeys(first, 40.0),
    )
    sample = run(make_core(DEMO), [request])["x", 0]
    assert sample.outputs[-1].error is None and sample.finish_reason == "stop"
    close = list(budget.close)
    begin = next(at for at in range(len(sample.token_ids)) if sample.token_ids[at : at + len(close)] == close)
    assert tokens <= begin <= tokens + 2
    b"".join(map(text.token_bytes, sample.token_ids)).decode()  # raises for partial characters
