"""Parsers of text that arrives in pieces, and their events."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Content:
    """Text for whoever reads the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: the `index`-th of the answer, from 0. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which are JSON text."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class OutputParser(Protocol):
    """Reads one sample's text in pieces of any size. The events put together never depend on the pieces.

    in_call: whether the arguments of a call have begun and not yet been closed.
    """

    @property
    def in_call(self) -> bool: ...

    def feed(self, text: str) -> list[Event]:
        """What has become certain with `text`."""

    def finish(self) -> list[Event]:
        """What was held back, once nothing more comes. Call it once."""


@runtime_checkable
class TracksThinking(Protocol):
    """A parser that knows where it stands, for counting the tokens of the thinking.

    thinking: whether what comes next is thinking, or may turn out to open it. thought: whether there was any thinking.
    """

    @property
    def thinking(self) -> bool: ...

    @property
    def has_thought(self) -> bool: ...


class PlainTextParser:
    """The parser of answers in which nothing is looked for."""

    in_call = False

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True, slots=True)
class ParsingPlan:
    """How the answers to one request are parsed.

    make: a new parser, one for each sample.
    markers: text of special tokens that the parser has to see, even where a reader of the answer shall not.
    legacy_function_call: whether a call is laid out as `function_call`, as OpenAI did before there were tools.
    """

    make: Callable[[], OutputParser]
    markers: frozenset[str] = frozenset()
    legacy_function_call: bool = False


MAX_CALLS = 128  # in one answer; what follows is content

MAX_NAME = 256  # characters of a function's name as a model writes it

MAX_HELD_SPACE = 64  # whitespace that is held back until it is known whether a call follows

_SPACE = re.compile(r"[ \t\r\n]*")

_OUT_OF_STRING = re.compile(r"[0-9A-Za-z+\-.:, \t\r\n]*")  # what JSON has outside strings beside brackets

_IN_STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)

ParserSteps = Generator[None, None, None]


def join_surrogates(text: str) -> str:
    """The text that escapes stand for: halves of a character are joined, and one alone is U+FFFD, as no JSON can hold it."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def as_json(value: Any) -> str:
    """The JSON of a value that a model wrote in JSON or Python, without halves of characters. Raises ValueError for NaN."""
    text = json.dumps(value, allow_nan=False)
    if "\\ud" in text:  # a character in two escapes, or half of one
        text = json.dumps(json.loads(join_surrogates(json.dumps(value, ensure_ascii=False))))
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a parser of calls is told about the request.

    schemas: the parameters of each function on offer, by name. new_id: makes the id of a call.
    max_calls: further calls are left out of the answer. calls_only: a grammar lets nothing else be written, so what looks
    like content is the beginning of a call that was cut short. barred: functions that the model sees and may not call now.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    new_id: Callable[[], str]
    max_calls: int = MAX_CALLS
    calls_only: bool = False
    disallowed: Set[str] = frozenset()


@dataclass(slots=True)
class _Buffer:
    data: str = ""
    position: int = 0
    ended: bool = False
    taken_pieces: list[str] = field(default_factory=list)  # taken, and perhaps to be given back as content


class StreamParser(ABC):
    """The base of parsers: fill in `run`. Text goes to `emit_content` or into calls; whitespace beside a call is dropped.

    in_call: see `OutputParser`. A call that is left out of the answer is none.
    """

    def __init__(self, options: CallOptions) -> None:
        self.options = options
        self.calls = 0
        self.in_call = False
        self._buffer = _Buffer()
        self._events: list[Event] = []
        self._held_space = ""  # held back: it counts only if text follows
        self._after_call = False
        self._steps = self.run()
        next(self._steps, None)

    @abstractmethod
    def run(self) -> ParserSteps:
        """Read the whole text."""

    # ---- OutputParser ------------------------------------------------------------------------------------------------
    def feed(self, text: str) -> list[Event]:
        """See `OutputParser`."""
        source = self._buffer
        source.data = source.data[source.position :] + text
        source.position = 0
        next(self._steps, None)
        return self._drain()

    def finish(self) -> list[Event]:
        """See `OutputParser`."""
        self._buffer.ended = True
        next(self._steps, None)
        if not self._after_call and self._held_space:
            self._events.append(Content(self._held_space))
        return self._drain()

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ---- what comes out ----------------------------------------------------------------------------------------------
    def emit_content(self, text: str) -> None:
        """Text is content."""
        if self._after_call:
            text = text.lstrip()
        if not text or self.options.calls_only:
            return
        self._after_call = False
        text = self._held_space + text
        kept = text[: max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)]
        self._held_space = text[len(kept) :]
        if kept:
            self._events.append(Content(kept))

    def emit_reasoning(self, text: str) -> None:
        """Text is reasoning."""
        if text:
            self._events.append(Reasoning(text))

    def may_call(self, name: str | None) -> bool:
        """Whether what a call names may be called, which is also one that is not on offer: a model may make names up."""
        return bool(name) and len(name or "") <= MAX_NAME and name not in self.options.disallowed

    def begin_call(self, name: str) -> None:
        """A call begins. What was taken so far belongs to it."""
        self._buffer.taken_pieces.clear()
        self._held_space, self._after_call = "", True
        self.calls += 1
        self.in_call = self.calls <= self.options.max_calls
        if self.in_call:
            self._events.append(CallStart(self.calls - 1, self.options.new_id(), name))

    def end_call(self) -> None:
        """The arguments of the call that began last are closed."""
        self.in_call = False

    def emit_arguments(self, text: str) -> None:
        """The next piece of the arguments of the call that began last."""
        if text and self.calls <= self.options.max_calls:
            self._events.append(CallArguments(self.calls - 1, text))

    def emit_taken(self) -> bool:
        """What was taken since the last call or `discard_taken` is content after all; whether it is more than whitespace."""
        text = "".join(self._buffer.taken_pieces)
        self._buffer.taken_pieces.clear()
        if text:
            self.emit_content(text)
        return bool(text.strip())

    def discard_taken(self) -> None:
        """What was taken belongs to the markup of a call that was made."""
        self._buffer.taken_pieces.clear()

    # ---- taking text -------------------------------------------------------------------------------------------------
    def wait_for_text(self) -> Generator[None, None, bool]:
        """Wait for text behind what is there; False where none comes any more."""
        known = len(self._buffer.data) - self._buffer.position
        while len(self._buffer.data) - self._buffer.position == known:
            if self._buffer.ended:
                return False
            yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """The next character, empty at the end."""
        if self._buffer.position == len(self._buffer.data) and not (yield from self.wait_for_text()):
            return ""
        return self._buffer.data[self._buffer.position]

    def take(self, count: int) -> str:
        """The next characters, which must be there."""
        source = self._buffer
        taken = source.data[source.position : source.position + count]
        source.position += count
        source.taken_pieces.append(taken)
        return taken

    def put_back(self, count: int) -> None:
        """Untake the last characters of what was taken last."""
        self._buffer.position -= count
        self._buffer.taken_pieces[-1] = self._buffer.taken_pieces[-1][:-count]

    def skip_space(self) -> ParserSteps:
        """Take whitespace."""
        while True:
            source = self._buffer
            end = _SPACE.match(source.data, source.position).end()  # type: ignore[union-attr]
            if end > source.position:
                self.take(end - source.position)
            if end < len(source.data) or not (yield from self.wait_for_text()):
                return

    def take_literal(self, *choices: str) -> Generator[None, None, str]:
        """Take the longest of `choices` that comes next; empty where none does."""
        longest = max(map(len, choices))
        while True:
            source = self._buffer
            ahead = source.data[source.position : source.position + longest]
            open_ = any(len(ahead) < len(choice) and choice.startswith(ahead) for choice in choices)
            if open_ and (yield from self.wait_for_text()):
                continue
            found = max((choice for choice in choices if ahead.startswith(choice)), key=len, default="")
            return self.take(len(found)) if found else ""

    def take_truncated_tag(self, tags: Sequence[str]) -> bool:
        """Take what is left where the text has ended in the middle of one of the tags; whether it has."""
        source = self._buffer
        rest = source.data[source.position :]
        if not (source.ended and rest and any(tag.startswith(rest) for tag in tags)):
            return False
        self.take(len(rest))
        return True

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """Take what `pattern` matches of the text that is there."""
        source = self._buffer
        return self.take(pattern.match(source.data, source.position).end() - source.position)  # type: ignore[union-attr]

    def take_while(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Take characters while `pattern`, which matches single characters, does; at most MAX_NAME of them."""
        taken: list[str] = []
        while len(taken) < MAX_NAME:
            character = yield from self.peek()
            if not character or not pattern.match(character):
                break
            taken.append(self.take(1))
        return "".join(taken)

    def pass_until(self, markers: Sequence[str], out: Callable[[str], None]) -> Generator[None, None, str]:
        """Hand text to `out` up to the first of `markers`, which is taken and returned; empty where none comes.

        Markers must differ in such a way that none begins another.
        """
        longest = max(map(len, markers))
        firsts = {marker[0] for marker in markers}
        while True:
            source = self._buffer
            data, position = source.data, source.position
            if not firsts.isdisjoint(data[position:]):
                places = [(at, marker) for marker in markers if (at := data.find(marker, position)) >= 0]
                at, found = min(places, default=(len(data), ""))
                if not found:  # the start of a marker may stand at the end
                    start = max(position, len(data) - longest + 1)
                    tails = (k for k in range(start, len(data)) if any(m.startswith(data[k:]) for m in markers))
                    at = len(data) if source.ended else next(tails, len(data))
            else:
                at, found = len(data), ""
            if at > position:
                source.position = at
                out(data[position:at])
            if found:
                return self.take(len(found))
            if not (yield from self.wait_for_text()):
                if source.position < len(source.data):
                    continue  # the rest is no marker
                return ""

    # ---- JSON --------------------------------------------------------------------------------------------------------
    def take_string(self) -> Generator[None, None, str | None]:
        """Take a JSON string and return its value; None where it is none."""
        if (yield from self.peek()) != '"':
            return None
        parts = [self.take(1)]
        while True:
            source = self._buffer
            end = _IN_STRING.match(source.data, source.position).end()  # type: ignore[union-attr]
            if end > source.position:
                parts.append(self.take(end - source.position))
            if end < len(source.data) and source.data[end] == '"':
                parts.append(self.take(1))
                break
            if not (yield from self.wait_for_text()):
                return None
        try:
            value: str = json.loads("".join(parts), strict=False)
        except ValueError:
            return None
        return join_surrogates(value)

    def take_brackets(self, out: Callable[[str], None]) -> Generator[None, None, bool]:
        """Take a JSON object or array and hand it to `out` as it comes; False where it breaks off or is not closed.

        Brackets are counted and strings are skipped; whether it is valid JSON otherwise is not looked at.
        """
        closing: list[str] = []
        inside = False
        while True:
            source = self._buffer
            data, begin = source.data, source.position
            at, broken = begin, False
            while at < len(data):
                if inside:
                    at = _IN_STRING.match(data, at).end()  # type: ignore[union-attr]
                    if at == len(data) or data[at] != '"':
                        break  # the text ends, perhaps behind a backslash
                    inside = False
                    at += 1
                    continue
                at = _OUT_OF_STRING.match(data, at).end()  # type: ignore[union-attr]
                if at == len(data):
                    break
                character = data[at]
                if character == '"':
                    inside = True
                elif character in "{[":
                    closing.append("}" if character == "{" else "]")
                elif character not in "}]" or character != closing[-1]:
                    broken = True
                    break
                else:
                    closing.pop()
                at += 1
                if not closing:
                    break
            if at > begin:
                out(self.take(at - begin))
            if broken:
                return False
            if not closing:
                return True
            if not (yield from self.wait_for_text()):
                return False

    def take_arguments(self) -> Generator[None, None, bool]:
        """Take the JSON object of a call's arguments, which may end before it is closed; whether it did not."""
        closed = yield from self.take_brackets(self.emit_arguments)
        if closed:
            self.end_call()
        return closed

    def peek_object(self) -> Generator[None, None, bool]:
        """Whether the text goes on as a JSON object does, down to its first quote. Takes nothing."""
        while True:
            source = self._buffer
            ahead = source.data[source.position :]
            rest = ahead[1:].lstrip(" \t\r\n")
            if ahead[:1] not in ("{", ""):
                return False
            if rest or len(ahead) > MAX_HELD_SPACE or not (yield from self.wait_for_text()):
                return rest[:1] in ('"', "}")
