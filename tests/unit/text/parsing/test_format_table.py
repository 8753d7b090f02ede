"""Every call format against one table: complete, cut, incomplete and unknown calls, with text around, in random pieces.

A row is one call of `run` as its source documents it. JSON means the arguments as JSON, RAW for the command without quotes,
PYTHON for it as a Python literal. The oracle of each test is the row: a parser may omit what is not certain, and invents nothing.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any, NamedTuple

import pytest
from helpers.parsed_answers import Made, read
from unit_helpers.grammar_draws import demo_compiler, takes_text

from windlass.server.text.stream_parser import CallOptions, OutputParser
from windlass.server.text.tool_parsers.call_grammars import CallGrammarOptions
from windlass.server.text.tool_parsers.formats import FORMATS

SCHEMAS: dict[str, Any] = {"run": {"type": "object", "properties": {"command": {"type": "string"}}}}
NS = "]<]minimax[>["
DSML = (
    '<｜DSML｜WRAPPER>\n<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="command" string="true">RAW</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜WRAPPER>"
)
CODER = "<WRAPPER>\n<function=run>\n<parameter=command>RAW</parameter>\n</function>\n</WRAPPER>"
OBJECT = '{"name": "run", "arguments": JSON}'
LIST = f"[{OBJECT}]"


class Row(NamedTuple):
    """source: where the text is documented. starts: a call begins an answer, or a line. ends: it ends the answer."""

    source: str
    text: str
    starts: bool = False
    ends: bool = False


ROWS = {
    "apertus": Row("vLLM, apertus_tool_parser", '<|tools_prefix|>[{"run": JSON}]<|tools_suffix|>'),
    "cohere": Row(
        "llama.cpp's template of Command R7B",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "run", "parameters": JSON}\n]<|END_ACTION|>',
    ),
    "command_r": Row(
        "llama.cpp's template of Command R+",
        'Action: ```json\n[\n    {\n        "tool_name": "run",\n        "parameters": JSON\n    }\n]```',
    ),
    "deepseek_v3": Row(
        "llama.cpp's template of DeepSeek R1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\nJSON\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Row(
        "llama.cpp's template of DeepSeek V3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>JSON<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": Row("llama.cpp's template of DeepSeek V3.2", DSML.replace("WRAPPER", "function_calls")),
    "deepseek_v4": Row("llama.cpp's template of DeepSeek V4", DSML.replace("WRAPPER", "tool_calls")),
    "functiongemma": Row(
        "vLLM's tests, test_functiongemma_tool_parser",
        "<start_function_call>call:run{command:<escape>RAW<escape>}<end_function_call>",
    ),
    "functionary_v31": Row("llama.cpp's template of Functionary 3.1", "<function=run>JSON</function>"),
    "functionary_v32": Row("llama.cpp's tests, test-chat.cpp", ">>>run\nJSON", ends=True),
    "gemma4": Row("llama.cpp's template of Gemma 4", '<|tool_call>call:run{command:<|"|>RAW<|"|>}<tool_call|>'),
    "gigachat3": Row(
        "llama.cpp's template of GigaChat 3", f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}", ends=True
    ),
    "glm45": Row(
        "llama.cpp's template of GLM 4.6",
        "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>RAW</arg_value>\n</tool_call>",
    ),
    "glm47": Row(
        "llama.cpp's template of GLM 4.7",
        "<tool_call>run<arg_key>command</arg_key><arg_value>RAW</arg_value></tool_call>",
    ),
    "granite": Row("llama.cpp's template of Granite 3.3", f"<|tool_call|>{LIST}"),
    "granite_20b": Row("vLLM's tests, test_granite_20b_fc_tool_parser", f"<function_call> {OBJECT}"),
    "harmony": Row(
        "llama.cpp's template of gpt-oss",
        "<|channel|>commentary to=functions.run <|constrain|>json<|message|>JSON<|call|>",
        ends=True,
    ),
    "hermes": Row("llama.cpp's template of Qwen 2.5", f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "hunyuan": Row("vLLM, hunyuan_a13b_tool_parser", f"<tool_calls>{LIST}</tool_calls>"),
    "internlm": Row(
        "vLLM's tests, test_internlm2_tool_parser; the line break: SGLang, internlm_detector",
        '<|action_start|><|plugin|>\n{"name": "run", "parameters": JSON}<|action_end|>',
    ),
    "kimi_k2": Row(
        "llama.cpp's template of Kimi K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>JSON<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "lfm2": Row("llama.cpp's template of LFM2.5", "<|tool_call_start|>[run(command=PYTHON)]<|tool_call_end|>"),
    "llama3_json": Row(
        "llama.cpp's template of Llama 3.1", '{"name": "run", "parameters": JSON}', starts=True, ends=True
    ),
    "longcat": Row(
        "mlx-lm, tool_parsers/longcat.py",
        "<longcat_tool_call>run\n<longcat_arg_key>command</longcat_arg_key>\n<longcat_arg_value>RAW</longcat_arg_value>\n"
        "</longcat_tool_call>",
    ),
    "longcat_json": Row("SGLang, longcat_detector", f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>"),
    "minicpm3": Row(
        "the model's adaptation of vLLM, minicpm_tool_parser",
        "<|tool_call_start|>\n```python\nrun(command=PYTHON)\n```\n<|tool_call_end|>",
    ),
    "minicpm5": Row(
        "llama.cpp's template of MiniCPM5",
        '<function name="run"><param name="command"><![CDATA[RAW]]></param></function>',
    ),
    "minimax_m2": Row(
        "llama.cpp's template of MiniMax M2",
        '<minimax:tool_call>\n<invoke name="run">\n<parameter name="command">RAW</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "minimax_m3": Row(
        "llama.cpp's template of MiniMax M3",
        f'{NS}<tool_call>\n{NS}<invoke name="run">{NS}<command>RAW{NS}</command>{NS}</invoke>\n{NS}</tool_call>',
    ),
    "mistral": Row(
        "llama.cpp's template of Mistral Nemo", '[TOOL_CALLS][{"name": "run", "arguments": JSON, "id": "abcdefghi"}]'
    ),
    "mistral_args": Row("llama.cpp's template of Mistral Small 3.2", "[TOOL_CALLS]run[CALL_ID]abcdefghi[ARGS]JSON"),
    "nemotron": Row("llama.cpp's template of Nemotron Nano 2", f"<TOOLCALL>{LIST}</TOOLCALL>"),
    "olmo3": Row("vLLM, olmo3_tool_parser", "<function_calls>\nrun(command=PYTHON)\n</function_calls>"),
    "phi4_mini": Row("Ollama's template of Phi-4-mini", f"<|tool_call|>{LIST}<|/tool_call|>"),
    "phi4_mini_functools": Row("vLLM's tests, test_phi4mini_tool_parser", f"functools{LIST}"),
    "plain_json": Row("vLLM, xlam_tool_parser", LIST, starts=True),
    "pythonic": Row("vLLM, pythonic_tool_parser", "[run(command=PYTHON)]", starts=True, ends=True),
    "qwen3_coder": Row(
        "llama.cpp's template of Qwen3-Coder", CODER.replace("WRAPPER", "tool_call").replace("RAW", "\nRAW\n")
    ),
    "seed_oss": Row(
        "llama.cpp's tests, test-chat.cpp: the line break before a closing tag is a part of the value",
        CODER.replace("WRAPPER", "seed:tool_call"),
    ),
}
COMMANDS = {
    "plain": "ls -l",
    "quotes": """echo "it's" '"' \\" `x`""",
    "JSON": '{"a": ["b", {"c": null}]}',
    "lines": "\nfor x in 1 2; do\n\techo $x\ndone\n",
    "markup": "<b class=\"x\">&amp;</b> [1] (2) {3}",
    "null": "null",
    "number": "007",
    "empty": "",
    "other letters": "größe \u20ac \U0001f600",
}  # fmt: skip
CLOSING = re.compile(
    r"(?:</[^<>]+>|<｜tool▁calls?▁end｜>|<\|[a-z_]*end\|>|<[a-z_]+\|>|<end_function_call>|```(?!\w))\n?"
)


def written(name: str, command: str = "ls -l", function: str = "run") -> str:
    text = ROWS[name].text.replace("run", function)
    for word, value in (("JSON", json.dumps({"command": command})), ("PYTHON", repr(command)), ("RAW", command)):
        if word in ROWS[name].text:
            text = text.replace(word, value)
            break
    return text


def parser_of(name: str) -> OutputParser:
    ids = (f"call_{number}" for number in itertools.count())
    return FORMATS[name].parser(CallOptions(schemas=SCHEMAS, new_id=lambda: next(ids)))


def parsed(name: str, text: str, seed: int | None = None) -> Made:
    """Return what a parser reads of a text in random pieces, or of the entire text."""
    chance = random.Random(seed)
    ends = sorted(chance.sample(range(len(text) + 1), min(len(text), 12))) if seed is not None else []
    return read(parser_of(name), *(text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])))


# Rows whose white space, ids or first marker the grammar does not permit, and Gemma's, whose quotes must be special tokens.
OTHER_GRAMMAR = {
    "functiongemma",
    "gemma4",
    "cohere",
    "command_r",
    "functionary_v32",
    "mistral",
    "mistral_args",
    "olmo3",
}


@pytest.mark.parametrize("command", ["ls -l", COMMANDS["quotes"], COMMANDS["lines"]], ids=["plain", "quotes", "lines"])
@pytest.mark.parametrize("name", sorted(ROWS.keys() - OTHER_GRAMMAR))
def test_forced_calls_are_in_the_documented_form(name: str, command: str) -> None:
    text = written(name, command)
    if "PYTHON" in ROWS[name].text:
        text = text.replace(repr(command), json.dumps(command))  # the grammar permits JSON's strings only
    row_ends = text.removesuffix("<|call|>")  # which ends the turn
    for parallel in (True, False):
        if name == "plain_json" and not parallel:
            continue
        for strict in ((), ("run",)):
            grammar = FORMATS[name].grammar(CallGrammarOptions(SCHEMAS, parallel, json.dumps, strict))
            assert grammar is not None
            compiled = demo_compiler().compile("lark", grammar)
            assert takes_text(compiled, row_ends) and takes_text(compiled, row_ends + "\n") is (name != "harmony")
            assert not takes_text(compiled, f"I call: {row_ends}")
            assert not takes_text(compiled, row_ends.replace("command", "comand"))


def test_every_format_has_a_row() -> None:
    assert set(ROWS) == set(FORMATS)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("name", ROWS)
def test_complete_calls(name: str, command: str) -> None:
    text = written(name, command)
    for seed in (None, *range(12)):
        content, reasoning, ((function, arguments),) = parsed(name, text, seed)
        assert (content, reasoning, function) == ("", "", "run"), text
        assert json.loads(arguments) == {"command": command}


@pytest.mark.parametrize("name", ROWS)
def test_text_around_a_call_is_content_without_markup(name: str) -> None:
    row, call = ROWS[name], written(name)
    for before, after in (("Before.\n", ""), ("", "\nAfter."), ("Before. ", "\n\nAfter.")):
        if (before and row.starts) or (after and row.ends):
            continue
        for seed in (None, *range(12)):
            content, _, calls = parsed(name, before + call + after, seed)
            assert content == before.strip() + after.strip()
            assert [(function, json.loads(arguments)) for function, arguments in calls] == [
                ("run", {"command": "ls -l"})
            ]


@pytest.mark.parametrize("command", ["ls -l", COMMANDS["quotes"], COMMANDS["lines"]], ids=["plain", "quotes", "lines"])
@pytest.mark.parametrize("name", ROWS)
def test_cut_calls(name: str, command: str) -> None:
    """A text that ends anywhere within a call gives the beginning of the call, or is content, unchanged."""
    text = written(name, command)
    ((_, complete),) = parsed(name, text)[2]
    for at in range(len(text)):
        content, _, calls = parsed(name, text[:at], at)
        if calls:
            ((function, arguments),) = calls
            assert function == "run" and complete.startswith(arguments), text[:at]
            assert not content, text[:at]
        else:
            assert content in (text[:at], "", text[:at].partition("<|message_sep|>")[2]), text[:at]


@pytest.mark.parametrize("name", ROWS)
def test_calls_without_a_closing_tag(name: str) -> None:
    """The call is complete, cut at its end, or content: no argument has another value."""
    text = written(name)
    ((_, complete),) = parsed(name, text)[2]
    for found in CLOSING.finditer(text):
        broken = text[: found.start()] + text[found.end() :]
        for seed in (None, *range(6)):
            content, _, calls = parsed(name, broken, seed)
            assert len(calls) <= 1
            for function, arguments in calls:
                assert function == "run" and (
                    arguments == complete or complete.startswith(arguments.rstrip("]})`\n"))
                ), broken
            assert calls or content, broken


@pytest.mark.parametrize("name", ROWS)
def test_calls_of_unknown_functions(name: str) -> None:
    """They are calls where a marker certainly begins one, and content, unchanged, elsewhere."""
    text = written(name, function="other")
    content, _, calls = parsed(name, text)
    if calls:
        ((function, arguments),) = calls
        assert (content, function, json.loads(arguments)) == ("", "other", {"command": "ls -l"})
    else:
        assert content == text


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "RAW" not in row.text])
def test_quotes_that_are_not_escaped(name: str) -> None:
    """The arguments are the model's text, which may be invalid JSON, or the call is content: nothing is repaired."""
    quote = "'" if "PYTHON" in ROWS[name].text else '"'
    text = written(name).replace("ls -l", f"echo {quote}a{quote} b")
    for seed in (None, *range(12)):
        content, _, calls = parsed(name, text, seed)
        if calls:
            ((_, arguments),) = calls
            assert arguments in text
            with pytest.raises(ValueError):
                json.loads(arguments)
        else:
            assert content == text
