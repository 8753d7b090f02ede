"""Tool calls in JSON: bare, tagged, Mistral's and DeepSeek's."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from windlass.server.text.stream_parser import MAX_NAME, ParserSteps, StreamParser

DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_MARKERS = frozenset({DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR})
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]")
_MISTRAL_NAME = re.compile(r"[\w.\-]")
_DEEPSEEK_NAME = re.compile(r"[^\s<{]")


@dataclass(slots=True)
class _CallHead:
    """Members of a call object read so far."""

    name: str | None = None
    arguments: list[str] | None = None  # read before the name
    started: bool = False


class JsonCallParser(StreamParser):
    """Base of parsers of JSON call objects."""

    def call_object(self, known_only: bool = False) -> Generator[None, None, bool]:
        """Take {"name": …, "arguments": {…}} and emit the call; return False if the text is not one.

        known_only: accept only tools of the request, for formats without a marker before calls.
        The text of an emitted call is discarded; otherwise the caller can still emit the taken text as content.
        """
        made = yield from self._call_object(_CallHead(), known_only)
        if made:
            self.discard_taken()
        return made

    def _call_object(self, head: _CallHead, known_only: bool) -> Generator[None, None, bool]:
        if (yield from self.peek()) != "{":
            return False
        self.take(1)
        while True:
            yield from self.skip_space()
            if (yield from self.take_literal("}")):
                break
            key = yield from self.take_string()
            yield from self.skip_space()
            if key is None or not (yield from self.take_literal(":")):
                return head.started
            yield from self.skip_space()
            if not (yield from self._member(key, head, known_only)):
                return head.started
            yield from self.skip_space()
            if not (yield from self.take_literal(",")):
                if (yield from self.take_literal("}")):
                    break
                return head.started
        if not head.started:
            if not head.name:
                return False
            self.begin_call(head.name)
            self.emit_arguments("".join(head.arguments) if head.arguments is not None else "{}")
            self.end_call()
        return True

    def _member(self, key: str, head: _CallHead, known_only: bool) -> Generator[None, None, bool]:
        character = yield from self.peek()
        if key == "name":
            name = yield from self.take_string()
            known = name in self.options.schemas if known_only else self.may_call(name)
            if not known or head.name is not None:
                return False
            head.name = name
            return True
        if key not in ("arguments", "parameters") or head.started or head.arguments is not None:
            return (yield from self._skip(character))
        if character == "{":
            return (yield from self._members_of_arguments(head))
        if character == '"':  # arguments as a JSON string
            inner = yield from self.take_string()
            head.arguments = None if inner is None else [inner.strip() or "{}"]
            return inner is not None and inner.lstrip()[:1] in ("{", "")
        return bool((yield from self.take_literal("null")))

    def _members_of_arguments(self, head: _CallHead) -> Generator[None, None, bool]:
        if head.name is None:
            head.arguments = []
            return (yield from self.take_brackets(head.arguments.append))
        if not (yield from self.peek_object()):
            return False
        self.begin_call(head.name)
        head.started = True
        return (yield from self.take_arguments())

    def _skip(self, first: str) -> Generator[None, None, bool]:
        """Take the value of an unknown member."""
        if first == '"':
            return (yield from self.take_string()) is not None
        if first and first in "{[":
            return (yield from self.take_brackets(lambda text: None))
        return bool((yield from self.take_while(_SCALAR)))

    def call_list(self, known_only: bool = False) -> Generator[None, None, bool]:
        """Take one call object or an array of them; return False if no call was emitted. See `call_object`."""
        if (yield from self.peek()) != "[":
            return (yield from self.call_object(known_only))
        self.take(1)
        return (yield from self.rest_of_list(known_only))

    def rest_of_list(self, known_only: bool = False) -> Generator[None, None, bool]:
        """Take the rest of an array of call objects after its opening bracket."""
        made = False
        while True:
            yield from self.skip_space()
            if not (yield from self.call_object(known_only)):
                return made
            made = True
            yield from self.skip_space()
            if not (yield from self.take_literal(",")):
                if (yield from self.take_literal("]")):
                    self.discard_taken()
                return made


class PlainJsonParser(JsonCallParser):
    """Parser of bare JSON: an object at the start of the text or of a line is a call if it names a tool of the request."""

    markers: ClassVar[tuple[str, ...]] = ("\n{", "\n[", "\n```json")
    tag: ClassVar[str] = "```json"

    def run(self) -> ParserSteps:
        marker = yield from self.take_literal(self.tag)
        while True:
            while True:
                yield from self.skip_space()
                made = yield from self.call_list(known_only=True)
                if self.emit_taken() or not made:  # content may follow a call
                    break
                yield from self.skip_space()
                if (yield from self.take_literal(";", ",")):  # separators of Llama 3
                    yield from self.skip_space()
                elif marker.endswith(self.tag):
                    yield from self.take_literal("```")
                self.discard_taken()
                if (yield from self.peek()) not in ("{", "["):
                    break
            marker = yield from self.pass_until(self.markers, self.emit_content)
            if not marker:
                return
            if marker in ("\n{", "\n["):
                self.put_back(1)


class Llama3JsonParser(PlainJsonParser):
    """Parser of bare JSON at the start of the text or after `<|python_tag|>`."""

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    tag: ClassVar[str] = "<|python_tag|>"


class TaggedJsonParser(JsonCallParser):
    """Parser of opening markers, each followed by a call object or a list of them and an optional closing marker."""

    openers: ClassVar[tuple[str, ...]] = ("<tool_call>", "<|tool_call|>")
    closers: ClassVar[tuple[str, ...]] = ("</tool_call>", "<|/tool_call|>")

    def run(self) -> ParserSteps:
        while (yield from self.pass_until(self.openers, self.emit_content)):
            yield from self.skip_space()
            made = yield from self.call_list()
            self.emit_taken()
            if made:
                yield from self.skip_space()
                yield from self.take_literal(*self.closers)
                self.discard_taken()


class MistralParser(JsonCallParser):
    """Parser of both formats of Mistral: JSON objects, or name and arguments between markers."""

    def run(self) -> ParserSteps:
        while (yield from self.pass_until(("[TOOL_CALLS]",), self.emit_content)):
            yield from self.skip_space()
            character = yield from self.peek()
            if character and character in "[{":
                yield from self.call_list()
            else:
                yield from self._named()
            self.emit_taken()

    def _named(self) -> Generator[None, None, None]:
        name = yield from self.take_while(_MISTRAL_NAME)
        if (yield from self.take_literal("[CALL_ID]")):
            yield from self.take_while(_MISTRAL_NAME)
        yield from self.take_literal("[ARGS]")
        yield from self.skip_space()
        if self.may_call(name) and (yield from self.peek_object()):
            self.begin_call(name)
            yield from self.take_arguments()
            self.discard_taken()


class DeepSeekParser(StreamParser):
    """Parser of both formats of DeepSeek: V3 writes the kind of call before the separator, V3.1 the name."""

    def run(self) -> ParserSteps:
        while marker := (yield from self.pass_until((DEEPSEEK_CALLS, DEEPSEEK_CALL), self.emit_content)):
            if marker == DEEPSEEK_CALLS:
                yield from self.skip_space()
                if not (yield from self.take_literal(DEEPSEEK_CALL)):
                    self.emit_taken()
                    continue
            made = yield from self._call()
            self.emit_taken()
            if made:
                yield from self.skip_space()
                yield from self.take_literal("```")
                yield from self.skip_space()
                yield from self.take_literal(DEEPSEEK_CALL_END)
                yield from self.skip_space()
                yield from self.take_literal(DEEPSEEK_CALLS_END)
                self.discard_taken()

    def _call(self) -> Generator[None, None, bool]:
        yield from self.skip_space()
        name = yield from self.take_while(_DEEPSEEK_NAME)
        if not (yield from self.take_literal(DEEPSEEK_SEPARATOR)):
            return False
        yield from self.skip_space()
        if (yield from self.peek()) != "{":  # DeepSeek V3: the first word was the kind of call
            name = yield from self.take_while(_DEEPSEEK_NAME)
            yield from self.skip_space()
            yield from self.take_literal("```json")
            yield from self.skip_space()
        if len(name) == MAX_NAME or not self.may_call(name) or not (yield from self.peek_object()):
            return False
        self.begin_call(name)
        yield from self.take_arguments()
        self.discard_taken()
        return True
