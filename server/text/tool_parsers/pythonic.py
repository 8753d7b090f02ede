"""Tool calls in Python syntax: Llama 3.2, Llama 4 and LFM2."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator
from typing import Any

from windlass.server.text.stream_parser import ParserSteps, StreamParser, as_json
from windlass.server.text.tool_parsers.json_calls import JsonCallParser

START, END = "<|python_start|>", "<|python_end|>"
LFM2_BEGIN, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2_MARKERS = frozenset({LFM2_BEGIN, LFM2_END})
MAX_PYTHON = 16384  # characters of a value in Python syntax: parsing longer ones would block the event loop
_NAME = re.compile(r"[\w.\-]")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_OUTSIDE = re.compile(r"[^'\"()\[\]{},=]*")
_STRING = re.compile(r"""'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+\"""", re.DOTALL)
_UNQUOTED_TEXT = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_LINE_BREAK = re.compile(r"\\.|[\n\r]", re.DOTALL)
_ESCAPES = {"\n": "\\n", "\r": "\\r"}
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(StreamParser):
    """Parser of a list of calls at the start of the text or after `<|python_start|>`.

    It is content if its first name is not a tool of the request.
    """

    def run(self) -> ParserSteps:
        yield from self.skip_space()
        yield from self.take_literal(START)
        while True:
            yield from self.skip_space()
            if (yield from self.take_literal("[")):
                yield from self.rest_of_calls(END)
            self.emit_taken()
            if not (yield from self.pass_until((START,), self.emit_content)):
                return

    def is_call(self, name: str) -> bool:
        """Return whether this name and a parenthesis begin a call."""
        return name in self.options.schemas

    def rest_of_calls(self, end: str) -> Generator[None, None, None]:
        """Take calls after the opening bracket of their list, and an optional closing marker."""
        while True:
            yield from self.skip_space()
            name = yield from self.take_while(_NAME)
            if not self.is_call(name) or not (yield from self.take_literal("(")):
                return
            self.begin_call(name)
            if not (yield from self._arguments(name)):
                if not (yield from self.peek()):
                    self.discard_taken()  # the answer ended within a value
                return
            yield from self.skip_space()
            if not (yield from self.take_literal(",")):
                break
        if (yield from self.take_literal("]")):
            yield from self.skip_space()
            yield from self.take_literal(end)
            self.discard_taken()

    def _arguments(self, function: str) -> Generator[None, None, bool]:
        """Read up to the closing parenthesis; return False if it is missing."""
        self.emit_arguments("{")
        written: set[str] = set()
        positions = iter(_properties(self.options.schemas.get(function)))
        while True:
            yield from self.skip_space()
            if (yield from self.take_literal(")")):
                break
            text, end = yield from self._value()
            name: str | None = None
            if end == "=":
                name = text.strip()
                text, end = yield from self._value()
            if not end:
                return False
            name = name or next(positions, None) or f"argument_{len(written)}"
            if name not in written:
                before = ", " if written else ""
                written.add(name)
                self.emit_arguments(f"{before}{json.dumps(name)}: {_as_json(text.strip())}")
            self.discard_taken()
            if end == ")":
                break
        self.emit_arguments("}")
        self.end_call()
        self.discard_taken()
        return True

    def _value(self) -> Generator[None, None, tuple[str, str]]:
        """Take Python text and the `,`, `=` or `)` after it; return both, with an empty character at the end of the text."""
        parts: list[str] = []
        closing: list[str] = []
        while True:
            character = yield from self.peek()
            if not character:
                break
            if character in "'\"":
                text = yield from self._quoted(character)
            elif not closing and character in ",=)":
                self.take(1)
                return "".join(parts), character
            elif character in _CLOSING:
                closing.append(_CLOSING[character])
                text = self.take(1)
            elif character in ")]}":
                if closing.pop() != character if closing else True:
                    break
                text = self.take(1)
            elif character in ",=":
                text = self.take(1)
            else:
                text = self.take_match(_OUTSIDE)
            parts.append(text)
        return "".join(parts), ""

    def _quoted(self, quote: str) -> Generator[None, None, str]:
        """Take a string literal with its quotes, or the rest of the text if it is not closed."""
        parts = [self.take(1)]
        plain = _UNQUOTED_TEXT[quote]
        while True:
            character = yield from self.peek()
            if not character:
                break
            if character == quote:
                parts.append(self.take(1))
                break
            if character == "\\":
                parts.append(self.take(1))
                if (yield from self.peek()):
                    parts.append(self.take(1))
            else:
                parts.append(self.take_match(plain))
        return "".join(parts)


class Lfm2Parser(PythonicParser, JsonCallParser):
    """Parser of `<|tool_call_start|>[weather(city="Rome")]<|tool_call_end|>`, anywhere in the text, with any function name."""

    def run(self) -> ParserSteps:
        while (yield from self.pass_until((LFM2_BEGIN,), self.emit_content)):
            yield from self.skip_space()
            is_list = yield from self.take_literal("[")
            yield from self.skip_space()
            if (yield from self.peek()) != "{":
                if is_list:
                    yield from self.rest_of_calls(LFM2_END)
            elif (yield from (self.rest_of_list() if is_list else self.call_object())):
                yield from self.skip_space()
                yield from self.take_literal(LFM2_END)
                self.discard_taken()
            self.emit_taken()

    def is_call(self, name: str) -> bool:
        return self.may_call(name)


def _properties(schema: Any) -> list[str]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return list(found) if isinstance(found, dict) else []


def _as_json(text: str) -> str:
    """Convert a Python value to JSON. Text that is not a Python value becomes a JSON string."""
    try:
        return as_json(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        pass
    if len(text) > MAX_PYTHON and text[:1] not in ("'", '"'):
        return json.dumps(text)
    try:
        return as_json(_python_value(ast.parse(_one_line(text), mode="eval").body))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(text)


def _one_line(text: str) -> str:
    """Escape the line breaks inside string literals, which Python does not permit."""
    return _STRING.sub(lambda found: _LINE_BREAK.sub(lambda each: _ESCAPES.get(each[0], each[0]), found[0]), text)


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        found: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise ValueError("a key is not a constant")
            found[str(key.value)] = _python_value(item)
        return found
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex):
        raise ValueError("not a JSON value")
    return value
