"""Nearly valid bodies: templates for every endpoint, and a seeded mutator."""

from __future__ import annotations

import json
import random
from typing import Any

COMPLETION: dict[str, Any] = {
    "model": "toy",
    "prompt": ["hello", "world"],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 2,
    "stream": False,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "logprobs": 2,
    "echo": True,
    "seed": 1,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    "rope_update": {"policy": "recompute", "exact": False},
    "bad_words": ["fox"],
    "stop_token_ids": [5],
    "allowed_token_ids": [65, 66],
    "timeout": 5,
    "truncate_prompt_tokens": 9,
    "metadata": {"a": {"b": [1, 2]}},
}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
    ],
    "max_completion_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"prefix": "p"},
    "continue_final_message": True,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
TOKENIZE: dict[str, Any] = {"prompt": "hello", "add_special_tokens": True, "return_token_strs": True}
DETOKENIZE: dict[str, Any] = {"tokens": [5, 6, 7], "skip_special_tokens": False}
TEMPLATES = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "stream": True, "prompt_logprobs": 1}),
    ("/v1/chat/completions", CHAT),
    ("/tokenize", TOKENIZE),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", DETOKENIZE),
    ("/v1/rotary/inspect", {"rope_scaling": COMPLETION["rope_scaling"], "length": 99}),
    ("/v1/rotary/inspect", {"rope_scaling": {"type": "dynamic", "factor": 2}, "rope_update": "rotate"}),
    ("/v1/completions", {"prompt": "a", "rope_scaling": "long", "rope_update": "frozen"}),
]
RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}], "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}]},
    ],
    "instructions": "be",
    "max_output_tokens": 3,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "truncation": "auto",
    "metadata": {"a": "b"},
    "stream": False,
}
MESSAGE: dict[str, Any] = {
    "max_tokens": 3,
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": ""},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "b", "is_error": True}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "stream": False,
}
ITEM_TEMPLATES = [
    ("/v1/responses", RESPONSE),
    ("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 2, "previous_response_id": None}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}], "stream": True}),
    (
        "/v1/responses/input_tokens",
        {name: RESPONSE[name] for name in ("input", "instructions", "tools", "tool_choice")},
    ),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_x"}]}),
    ("/v1/messages/count_tokens", {name: MESSAGE[name] for name in ("messages", "system", "tools")}),
]
EMBEDDING: dict[str, Any] = {
    "model": "toy",
    "input": ["hello", "world"],
    "encoding_format": "float",
    "dimensions": 4,
    "pooling": "mean",
    "normalize": True,
    "truncate_prompt_tokens": 20,
    "truncation_side": "left",
    "attention_window": 64,
    "attention_sinks": 4,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_update": {"policy": "recompute", "exact": True},
    "priority": 1,
    "user": "me",
}
INFILL = {
    "input_prefix": "def f(x):\n    ",
    "input_suffix": "\n    return y",
    "input_extra": [{"filename": "a.py", "text": "x = 1"}, {"text": "y"}],
    "prompt": "re",
    "n_predict": 3,
    "n_indent": 2,
    "t_max_predict_ms": 50.0,
    "samplers": ["top_k", "infill"],
    "response_fields": ["content", "timings/prompt_n"],
    "repeat_penalty": 1.1,
    "return_tokens": True,
    "stop": ["a"],
}
PROMPT_TEMPLATES = [
    ("/v1/embeddings", EMBEDDING),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "encoding_format": "base64"}),
    ("/pooling", {**EMBEDDING, "pooling": "all"}),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d"], "pooling": "last"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}),
    ("/classify", {"input": [5, 6, 7], "use_activation": False}),
    ("/infill", INFILL),
]
# Inserted into the JSON text unchanged, so that they can be invalid JSON.
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 400, "-" + "9" * 30, '"\\ud800"', '"\\u0000"']
RAW += [
    '"\\udfff\\ud800x"',
    "[" * 300 + "]" * 300,
    '{"a":' * 150 + "1" + "}" * 150,
    "nul",
    "+1",
    "01",
    "0x1",
    "'a'",
    "undefined",
]


# Larger than permitted, but small enough that a client sends all of it before it reads the response. A body of 100 MiB would be
# refused during sending, and the connection closed.
MOST_BYTES = 40 << 20


class Mutator:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def value(self, depth: int = 0) -> Any:
        """Return a random JSON value, often of an unusual type or size."""
        rng = self.rng
        kind = rng.randrange(12 if depth < 3 else 8)
        match kind:
            case 0:
                return rng.choice([None, True, False])
            case 1:
                return rng.choice([0, 1, -1, 2, 16, 64, 65, 422, 423, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30])
            case 2:
                return rng.choice([0.0, -0.0, 0.5, 1.5, -2.5, 1e-308, 1e308, 5e-324, 100.0, 3.0])
            case 3:
                return rng.choice(
                    ["", " ", "a", "text", "é日😀", "\u202e", "\\", '"', "null", "5", "toy", "user", "yarn"]
                )
            case 4:
                return "".join(
                    chr(rng.choice([rng.randrange(1, 128), rng.randrange(0xE000, 0x10FFFF)])) for _ in range(9)
                )
            case 5:
                return "x" * rng.choice([100, 257, 5000, 40000] if depth < 3 else [100])
            case 6:
                return f"<<{rng.choice(RAW)}>>"
            case 7:
                return rng.choice([[], {}, [[]], [None], "[]"])
            case 8:
                return [self.value(depth + 1) for _ in range(rng.randrange(4))]
            case 9:
                return {self.key(): self.value(depth + 1) for _ in range(rng.randrange(4))}
            case 10:
                return [self.value(3)] * rng.choice([1, 17, 1025])
            case _:
                return {str(i): self.value(3) for i in range(rng.choice([1, 30, 1025]))}

    def key(self) -> str:
        names = [
            "type",
            "role",
            "content",
            "factor",
            "rope_type",
            "alpha",
            "rope_theta",
            "original_max_position_embeddings",
            "policy",
            "exact",
            "a",
            "",
            "0",
            "__proto__",
            "self",
            "messages",
            "\u00e9",
        ]
        return self.rng.choice([*names, *COMPLETION, *CHAT, *RESPONSE, *MESSAGE, *EMBEDDING])

    def mutate(self, value: Any, depth: int = 0) -> Any:
        """Return a copy with a few parts replaced, removed or added."""
        rng = self.rng
        if depth and rng.random() < 0.25:
            return self.value(depth)
        if isinstance(value, dict):
            result = {key: self.mutate(item, depth + 1) if rng.random() < 0.3 else item for key, item in value.items()}
            if result and rng.random() < 0.2:
                del result[rng.choice(list(result))]
            if rng.random() < 0.3:
                result[self.key()] = self.value(depth)
            return result
        if isinstance(value, list):
            result = [self.mutate(item, depth + 1) if rng.random() < 0.5 else item for item in value]
            return result * rng.choice([1, 1, 1, 0, 2]) + ([self.value(depth)] if rng.random() < 0.2 else [])
        return self.value(depth) if rng.random() < 0.5 else value

    def body(self, template: dict[str, Any]) -> bytes:
        value = self.mutate(template) if self.rng.random() < 0.93 else self.value()
        text = json.dumps(value, ensure_ascii=self.rng.random() < 0.5)
        for raw in RAW:  # "<<raw>>" becomes raw
            text = text.replace(json.dumps(f"<<{raw}>>"), raw).replace(f'"<<{raw}>>"', raw)
        data = text.encode("utf-8", "surrogatepass")[:MOST_BYTES]
        damage = self.rng.random()
        if damage < 0.05 and data:
            return data[: self.rng.randrange(len(data))]
        if damage < 0.10 and data:
            position = self.rng.randrange(len(data))
            return data[:position] + bytes([self.rng.randrange(256)]) + data[position + self.rng.randrange(2) :]
        return data


OTHER_TEMPLATES: list[tuple[str, dict[str, Any]]] = [
    (
        "/apply_template",
        {"messages": CHAT["messages"], "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}},
    ),
    ("/v1/rotary/curves", {"rope_scaling": COMPLETION["rope_scaling"], "positions": [0, 7], "distances": [1, 2, 3]}),
    ("/v1/attention", {"prompt": "hello world", "layer": 0, "head": 0}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "nothing/there"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("/score", {"text_1": "a", "text_2": ["c", "d"]}),
    ("/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v2/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1, "max_tokens_per_doc": 4}),
    ("/apply-template", {"messages": CHAT["messages"]}),
]
