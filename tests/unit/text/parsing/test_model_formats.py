"""Calls as model families write them: format found from the template, the same result for every split, malformed calls.

The source after each family is where the syntax is documented; the texts are our own.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.parsed_answers import put_together
from unit_helpers.vocabulary_files import vocabulary_files

from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError, probe_template
from windlass.server.text.reasoning import FORMATS as THINKING
from windlass.server.text.reasoning import ChannelParser, ThinkingParser, format_of_template
from windlass.server.text.stream_parser import CallOptions, OutputParser, ParsingPlan
from windlass.server.text.tool_parsers.formats import FORMATS, detect, is_known

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {
                "type": "object",
                "properties": {"zip": {"type": "string"}, "floors": {"type": "array", "items": {"type": "integer"}}},
            },
        },
    },
    "run": {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}},
    "stop": {"type": "object", "properties": {}},
}
ROME = {"city": "Rome", "days": 3}
JSON = '{"city": "Rome", "days": 3}'
CALL = f'{{"name": "weather", "arguments": {JSON}}}'
NS = "]<]minimax[>["
KIMI = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>"

Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Family:
    """Syntax of a family: parser, source, template of its kind, answer, and its calls and content."""

    parser: str
    source: str
    template: str
    text: str
    calls: Calls
    content: str = ""


def one(parser: str, source: str, template: str, text: str, content: str = "") -> Family:
    return Family(parser, source, template, text, [("weather", ROME)], content)


FAMILIES = {
    "GLM 4.5": one(
        "glm45",
        "the model's chat template (llama.cpp, models/templates/GLM-4.6.jinja)",
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>",
        "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "I look.",
    ),
    "GLM 4.7": Family(
        "glm47",
        "the model's chat template (vLLM, glm47_moe_tool_parser)",
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></tool_call>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>stop</tool_call>",
        [("weather", ROME), ("stop", {})],
    ),
    "LongCat": one(
        "longcat",
        "mlx-lm, tool_parsers/longcat.py",
        "<longcat_tool_call>{name}\n<longcat_arg_key>k</longcat_arg_key>\n<longcat_arg_value>v</longcat_arg_value>",
        "<longcat_tool_call>functions.weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Rome</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
    ),
    "LongCat Flash": Family(
        "longcat_json",
        "vLLM's tests, test_longcat_tool_parser; the line breaks: SGLang, longcat_detector",
        '<longcat_tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</longcat_tool_call>',
        f'I look.\n<longcat_tool_call>{CALL}</longcat_tool_call>\n<longcat_tool_call>\n{{"name": "stop", "arguments": {{}}}}\n'
        "</longcat_tool_call>",
        [("weather", ROME), ("stop", {})],
        "I look.",
    ),
    "MiniMax M2": one(
        "minimax_m2",
        "the model's chat template (llama.cpp, unsloth-MiniMax-M2.jinja)",
        '<minimax:tool_call>\n<invoke name="n">\n<parameter name="p">v</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "MiniMax M3": Family(
        "minimax_m3",
        "ATOM, tool parser of MiniMax M3; nested values: vLLM, minimax_m3_tool_parser",
        "{%- set ns_token = ']<]minimax[>[' -%}",
        f'{NS}<tool_call>\n{NS}<invoke name="weather">\n{NS}<city>Rome{NS}</city>\n{NS}<where>{NS}<zip>00184{NS}</zip>'
        f"{NS}<floors>{NS}<item>1{NS}</item>{NS}<item>2{NS}</item>{NS}</floors>{NS}</where>{NS}</invoke>\n"
        f'{NS}<invoke name="stop">{NS}</invoke>\n{NS}</tool_call>',
        [("weather", {"city": "Rome", "where": {"zip": "00184", "floors": [1, 2]}}), ("stop", {})],
    ),
    "DeepSeek V3.2": one(
        "deepseek_v32",
        "the model's encoding (llama.cpp, models/templates/DeepSeek-V3.2.jinja)",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="$FUNCTION_NAME">',
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Rome'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    ),
    "DeepSeek V4": one(
        "deepseek_v4",
        "vLLM, deepseekv4_tool_parser",
        "<｜DSML｜tool_calls>",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Rome'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
    ),
    "Kimi K2": one(
        "kimi_k2",
        "the model's chat template (llama.cpp, moonshotai-Kimi-K2.jinja)",
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>",
    ),
    "Kimi K2, two calls": Family(
        "kimi_k2",
        "the model's chat template",
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        f"So.<|tool_calls_section_begin|>{KIMI}<|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("weather", ROME), ("stop", {})],
        "So.",
    ),
    "Nemotron Nano v2, H": one(
        "nemotron",
        "the model's chat template (llama.cpp, NVIDIA-Nemotron-Nano-v2.jinja)",
        '<TOOLCALL>[{"name": "tool_name1", "arguments": {}}]</TOOLCALL>',
        f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    ),
    "Nemotron 3, Qwen 3.5, Step 3.5": one(
        "qwen3_coder",
        "the model's chat template (llama.cpp, StepFun3.7-Flash.jinja)",
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "Seed-OSS": one(
        "seed_oss",
        "the model's chat template (llama.cpp, ByteDance-Seed-OSS.jinja)",
        "<seed:tool_call>\n<function=example_function_name>\n<parameter=p>v</parameter>\n</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
    ),
    "Command R7B, A": one(
        "cohere",
        "the model's chat template (llama.cpp, c4ai-command-r7b-12-2024-tool_use.jinja)",
        "1. Action: write <|START_ACTION|> followed by a list of JSON-formatted tool calls with tool_name",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": ' + JSON + "}\n]<|END_ACTION|>",
    ),
    "Command R7B, an answer": Family(
        "cohere",
        "the model's chat template",
        "write <|START_ACTION|>",
        "<|START_RESPONSE|>It rains.<|END_RESPONSE|>",
        [],
        "It rains.",
    ),
    "Command R": one(
        "command_r",
        "the model's chat template (tool_use)",
        "Write 'Action:' followed by a json-formatted list of actions: \"tool_name\": title of the tool",
        'Action: ```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": ' + JSON + "\n    }\n]```",
    ),
    "Command R, an answer": Family(
        "command_r",
        "the model's chat template",
        "Write 'Action:' followed by a json-formatted list of actions: \"tool_name\": title of the tool",
        'Action: ```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```\nIt rains.',
        [],
        "It rains.",
    ),
    "Hunyuan": one(
        "hunyuan",
        "vLLM, hunyuan_a13b_tool_parser",
        "<tool_calls>[{{ calls }}]</tool_calls>",
        f"<tool_calls>[{CALL}]</tool_calls>",
    ),
    "Apertus": Family(
        "apertus",
        "vLLM, apertus_tool_parser",
        "{%- set tool_calls_token = '<|tools_prefix|>' -%}",
        '<|tools_prefix|>[{"weather": ' + JSON + '}, {"stop": {}}]<|tools_suffix|>',
        [("weather", ROME), ("stop", {})],
    ),
    "Phi-4-mini, functools": Family(
        "phi4_mini_functools",
        "vLLM's tests, test_phi4mini_tool_parser; its template tool_chat_template_phi4_mini.jinja",
        "formatted as functools[{\"name\": [function name], \"arguments\": [function arguments as JSON]}, ...]",
        f'I look.\nfunctools[\n  {CALL},\n  {{"name": "stop", "arguments": {{}}}}\n]',
        [("weather", ROME), ("stop", {})],
        "I look.",
    ),
    "Phi-4-mini, a list between tokens": one(
        "phi4_mini", "Ollama's template", "<|tool|>{{ tools }}<|/tool|>", f"<|tool_call|>[{CALL}]<|/tool_call|>"
    ),
    "Phi-4-mini, one call between tokens": Family(
        "phi4_mini",
        "llama.cpp, models/templates/llama-cpp-microsoft-Phi-4-mini-instruct.jinja",
        "<|tool|>{{ tools }}<|/tool|>",
        f'<|tool_call|>{CALL}<|/tool_call|><|tool_call|>{{"name": "stop", "arguments": {{}}}}<|/tool_call|>',
        [("weather", ROME), ("stop", {})],
    ),
    "OLMo 3": Family(
        "olmo3",
        "vLLM, olmo3_tool_parser",
        "<function_calls>{{ calls }}</function_calls>",
        "<function_calls>\nweather(city=\"Rome\", days=3)\nrun(command='echo \"a, b\"', timeout=null)\n</function_calls>",
        [("weather", ROME), ("run", {"command": 'echo "a, b"', "timeout": None})],
    ),
    "FunctionGemma": one(
        "functiongemma",
        "Google's documentation of FunctionGemma: every text between <escape>",
        "<start_function_call>call:{{ name }}{",
        "<start_function_call>call:weather{city:<escape>Rome<escape>,days:3}<end_function_call>",
    ),
    "FunctionGemma, a number between quotes": Family(
        "functiongemma",
        "vLLM's tests, test_functiongemma_tool_parser",
        "<start_function_call>call:{{ name }}{",
        "I look. <start_function_call>call:weather{city:<escape>Rome<escape>days:<escape>3<escape>}<end_function_call>"
        "<start_function_call>call:stop{}<end_function_call>",
        [("weather", ROME), ("stop", {})],
        "I look.",
    ),
    "Granite 20B FC": Family(
        "granite_20b",
        "vLLM's tests, test_granite_20b_fc_tool_parser",
        "<function_call> {{ call }}",
        f'<function_call> {CALL}\n<function_call> {{"name": "stop", "arguments": {{}}}}',
        [("weather", ROME), ("stop", {})],
    ),
    "Granite 20B FC, no call": Family(
        "granite_20b",
        "vLLM's template of the model asks for it where no function fits",
        "<function_call> {{ call }}",
        '<function_call> {"name": "no_function", "arguments": {}}',
        [],
    ),
    "InternLM 2, 2.5": one(
        "internlm",
        "vLLM's tests, test_internlm2_tool_parser: one call per answer",
        "<|action_start|><|plugin|>",
        'I look.<|action_start|><|plugin|>{"name": "weather", "parameters": ' + JSON + "}<|action_end|>",
        "I look.",
    ),
    "InternLM 2, 2.5, with a space and a line break": one(
        "internlm",
        "SGLang, internlm_detector",
        "<|action_start|><|plugin|>",
        'I look.<|action_start|> <|plugin|>\n{"name": "weather", "parameters": ' + JSON + "}<|action_end|>",
        "I look.",
    ),
    "InternLM 2, 2.5, without the plugin's marker": Family(
        "internlm",
        "vLLM's tests, test_internlm2_tool_parser: malformed",
        "<|action_start|><|plugin|>",
        '<|action_start|>{"name": "weather"}',
        [],
        '<|action_start|>{"name": "weather"}',
    ),
    "SmolLM 3, Ling": one(
        "hermes",
        "the model's chat template",
        '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>',
        f"<tool_call>{CALL}</tool_call>",
    ),
    "GigaChat 3": one(
        "gigachat3",
        "the model's chat template (llama.cpp, GigaChat3-10B-A1.8B.jinja)",
        "{{ 'function call' }}{%- set role_sep = '<|role_sep|>\n' %}",
        f"I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{CALL}",
        "I look.",
    ),
    "GigaChat 3.1": one("gigachat3", "vLLM, gigachat3_tool_parser", "<|function_call|>", f"<|function_call|>{CALL}"),
    "MiniCPM 3": Family(
        "minicpm3",
        "the model's adaptation of vLLM, minicpm_tool_parser",
        "<|tool_call_start|>\n```python\nfunc1(params_name=params_value)\n```\n<|tool_call_end|>",
        '<|tool_call_start|>\n```python\nweather(city="Rome", days=3)\nstop()\n```\n<|tool_call_end|>',
        [("weather", ROME), ("stop", {})],
    ),
    "MiniCPM 5": one(
        "minicpm5",
        "vLLM, minicpm5xml_tool_parser",
        '<function name="f"><param name="p">v</param></function>',
        '<function name="weather"><param name="city"><![CDATA[Rome]]></param><param name="days">3</param></function>',
    ),
    "Functionary 3.1": one(
        "functionary_v31",
        "the model's chat template (Llama 3.1's custom tool calls)",
        "<function=example_function_name>{{example_parameters}}</function>",
        f"<function=weather>{JSON}</function>",
    ),
    "Functionary 3.2": Family(
        "functionary_v32",
        "llama.cpp, tests/test-chat.cpp",
        "{{ '>>>all\\n' + content }}",
        f">>>all\nI look.\n>>>weather\n{JSON}\n>>>stop\n{{}}",
        [("weather", ROME), ("stop", {})],
        "I look.",
    ),
    "Functionary 3.2, without the prompt's marker": one(
        "functionary_v32", "llama.cpp, tests/test-chat.cpp", "{{ '>>>all\\n' + content }}", f"weather\n{JSON}"
    ),
    "xLAM": one(
        "plain_json",
        "vLLM, xlam_tool_parser",
        'make calls in a single JSON array: [{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]',
        f"[{CALL}]",
    ),
    "xLAM, Mistral's marker": one(
        "plain_json",
        "vLLM, xlam_tool_parser",
        'make calls in a single JSON array: [{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]',
        f"[TOOL_CALLS][{CALL}]",
    ),
    "Gemma 3": one(
        "pythonic",
        "the model card",
        "Write calls as ```tool_code",
        '```tool_code\nweather(city="Rome", days=3)\n```',
    ),
}  # fmt: skip

# Qwen2.5, Qwen2.5-Coder and Hermes: forms that llama.cpp reads (common/chat-parser, Hermes 2 Pro).
HERMES = FAMILIES["SmolLM 3, Ling"].template
OBSERVED = {
    "tags of the prompt": f"<tools>\n{CALL}\n</tools>",
    "tool": f"<tool>{CALL}</tool>",
    "function_call": f"<function_call>{CALL}</function_call>",
    "response": f"<response>\n{CALL}\n</response>",
    "xml": f"<xml>\n{CALL}\n</xml>",
    "xml and json": f"<xml><json>{CALL}</json></xml>",
    "fence": f"```json\n{CALL}\n```",
    "fence without a language": f"```\n{CALL}\n```",
    "fence of xml": f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n```",
    "bare": CALL,
    "doubled braces": f"<tool_call>\n{{{CALL}}}\n</tool_call>",
    "doubled braces, one missing": f"<tool_call>\n{{{CALL}\n</tool_call>",
    "doubled braces, bare": f"{{{CALL}}}",
    "doubled braces of the arguments": f'{{{{"name": "weather", "arguments": {{{JSON}}}}}}}',
    "function with JSON": f"<function=weather>{JSON}</function>",
    "named function with JSON": f'<function name="weather">{JSON}</function>',
    "OpenAI's object": f'{{"type": "function", "function": {CALL}}}',
    "superfluous brace": f"<tool_call>\n{CALL}}}\n</tool_call>",
    "closed twice": f"<tool_call>\n{CALL}\n</tool_call>\n</tool_call>",
}


def parser_of(name: str) -> OutputParser:
    ids = (f"call_{number}" for number in itertools.count())
    return FORMATS[name].parser(CallOptions(schemas=SCHEMAS, new_id=lambda: next(ids)))


def read(name: str, pieces: list[str]) -> tuple[str, Calls]:
    parser = parser_of(name)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content, _, calls = put_together(events)
    return content, [(called, json.loads(arguments)) for called, arguments in calls]


def splits(text: str) -> list[list[str]]:
    """Return the text whole, in characters, cut at every position, and cut at random."""
    chance = random.Random(len(text))
    found = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for _ in range(20):
        ends = [0, *sorted(chance.sample(range(len(text) + 1), min(8, len(text)))), len(text)]
        found.append([text[start:end] for start, end in itertools.pairwise(ends)])
    return found


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_calls_of_a_family(family: Family) -> None:
    assert detect(family.template).name == family.parser and is_known(family.template)
    for pieces in splits(family.text):
        assert read(family.parser, pieces) == (family.content, family.calls), pieces


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("text", OBSERVED.values(), ids=OBSERVED)
@pytest.mark.parametrize("parser", ["hermes", "plain_json"])
def test_calls_as_qwen_writes_them(parser: str, text: str) -> None:
    for pieces in splits(text):
        assert read(parser, pieces) == ("", [("weather", ROME)]), pieces


def test_several_calls_in_one_fence() -> None:
    text = f'I call:\n```json\n{CALL}\n{{"name": "stop", "arguments": {{}}}}\n```\n```json\n{CALL}\n```'
    for pieces in splits(text):
        assert read("hermes", pieces) == ("I call:", [("weather", ROME), ("stop", {}), ("weather", ROME)])


UNKNOWN = [
    '<tools>{"name": "other", "arguments": {}}</tools>',
    '```json\n{"name": "Bob", "age": 3}\n```',
    "<response>It rains.</response>",
    '```python\nprint("weather")\n```',
    '{"name": "Bob"}',
    "<function=other>{}</function>",
    "Use <tool_call> to call.",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_text_that_names_no_known_function_stays(text: str) -> None:
    for pieces in splits(text):
        assert read("hermes", pieces) == (text, [])


CODER = "<tool_call>\n<function=run>\n<parameter=command>\nls\n"
MALFORMED: list[tuple[str, str, str, Calls]] = [
    # missing tags
    ("qwen3_coder", f"{CODER}</function>\n</tool_call>", "", [("run", {"command": "ls"})]),
    ("qwen3_coder", f"{CODER}<parameter=timeout>\n3\n</parameter>\n</function>\n</tool_call>", "",
     [("run", {"command": "ls", "timeout": 3})]),
    ("qwen3_coder", f"{CODER}</parameter>\n</tool_call>\nDone.", "Done.", [("run", {"command": "ls"})]),
    ("qwen3_coder", f"{CODER}</tool_call>\n{CODER}</parameter>\n</function>\n</tool_call>", "",
     [("run", {"command": "ls"})] * 2),
    ("qwen3_coder", f"{CODER}</parameter>\n{CODER}</parameter>\n</function>\n</tool_call>", "",
     [("run", {"command": "ls"})] * 2),
    ("qwen3_coder", "<function=run>\n<parameter=command\nls\n</parameter>\n</function>", "", [("run", {"command": "ls"})]),
    ("qwen3_coder", "<function=run\n<parameter=command>ls</parameter></function>", "", [("run", {"command": "ls"})]),
    ("qwen3_coder", "<function=stop>\n</tool_call>", "", [("stop", {})]),
    ("qwen3_coder", "<function=run><parameter=command>ls<parameter=timeout>3</function>", "",
     [("run", {"command": "ls", "timeout": 3})]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="run">\n<parameter name="command">ls\n</invoke>\n</minimax:tool_call>',
     "", [("run", {"command": "ls"})]),
    ("glm45", "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>ls\n</tool_call>", "", [("run", {"command": "ls"})]),
    ("deepseek_v32", '<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="command" string="true">ls\n</｜DSML｜invoke>', "",
     [("run", {"command": "ls"})]),
    ("minimax_m3", f'{NS}<tool_call>{NS}<invoke name="run">{NS}<command>ls{NS}</invoke>{NS}</tool_call>', "",
     [("run", {"command": "ls"})]),
    ("minimax_m3", f'{NS}<tool_call>{NS}<invoke name="run">{NS}<command>ls{NS}</command>{NS}<invoke name="stop">{NS}</invoke>',
     "", [("run", {"command": "ls"}), ("stop", {})]),
    # tags within values
    ("qwen3_coder", "<function=run>\n<parameter=command>\necho <parameter=x> </function> <b>\n</parameter>\n</function>", "",
     [("run", {"command": "echo <parameter=x> </function> <b>"})]),
    # tags within JSON
    ("qwen3_coder", '<function=weather>\n<parameter=where>\n{"zip": "</parameter>\\n</function>\\"</tool_call>"}\n</parameter>\n'
     "<parameter=days>\n3\n</parameter>\n</function>", "",
     [("weather", {"where": {"zip": '</parameter>\n</function>"</tool_call>'}, "days": 3})]),
    ("glm47", '<tool_call>weather<arg_key>where</arg_key><arg_value>{"zip": "</arg_value>"}</arg_value></tool_call>', "",
     [("weather", {"where": {"zip": "</arg_value>"}})]),
    ("qwen3_coder", '<function=run>\n<parameter=command>\necho "</parameter>\n</function>', "",
     [("run", {"command": 'echo "'})]),
    # line breaks of a value
    ("seed_oss", "<seed:tool_call>\n<function=run>\n<parameter=command>ls\n</parameter>\n</function>\n</seed:tool_call>", "",
     [("run", {"command": "ls\n"})]),
    # JSON between the tags
    ("qwen3_coder", '<tool_call>\n<function=run>\n{"command": "ls"}\n</function>\n</tool_call>', "",
     [("run", {"command": "ls"})]),
    ("qwen3_coder", f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ROME)]),
    ("glm45", f"<tool_call>{CALL}</tool_call>", "", [("weather", ROME)]),
    # values
    ("qwen3_coder", "<function=weather><parameter=where>{'zip': '1', 'x': True}</parameter></function>", "",
     [("weather", {"where": {"zip": "1", "x": True}})]),
    ("qwen3_coder", "<function=weather><parameter=days>07</parameter><parameter=city>07</parameter></function>", "",
     [("weather", {"days": 7, "city": "07"})]),
    ("lfm2", "<|tool_call_start|>[weather(days=07, city='07')]<|tool_call_end|>", "", [("weather", {"days": 7, "city": "07"})]),
    ("gemma4", '<|tool_call>call:weather{days:07,city:<|"|>07<|"|>}<tool_call|>', "", [("weather", {"days": 7, "city": "07"})]),
    ("lfm2", '<|tool_call_start|>[run(command="""a\n"b" c""")]<|tool_call_end|>', "", [("run", {"command": 'a\n"b" c'})]),
    ("pythonic", "[weather({'city': 'Rome', 'days': 3})]", "", [("weather", ROME)]),
    ("pythonic", "[weather('Rome', 3)]\nI look.", "I look.", [("weather", ROME)]),
]  # fmt: skip


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(("parser", "text", "content", "calls"), MALFORMED)
def test_malformed_calls(parser: str, text: str, content: str, calls: Calls) -> None:
    for pieces in splits(text):
        assert read(parser, pieces) == (content, calls), pieces


UNCERTAIN = [
    'run(command="echo "hi" done")',
    'run(command="git commit -m "fix", timeout=1")',
    'run(command="echo "" done")',
    'run(command="find . -name ")", timeout=3)',
    'run(command="a" "b")',
    'run(command="a" + "b")',
    'run(command="rm", command="ls")',
    'run(command="rm", "ls")',
    'run(command="rm", timeout=open("x"))',
    "run(command=ls)",
    "run('ls', 3, 4)",
    'run(command="ls") and more',
    'run(command="echo ")]", timeout=3)',
    "stop(1)",
]


@pytest.mark.parametrize("call", UNCERTAIN)
def test_python_that_is_not_certain_stays_text(call: str) -> None:
    """A quote within a string must never change the arguments: the client would run another command."""
    for parser, text in (
        ("pythonic", f"[{call}]"),
        ("lfm2", f"<|tool_call_start|>[{call}]<|tool_call_end|>"),
        ("olmo3", f"<function_calls>\n{call}\n</function_calls>"),
        ("minicpm3", f"<|tool_call_start|>\n```python\n{call}\n```\n<|tool_call_end|>"),
    ):
        for pieces in ([text], list(text)):
            assert read(parser, pieces) == (text, []), parser


def think(format: str, tools: str, phase: Any, pieces: list[str]) -> tuple[str, str, Calls]:
    made = THINKING[format]
    stage = ChannelParser if made.may_recur else ThinkingParser
    parser = stage(made, phase, ParsingPlan(lambda: parser_of(tools), call_openers=FORMATS[tools].opens))
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content, reasoning, calls = put_together(events)
    return reasoning, content, [(called, json.loads(arguments)) for called, arguments in calls]


LOOK = [("weather", ROME)]
THOUGHTS: list[tuple[str, str, str, str, str, str, Calls]] = [
    ("mistral", "mistral_args", "before", "[THINK]I look.[/THINK]Hi.", "I look.", "Hi.", []),
    ("seed_oss", "seed_oss", "before", "<seed:think>I look.</seed:think>\nHi.", "I look.", "Hi.", []),
    ("cohere", "cohere", "before", "<|START_THINKING|>I look.<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>",
     "I look.", "Hi.", []),
    ("cohere", "cohere", "inside", 'I look.<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", '
     f'"parameters": {JSON}}}]<|END_ACTION|>', "I look.", "", LOOK),
    ("hunyuan", "hunyuan", "before", "<think>\nI look.\n</think>\n<answer>\nHi.\n</answer>", "I look.", "Hi.", []),
    ("hunyuan", "hunyuan", "after", "<answer>\nHi.\n</answer>", "", "Hi.", []),
    ("hunyuan", "hunyuan", "inside", f"I look.\n</think>\n<answer>\n<tool_calls>[{CALL}]</tool_calls>\n</answer>", "I look.",
     "", LOOK),
    ("apertus", "apertus", "before", "<|inner_prefix|>I look.<|inner_suffix|>Hi.", "I look.", "Hi.", []),
    ("apertus", "apertus", "inside", f'I look.<|tools_prefix|>[{{"weather": {JSON}}}]<|tools_suffix|>', "I look.", "", LOOK),
    ("minicpm3", "minicpm3", "before", "<|thought_start|>\nI look.\n<|thought_end|>\nHi.", "I look.", "Hi.", []),
    ("longcat", "longcat", "inside", f"I look.\n<longcat_tool_call>{CALL}</longcat_tool_call>", "I look.", "", LOOK),
    ("minimax_m3", "minimax_m3", "before", "</mm:think>Hi.", "", "Hi.", []),
    ("qwen3", "hermes", "before", "</think>\n\nHi.", "", "Hi.", []),
    # calls within open thinking
    ("qwen3", "qwen3_coder", "inside", f"I look.\n{CODER}</parameter>\n</function>\n</tool_call>", "I look.", "",
     [("run", {"command": "ls"})]),
    ("qwen3", "hermes", "inside", f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n</think>\n\nDone.", "I look.", "Done.", LOOK),
    ("qwen3", "hermes", "inside", f"With <tool_call> and <tool_call>{{ I call.\n</think>\n<tool_call>{CALL}</tool_call>",
     "With <tool_call> and <tool_call>{ I call.", "", LOOK),
    ("qwen3", "hermes", "inside", "With <tool_call>", "With <tool_call>", "", []),
    ("deepseek_r1", "deepseek_v31", "inside", f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "I look.", "", LOOK),
    ("qwen3", "kimi_k2", "inside", f"I look.<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>", "I look.", "", LOOK),
    ("qwen3", "glm45", "inside", "I look.<tool_call>stop</tool_call>", "I look.", "", [("stop", {})]),
    ("qwen3", "lfm2", "inside", "I look.<|tool_call_start|>[stop()]<|tool_call_end|>", "I look.", "", [("stop", {})]),
    ("qwen3", "lfm2", "inside", "I look.<|tool_call_start|>[stop()", "I look.", "", [("stop", {})]),
]  # fmt: skip


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(("format", "tools", "phase", "text", "thinking", "content", "calls"), THOUGHTS)
def test_thinking_of_a_family(
    format: str, tools: str, phase: str, text: str, thinking: str, content: str, calls: Calls
) -> None:
    for pieces in splits(text):
        assert think(format, tools, phase, pieces) == (thinking, content, calls), pieces


def test_openers_within_the_thinking_are_examined_up_to_a_limit() -> None:
    for text in ("<tool_call>" * 3000, '<tool_call>{"a": "' * 3000):
        for pieces in ([text], [text[at : at + 1000] for at in range(0, len(text), 1000)]):
            reasoning, content, calls = think("qwen3", "hermes", "inside", [*pieces, "</think>Hi."])
            assert (reasoning, content, calls) == (text, "Hi.", [])


THINKING_TEMPLATES = {
    "[THINK]Your thoughts[/THINK]": "mistral",
    "{{ '<seed:think>' }}": "seed_oss",
    "write <|START_THINKING|> followed by a plan": "cohere",
    "{%- set inner_token = '<|inner_prefix|>' -%}": "apertus",
    "<|thought_start|>{{ thought }}<|thought_end|>": "minicpm3",
    "{{ '<longcat_think>' }}": "longcat",
    "{{ '<mm:think>' }}": "minimax_m3",
    "{{ '<think>' + reasoning + '</think>\\n<answer>' + content + '</answer>' }}": "hunyuan",
    "{{ '\\n<response>' + result + '</response>' }}{{ '<think>\\n' }}": "qwen3",  # MiniMax M2 shows results so
}


@pytest.mark.parametrize(("template", "name"), THINKING_TEMPLATES.items())
def test_thinking_format_of_a_template(template: str, name: str) -> None:
    assert format_of_template(template) == name


def test_template_without_a_known_format() -> None:
    assert not is_known("{% if tools %}{{ tools | tojson }}{% endif %}<call>{{ call }}</call>")


# Templates that render the call of a history in the syntax in which the model writes calls.
RENDERED = """
Apertus-8B-Instruct Apriel-1.6-15b-Thinker-fixed Bielik-11B-v3.0-Instruct ByteDance-Seed-OSS Cohere2MoE
CohereForAI-c4ai-command-r7b-12-2024-tool_use GLM-4.6 GLM-4.7-Flash GigaChat3-10B-A1.8B GigaChat3.1-10B-A1.8B LFM2.5-8B-A1B
MiMo-VL MiniMax-M1 MiniMax-M2 MiniMax-M3 Mistral-Small-3.2-24B-Instruct-2506 NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
NVIDIA-Nemotron-Nano-v2 NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B
Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Qwen3-Coder Qwen3.5-4B Reka-Edge Spark2.5 StepFun3.5-Flash
deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-V3.1 deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4
deepseek-ai-DeepSeek-V4-Flash-0731 google-gemma-4-31B-it google-gemma-4-31B-it-interleaved ibm-granite-granite-4.0
ibm-granite-granite-4.1 inclusionai-ling-3.0-flash meetkai-functionary-medium-v3.1 meetkai-functionary-medium-v3.2
meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct meta-llama-Llama-3.3-70B-Instruct
mistralai-Ministral-3-14B-Reasoning-2512 mistralai-Mistral-Nemo-Instruct-2407 moonshotai-Kimi-K2 openai-gpt-oss-120b
openbmb-MiniCPM5-1B poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1 poolside-Laguna-XS.2 unsloth-Apriel-1.5
unsloth-mistral-Devstral-Small-2507
""".split()
UNKNOWN_TEMPLATES = {"Kimi-K3", "muse-glimmer", "tencent-Hy3", "upstage-Solar-Open-100B"}


def parsed_from_history(source: str) -> bool:
    """Return whether a call in a history, as the template renders it, is parsed back."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    function = {"name": "weather", "description": "The weather.", "parameters": SCHEMAS["weather"]}
    tools = [{"type": "function", "function": function}]
    user = [{"role": "user", "content": "USER"}]
    for arguments in (ROME, JSON):
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        history = [
            *user,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "RESULT"},
        ]
        try:
            prompt = template.render(user, tools=tools)
            text = template.render(history, tools=tools, add_generation_prompt=False)
        except ChatTemplateError:
            continue
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
        for begin in (len(list(common)), text.rindex("USER") + len("USER")):
            answer = text[begin:].partition("RESULT")[0]
            try:
                calls = read(detect(source).name, [answer])[1]
            except ValueError:  # arguments within a string, where the template expects an object
                continue
            if calls == LOOK:
                return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_calls_that_templates_render_are_parsed(request: pytest.FixtureRequest) -> None:
    """The templates in llama.cpp's source, about 70."""
    folder = vocabulary_files(Path(request.config.cache.mkdir("gguf-vocabularies")))
    sources = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}
    assert [name for name in RENDERED if not parsed_from_history(sources[name])] == []
    shown = {name for name, text in sources.items() if probe_template(ChatTemplate(text, {})).tools}
    assert {name for name in shown if not is_known(sources[name])} == UNKNOWN_TEMPLATES
