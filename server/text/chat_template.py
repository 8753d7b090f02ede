"""Chat templates in a jinja2 sandbox, byte for byte as transformers renders them, and templates of pairs.

The capabilities of a chat template are found by rendering short conversations with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from typing import Any

import jinja2
import jinja2.debug  # which jinja2 otherwise imports at the first error of a template
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from windlass.server.text.tokenizer_files import (
    RESERVED,
    CallIds,
    PairField,
    PairPrompt,
    PairTemplate,
    TemplateCapabilities,
)

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # most templates read the first
_PLAIN_REASONING = re.compile(r"\.reasoning\b|['\"]reasoning['\"]")  # templates that read this name
_ROLES: dict[PairField, str] = {"instruction": "system", "query": "query", "document": "document"}
_PLACEHOLDERS: dict[PairField, str] = {"instruction": "\ue000", "query": "\ue001", "document": "\ue002"}  # private use
_SPACE = "\u2003"  # white space that no template contains; whether it remains shows whether a text is trimmed
_PLACEHOLDER_PATTERN = re.compile(f"({_SPACE}?)([\ue000-\ue002])({_SPACE}?)")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training masks; for serving it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` that refuses underscore names, which could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=1)` must work
        self, positional = args[0], args[1:]
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"chat templates cannot store the underscore name {name!r} on a namespace")


class _Dict:
    """`dict` for templates: callable, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox without constant folding, which would compute `9 ** 9 ** 9` while compiling."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})


def sandboxed_environment() -> jinja2.Environment:
    """An environment with the extensions and globals of chat templates in transformers."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


class ChatTemplateError(ValueError):
    """The messages cannot be rendered with this template; the message is short and meant for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ChatTemplate:
    """A compiled chat template; rendering is thread-safe and uses neither disk nor network.

    source: jinja2 text. special_tokens: names such as bos_token, visible to the template.
    Raises ChatTemplateError if the source does not parse.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._plain_reasoning = bool(_PLAIN_REASONING.search(source))
        self._max_output_chars = max_output_chars
        try:
            self._template = sandboxed_environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template does not parse, line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, RecursionError, ValueError, TypeError, SyntaxError) as error:
            raise ChatTemplateError(f"the chat template does not parse: {_short_message(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        null_content: bool = False,
        variables: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; tokenize it with add_special_tokens=False.

        messages, tools, variables: exact JSON types (dict, list, str, int, float, bool, None), whose methods the sandbox knows.
        Keys of messages whose value is None are dropped, as in transformers. null_content: except the content of a message with
        calls, for templates that test whether it is none.
        continue_final_message: end inside the last message, for the model to continue it (True: its "content"; a string: that
        field). Excludes add_generation_prompt, which must then be False.
        variables, kwargs: further variables of the template, such as `chat_template_kwargs`. They override special tokens; names
        of `RESERVED` are refused. Raises ChatTemplateError.
        """
        if not messages:
            raise ChatTemplateError("messages must contain at least one message")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt cannot be combined: set one of them"
            )
        extra = {**kwargs, **(variables or {})}
        for name in extra:
            if name in RESERVED:
                raise ChatTemplateError(f"{name!r} cannot be given as a template variable")
        try:
            chat = _prepare_messages(messages, self._plain_reasoning, null_content)
            final = _tag_final_message(chat, continue_final_message, self.source) if continue_final_message else None
            scope = {"documents": None, **self._special_tokens, **extra}
            scope.update(messages=chat, tools=tools, add_generation_prompt=add_generation_prompt)
            text = self._generate(scope)
            return text if final is None else _strip_from_tag(text, final)
        except ChatTemplateError:
            raise
        except SecurityError as error:
            raise ChatTemplateError(f"the chat template was stopped by the sandbox: {_short_message(error)}") from error
        except TemplateError as error:
            raise ChatTemplateError(_short_message(error)) from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template or the messages nest too deeply") from error
        except MemoryError:
            raise  # reported by the code that set the limit
        except Exception as error:  # templates can fail in any way that Python code can
            raise ChatTemplateError(f"the chat template failed on these messages: {_short_message(error)}") from error

    def _generate(self, scope: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(scope):
            size += len(part)
            if size > self._max_output_chars:
                raise ChatTemplateError(
                    f"the chat template builds more than {self._max_output_chars} characters of text"
                )
            parts.append(part)
        return "".join(parts)


def _short_message(error: BaseException) -> str:
    text = " ".join(str(getattr(error, "message", None) or error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _prepare_messages(
    messages: Sequence[Mapping[str, Any]], plain_reasoning: bool, null_content: bool
) -> list[dict[str, Any]]:
    """Copies of the messages without empty keys, with the thinking of earlier turns under all names that templates read."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"each message must be an object, got {type(message).__name__}")
        # Clients send "content": null or "tool_calls": null; templates test for the key, not for None.
        plain = {key: value for key, value in message.items() if value is not None}
        if null_content and "tool_calls" in plain and "content" in message:
            plain.setdefault("content", None)
        reasoning = next((plain[key] for key in _REASONING_FIELDS if plain.get(key) is not None), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
            if plain_reasoning:
                plain["reasoning"] = reasoning
        chat.append(plain)
    return chat


def _tag_final_message(chat: list[dict[str, Any]], field: bool | str, source: str) -> str:
    """Append the tag to the text to be continued, in the copied message; returns that text without the tag."""
    name = field if isinstance(field, str) else "content"
    last = chat[-1]
    text = last.get(name)
    if text is None:
        raise ChatTemplateError(f'continue_final_message is set but the final message has no "{name}" to continue')
    fields = [name]
    if name in _REASONING_FIELDS:
        fields = [key for key in _REASONING_FIELDS if last.get(key) == text]
    if not any(key in source for key in fields):
        raise ChatTemplateError(f'continue_final_message: the chat template does not use the field "{name}"')
    if isinstance(text, (list, tuple)):
        blocks = list(text)
        for index, block in reversed(list(enumerate(blocks))):
            if isinstance(block, dict) and isinstance(block.get("text"), str):
                original: str = block["text"]
                blocks[index] = {**block, "text": original + _CONTINUE_TAG}
                last.update(dict.fromkeys(fields, blocks))
                return original
        raise ChatTemplateError("continue_final_message is set but the final message has no text to continue")
    if not isinstance(text, str):
        raise ChatTemplateError(f'continue_final_message: "{name}" of the final message must be text')
    for key in fields:
        last[key] = text + _CONTINUE_TAG
    return text


def _strip_from_tag(rendered: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in rendered or tag not in rendered:
        raise ChatTemplateError("continue_final_message: the chat template changes or drops the final message")
    at = rendered.rindex(tag)
    if rendered[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return rendered[:at]
    return rendered[:at].rstrip()  # the template trims messages, so it would also have trimmed this one


def build_pair_template(template: ChatTemplate) -> PairTemplate:
    """The pair template of a chat template; raises ChatTemplateError if that does not render the roles `query` and `document`."""
    plain = _split_at_placeholders(template, ("query", "document"))
    missing = [role for role in ("query", "document") if role not in plain.pair_fields]
    if missing:
        raise ChatTemplateError(
            f"it shows no message of the role {' and none of '.join(missing)}, and must show a query and a document"
        )
    try:
        instructed = _split_at_placeholders(template, ("instruction", "query", "document"))
    except ChatTemplateError:
        return PairTemplate(plain, None)
    return PairTemplate(plain, instructed if {*instructed.pair_fields} == {*_ROLES} else None)


def _split_at_placeholders(template: ChatTemplate, roles: tuple[PairField, ...]) -> PairPrompt:
    messages = [
        {"role": _ROLES[pair_field], "content": f"{_SPACE}{_PLACEHOLDERS[pair_field]}{_SPACE}"} for pair_field in roles
    ]
    # Texts and, for each gap between them, the space before it, its placeholder and the space after it.
    pieces = _PLACEHOLDER_PATTERN.split(template.render(messages))
    pair_fields = {mark: pair_field for pair_field, mark in _PLACEHOLDERS.items()}
    trimmed = [not (before and after) for before, after in zip(pieces[1::4], pieces[3::4], strict=True)]
    return PairPrompt(tuple(pieces[::4]), tuple(pair_fields[mark] for mark in pieces[2::4]), tuple(trimmed))


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
