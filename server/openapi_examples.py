"""Examples of requests and streams in the OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

_USER = {"role": "user", "content": "Where does the river begin?"}

_STREAMING = {"stream": True, "stream_options": {"include_usage": True}}

# By path: name -> summary and body.
_REQUEST_EXAMPLES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "/v1/completions": {
        "plain": ("What follows a prompt", {"prompt": "The king said", "max_tokens": 16}),
        "several": (
            "Two prompts, two answers to each",
            {"prompt": ["The king", "The sea"], "max_tokens": 8, "n": 2, "seed": 7},
        ),
        "scored": (
            "The log-probabilities of a text",
            {"prompt": "The sea is wide", "max_tokens": 0, "echo": True, "logprobs": 1},
        ),
        "streamed": ("As events", {"prompt": "The king said", "max_tokens": 16, **_STREAMING}),
        "scaled": (
            "Under another rotary scaling",
            {"prompt": "The king said", "max_tokens": 8, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        ),
    },
    "/infill": {
        "plain": (
            "What stands between two texts",
            {"input_prefix": "def area(r):\n    return ", "input_suffix": "\n\nprint(area(2))\n", "n_predict": 16},
        ),
        "files": (
            "With a passage of another file, as events",
            {
                "input_prefix": "from shapes import area\n",
                "input_suffix": "\n",
                "input_extra": [{"filename": "shapes.py", "text": "def area(r):\n    return 3.14 * r * r\n"}],
                "prompt": "print(",
                "n_predict": 8,
                "stream": True,
            },
        ),
    },
    "/v1/chat/completions": {
        "plain": ("The next turn", {"messages": [_USER], "max_tokens": 16}),
        "streamed": ("As events", {"messages": [_USER], "max_tokens": 16, **_STREAMING}),
        "held": (
            "Held to a schema",
            {
                "messages": [_USER],
                "max_tokens": 64,
                "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}},
            },
        ),
        "likely": (
            "With log-probabilities",
            {"messages": [_USER], "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2},
        ),
    },
    "/v1/embeddings": {
        "plain": ("A vector for each text", {"input": ["The king said", "The sea is wide"]}),
        "packed": (
            "Short ones, in base64",
            {"input": "The king said", "pooling": "mean", "dimensions": 8, "encoding_format": "base64"},
        ),
    },
    "/pooling": {
        "states": ("The state of each token", {"input": "The king said", "pooling": "all", "dimensions": 4}),
    },
    "/v1/score": {
        "one": ("Two texts", {"text_1": "The king said", "text_2": "The king spoke"}),
        "several": ("One text beside others", {"text_1": "The sea", "text_2": ["The sea is wide", "The king said"]}),
    },
    "/v1/rerank": {
        "best": (
            "The best of a few documents",
            {"query": "Where is the sea?", "documents": ["The king said", "The sea is wide"], "top_n": 1},
        ),
    },
    "/classify": {"plain": ("Two texts, of a model that classifies", {"input": ["so good", "so bad"]})},
    "/v1/responses": {
        "plain": ("A text", {"input": "Where does the river begin?", "max_output_tokens": 16}),
        "items": (
            "Items",
            {
                "instructions": "Answer in one word.",
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "Where does the river begin?"}]}],
                "max_output_tokens": 16,
                "store": False,
            },
        ),
        "streamed": ("As events", {"input": "Where does the river begin?", "max_output_tokens": 16, "stream": True}),
    },
    "/v1/responses/input_tokens": {"plain": ("A text", {"input": "Where does the river begin?"})},
    "/v1/messages": {
        "plain": ("The next turn", {"messages": [_USER], "max_tokens": 16}),
        "blocks": (
            "Blocks",
            {
                "system": "Answer in one word.",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Where does the river begin?"}]}],
                "max_tokens": 16,
                "temperature": 0,
            },
        ),
        "streamed": ("As events", {"messages": [_USER], "max_tokens": 16, "stream": True}),
    },
    "/v1/messages/count_tokens": {"plain": ("A conversation", {"messages": [_USER]})},
    "/v1/rotary/inspect": {
        "scaled": ("A scaling", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        "length": (
            "One that follows the length",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "length": 30000},
        ),
    },
    "/v1/rotary/curves": {
        "scaled": (
            "A scaling",
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
                "positions": [0, 1, 100],
                "distances": [0, 10, 1000],
            },
        )
    },
    "/v1/attention": {
        "scaled": (
            "A head under a scaling",
            {
                "prompt": "In the beginning",
                "layer": 0,
                "head": 1,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
        )
    },
    "/tokenize": {
        "text": ("A text", {"prompt": "The king said"}),
        "chat": ("A conversation, as the chat template writes it", {"messages": [_USER], "return_token_strs": True}),
    },
    "/v1/load_lora_adapter": {
        "plain": ("A directory in the server's folder", {"lora_name": "poet", "lora_path": "poet"})
    },
    "/v1/unload_lora_adapter": {"plain": ("A loaded adapter", {"lora_name": "poet"})},
    "/apply_template": {"plain": ("A conversation", {"messages": [_USER]})},
    "/detokenize": {"plain": ("Token ids", {"tokens": [10, 11, 12]})},
}


def request_examples(path: str, model: str) -> dict[str, Any]:
    """The examples of a body, by name; empty where there are none. model: the name that clients send."""
    return {
        name: {"summary": summary, "value": body if "lora_name" in body else {"model": model, **body}}
        for name, (summary, body) in _REQUEST_EXAMPLES.get(path, {}).items()
    }


_CHUNK = {"created": 1767225600, "model": "demo", "system_fingerprint": "fp_4f1d2c3b5a697887"}

_USAGE = {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}}

_UNFINISHED = {"logprobs": None, "finish_reason": None}

_MESSAGE_USAGE = {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 2}

_INFILL_COUNTS = {"tokens_predicted": 9, "tokens_evaluated": 21}


def _completion(choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    choices = [] if choice is None else [{"index": 0, **choice}]
    return {"id": "cmpl-1", "object": "text_completion", **_CHUNK, "choices": choices, "usage": None, **more}


def _chat(choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {**_completion(choice, **more), "id": "chatcmpl-1", "object": "chat.completion.chunk"}


_STREAM_EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        _completion({"text": " no", **_UNFINISHED}),
        _completion({"text": ".", **_UNFINISHED, "finish_reason": "length", "stop_reason": None}),
        _completion(None, usage=_USAGE),
    ],
    "/v1/chat/completions": [
        _chat({"delta": {"role": "assistant", "content": ""}, **_UNFINISHED}),
        _chat({"delta": {"content": "Far"}, **_UNFINISHED}),
        _chat({"delta": {"content": "."}, **_UNFINISHED, "finish_reason": "length", "stop_reason": None}),
        _chat(None, usage=_USAGE),
    ],
    "/v1/messages": [
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "demo",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_MESSAGE_USAGE, "output_tokens": 0},
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Far."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": _MESSAGE_USAGE},
        {"type": "message_stop"},
    ],
    "/infill": [
        {"index": 0, "content": "3.14 * r * r", "tokens": [], "stop": False, "id_slot": 0, **_INFILL_COUNTS},
        {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "id_slot": 0,
            "model": "demo",
            **_INFILL_COUNTS,
            "tokens_cached": 0,
            "has_new_line": False,
            "truncated": False,
            "stop_type": "eos",
            "stopping_word": "",
        },
    ],
    # The first and the last event hold the whole response, which is too long for an example.
    "/v1/responses": [
        {
            "type": "response.output_text.delta",
            "sequence_number": 4,
            "item_id": "msg_10000",
            "output_index": 0,
            "content_index": 0,
            "delta": "Far.",
            "logprobs": [],
        },
        {
            "type": "response.output_text.done",
            "sequence_number": 5,
            "item_id": "msg_10000",
            "output_index": 0,
            "content_index": 0,
            "text": "Far.",
            "logprobs": [],
        },
    ],
}

_WITH_DONE_EVENT = ("/v1/completions", "/v1/chat/completions")  # their streams have a last event that says so

_WITHOUT_EVENT_NAMES = (*_WITH_DONE_EVENT, "/infill")  # their events have no `event:` line


def stream_examples(path: str) -> dict[str, Any]:
    """Examples of a stream's events, by name; empty where nothing is streamed."""
    named = path not in _WITHOUT_EVENT_NAMES
    events = [
        {**({"event": event["type"]} if named else {}), "data": json.dumps(event)}
        for event in _STREAM_EXAMPLES.get(path, ())
    ]
    if path in _WITH_DONE_EVENT:
        events.append({"data": "[DONE]"})
    return {f"event_{number}": {"value": event} for number, event in enumerate(events, start=1)}
