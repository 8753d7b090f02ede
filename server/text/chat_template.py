"""Chat templates in a jinja2 sandbox, byte for byte as transformers renders them, and templates of pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug  # which jinja2 otherwise imports at the first error of a template
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from windlass.server.text.pair_prompts import PairField, PairPrompt, PairTemplate
from windlass.server.text.template_facts import RESERVED

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
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        cache_size=0,
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
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_output_chars: int = MAX_OUTPUT_CHARS,
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
            scope.update(
                messages=chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
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
