"""Messages of a request in the form that a chat template reads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from windlass.server.errors import bad_request
from windlass.server.schemas.chat import ChatMessage
from windlass.server.schemas.tools import MadeFunctionCall, parse_arguments
from windlass.server.text.template_facts import TemplateCapabilities

_IGNORED_FIELDS = {"refusal", "annotations", "audio", "images", "thinking_blocks", "reasoning_details"}
_EXCLUDED_FIELDS = {"type", *_IGNORED_FIELDS, "function_call", "tool_calls", "tool_call_id", "content"}
MAX_ARGUMENT_VALUES = 1_000_000  # keys and values in the arguments of all calls: far above any real chat's
_ROLES_WITH_CONTENT = frozenset({"user", "system", "developer"})
_ROLES = (*sorted(_ROLES_WITH_CONTENT), "assistant", "tool", "function")
_ID = re.compile(r"[a-zA-Z0-9]{9}")


def prepare_history(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    capabilities: TemplateCapabilities,
    example: str,
) -> list[dict[str, Any]]:
    """The messages for the template; raises ApiError naming the message at fault.

    tools: functions on offer; a system message describes them if the template cannot. example: of a call, for that message.
    """
    check_history(messages, capabilities)
    values = _ValueCounter()
    plain = [
        _template_message(message, capabilities, values, f"messages[{number}]")
        for number, message in enumerate(messages)
    ]
    if not capabilities.calls:
        plain = _without_calls(plain)
    if tools and not capabilities.tools:
        plain = _with_instructions(plain, tools, example)
    return plain


def check_history(messages: Sequence[ChatMessage], capabilities: TemplateCapabilities | None) -> None:
    """Check that user and system messages have content and that calls have results; raises ApiError naming the message.

    capabilities: of the template, which may support further roles. An unsupported role that resembles a known one is refused,
    because most templates would render it unchanged for a model that has never seen it.
    """
    for number, message in enumerate(messages):
        suggestion = (
            None if capabilities is None or message.role in capabilities.quoted_words else _suggest_role(message.role)
        )
        if suggestion is not None:
            where = f"messages[{number}].role"
            raise bad_request(f"{where} is {message.role!r}: did you mean {suggestion!r}?", where, "invalid_value")
        if message.role in _ROLES_WITH_CONTENT and message.content is None:
            where = f"messages[{number}].content"
            raise bad_request(
                f"{where} is missing: a message of the role {message.role} must have it", where, "missing_field"
            )
    _check_calls(messages)


def _suggest_role(role: str) -> str | None:
    """A known role that differs by one letter or by two swapped letters; None for a known role."""
    if role in _ROLES:
        return None
    return next((known for known in _ROLES if _is_one_edit_away(role, known)), None)


def _is_one_edit_away(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = short[at + 1 : at + 2] + short[at : at + 1] + short[at + 2 :]
    return short[at + 1 :] == long[at + 1 :] or swapped == long[at:]


def _check_calls(messages: Sequence[ChatMessage]) -> None:
    """Check that tool messages with the results of all calls follow an assistant message, and that each has its call."""
    open_calls: dict[str, None] = {}
    at = 0  # index of the message with the calls
    for number, message in enumerate(messages):
        if message.role == "tool":
            where = f"messages[{number}].tool_call_id"
            if message.tool_call_id is None:
                raise bad_request(
                    f"{where} is missing: a tool message names the call that it answers", where, "missing_field"
                )
            if message.tool_call_id not in open_calls:
                raise bad_request(
                    f"{where} answers no call: the assistant's message before it has no call {message.tool_call_id[:64]!r} "
                    "that is still open",
                    where,
                    "invalid_value",
                )
            del open_calls[message.tool_call_id]
            continue
        if open_calls:
            break
        if message.role == "assistant" and message.tool_calls:
            open_calls, at = {call.id: None for call in message.tool_calls}, number
            if len(open_calls) < len(message.tool_calls):
                where = f"messages[{number}].tool_calls"
                raise bad_request(f"{where} holds two calls of one id", where, "invalid_value")
    if open_calls:
        where = f"messages[{at}].tool_calls"
        shown = ", ".join(call[:64] for call in list(open_calls)[:3])
        raise bad_request(
            f"{where}: no tool message answers {shown}: every call needs one, directly after this message",
            where,
            "invalid_value",
        )


class _ValueCounter:
    """Counts keys and values in the arguments of all calls. As strings in a body they were not counted as its structure."""

    def __init__(self) -> None:
        self._total = 0

    def count(self, arguments: Any, path: str) -> Any:
        """The arguments; raises ApiError naming `path` if all calls together have too many values."""
        stack = [arguments]
        while stack:
            item = stack.pop()
            self._total += 1
            if isinstance(item, dict):
                self._total += len(item)
                stack.extend(item.values())
            elif isinstance(item, list):
                stack.extend(item)
        if self._total > MAX_ARGUMENT_VALUES:
            raise bad_request(
                f"{path}: the arguments of all calls so far have more than {MAX_ARGUMENT_VALUES} keys and values", path
            )
        return arguments


def _template_message(
    message: ChatMessage, capabilities: TemplateCapabilities, values: _ValueCounter, path: str
) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude=_EXCLUDED_FIELDS)
    if plain["role"] == "developer" and not capabilities.developer:
        plain["role"] = "system"  # OpenAI's newer name is `developer`
    elif plain["role"] == "function":
        plain["role"] = "tool"
    calls = [(call.id, call.function) for call in message.tool_calls or ()]
    calls_path = f"{path}.tool_calls" if calls else f"{path}.function_call"
    if message.function_call is not None and not calls:
        calls = [(_function_call_id(message.function_call.name), message.function_call)]
    content = message.content
    if calls:
        plain["tool_calls"] = [
            {
                "id": _template_call_id(call_id, capabilities),
                "type": "function",
                "function": {
                    "name": function.name,
                    "arguments": values.count(_arguments(function, capabilities), calls_path),
                },
            }
            for call_id, function in calls
        ]
        if content is None and capabilities.null_content:
            return {**plain, "content": None}
    if plain["role"] == "tool":
        plain["tool_call_id"] = _template_call_id(
            message.tool_call_id or _function_call_id(message.name or ""), capabilities
        )
    role = plain.pop("role")
    return {"role": role, "content": content or "", **plain}


def _arguments(function: MadeFunctionCall, capabilities: TemplateCapabilities) -> Any:
    if not capabilities.text_arguments:
        return parse_arguments(function.arguments)
    if isinstance(function.arguments, str) and function.arguments.strip():
        return function.arguments
    return json.dumps(parse_arguments(function.arguments), ensure_ascii=False)


def _function_call_id(name: str) -> str:
    return f"call_{name}"  # calls of the older form have no id


def _template_call_id(call_id: str, capabilities: TemplateCapabilities) -> str:
    """A call id that the template accepts, the same for the same call."""
    if not capabilities.short_ids or _ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


# ---- templates without calls ------------------------------------------------------------------------------------
_INSTRUCTIONS = """You may call these functions:

{functions}

To call functions, answer with nothing but calls in this form:
{example}
Otherwise answer in plain text. The results of calls come in the next message."""


def _with_instructions(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], example: str
) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(functions=functions, example=example)
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
    if first is not None and first["content"]:
        text = f"{first['content']}\n\n{text}"
    return [{**(first or {}), "role": "system", "content": text}, *rest]


def _without_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls as text in their content, and results as user messages."""
    converted: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    results = False  # whether the last message has results
    for message in messages:
        calls = message.get("tool_calls", ())
        names.update({call["id"]: call["function"]["name"] for call in calls})
        if message["role"] == "tool":
            name = names.get(message["tool_call_id"]) or message.get("name") or "the function"
            text = f"Result of {name}:\n{message['content']}"
            if results:
                converted[-1]["content"] += f"\n\n{text}"
            else:
                converted.append({"role": "user", "content": text})
            results = True
            continue
        results = False
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            written = json.dumps(
                [{key: call["function"][key] for key in ("name", "arguments")} for call in calls], ensure_ascii=False
            )
            plain["content"] = f"{plain['content']}\n{written}" if plain["content"] else written
        converted.append(plain)
    return converted
