"""Messages of a request in the form that a chat template reads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from windlass.server.errors import bad_request
from windlass.server.schemas.chat import ChatMessage
from windlass.server.schemas.tools import MadeFunctionCall, parse_arguments
from windlass.server.text.tokenizer_files import CallIds, TemplateCapabilities

_IGNORED_FIELDS = {"refusal", "annotations", "audio", "images", "thinking_blocks", "reasoning_details"}
_EXCLUDED_FIELDS = {"type", *_IGNORED_FIELDS, "function_call", "tool_calls", "tool_call_id", "content"}
MAX_ARGUMENT_VALUES = 1_000_000  # keys and values in the arguments of all calls: far above any real chat's
_ROLES_WITH_CONTENT = frozenset({"user", "system", "developer"})
_ROLES = (*sorted(_ROLES_WITH_CONTENT), "assistant", "tool", "function")
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_JOINED_TEXTS = frozenset({"content", "reasoning_content", "reasoning"})


@dataclass(frozen=True, slots=True)
class FittedMessages:
    """Messages for a template. changes: kinds of changes to what the request has, in alphabetical order."""

    messages: list[dict[str, Any]]
    changes: tuple[Change, ...] = ()


def prepare_history(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    capabilities: TemplateCapabilities,
    example: str,
) -> FittedMessages:
    """Fit the messages to the template; raises ApiError naming the message at fault.

    tools: functions on offer; a system message describes them if the template cannot. example: of a call, for that message.
    """
    check_history(messages, capabilities)
    values, ids = _ValueCounter(), _CallIds(capabilities.call_ids)
    plain = [
        _template_message(message, capabilities, values, ids, f"messages[{number}]")
        for number, message in enumerate(messages)
    ]
    fitting = _Fitting(capabilities)
    plain = fitting.match_results(plain) if capabilities.calls else fitting.calls_as_text(plain)
    if tools and not capabilities.tools:
        plain = _with_instructions(plain, tools, example)
        fitting.changes.add("tools-as-text")
    plain = fitting.place_systems(plain)
    if not capabilities.user_after_result:
        plain = fitting.text_into_results(plain)
    plain = fitting.gather_texts(plain)
    plain = fitting.merge_turns(plain)
    return FittedMessages(plain, tuple(sorted(fitting.changes)))


def prepare_tools(
    tools: Sequence[Mapping[str, Any]] | None, capabilities: TemplateCapabilities
) -> Sequence[Mapping[str, Any]] | None:
    """The functions that the template shows, in the form that it reads."""
    if not tools or not capabilities.tools:
        return None
    if not capabilities.described_tools:
        return tools
    return [
        {**tool, "function": {**tool["function"], "description": tool["function"].get("description", "")}}
        for tool in tools
    ]


def check_history(messages: Sequence[ChatMessage], capabilities: TemplateCapabilities | None) -> None:
    """Check that user and system messages have content and that results name a call; raises ApiError naming the message.

    capabilities: of the template, which may support further roles. An unsupported role that resembles a known one is refused,
    because most templates would render it unchanged for a model that has never seen it.
    """
    for number, message in enumerate(messages):
        suggestion = (
            None if capabilities is None or message.role in capabilities.known_roles else _suggest_role(message.role)
        )
        if suggestion is not None:
            where = f"messages[{number}].role"
            raise bad_request(f"{where} is {message.role!r}: did you mean {suggestion!r}?", where, "invalid_value")
        if message.role in _ROLES_WITH_CONTENT and message.content is None:
            where = f"messages[{number}].content"
            raise bad_request(
                f"{where} is missing: a message of the role {message.role} must have it", where, "missing_field"
            )
        if message.role == "tool" and message.tool_call_id is None:
            where = f"messages[{number}].tool_call_id"
            raise bad_request(
                f"{where} is missing: a tool message names the call that it answers", where, "missing_field"
            )
        calls = message.tool_calls or ()
        if message.role == "assistant" and len({call.id for call in calls}) < len(calls):
            where = f"messages[{number}].tool_calls"
            raise bad_request(f"{where} has two calls with the same id", where, "invalid_value")


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


class _CallIds:
    """Call ids that the template accepts, the same for the same call."""

    def __init__(self, form: CallIds) -> None:
        self._form = form
        self._made: dict[str, str] = {}  # of the last call with an id
        self._count = 0

    def of_call(self, call_id: str, name: str) -> str:
        """The id of the next call."""
        if self._form == "named":
            self._made[call_id] = f"functions.{name}:{self._count}"
            self._count += 1
        return self.of_result(call_id)

    def of_result(self, call_id: str) -> str:
        """The id of the call that a result names."""
        if self._form == "short" and not _ID.fullmatch(call_id):
            return hashlib.sha256(call_id.encode()).hexdigest()[:9]
        return self._made.get(call_id, call_id)


def _template_message(
    message: ChatMessage, capabilities: TemplateCapabilities, values: _ValueCounter, ids: _CallIds, path: str
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
                "id": ids.of_call(call_id, function.name),
                "type": "function",
                "function": {
                    "name": function.name,
                    "arguments": values.count(_arguments(function, capabilities), calls_path),
                },
            }
            for call_id, function in calls
        ]
        if capabilities.null_content if content is None else not content and not capabilities.empty_content:
            return {**plain, "content": None}
    if plain["role"] == "tool":
        plain["tool_call_id"] = ids.of_result(message.tool_call_id or _function_call_id(message.name or ""))
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


# ---- messages that the template does not accept as they are -----------------------------------------------------
Change = Literal[
    "calls-as-text",
    "calls-split",
    "result-added",
    "result-as-text",
    "system-as-user",
    "system-joined",
    "text-in-result",
    "text-in-thinking",
    "tools-as-text",
    "turns-merged",
]
_SYSTEM_ROLES = ("system", "developer")
_NO_RESULT = "No result: the call was interrupted."


class _Fitting:
    """Changes messages to those that a template accepts and shows. changes: kinds of the changes so far."""

    def __init__(self, capabilities: TemplateCapabilities) -> None:
        self._capabilities = capabilities
        self.changes: set[Change] = set()

    # ---- calls and results ---------------------------------------------------------------------------------------
    def match_results(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with calls that have results, results that have calls, and single calls, where these are required."""
        matched: list[dict[str, Any]] = []
        names: dict[str, str] = {}  # of all calls so far, by id
        start = 0
        while start < len(messages):
            message, start = messages[start], start + 1
            calls = message.get("tool_calls", ())
            names.update({call["id"]: call["function"]["name"] for call in calls})
            end = start
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            if message["role"] == "tool":  # the message before it has no calls
                matched.append(self._orphan(message, names))
            elif calls:
                matched += self._with_results(message, messages[start:end], names)
                start = end
            else:
                matched.append(message)
        return matched

    def _with_results(
        self, message: dict[str, Any], results: Sequence[dict[str, Any]], names: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """A message with calls and the results after it."""
        calls = message["tool_calls"]
        open_calls = {call["id"]: call for call in calls}
        kept: list[dict[str, Any]] = []
        orphans: list[dict[str, Any]] = []
        for result in results:
            if open_calls.pop(result["tool_call_id"], None) is not None:
                kept.append(self._named(result, names))
            else:
                orphans.append(self._orphan(result, names))
        if open_calls and not self._capabilities.open_calls:
            added = [{"role": "tool", "content": _NO_RESULT, "tool_call_id": call_id} for call_id in open_calls]
            kept += [self._named(result, names) for result in added]
            self.changes.add("result-added")
        turns: list[dict[str, Any]] = []
        if message["content"] and not self._capabilities.text_with_calls and self._capabilities.repeated_assistants:
            self.changes.add("calls-split")
            turns.append(_without_calls(message))
            message = self._only_calls(message)
        elif (
            (thinking := message.get("reasoning_content") or message.get("reasoning"))
            and message["content"]
            and (not self._capabilities.thinking_with_text)
        ):
            # A turn of its own would count as a final answer, after which gpt-oss's template omits earlier thinking.
            self.changes.add("text-in-thinking")
            joined = f"{thinking}\n\n{message['content']}"
            message = {**message, "content": self._no_text, "reasoning_content": joined}
        if len(calls) == 1 or self._capabilities.parallel_calls:
            return [*turns, message, *kept, *orphans]
        self.changes.add("calls-split")
        answers = {result["tool_call_id"]: result for result in kept}
        for number, call in enumerate(calls):
            turns.append({**(self._only_calls(message) if number else message), "tool_calls": [call]})
            turns += [answers[call["id"]]] if call["id"] in answers else []
        return [*turns, *orphans]

    def _named(self, result: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        name = names.get(result["tool_call_id"])
        if not self._capabilities.named_results or name is None or "name" in result:
            return result
        return {**result, "name": name}

    def _orphan(self, result: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """A result that follows no open call."""
        if self._capabilities.orphan_results:
            return self._named(result, names)
        self.changes.add("result-as-text")
        return {"role": "user", "content": _result_as_text(result, names)}

    def calls_as_text(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with calls as text in their content, and results as user messages."""
        converted: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
            if is_result:
                self.changes.add("calls-as-text")
                text = "\n\n".join(_result_as_text(message, names) for message in group)
                converted.append({"role": "user", "content": text})
                continue
            for message in group:
                calls = message.get("tool_calls")
                if calls:
                    self.changes.add("calls-as-text")
                    names.update({call["id"]: call["function"]["name"] for call in calls})
                converted.append(_with_calls_as_text(message, calls) if calls else message)
        return converted

    # ---- system messages -----------------------------------------------------------------------------------------
    def place_systems(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with as many system messages as the template shows; others are joined or become text of the user.

        Later ones become text of the user where they are: at the front they would change the cached prompt of every turn.
        """
        begin = next((at for at, each in enumerate(messages) if each["role"] not in _SYSTEM_ROLES), len(messages))
        front, rest = list(messages[:begin]), list(messages[begin:])
        if len(front) > 1 and not (self._capabilities.system and self._capabilities.several_systems):
            self.changes.add("system-joined")
            front = [_join(front)]
        if not self._capabilities.late_systems:
            rest = [self._as_user(message) for message in rest]
        if front and not self._capabilities.system:
            first = self._as_user(front[0])
            if rest and rest[0]["role"] == "user":
                return [_join([first, rest[0]]), *rest[1:]]
            front = [first]
        return front + rest

    def _as_user(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] not in _SYSTEM_ROLES:
            return message
        self.changes.add("system-as-user")
        return {**message, "role": "user"}

    # ---- alternation ---------------------------------------------------------------------------------------------
    def text_into_results(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with a user's text after a result as part of that result."""
        groups: list[list[dict[str, Any]]] = []
        for message in messages:
            if message["role"] == "user" and groups and groups[-1][0]["role"] == "tool":
                groups[-1].append(message)
                self.changes.add("text-in-result")
            else:
                groups.append([message])
        return [_join(group) if len(group) > 1 else group[0] for group in groups]

    def gather_texts(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the texts between two turns of the user in the last of them, as a turn without calls.

        For templates that drop a text that accompanies calls, and count only turns without calls when they demand alternation.
        """
        if not self._capabilities.gathers_texts:
            return list(messages)
        fitted: list[dict[str, Any]] = []
        for is_exchange, group in groupby(messages, lambda message: message["role"] in ("assistant", "tool")):
            turns = list(group)
            texts = [at for at, turn in enumerate(turns) if turn["role"] == "assistant" and turn["content"]]
            if not (is_exchange and texts and any("tool_calls" in turn for turn in turns)):
                fitted += turns
                continue
            if len(texts) > 1:
                self.changes.add("turns-merged")
            for at, turn in enumerate(turns):
                if at == texts[-1]:
                    fitted.append(_join([_without_calls(turns[each]) for each in texts]))
                if at not in texts:
                    fitted.append(turn)
                elif "tool_calls" in turn:
                    self.changes.add("calls-split")
                    fitted.append(self._only_calls(turn))
        return fitted

    def _only_calls(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with the calls of another one, without its text."""
        return {"role": message["role"], "content": self._no_text, "tool_calls": message["tool_calls"]}

    @property
    def _no_text(self) -> str | None:
        """The content of a message that has calls and no text."""
        return None if self._capabilities.null_content or not self._capabilities.empty_content else ""

    def merge_turns(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages without consecutive turns of one role, where the template demands alternation."""
        demands = {
            "user": not self._capabilities.repeated_users,
            "assistant": not self._capabilities.repeated_assistants,
        }
        if not any(demands.values()):
            return list(messages)
        fitted: list[dict[str, Any]] = []
        apart = self._capabilities.gathers_texts
        for (role, _), turns in groupby(messages, lambda each: (each["role"], apart and "tool_calls" in each)):
            group = list(turns)
            if len(group) > 1 and demands.get(role):
                self.changes.add("turns-merged")
                group = [_join(group)]
            fitted += group
        return fitted


def _join(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One message with the fields of the first, and the texts and calls of all."""
    joined = {key: value for message in reversed(messages) for key, value in message.items()} | messages[0]
    for field in _JOINED_TEXTS & joined.keys():
        texts = [message[field] for message in messages if message.get(field)]
        joined[field] = "\n\n".join(texts) if texts else joined[field]
    if "tool_calls" in joined:
        joined["tool_calls"] = [call for message in messages for call in message.get("tool_calls", ())]
    return joined


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _with_calls_as_text(message: dict[str, Any], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    plain = _without_calls(message)
    functions = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
    written = json.dumps(functions, ensure_ascii=False)
    return {**plain, "content": f"{plain['content']}\n{written}" if plain["content"] else written}


def _result_as_text(result: dict[str, Any], names: Mapping[str, str]) -> str:
    name = names.get(result["tool_call_id"]) or result.get("name") or "the function"
    return f"Result of {name}:\n{result['content']}"
