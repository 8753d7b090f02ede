"""Refused requests: each row has a body and the param, the code and a fragment of the message of its error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
from helpers.live_server import Live, live_server
from helpers.toy_tokenizers import taught

from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.schemas.completions import MAX_PASSAGES
from windlass.server.schemas.tools import MAX_ARGUMENTS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
INFILL, ATTENTION, TOKENIZE, DETOKENIZE = "/infill", "/v1/attention", "/tokenize", "/detokenize"
STREAMED = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, INFILL)
FOREIGN_FIELDS = {RESPONSES: "messages", INFILL: "max_tokens"}  # of the API that the request is translated to

USER = [{"role": "user", "content": "hello"}]
GAP = {"input_prefix": "def f(x):\n    ", "input_suffix": "\n    return y"}
TOOLS_TEMPLATE = (
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ reasoning_effort }}"
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning %}<{{ message.reasoning }}>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{# <think> </think> #}"
)
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FILL_IN_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
LINEAR, YARN = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}
PROFILES = {"long": RopeScaling.from_dict(YARN), "grow": RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4.0})}

SERVERS: dict[str, Callable[[], AbstractContextManager[Live]]] = {
    "plain": lambda: live_server(rope_profiles=PROFILES, attention_maps=True),
    "tools": lambda: live_server(template=TOOLS_TEMPLATE, tokens=MARKERS, model={"max_model_len": 4096}),
    "infill": lambda: live_server(backend=taught(FILL_IN_TOKENS, special=False)),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], Live]]:
    """Returns the server with that name, which it starts if it is not running."""
    with ExitStack() as stack:
        running: dict[str, Live] = {}

        def find(name: str) -> Live:
            if name not in running:
                running[name] = stack.enter_context(SERVERS[name]())
            return running[name]

        yield find


def refused(path: str, common: dict[str, Any], *rows: tuple[Any, ...], server: str = "plain") -> list[Any]:
    """Parameters of the test. common: fields of all bodies. Each row: fields, param[, fragment of the message[, code]]."""
    return [
        pytest.param(
            server, path, {**common, **fields}, fields, param, *rest, *("", "")[len(rest) :], id=f"{path} {fields}"[:60]
        )
        for fields, param, *rest in rows
    ]


OUT_OF_BOUNDS: list[tuple[str, list[Any]]] = [
    ("max_tokens", [-1, 2**31, 1.5, "5", True, [], 10**30]),
    ("temperature", [-0.1, 101, "1", True, [], 10**400]),
    ("top_p", [0, 1.01, -1, "x"]),
    ("n", [0, 65, -1, 1.0, "2", True, 10**6, 2**63, 10**30]),
    ("best_of", [0, 65, 10**6, 2**63, 10**30]),
    ("stream", ["true", 1, []]),
    ("stream_options", [5, [], "x"]),
    ("stop", [5, [5], [""], "", ["a"] * 65, "x" * 257, {"a": 1}]),
    ("seed", [1.5, "x", 2**63, -(2**63)]),
    ("presence_penalty", [2.1, -2.1, "x"]),
    ("frequency_penalty", [2.1, -2.1, []]),
    ("logit_bias", [{"a": 1}, {"1": 101}, {"1": -101}, {"1": "x"}, {"-1": 1}, {"423": 1}, {"1_0": 1}, [], "x", {"": 1}]),
    ("logprobs", [-1, 21, True, "1"]),
    ("echo", [1, "x"]),
    ("top_k", [-2, 2**31, 1.5]),
    ("min_p", [-0.1, 1.1]),
    ("typical_p", [0, 1.1]),
    ("xtc_probability", [-0.1, 1.1, "x"]),
    ("xtc_threshold", [-0.1, 1.1, []]),
    ("dry_multiplier", [-0.1, 101, "1", True]),
    ("dry_base", [0.9, 101, []]),
    ("dry_allowed_length", [-1, 1.5, 2**31]),
    ("dry_penalty_last_n", [-2, 32769, "x"]),
    ("dry_sequence_breakers", ["x", '"a', '"a", 5', '["a"', "[" * 9999, [""], [5], ["a"] * 33, ["x" * 41], 5, {}, '"' * 10**6]),
    ("repetition_penalty", [0, -1, 101]),
    ("min_tokens", [-1, 17, 10**20]),
    ("ignore_eos", ["no", 0]),
    ("stop_token_ids", [[-1], [423], [1.5], 5, [1] * 1025, [10**30]]),
    ("allowed_token_ids", [[], [-1], [423], ["x"]]),
    ("bad_words", ["x", [""], [5], ["a"] * 1025, ["x" * 257]]),
    ("include_stop_str_in_output", [1]),
    ("skip_special_tokens", [0]),
    ("add_special_tokens", ["x"]),
    ("prompt_logprobs", [-1, 21, True]),
    ("return_token_ids", [1]),
    ("truncate_prompt_tokens", [0, -1, 1.5]),
    ("truncation_side", ["middle", "", 1]),
    ("return_tokens_as_token_ids", [1, "yes"]),
    ("cache_salt", ["", 5, "x" * 257]),
    ("priority", [1.5, 2**31, "high"]),
    ("timeout", [0, -1, 10**9, "5"]),
    ("request_id", ["", "a b", "x" * 129, "a\nb", "é", 5]),
    ("model", [5, ["toy"]]),
]  # fmt: skip
COMPLETION_REFUSALS = refused(
    COMPLETIONS,
    {"prompt": "a"},
    *(({field: value}, field) for field, values in OUT_OF_BOUNDS for value in values),
    *(({"prompt": prompt}, "prompt") for prompt in (
        None, [], {}, 5, True, [True], [[]], [[], [5]], ["a", 5], [5, "a"], [[5], "a"], [["a"]], [[5, 1.5]], [5, None], [-1],
        [423], [10**30], [[423]], [[[5]]], [1.5],
    )),
    *(({"prompt": [each] * 1025}, "prompt") for each in ("a", [5])),
    *(({field: value}, field, "vocabulary") for field, value in (
        ("logit_bias", {"423": 1}), ("logit_bias", {"9999999999": 1}), ("stop_token_ids", [423]),
        ("allowed_token_ids", [2**31 - 1]),
    )),
    ({"rope_update": "sometimes"}, "rope_update"),
    ({"rope_update": 5}, "rope_update"),
    ({"rope_update": []}, "rope_update"),
    ({"context_overflow": "drop_turns"}, "context_overflow"),
    ({"context_overflow": "roll"}, "context_overflow"),
    ({"keep_tokens": 16}, "keep_tokens"),
    ({"keep_tokens": -1}, "keep_tokens"),
    ({"keep_tokens": 0}, "keep_tokens"),
    ({"cache_reuse": -64}, "cache_reuse"),
    ({"suffix": "tail"}, "suffix"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": {"type": "no-such-type"}}, "guided_json"),
    ({"grammar": "root ::= nothing"}, "grammar"),
    ({"json_schema": {"type": "strin"}}, "json_schema"),
    ({"response_format": {"type": "text", "more": 1}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"rope_scaling": "a-profile"}, "rope_scaling"),
    ({"rope_scaling": 4}, "rope_scaling"),
    ({"tools": [{}]}, "tools"),
    ({"no_such_field": 0}, "no_such_field"),
    ({"N": 1}, "N"),
    ({"temperature": 300}, "temperature", "temperature should be less than or equal to 100"),
    ({"temperature": "hot"}, "temperature", "temperature should be a valid number"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens should be a valid integer"),
    ({"stop": ["x"] * 65}, "stop", "stop should have at most 64 items after validation, not 65"),
    ({"stream": True, "stream_options": 3}, "stream_options", "stream_options should be an object"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "logit_bias may have at most 1024 entries, got 1025"),
    ({"rope_scaling": 5}, "rope_scaling", "rope_scaling should be an object such as"),
    ({"prompt": []}, "prompt", "prompt should not be an empty list"),
    ({"temprature": 1}, "temprature", "unknown field 'temprature': did you mean 'temperature'?"),
    ({"Max_Tokens": 1}, "Max_Tokens", "unknown field 'Max_Tokens': did you mean 'max_tokens'?"),
    ({"max_new_tokens": 1}, "max_new_tokens", "unknown field 'max_new_tokens': it is called max_tokens here"),
    ({"colour": "red"}, "colour", "unknown field 'colour': remove it"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge",
     "unknown field 'stream_options.include_usge': did you mean 'include_usage'?"),
    ({"rope_update": {"policy": "rotat"}}, "rope_update.policy",
     "rope_update.policy should be 'frozen', 'recompute' or 'rotate' (did you mean 'rotate'?)"),
    ({"stop": ["a", 5]}, "stop", "stop[1] should be a valid string"),
    *(({"top_p": value}, "top_p", fragment, "invalid_value")
      for value in (0, 0.0, -0.0) for fragment in ("should be greater than 0", "set temperature to 0")),
    *(({"add_special_tokens": False, "prompt": prompt}, "prompt", f"{place} is empty: give at least one token", "empty_prompt")
      for prompt, place in (("", "prompt"), (["a", ""], "prompt[1]"), ([[1], []], "prompt[1]"))),
    ({"prompt": None}, "prompt"),
    ({"rope_scaling": "yarn"}, "rope_scaling.factor", "is missing: rope_type 'yarn' needs it"),
    ({"rope_scaling": {"rope_type": "yarm", "factor": 4}}, "rope_scaling.rope_type",
     "rope_scaling.rope_type 'yarm' is not known (did you mean 'yarn'?): use one"),
    ({"rope_scaling": {"rope_type": "yarn", "facter": 4}}, "rope_scaling.facter",
     "facter is not a field of rope_type 'yarn' (did you mean 'factor'?): it takes"),
    ({"rope_scaling": {"rope_tipe": "yarn", "factor": 4}}, "rope_scaling.rope_type",
     "rope_type is missing (did you mean it by 'rope_tipe'?): give one of"),
    ({"cache_reuse": -1}, "cache_reuse"),
    ({"cache_reuse": 31}, "cache_reuse"),
    ({"cache_reuse_recompute": 0.1}, "cache_reuse_recompute"),
    ({"cache_reuse": 64, "cache_reuse_recompute": -0.1}, "cache_reuse_recompute"),
    ({"passages": []}, "passages"),
    ({"passages": [{"start": 0, "end": 40}], "cache_reuse": 0}, "cache_reuse"),
    ({"passages": [{"start": 0}]}, "passages[0].end"),
    ({"passages": [{"start": 0, "end": 9}] * 65}, "passages"),
    ({"keep_tokens": 16}, "keep_tokens", "requires context_overflow shift"),
    ({"keep_tokens": -1, "context_overflow": "shift"}, "keep_tokens", "greater than or equal to 0"),
    ({"keep_tokens": 10**6, "context_overflow": "shift"}, "keep_tokens", "must lie between 0 and"),
    ({"attention_sinks": 4}, "attention_sinks", "requires attention_window"),
    ({"attention_window": 0}, "attention_window", "greater than or equal to 1"),
    ({"attention_window": 10**6}, "attention_window", "they may be at most"),
    ({"context_overflow": "roll"}, "context_overflow", "'error', 'stop', 'shift' or 'drop_turns'"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"prompt": [[]]}, "prompt"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"rope_scaling": {"rope_type": "nonsense"}}, "rope_scaling.rope_type"),
    ({"n_predict": 5}, "n_predict", "unknown field 'n_predict': it is called max_tokens here"),
    ({"n_probs": 5}, "n_probs", "unknown field 'n_probs': it is called logprobs here"),
    ({"rope_freq_scale": 0.5}, "rope_freq_scale",
     "it is rope_scaling here, an object such as {'rope_type': 'linear', 'factor': 4}"),
)  # fmt: skip

CHAT_REFUSALS = refused(
    CHAT,
    {"messages": USER},
    ({"tool_choice": "required"}, "tool_choice"),
    ({"guided_regex": "a", "grammar": "root ::= [a]"}, "grammar"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format"),
    ({"echo": True}, "echo"),
    ({"prompt": "x"}, "prompt"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    *(({"messages": [*USER, message]}, f"messages[1].{field}") for message, field in (
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"content": "x"}, "role"),
        ({"role": "user", "content": "x", "surprise": 1}, "surprise"),
        ({"role": "assistant", "content": "x", "audio": {"id": "y"}}, "audio"),
    )),
    *(({"messages": [*USER, {"role": "assistant", "content": [part]}, *USER]}, "messages[1].content", fragment)
      for part, fragment in (
        ({"type": "text", "text": "a", "voice": "b" * 99}, "part 0 has the unknown field 'voice': remove it"),
        ({"type": "text", "text": "a", "b" * 99: 1}, f"part 0 has the unknown field '{'b' * 64}': remove it"),
        ({"type": "text", "text": "a", "refusal": "no"}, "part 0 has the unknown field 'refusal': remove it"),
        ({"type": "refusal", "text": "no"}, "only text is supported"),
        ({"type": ["text"], "text": "a"}, "only text is supported"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "only text is supported"),
        ("a", "only text is supported"),
    )),
    *(({"messages": [*USER, {"role": role, **content}]}, "messages[1].content", "", "missing_field")
      for role in ("user", "system", "developer") for content in ({}, {"content": None})),
    *(({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs.{name}", "", "invalid_value")
      for name in ("messages", "add_generation_prompt", "tools")),
    *(({"messages": [{"role": "usr", "content": "a"}, *USER], **fields}, "messages[0].role",
       "messages[0].role is 'usr': did you mean 'user'?", "invalid_value")
      for fields in ({}, {"context_overflow": "drop_turns"})),
    ({"messages": [{"role": "forbidden", "content": "x"}]}, "messages", "no such role"),
    *(({"messages": [message]}, param) for message, param in (
        ({"role": "user", "content": "a", "prefix": True}, "messages[0].prefix"),
        ({"role": "assistant", "content": "a", "images": [{}]}, "messages[0].images"),
        ({"role": "assistant", "content": "a", "thinking_blocks": [{}]}, "messages[0].thinking_blocks"),
        ({"role": "assistant", "content": "a", "audio": {"id": "b"}}, "messages[0].audio"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "detail": "high"}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": None, "content": "a"}, "messages[0].role"),
    )),
    *(({"modalities": modalities}, "modalities", "", "unsupported_field")
      for modalities in (["audio"], ["text", "audio"], "text")),
    ({"messages": [*USER, "x"]}, "messages[1]", "messages[1] should be an object"),
    ({"tools": ["x"]}, "tools[0]", "tools[0] should be an object"),
    ({"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents",
     "unknown field 'messages[0].contents': did you mean 'content'?"),
    *(({"top_p": value}, "top_p", fragment, "invalid_value")
      for value in (0, 0.0, -0.0) for fragment in ("should be greater than 0", "set temperature to 0")),
    ({"passages": [{"start": 0, "end": 40}]}, "passages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"num_predict": 5}, "num_predict", "unknown field 'num_predict': it is called max_tokens here"),
    ({"n_keep": 5}, "n_keep", "it is called keep_tokens here"),
    ({"n_probs": 5}, "n_probs", "ask for logprobs and top_logprobs here"),
    ({"repeat_penalty": 1.1}, "repeat_penalty", "it is called repetition_penalty here"),
)  # fmt: skip

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """The choice among these functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOL_REFUSALS = refused(
    CHAT,
    {"messages": USER},
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "string"}}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"title": "y" * 140_000}}}]},
     "tools[0].function.parameters"),
    ({"tools": [CHAT_TOOL, CHAT_TOOL]}, "tools"),
    ({"tools": [CHAT_TOOL] * 1025}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}", "description": "y" * 90_000}} for i in range(12)]},
     "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CHAT_TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "find"}}}, "tool_choice"),
    ({"tools": [CHAT_TOOL], "tool_choice": allowed("auto")}, "tool_choice"),
    ({"tools": [CHAT_TOOL], "tool_choice": allowed("auto", *["look"] * 1025)}, "tool_choice"),
    ({"tools": [CHAT_TOOL], "tool_choice": allowed("sometimes", "look")}, "tool_choice"),
    ({"tools": [CHAT_TOOL], "tool_choice": allowed("auto", "look", "find")}, "tool_choice"),
    ({"tools": [CHAT_TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["look"]}}},
     "tool_choice"),
    ({"tools": [CHAT_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look"}]}},
     "tool_choice"),
    ({"tools": [CHAT_TOOL], "functions": [CHAT_TOOL["function"]]}, "functions"),
    ({"function_call": {"name": "look"}}, "function_call"),
    ({"functions": [CHAT_TOOL["function"]], "function_call": {"name": "find"}}, "function_call"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "look", "arguments": ["Rome"]}}]}]},
     "messages[1].tool_calls[1].function.arguments"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": 1}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": "[" * (MAX_ARGUMENTS + 1)}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
    server="tools",
)  # fmt: skip

GBNF = 'root ::= num ("+" num)*\nnum ::= [0-9]+'


def in_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def recursive() -> dict[str, Any]:
    return {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}},
        "$ref": "#/$defs/node",
    }


FORMATS: list[tuple[Any, ...]] = [
    ({"response_format": {}}, "response_format", "type"),
    ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format", "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": "yes"}}}, "response_format", "strict"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format", "schema"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "xml"),
    ({"structured_outputs": []}, "structured_outputs", ""),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "1 to 4096"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs", "empty"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "string"),
    ({"guided_choice": ["a"] * 5000}, "guided_choice", "4096"),
    ({"guided_regex": ""}, "guided_regex", ""),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
    ({"response_format": {"type": "json_object"}, "grammar": GBNF}, "grammar", "response_format"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json", "x-guidance"),
    ({"guided_json": {"type": "string", "description": "x" * 140_000}}, "guided_json", "131072"),
    ({"guided_regex": "a" * 140_000}, "guided_regex", "131072"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    ({"guided_regex": "(?=a)a"}, "guided_regex", "look"),
    ({"guided_regex": r"(a)\1"}, "guided_regex", "backreference"),
    ({"guided_regex": r"[^\x00-\x{10FFFF}]"}, "guided_regex", "no output satisfies it"),
    ({"grammar": 'root ::= "a" | nope'}, "grammar", "nope"),
    ({"grammar": "root ::= " + "(" * 5000}, "grammar", ""),
    ({"grammar": "what?"}, "grammar", ""),
    ({"guided_grammar": "start: nope"}, "guided_grammar", "nope"),
    ({"guided_grammar": "start: <nope>"}, "guided_grammar", "nope"),
    (in_format(False), "response_format", "no output satisfies it"),
    (in_format({"type": "string", "minLength": 5, "maxLength": 2}), "response_format", "minLength"),
    (in_format({"not": {"type": "string"}}, strict=True), "response_format", "not"),
    (in_format({"$ref": "http://127.0.0.1:9/schema"}), "response_format", "127.0.0.1"),
    (in_format({"$ref": "file:///etc/passwd"}), "response_format", "passwd"),
    (in_format({"$ref": "#"}), "response_format", "no document"),
    (in_format(recursive()), "response_format", "no document"),
    (in_format(deep(80)), "response_format", "recursion"),
    (in_format({"enum": [[]] * 3000, "type": "object"}), "response_format", "nsatisfiable"),
    (in_format({"type": "string", "pattern": "(a"}), "response_format", "unclosed"),
]  # fmt: skip
FORMAT_REFUSALS = [
    *refused(COMPLETIONS, {"prompt": "a"}, *FORMATS, server="tools"),
    *refused(CHAT, {"messages": USER}, *FORMATS, server="tools"),
]

RESPONSE_TOOL = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
NAMED = {"type": "function", "name": "look"}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,%%%not base64"}
CALLED = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
RESPONSE_REFUSALS = refused(
    RESPONSES,
    {"input": "hello"},
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "pope", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "!!!"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": ["a"], "id": "x"}]}, "input[0].type"),
    ({"input": [{**CALLED, "arguments": "x" * (MAX_ARGUMENTS + 1)}]}, "input[0].arguments"),
    ({"input": [{**CALLED, "arguments": "\"" * (MAX_ARGUMENTS - 1)}]}, "input[0].arguments"),
    ({"input": [{**CALLED, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"role": "user", "content": "a", "colour": "red"}]}, "input[0].colour"),
    ({"tools": [{"type": "function", "name": "two words"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools[0].function"),
    ({"tools": [RESPONSE_TOOL, RESPONSE_TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),
    ({"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
    ({"tools": [RESPONSE_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"tools": [RESPONSE_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [NAMED]}}, "tool_choice"),
    ({"tools": [RESPONSE_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["look"]}}, "tool_choice"),
    ({"tools": [{**NAMED, "name": "find"}], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}},
     "tool_choice"),
    ({"tools": [{**RESPONSE_TOOL, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
    ({"tools": [{**RESPONSE_TOOL, "async": True}]}, "tools[0].async"),
    ({"access_programs": ["x"]}, "access_programs"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text.format"),
    ({"text": {"style": "x"}}, "text.style"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"min_tokens": 9, "max_output_tokens": 3}, "min_tokens"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"n": 2}, "n"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"include": ["everything"]}, "include"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "some"}, "truncation"),
    ({"truncation": "auto", "context_overflow": "stop"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"previous_response_id": 3}, "previous_response_id"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, "rope_scaling.factor"),
    ({"passages": [{"start": 0, "end": 1}]}, "passages"),
    ({"n_predict": 5}, "n_predict", "it is called max_output_tokens here"),
    ({"num_keep": 5}, "num_keep", "it is called keep_tokens here"),
    server="tools",
)  # fmt: skip

MESSAGE_TOOL = {"name": "look", "input_schema": SCHEMA}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%%%not base64"}}
USE = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
MESSAGE_REFUSALS = refused(
    MESSAGES,
    {"messages": USER, "max_tokens": 5},
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
    ({"messages": [*USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "messages[1].content[0].input"),
    ({"messages": [*USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
        {"type": "text", "text": "See:"}, {"type": "tool_result", "tool_use_id": USE["id"]}]}]}, "messages[2].content[1]"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"system": 3}, "system"),
    ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "two words", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [MESSAGE_TOOL, MESSAGE_TOOL]}, "tools"),
    ({"tools": [MESSAGE_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [MESSAGE_TOOL], "tool_choice": {"type": "tool", "name": "find"}}, "tool_choice"),
    ({"tools": [MESSAGE_TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop": "x"}, "stop"),
    ({"top_p": 2}, "top_p"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "output_config.format"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"fallbacks": [{"model": "x"}]}, "fallbacks"),
    ({"colour": "red"}, "colour"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, "rope_scaling.factor"),
    ({"n_predict": 5}, "n_predict", "it is called max_tokens here"),
    server="tools",
)  # fmt: skip

EMBEDDING_REFUSALS = refused(
    EMBEDDINGS,
    {},
    ({}, "input", "", "missing_field"),
    ({"input": ""}, "input", "", "empty_prompt"),
    ({"input": []}, "input"),
    ({"input": [""]}, "input[0]", "", "empty_prompt"),
    ({"input": [[]]}, "input[0]", "", "empty_prompt"),
    ({"input": ["a", [5]]}, "input[1]"),
    ({"input": [[5], "a"]}, "input[1]"),
    ({"input": [5, "a"]}, "input"),
    ({"input": [[5], [True]]}, "input[1]"),
    ({"input": [1.5]}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [[5], [423]]}, "input[1]"),
    ({"input": ["a"] * 2049}, "input", "", "too_many"),
    ({"input": [[5]] * 100_000}, "input", "", "too_many"),
    ({"input": [5] * 257}, "input", "", "context_length_exceeded"),
    ({"input": [[5], [5] * 257]}, "input[1]", "", "context_length_exceeded"),
    ({"input": ["a", "b", "x" * 300]}, "input[2]", "", "context_length_exceeded"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 9}, "dimensions"),
    ({"input": "a", "dimensions": "9"}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "pooling": "best"}, "pooling"),
    ({"input": "a", "normalize": 1}, "normalize"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
    ({"input": "a", "attention_sinks": 4}, "attention_sinks"),
    ({"input": "a", "stream": True}, "stream", "", "unknown_field"),
    ({"prompt": "a"}, "prompt", "", "unknown_field"),
)  # fmt: skip

SCORE_REFUSALS = refused(
    SCORE,
    {},
    ({"text_1": "a"}, "text_2", "", "missing_field"),
    ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ({"text_1": "", "text_2": "c"}, "text_1", "", "empty_prompt"),
    ({"text_1": "a", "text_2": []}, "text_2"),
    ({"text_1": "a", "text_2": ["b", 5]}, "text_2[1]"),
    ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "", "too_many"),
    ({"text_1": "a", "text_2": ["b", "x" * 300]}, "text_2[1]", "", "context_length_exceeded"),
    ({"text_1": "a", "text_2": "b", "pooling": "all"}, "pooling"),
)  # fmt: skip

RERANK_REFUSALS = refused(
    RERANK,
    {},
    ({"query": "", "documents": ["a"]}, "query"),
    ({"query": "a", "documents": []}, "documents"),
    ({"query": "a", "documents": "a"}, "documents"),
    ({"query": "a", "documents": ["a", {"text": 5}]}, "documents[1]"),
    ({"query": "a", "documents": [{"text": "a", "id": 1}]}, "documents[0]"),
    ({"query": "a", "documents": ["a", {"text": ""}]}, "documents[1]", "", "empty_prompt"),
    ({"query": "a", "documents": [5] * 100_000}, "documents", "", "too_many"),
    ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ({"query": "x" * 300, "documents": ["a"]}, "query", "", "context_length_exceeded"),
)  # fmt: skip

INFILL_REFUSALS = refused(
    INFILL,
    {**GAP, "n_predict": 3},
    ({"input_prefix": None}, "input_prefix"),
    ({"input_suffix": 5}, "input_suffix"),
    ({"n_predict": -2}, "n_predict"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
    ({"input_extra": [{"text": "a"}] * (MAX_PASSAGES + 1)}, "input_extra"),
    ({"input_extra": [{"text": "a", "filename": "b" * 5000}]}, "input_extra[0].filename"),
    ({"input_extra": "a"}, "input_extra"),
    ({"samplers": ["mirostat"]}, "samplers"),
    ({"samplers": [5]}, "samplers"),
    ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
    ({"min_tokens": 9, "n_predict": 3}, "min_tokens"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"passages": [{"start": 0, "end": 64}]}, "passages"),
    ({"rope_scaling": {"rope_type": "none such"}}, "rope_scaling.rope_type"),
    ({"model": "other"}, "model", "", "model_not_found"),
    server="infill",
)  # fmt: skip

GAP_REFUSALS = refused(
    COMPLETIONS,
    {"prompt": "a"},
    ({"suffix": 5}, "suffix"),
    ({"suffix": ["a"]}, "suffix"),
    ({"suffix": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"suffix": "fox " * 200_000}, "suffix", "", "context_length_exceeded"),
    ({"prompt": "fox " * 200_000, "suffix": "a"}, "prompt", "", "context_length_exceeded"),
    ({"prompt": [10**9], "suffix": "a"}, "prompt"),
    ({"suffix": FILL_IN_TOKENS[0] * 5000}, "suffix", "", "context_length_exceeded"),
    ({"prompt": FILL_IN_TOKENS[0] * 500_000, "suffix": "a"}, "prompt", "", "context_length_exceeded"),
    ({"prompt": ["a", "b" * 5000], "suffix": "a"}, "prompt", "", "context_length_exceeded"),
    server="infill",
)  # fmt: skip

SCALINGS: list[tuple[Any, str, str, str]] = [
    ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor", "greater than 0", "invalid_value"),
    ({"rope_type": "linear", "factor": -2}, "rope_scaling.factor", "greater than 0", "invalid_value"),
    ({"rope_type": "linear", "factor": "4"}, "rope_scaling.factor", "must be a number", "invalid_value"),
    ({"rope_type": "linear", "factor": True}, "rope_scaling.factor", "must be a number", "invalid_value"),
    ({"rope_type": "linear", "factor": 10**400}, "rope_scaling.factor", "finite", "invalid_value"),
    ({"rope_type": "yarn", "factor": math.inf}, "rope_scaling.factor", "finite", "invalid_value"),
    ({"rope_type": "yarn", "factor": -math.inf}, "rope_scaling.factor", "finite", "invalid_value"),
    ({"rope_type": "yarn", "factor": math.nan}, "rope_scaling.factor", "finite", "invalid_value"),
    ({"rope_type": "yarn"}, "rope_scaling.factor", "needs it", "missing_field"),
    ({"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 32}, "rope_scaling.beta_fast", "smaller", "invalid_value"),
    ({"rope_type": "spiral"}, "rope_scaling.rope_type", "default, linear, ntk, dynamic, yarn", "invalid_value"),
    ({"factor": 2}, "rope_scaling.rope_type", "give one of default, linear", "missing_field"),
    ({}, "rope_scaling.rope_type", "missing", "missing_field"),
    ({"rope_type": "linear", "factor": 2, "surprise": 1},
     "rope_scaling.surprise", "it takes rope_theta, factor", "unknown_field"),
    ({**LINEAR, "partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor", "belongs to the model", "unknown_field"),
    ({**LINEAR, "rope_theta": 1}, "rope_scaling.rope_theta", "greater than 1", "invalid_value"),
    ({"rope_type": "longrope", "short_factor": [1] * 4, "long_factor": [1] * 4},
     "rope_scaling.short_factor", "8 numbers, one per rotated pair of this model, got 4", "invalid_value"),
    ({"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7},
     "rope_scaling.long_factor", "as many numbers", "invalid_value"),
    ({"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7 + [0]},
     "rope_scaling.long_factor[7]", "greater than 0", "invalid_value"),
    ({"sliding_attention": LINEAR}, "rope_scaling.sliding_attention", "it has full_attention", "invalid_value"),
    ({"full_attention": {"rope_type": "x"}}, "rope_scaling.full_attention.rope_type", "default", "invalid_value"),
    ({"full_attention": LINEAR, "middle": LINEAR}, "rope_scaling.middle", "full_attention or sliding_attention", "unknown_field"),
    (4, "rope_scaling", "or the name of a profile", "invalid_value"),
    ([YARN], "rope_scaling", "or the name of a profile", "invalid_value"),
    ("", "rope_scaling", "grow, long", "unknown_profile"),
]  # fmt: skip
UPDATES = "rope_update should be 'frozen', 'recompute' or 'rotate', or an object {'policy': …, 'exact': …}"
ROTARY_REFUSALS = refused(
    COMPLETIONS,
    {"prompt": "a"},
    *(({"rope_scaling": scaling}, *rest) for scaling, *rest in SCALINGS),
    *(({"rope_update": value}, "rope_update", UPDATES, "invalid_value")
      for value in ("sometimes", "", 5, 1.5, [], ["rotate"], True, False)),
    ({"rope_update": {"policy": "never"}}, "rope_update.policy", "'frozen', 'recompute' or 'rotate'", "invalid_value"),
    ({"rope_update": {"exact": True}}, "rope_update.policy", "missing", "missing_field"),
    ({"rope_update": {"policy": 5}}, "rope_update.policy", "'frozen', 'recompute' or 'rotate'", "invalid_value"),
    ({"rope_update": {"policy": "never", "exact": True}}, "rope_update.policy",
     "'frozen', 'recompute' or 'rotate'", "invalid_value"),
    ({"rope_update": {"policy": "rotate", "exact": True}}, "rope_update.exact", "requires the policy", "invalid_value"),
    ({"rope_update": {"policy": "frozen", "exact": True}}, "rope_update.exact", "requires the policy", "invalid_value"),
    ({"rope_update": {"policy": "recompute", "exact": 1}}, "rope_update.exact", "", "invalid_value"),
    ({"rope_update": {"policy": "recompute", "speed": 1}}, "rope_update.speed", "unknown field", "unknown_field"),
    ({"rope_update": {"policy": "recompute", "exact": True}}, "rope_update.exact", "-policy exact", "rope_exact_not_allowed"),
)  # fmt: skip

ATTENTION_REFUSALS = refused(
    ATTENTION,
    {},
    ({}, None),
    ({"prompt": "a", "tokens": [1]}, None),
    ({"tokens": [1] * 257}, "tokens"),
    ({"tokens": [1, 10**6]}, "tokens"),
    ({"tokens": [1, "x"]}, "tokens"),
    ({"prompt": "a", "layer": -1}, "layer"),
    ({"prompt": "a", "head": 2**40}, "head"),
    ({"prompt": "a", "rope_scaling": "nobody"}, "rope_scaling"),
    ({"prompt": "x" * 20000}, "prompt"),
)  # fmt: skip
OTHER_REFUSALS = [
    *refused(COMPLETIONS, {}, ({}, "prompt")),
    *refused(EMBEDDINGS, {"input": "a"}, ({"model": "other"}, "model", "", "model_not_found")),
    *refused(RESPONSES, {"input": "a"}, ({"model": "other"}, "model", "", "model_not_found")),
    *refused("/classify", {}, ({"input": "a"}, "model", "", "no_classifier")),
    *refused("/pooling", {}, ({"input": "a", "pooling": "none"}, "pooling")),
    *refused(TOKENIZE, {}, ({"promt": "x"}, "promt", "unknown field 'promt': did you mean 'prompt'?"),
             ({"prompt": "a", "messages": []}, "messages")),
    *refused(DETOKENIZE, {}, *(({"tokens": tokens}, "tokens")
                               for tokens in ([-1], [423], [10**30], ["a"], [1.5], 5, None, [True], [[1]]))),
]  # fmt: skip
REFUSALS = [
    *COMPLETION_REFUSALS,
    *CHAT_REFUSALS,
    *TOOL_REFUSALS,
    *FORMAT_REFUSALS,
    *RESPONSE_REFUSALS,
    *MESSAGE_REFUSALS,
    *EMBEDDING_REFUSALS,
    *SCORE_REFUSALS,
    *RERANK_REFUSALS,
    *INFILL_REFUSALS,
    *GAP_REFUSALS,
    *ROTARY_REFUSALS,
    *ATTENTION_REFUSALS,
    *OTHER_REFUSALS,
]


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(("server", "path", "body", "fields", "param", "fragment", "code"), REFUSALS)
def test_refused_request_names_the_field(
    servers: Callable[[str], Live], server: str, path: str, body: Any, fields: Any, param: str, fragment: str, code: str
) -> None:
    live = servers(server)
    live.reset()
    for stream in ({"stream": False}, {"stream": True}) if path in STREAMED else ({},):
        text = json.dumps({**stream, **body})  # writes NaN and Infinity
        response = live.http.post(path, content=text.encode(), headers={"content-type": "application/json"})
        answer = response.json()
        error = answer["error"]
        assert (response.status_code, error["param"]) == (404 if code == "model_not_found" else 400, param), error
        assert error["code"] and code in ("", error["code"]), error
        assert fragment in error["message"] and len(error["message"]) < 700, error
        assert "<state>" not in error["message"] and "RopeUpdate" not in error["message"]
        assert FOREIGN_FIELDS.get(path, "\0") not in error["message"] or FOREIGN_FIELDS[path] in fields
        assert error["type"] in ("invalid_request_error", "not_found_error")
        assert response.headers["x-request-id"]
        if path == MESSAGES:
            assert answer["type"] == "error" and answer["request_id"] == response.headers["request-id"]
    assert not live.engine.requests and not live.engine.attention
