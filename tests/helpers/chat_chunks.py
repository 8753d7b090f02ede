"""Combination of the chunks of a chat stream, as clients do it."""

from __future__ import annotations

from typing import Any


def assembled(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Return the choice of a response without streaming; log-probabilities and token ids are flat lists."""
    message: dict[str, Any] = {"content": None, "refusal": None}
    choice: dict[str, Any] = {"message": message, "finish_reason": None, "token_ids": [], "logprobs": []}
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != index:
                continue
            _merge(message, part["delta"])
            choice["finish_reason"] = choice["finish_reason"] or part["finish_reason"]
            choice["token_ids"] += part.get("token_ids") or []
            choice["logprobs"] += (part.get("logprobs") or {}).get("content") or []
    return choice


def _merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        elif key == "function_call":
            if "name" in value:
                message["function_call"] = dict(value)
            else:
                message["function_call"]["arguments"] += value["arguments"]
        elif isinstance(message.get(key), str):
            message[key] += value
        else:
            message[key] = value
