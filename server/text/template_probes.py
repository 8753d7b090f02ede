"""Capabilities of a chat template, found by rendering short conversations with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError
from windlass.server.text.template_facts import CallIds, TemplateCapabilities

_Message = dict[str, Any]
_UNKNOWN_ROLE = "probe_role"
_MAX_ROLES = _MAX_ROLE_CHARS = 64  # recorded ones; roles of requests are no longer
_CALL_IDS: dict[CallIds, str] = {  # short for Mistral's templates, named for Kimi K2's
    "any": "probe{0}",
    "short": "probe000{0}",
    "named": "functions.probe_name{0}:{0}",
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "Looks up a value.",
            "parameters": {
                "type": "object",
                "properties": {"probe_key": {"type": "string", "description": "The key."}},
            },
        },
    }
]
_UNDESCRIBED_TOOLS = [
    {"type": "function", "function": {"name": "probe_tool", "parameters": {"type": "object", "properties": {}}}}
]


class _RecordedRole(str):
    """A role that records the texts it is compared with."""

    compared: set[str]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and len(other) <= _MAX_ROLE_CHARS and len(self.compared) < _MAX_ROLES:
            self.compared.add(str(other))
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class _CallForm:
    """A form of calls and results in a history.

    null_content: of a message with calls; otherwise it is empty. parts: of a call and its result that the template shows.
    """

    parts: tuple[str, ...] = ("name", "value", "result")
    call_ids: CallIds = "any"
    text_arguments: bool = False
    null_content: bool = False
    named_results: bool = False
    with_tools: bool = False

    def call(self, number: int = 0) -> _Message:
        arguments = {f"probe_key{number}": f"probe_value{number}"}
        return {
            "id": self._id(number),
            "type": "function",
            "function": {
                "name": f"probe_name{number}",
                "arguments": json.dumps(arguments) if self.text_arguments else arguments,
            },
        }

    def assistant(self, *numbers: int, text: str = "") -> _Message:
        calls = [self.call(number) for number in numbers]
        return {"role": "assistant", "content": None if self.null_content and not text else text, "tool_calls": calls}

    def result(self, number: int = 0) -> _Message:
        name = {"name": f"probe_name{number}"} if self.named_results else {}
        return {"role": "tool", "content": f"probe_result{number}", "tool_call_id": self._id(number), **name}

    def shown(self, *numbers: int) -> list[str]:
        """The texts of calls and their results."""
        return [f"probe_{part}{number}" for number in numbers for part in self.parts]

    def _id(self, number: int) -> str:
        return _CALL_IDS[self.call_ids].format(number)


def probe_template(template: ChatTemplate, variables: Mapping[str, Any] | None = None) -> TemplateCapabilities:
    """The capabilities of a template. If it does not show even one message of a user, all are assumed.

    variables: those that every conversation has.
    """
    return _Prober(template, variables).capabilities()


class _Prober:
    def __init__(self, template: ChatTemplate, variables: Mapping[str, Any] | None) -> None:
        self._template, self._variables = template, variables
        self._tools: Sequence[Mapping[str, Any]] | None = None  # for conversations about something else

    def capabilities(self) -> TemplateCapabilities:
        user = _user("probe_user")
        if not self._shows([user]):
            self._tools = _TOOLS  # a template for chats with functions may require them
            if not self._shows([user]):
                return TemplateCapabilities(known_roles=self._known_roles())
        system = self._shows([_system("probe_system"), user])
        developer = system and self._has_developer()
        roles = ("system", "developer") if developer else ("system",)
        form = self._call_form()
        return TemplateCapabilities(
            tools=self._has_tools(_TOOLS),
            described_tools=not self._has_tools(_UNDESCRIBED_TOOLS),
            developer=developer,
            system=system,
            several_systems=system and all(self._has_two_systems(*pair) for pair in product(roles, repeat=2)),
            late_systems=system and all(self._has_late_system(*pair) for pair in product(roles, repeat=2)),
            repeated_users=self._shows([_user("probe_a"), _user("probe_b")])
            and self._shows([user, _assistant("probe_answer"), _user("probe_a"), _user("probe_b")]),
            repeated_assistants=self._shows([user, _assistant("probe_a"), _assistant("probe_b"), _user("probe_c")]),
            known_roles=self._known_roles(),
            **({"calls": False} if form is None else self._call_capabilities(form)),
        )

    # ---- roles -------------------------------------------------------------------------------------------------------
    def _has_developer(self) -> bool:
        """Whether the role is shown, and not only as any unknown role is."""
        messages = [{"role": "developer", "content": "probe_developer"}, _user("probe_user")]
        if not self._shows(messages):
            return False
        unknown = self._render([{**messages[0], "role": _UNKNOWN_ROLE}, messages[1]])
        known = self._render(messages)
        return unknown is None or known is None or known != unknown.replace(_UNKNOWN_ROLE, "developer")

    def _has_two_systems(self, first: str, second: str) -> bool:
        return self._shows(
            [
                {"role": first, "content": "probe_first"},
                {"role": second, "content": "probe_second"},
                _user("probe_user"),
            ]
        )

    def _has_late_system(self, first: str, late: str) -> bool:
        begin = [{"role": first, "content": "probe_first"}, _user("probe_user")]
        message = {"role": late, "content": "probe_late"}
        return self._shows([*begin, message]) and self._shows(
            [*begin, _assistant("probe_answer"), message, _user("probe_end")]
        )

    def _known_roles(self) -> frozenset[str]:
        role = _RecordedRole(_UNKNOWN_ROLE)
        role.compared = set()
        odd, user, assistant = {"role": role, "content": "probe"}, _user("probe"), _assistant("probe")
        for messages in ([odd], [user, odd], [user, assistant, odd], [_system("probe"), odd], [odd, user]):
            self._render(messages)
        return frozenset(role.compared)

    # ---- functions ---------------------------------------------------------------------------------------------------
    def _has_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        user = _user("probe_user")
        return any(
            "probe_tool" in (self._render(messages, tools) or "") for messages in ([user], [_system("probe"), user])
        )

    def _call_form(self) -> _CallForm | None:
        """The form in which the template shows a call and its result, preferring the simplest one."""
        parts = ("name", "value", "result"), ("value", "result")
        no_yes = False, True
        for shown, named, ids, null, tools in product(parts, no_yes, _CALL_IDS, no_yes, no_yes):
            forms = [_CallForm(shown, ids, text, null, named, tools) for text in no_yes]
            as_object, as_text = map(self._show_call, forms)
            if as_object is not None or as_text is not None:
                return forms[_reads_text(as_object, as_text)]
        return None

    def _show_call(self, form: _CallForm) -> str | None:
        """The text of a call and its result, if it shows both."""
        text = self._render(
            [_user("probe_user"), form.assistant(0), form.result()], _TOOLS if form.with_tools else self._tools
        )
        return text if text is not None and all(part in text for part in form.shown(0)) else None

    def _call_capabilities(self, form: _CallForm) -> dict[str, Any]:
        tools = _TOOLS if form.with_tools else self._tools
        user, end = _user("probe_user"), _user("probe_end")
        *call, result = form.shown(0)
        orphan = form.result()
        with_text = form.assistant(0, text="probe_text")
        shows_text = self._shows([user, with_text, orphan], *form.shown(0), "probe_text", tools=tools)
        return {
            "calls": True,
            "text_arguments": form.text_arguments,
            "call_ids": form.call_ids,
            "named_results": form.named_results,
            "null_content": self._has_null_content(form),
            "empty_content": not form.null_content,
            "text_with_calls": shows_text,
            "thinking_with_text": not shows_text
            or self._shows(
                [user, {**with_text, "reasoning_content": "probe_thinking"}, orphan], "probe_text", tools=tools
            ),
            "text_before_calls": self._shows(
                [user, _assistant("probe_text"), form.assistant(0), form.result()],
                *form.shown(0),
                "probe_text",
                tools=tools,
            ),
            "parallel_calls": self._shows(
                [user, form.assistant(0, 1), form.result(0), form.result(1)], *form.shown(0, 1), tools=tools
            ),
            "user_after_result": self._shows(
                [user, form.assistant(0), orphan, end], *form.shown(0), "probe_end", tools=tools
            ),
            "open_calls": self._shows([user, form.assistant(0), end], *call, "probe_end", tools=tools),
            "orphan_results": self._shows([orphan, _assistant("probe_answer"), end], result, "probe_end", tools=tools)
            and self._shows([user, _assistant("probe_answer"), orphan, end], result, "probe_end", tools=tools),
        }

    def _has_null_content(self, form: _CallForm) -> bool:
        """Whether null content of a message with calls is shown in a form of its own."""
        texts = {null: self._show_call(replace(form, null_content=null)) for null in (False, True)}
        empty, null = texts[False], texts[True]
        if null is None or empty is None:
            return null is not None
        return null != empty and null.count("None") <= empty.count("None")  # Python's null in a prompt is an accident

    # ---- rendering ---------------------------------------------------------------------------------------------------
    def _shows(
        self, messages: Sequence[_Message], *texts: str, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> bool:
        """Whether the template accepts these messages and shows these texts; by default their contents."""
        text = self._render(messages, tools)
        return text is not None and all(part in text for part in texts or [each["content"] for each in messages])

    def _render(self, messages: Sequence[_Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        try:
            return self._template.render(
                messages, tools=tools or self._tools, null_content=True, variables=self._variables
            )
        except ChatTemplateError:
            return None


def _reads_text(as_object: str | None, as_text: str | None) -> bool:
    """Whether arguments are read as JSON text, by what a template makes of each form; None if it does not show the call."""
    if as_object is None or as_text is None:
        return as_object is None
    python = repr({"probe_key0": "probe_value0"})  # what printing an object as text gives
    return python in as_object and json.dumps({"probe_key0": "probe_value0"}) in as_text


def _user(content: str) -> _Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> _Message:
    return {"role": "assistant", "content": content}


def _system(content: str) -> _Message:
    return {"role": "system", "content": content}
