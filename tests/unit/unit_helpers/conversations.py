"""Random conversations for chat templates: tools, content parts, thinking, unusual roles, empty content."""

from __future__ import annotations

import random
from typing import Any

_TEXTS = (
    *("", " ", "Hi", "  two words \n", "Größe? 東京 😀", "a\n\nb", "{{ messages }} {% raw %}"),
    *(
        "<think>\nhm\n</think>\n\nYes",
        "<|im_end|>",
        "'quoted' \"twice\" <b>&amp;",
        "x" * 300,
        "[INST] </s>",
        "\u2028\x00\x1b",
    ),
    *('{"a": 1}', "<tool_call>{}</tool_call>"),
)
_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Größe <b>", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "default": 3},
        "deep": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}, "required": ["x"]},
        "list": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}


def conversation(seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return messages and the other arguments of `apply_chat_template`."""
    r = random.Random(seed)
    messages: list[dict[str, Any]] = []
    if r.random() < 0.5:
        messages.append({"role": r.choice(["system", "system", "developer"]), "content": _content(r)})
    tools = _tools(r) if r.random() < 0.4 else None
    for _ in range(r.choice([1, 1, 2, 3, 4])):
        messages.append({"role": "user", "content": _content(r)})
        if r.random() < 0.7:
            messages += _answer(r)
    if r.random() < 0.15:
        r.shuffle(messages)
    if r.random() < 0.1:
        messages.append({"role": r.choice(["critic", "function", "user_2", ""]), "content": _content(r)})
    options: dict[str, Any] = {} if tools is None else {"tools": tools}
    if r.random() < 0.2:
        options["documents"] = [
            {"title": "A", "text": r.choice(_TEXTS)},
            {"doc_id": 1, "contents": "b", "title": "", "text": ""},
        ]
    if r.random() < 0.3:
        options |= r.choice(
            [
                {"enable_thinking": False},
                {"enable_thinking": True},
                {"reasoning_effort": "high"},
                {"thinking": True},
                {"xml_tools": True},
            ]
        )
    kind = r.random()
    if kind < 0.5:
        return messages, options | {"add_generation_prompt": True}
    if kind < 0.75:
        return messages, options | {"add_generation_prompt": False}
    field = r.choice([True, True, True, "reasoning_content", "thinking"])
    return messages, options | {"add_generation_prompt": False, "continue_final_message": field}


def _content(r: random.Random) -> Any:
    text = r.choice(_TEXTS)
    if r.random() < 0.8:
        return text
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if r.random() < 0.4:
        parts.insert(r.randrange(2), {"type": "image", "image": "x"})
    if r.random() < 0.4:
        parts.append({"type": "text", "text": r.choice(_TEXTS)})
    return parts


def _answer(r: random.Random) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(r)}
    if r.random() < 0.3:
        message[r.choice(["reasoning_content", "reasoning", "thinking"])] = r.choice(_TEXTS)
    if r.random() < 0.6:
        return [message]
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {
                "name": r.choice(["weather", "find"]),
                "arguments": r.choice(
                    [{}, {"city": "Größe", "days": 2, "deep": {"x": None}, "list": ["a", 1.5, True]}, '{"a": 1}']
                ),
            },
        }
        for number in range(r.choice([1, 1, 2]))
    ]
    message["tool_calls"] = calls
    if r.random() < 0.3:
        del message["content"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": _content(r)}
        for call in calls
    ]
    return [message, *results] if r.random() < 0.9 else [message]


def _tools(r: random.Random) -> list[dict[str, Any]]:
    names = [("weather", _PARAMETERS), ("find", {"type": "object", "properties": {}})]
    return [
        {"type": "function", "function": {"name": name, "description": r.choice(_TEXTS), "parameters": parameters}}
        for name, parameters in names[: r.choice([1, 2])]
    ]
