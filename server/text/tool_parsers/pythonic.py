"""Tool calls in Python syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from windlass.server.text.stream_parser import CallOptions, ParserSteps
from windlass.server.text.tool_parsers.call_grammars import literal_json
from windlass.server.text.tool_parsers.json_calls import JsonCallParser

START, END = "<|python_start|>", "<|python_end|>"
LFM2_BEGIN, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO3_BEGIN, OLMO3_END = "<function_calls>", "</function_calls>"
_NAME = re.compile(r"[\w.\-]")
_IDENTIFIER = re.compile(r"[^\W\d][\w.\-]*")
_INDENT = re.compile(r"[ \t]*")
_FENCES = ("```python", "```py", "```tool_code")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_OUTSIDE = re.compile(r"[^'\"()\[\]{},=]*")
_UNQUOTED_TEXT = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonForm:
    """Text around calls in Python: a list in brackets, or one call per line.

    opens: each begins calls. closes: text after calls; anything else after them makes them text. any_name: calls may name
    functions that the request does not offer. starts: a list at the start of the text is calls.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    any_name: bool = True
    starts: bool = False


PYTHONIC = PythonForm(opens=(START, "```tool_code"), closes=(END, "```"), any_name=False, starts=True)
LFM2 = PythonForm(opens=(LFM2_BEGIN,), closes=(LFM2_END,))
OLMO3 = PythonForm(opens=(OLMO3_BEGIN,), closes=(OLMO3_END,))


class PythonParser(JsonCallParser):
    """Parser of calls in Python.

    Calls are emitted once all of them are read. They stay text unless every value is a literal, strings follow each other
    only after a comma, and nothing follows the calls: a quote within a string would otherwise change arguments.
    """

    def __init__(self, form: PythonForm, options: CallOptions) -> None:
        self._form = form
        super().__init__(options)

    def run(self) -> ParserSteps:
        if self._form.starts:
            yield from self.skip_space()
            if (yield from self.peek()) == "[":
                yield from self._calls(marked=False)
            self.emit_taken()
        while (yield from self.pass_until(self._form.opens, self.emit_content)):
            yield from self._calls(marked=True)
            self.emit_taken()

    def _calls(self, *, marked: bool) -> ParserSteps:
        """Take calls up to the end of the text that belongs to them; emit them if they are certain."""
        yield from self.skip_space()
        fenced = yield from self.take_literal(*_FENCES)
        yield from self.skip_space()
        listed = yield from self.take_literal("[")
        yield from self.skip_space()
        if (yield from self.peek()) == "{" and self._form.any_name:
            if (yield from (self.rest_of_list() if listed else self.call_object())):
                yield from self.take_all(*self._form.closes)
                self.discard_taken()
            return
        found: list[tuple[str, str]] = []
        while True:
            name = yield from self.take_while(_NAME)
            known = self.may_call(name) if self._form.any_name else name in self.options.schemas
            arguments = None
            if known and (yield from self.take_literal("(")):
                arguments = yield from self._arguments(name)
            if arguments is None:
                if not found or (yield from self.peek()):
                    return
                break  # the answer was cut within a call, after complete ones
            found.append((name, arguments))
            yield from self.skip_space()
            separated = yield from self.take_literal(",", ";")
            yield from self.skip_space()
            character = yield from self.peek()
            if not character or (listed and character == "]"):
                if character:
                    self.take(1)
                    if not (yield from self._ends(fenced, marked=marked)):
                        return
                break
            if not separated and (listed or not _NAME.match(character)):
                if listed or not (yield from self._ends(fenced, marked=marked)):
                    return
                break
        for name, arguments in found:
            self.begin_call(name)
            self.emit_arguments(arguments)
            self.end_call()
        self.discard_taken()

    def _ends(self, fenced: str, *, marked: bool) -> Generator[None, None, bool]:
        """Take what closes the calls; return whether only a new line, or nothing if a marker opened them, may follow."""
        yield from self.take_match_ahead(_INDENT)
        if fenced:
            yield from self.skip_space()
            yield from self.take_literal("```")
        if (yield from self.peek()) == "\n" and not marked:
            return True
        yield from self.skip_space()
        closed = yield from self.take_literal(*self._form.closes)
        return bool(closed) or not (yield from self.peek())

    def _arguments(self, function: str) -> Generator[None, None, str | None]:
        """Take up to the closing parenthesis and return the JSON of the arguments, None if they are not certain."""
        schema = self.options.schemas.get(function)
        properties = _properties(schema)
        named: dict[str, str] = {}
        positional: list[str] = []
        yield from self.skip_space()
        while not (yield from self.take_literal(")")):
            text, end = yield from self._value()
            name: str | None = None
            if end == "=":
                name = text.strip()
                if not _IDENTIFIER.fullmatch(name) or name in named:
                    return None
                text, end = yield from self._value()
            value = None if end not in (",", ")") else literal_json(text.strip())
            if value is None or (name is None and (named or len(positional) >= len(properties))):
                return None
            if name is None:
                positional.append(value)
            else:
                named[name] = value
            if end == ")":
                break
            yield from self.skip_space()
        if len(positional) == 1 and positional[0].startswith("{") and not named:
            given = json.loads(positional[0])
            if given.keys() <= set(properties):  # all arguments in one dictionary
                return positional[0]
        members = {**dict(zip(properties, positional, strict=False))}
        if members.keys() & named.keys():
            return None
        written = (f"{json.dumps(name)}: {value}" for name, value in (members | named).items())
        return f"{{{', '.join(written)}}}"

    def _value(self) -> Generator[None, None, tuple[str, str]]:
        """Take Python text and the `,`, `=` or `)` after it; return both, with an empty character if the text is unclear."""
        parts: list[str] = []
        closing: list[str] = []
        begins = True  # whether a string may begin here
        while True:
            character = yield from self.peek()
            if not character:
                break
            if character in "'\"":
                if not begins:
                    break
                text = yield from self._quoted(character)
                begins = False
            elif not closing and character in ",=)":
                self.take(1)
                return "".join(parts), character
            elif character in _CLOSING:
                closing.append(_CLOSING[character])
                text = self.take(1)
                begins = True
            elif character in ")]}":
                if closing.pop() != character if closing else True:
                    break
                text = self.take(1)
                begins = False
            elif character in ",=":
                text = self.take(1)
                begins = True
            else:
                text = self.take_match(_OUTSIDE)
                if visible := text.strip():
                    begins = visible.endswith(":")
            parts.append(text)
        return "".join(parts), ""

    def _quoted(self, quote: str) -> Generator[None, None, str]:
        """Take a string literal with its quotes, or the rest of the text if it is not closed."""
        opened = yield from self.take_literal(quote * 3, quote)
        parts = [opened]
        plain = _UNQUOTED_TEXT[quote]
        while True:
            character = yield from self.peek()
            if not character:
                break
            if character == "\\":
                parts.append(self.take(1))
                if (yield from self.peek()):
                    parts.append(self.take(1))
            elif closed := (yield from self.take_literal(opened)):
                parts.append(closed)
                break
            elif character == quote:
                parts.append(self.take(1))
            else:
                parts.append(self.take_match(plain))
        return "".join(parts)


def _properties(schema: Any) -> list[str]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return list(found) if isinstance(found, dict) else []
