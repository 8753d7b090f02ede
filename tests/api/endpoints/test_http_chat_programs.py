"""Requests of chat pages and editors, recorded or taken from their code and shortened: Continue, Cline, Open WebUI, LibreChat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.chat_chunks import assembled
from helpers.live_server import Live, server_fixture

from windlass.server.schemas.base import IGNORED_HEADER

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MODEL = {"max_model_len": 100_000, "trained_len": 100_000}
TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
USAGE = {"include_usage": True}
shared = server_fixture(model=MODEL, tokens=TOKENS)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


TEXT = {"type": "string", "description": "A text"}
FILES = {"type": "array", "items": {"type": "object", "properties": {"path": TEXT}, "additionalProperties": False}}
READ, READ_FILES, COMMANDS = (
    tool("Read", filepath=TEXT),
    tool("read_files", files=FILES),
    tool("run_commands", commands=TEXT),
)
SEARCH = tool("search_web", query={**TEXT, "title": "Query"}, count={"anyOf": [{"type": "integer"}, {"type": "null"}]})

# The third request of a conversation, after a call.
CONTINUE = {
    "model": "toy",
    "messages": [
        {"role": "system", "content": "You are an agent in the Continue CLI."},
        {"role": "user", "content": "Read a.py and explain it."},
        {"role": "assistant", "content": "I will look at it.", "tool_calls": [call(1, "Read", filepath="a.py")]},
        {"role": "tool", "content": "Content of a.py:\nprint('hi')\n", "tool_call_id": "call_1"},
    ],
    "tools": [READ],
    "stream": True,
    "stream_options": USAGE,
}
STOPS = "endoftext fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep im_start im_end".split()
KEYWORDS = ["\nfunction", "\nclass", "\nmodule", "\nexport", "\nimport"]  # of earlier versions, by language
# Its completion at the cursor, for models named like Qwen2.5-Coder.
CONTINUE_GAP = {
    "model": "toy",
    "prompt": "<|fim_prefix|>def area(r):\n    return <|fim_suffix|>\n\nprint(area(2))\n<|fim_middle|>",
    "max_tokens": 64,
    "temperature": 0.01,
    "stop": [*(f"<|{name}|>" for name in STOPS), "\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```", *KEYWORDS],
    "stream": True,
}
CLINE = {
    "model": "toy",
    "messages": [
        {"role": "system", "content": "You are Cline, an AI coding agent."},
        {"role": "user", "content": "Read a.py and list the files"},
        {
            "role": "assistant",
            "content": "I will read it.",
            "tool_calls": [call(1, "read_files", files=[{"path": "/a.py"}]), call(2, "run_commands", commands=["ls"])],
        },
        {
            "role": "tool",
            "content": '[{"query":"/a.py","result":"1 | print(1)","success":true}]',
            "tool_call_id": "call_1",
        },
        {"role": "tool", "content": '[{"query":"ls","result":"a.py\\n","success":true}]', "tool_call_id": "call_2"},
    ],
    "tools": [READ_FILES, COMMANDS],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": USAGE,
}
# A turn that was stopped leaves consecutive messages of the user.
CLINE_STOPPED = CLINE | {"messages": [*CLINE["messages"][:2], {"role": "user", "content": "ok"}]}
OPEN_WEBUI = {
    "model": "toy",
    "messages": [
        {"role": "system", "content": "User Context:\n\n"},
        {"role": "user", "content": "Who won?"},
        {"role": "assistant", "content": "", "tool_calls": [call(1, "search_web", query="who won")]},
        {"role": "tool", "content": "", "tool_call_id": "call_1"},
    ],
    "tools": [SEARCH],
    "stream": True,
    "stream_options": USAGE,
}
OPEN_WEBUI_CONTINUE = OPEN_WEBUI | {"messages": [*OPEN_WEBUI["messages"][:2], {"role": "assistant", "content": "Once"}]}
OPEN_WEBUI_TITLE = {
    "model": "toy",
    "messages": [{"role": "user", "content": "### Task:\n"}],
    "stream": False,
    "max_tokens": 1000,
}
OPEN_WEBUI_RESPONSES = {
    "model": "toy",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who won?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I will search."}]},
        {"type": "function_call", "call_id": "call_1", "name": "search_web", "arguments": '{"query": "x"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "found"},
    ],
    "instructions": "User Context:\n\n",
    "tools": [{"type": "function", "strict": False, **SEARCH["function"]}],
    "max_output_tokens": 100,
    "temperature": 0.5,
    "stream": True,
}
LIBRECHAT = {
    "model": "toy",
    "temperature": 1,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "user": "66f0c0ffee",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call(1, "weather", city="Rome")]},
        {"role": "tool", "content": "sunny in Rome", "name": "weather", "tool_call_id": "call_1"},
    ],
    "tools": [tool("weather", city=TEXT)],
    "max_tokens": 200,
    "stream": True,
    "stream_options": USAGE,
}
TITLE = {"type": "object", "properties": {"language": TEXT, "title": TEXT}, "required": ["language", "title"]}
LIBRECHAT_TITLE = {
    "model": "toy",
    "user": "66f0c0ffee",
    "messages": [{"role": "user", "content": "Analyze this conversation"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "extract", "schema": TITLE}},
    "max_tokens": 200,
    "stream": False,
}

REQUESTS = {  # path, body, fields without effect
    "Continue": (CHAT, CONTINUE, None),
    "Continue, at the cursor": (COMPLETIONS, CONTINUE_GAP, None),
    "Cline": (CHAT, CLINE, None),
    "Cline, after a stop": (CHAT, CLINE_STOPPED, None),
    "Open WebUI": (CHAT, OPEN_WEBUI, None),
    "Open WebUI, Continue": (CHAT, OPEN_WEBUI_CONTINUE, None),
    "Open WebUI, title": (CHAT, OPEN_WEBUI_TITLE, None),
    "Open WebUI, Responses": (RESPONSES, OPEN_WEBUI_RESPONSES, None),
    "LibreChat": (CHAT, LIBRECHAT, "user"),
    "LibreChat, title": (CHAT, LIBRECHAT_TITLE, "user"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_answered(live: Live, name: str) -> None:
    path, body, ignored = REQUESTS[name]
    live.generate("Fine.")
    with live.http.stream("POST", path, json=body) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
        assert response.headers.get(IGNORED_HEADER) == ignored
    assert "Fine." in text.replace('"', "") or body["stream"]
    if path == CHAT and body["stream"]:
        *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
        chunks = [json.loads(event) for event in events]
        assert done == "[DONE]" and chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
        choice = assembled(chunks)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Fine.", "stop")


CALLS = {  # request, the model's text, expected calls
    "Continue": (CONTINUE, 'I look.\n{"name": "Read", "arguments": {"filepath": "a.py"}}', ["Read"]),
    "Cline": (
        CLINE,
        '{"name": "read_files", "arguments": {"files": []}}\n{"name": "run_commands", "arguments": {"commands": ["ls"]}}',
        ["read_files", "run_commands"],
    ),
    "LibreChat": (LIBRECHAT, '{"name": "weather", "arguments": {"city": "Rome"}}', ["weather"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_streamed_as_they_are_read(live: Live, name: str) -> None:
    """The first chunk of a call has index, id, type and name, further ones only arguments."""
    body, text, names = CALLS[name]
    live.generate(text)
    events = live.stream(CHAT, body)
    parts = [
        part for event in events[:-1] for choice in event["choices"] for part in choice["delta"].get("tool_calls", ())
    ]
    first = [part for part in parts if "id" in part]
    assert [(part["index"], part["type"], part["function"]["name"]) for part in first] == [
        (index, "function", name) for index, name in enumerate(names)
    ]
    assert all(part["function"].keys() == {"arguments"} for part in parts if "id" not in part)
    choice = assembled(events[:-1])
    assert choice["finish_reason"] == "tool_calls"
    assert all(json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"])


# Open WebUI sends every setting of its page, also those that only Ollama defines.
SETTINGS: dict[str, Any] = {
    "seed": 1, "stop": ["###"], "temperature": 0.8, "reasoning_effort": "medium", "logit_bias": {"5": 1}, "max_tokens": 128,
    "top_k": 40, "top_p": 0.9, "min_p": 0.0, "frequency_penalty": 1.1, "presence_penalty": 0.0, "mirostat": 0,
    "mirostat_eta": 0.1, "mirostat_tau": 5.0, "tfs_z": 1, "use_mmap": True, "use_mlock": True, "think": True,
    "keep_alive": "5m", "num_ctx": 2048, "num_batch": 512, "num_thread": 2, "num_gpu": 0,
}  # fmt: skip


def test_settings_of_open_webui_are_accepted(live: Live) -> None:
    response = live.post(CHAT, OPEN_WEBUI_TITLE | SETTINGS)
    assert response.status_code == 200, response.text
    ignored = {"reasoning_effort", "mirostat_eta", "mirostat_tau", "use_mmap", "use_mlock", "think", "keep_alive"}
    ignored |= {"num_ctx", "num_batch", "num_thread", "num_gpu"}
    assert set(response.headers[IGNORED_HEADER].split(", ")) == ignored


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("repeat_last_n", 64, "repetition_penalty"),
        ("num_keep", 24, "keep_tokens"),
        ("format", "json", "response_format"),
    ],
)
def test_settings_that_would_change_the_answer_are_refused_with_their_name_here(
    live: Live, name: str, value: Any, meant: str
) -> None:
    error = live.refuse(CHAT, OPEN_WEBUI_TITLE | {name: value})
    assert (error["param"], error["code"]) == (name, "unknown_field") and meant in error["message"]
