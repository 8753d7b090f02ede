"""Incremental parsers of generated text, and their events."""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

MAX_CALLS = 128  # in one answer; further calls are ignored
MAX_NAME = 256  # characters of a function's name in generated text
MAX_HELD_SPACE = 64  # characters of white space held back until it is known whether a call follows
_SPACE = re.compile(r"[ \t\r\n]*")
_OUT_OF_STRING = re.compile(r"[0-9A-Za-z+\-.:, \t\r\n]*")  # characters of JSON outside strings, except brackets
_IN_STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)

ParserSteps = Generator[None, None, None]


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call. index: number of the call in the answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Next piece of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class OutputParser(Protocol):
    """Incremental parser of one sample's text. The concatenated events do not depend on how the text is split.

    in_call: whether the arguments of a call are open.
    """

    @property
    def in_call(self) -> bool: ...

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""

    def finish(self) -> list[Event]:
        """Return the events held back at the end of the text. Must be called once."""


@runtime_checkable
class TracksThinking(Protocol):
    """Parser that allows counting the tokens of the thinking.

    thinking: whether the next text is thinking or may open it. has_thought: whether there was any thinking.
    """

    @property
    def thinking(self) -> bool: ...

    @property
    def has_thought(self) -> bool: ...


class PlainTextParser:
    """Parser that emits all text as content."""

    in_call = False

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True, slots=True)
class ParsingPlan:
    """Parser of a request's answers and the special tokens that it needs.

    new_parser: creates the parser of one sample.
    markers: special tokens that the parser must see, even if they are omitted from answers.
    call_openers: markers after which a call ends the thinking. call_closers: markers after calls.
    legacy_function_call: whether a call is returned as `function_call`, OpenAI's API before tools.
    """

    new_parser: Callable[[], OutputParser]
    markers: frozenset[str] = frozenset()
    call_openers: tuple[str, ...] = ()
    call_closers: tuple[str, ...] = ()
    legacy_function_call: bool = False


def join_surrogates(text: str) -> str:
    """Join surrogate pairs; replace lone surrogates by U+FFFD, because UTF-8 cannot encode them."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def as_json(value: Any) -> str:
    """Return the JSON of a value without lone surrogates. Raises ValueError for NaN and infinity."""
    text = json.dumps(value, allow_nan=False)
    if "\\ud" in text:  # a surrogate
        text = json.dumps(json.loads(join_surrogates(json.dumps(value, ensure_ascii=False))))
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of a tool call parser.

    schemas: parameters of the request's tools, by name. new_id: creates the id of a call.
    max_calls: further calls are omitted. calls_only: a grammar permits only calls, so text outside calls is the beginning
    of an incomplete call. disallowed: tools that the model sees and that `tool_choice` excludes.
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
    taken_pieces: list[str] = field(default_factory=list)  # taken since the last decision between content and markup


@dataclass(frozen=True, slots=True)
class _Markers:
    """Compiled markers: pattern of all of them, their proper prefixes, and the length of the longest one."""

    pattern: re.Pattern[str]
    prefixes: frozenset[str]
    firsts: re.Pattern[str]
    longest: int


@functools.lru_cache(256)
def _compiled(markers: tuple[str, ...]) -> _Markers:
    by_length = sorted(markers, key=len)  # at one position the shortest wins
    firsts = "".join(map(re.escape, sorted({marker[0] for marker in markers})))
    return _Markers(
        re.compile("|".join(map(re.escape, by_length))),
        frozenset(marker[:length] for marker in markers for length in range(1, len(marker))),
        re.compile(f"[{firsts}]"),
        len(by_length[-1]),
    )


def find_marker(text: str, markers: tuple[str, ...], start: int = 0) -> tuple[int, int] | None:
    """Return start and end of the first marker in the text, None if there is none."""
    found = _compiled(markers).pattern.search(text, start)
    return found.span() if found else None


def partial_marker_length(text: str, markers: tuple[str, ...], start: int = 0) -> int:
    """Return how many characters at the end of the text may be the beginning of a marker."""
    known = _compiled(markers)
    at = max(start, len(text) - known.longest + 1)
    while first := known.firsts.search(text, at):
        at = first.start()
        if text[at:] in known.prefixes:
            return len(text) - at
        at += 1
    return 0


class StreamParser(ABC):
    """Base of parsers written as a generator, `run`, that yields when it needs more text.

    Text is passed to `emit_content` or becomes part of a call. White space next to a call is dropped.
    in_call: see `OutputParser`; False for omitted calls.
    """

    def __init__(self, options: CallOptions) -> None:
        self.options = options
        self.calls = 0
        self.in_call = False
        self._buffer = _Buffer()
        self._events: list[Event] = []
        self._held_space = ""  # white space that is content only if text follows
        self._after_call = False
        self._steps = self.run()
        next(self._steps, None)

    @abstractmethod
    def run(self) -> ParserSteps:
        """Parse the text up to its end."""

    def feed(self, text: str) -> list[Event]:
        source = self._buffer
        source.data = source.data[source.position :] + text
        source.position = 0
        next(self._steps, None)
        return self._drain()

    def finish(self) -> list[Event]:
        self._buffer.ended = True
        next(self._steps, None)
        if not self._after_call and self._held_space:
            self._events.append(Content(self._held_space))
        return self._drain()

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Events

    def emit_content(self, text: str) -> None:
        """Emit content."""
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
        """Emit reasoning."""
        if text:
            self._events.append(Reasoning(text))

    def may_call(self, name: str | None) -> bool:
        """Return whether a call with this name is emitted. Unknown names are permitted: the client decides about them."""
        return bool(name) and len(name or "") <= MAX_NAME and name not in self.options.disallowed

    def begin_call(self, name: str) -> None:
        """Emit the start of a call and discard the text taken so far."""
        self._buffer.taken_pieces.clear()
        self._held_space, self._after_call = "", True
        self.calls += 1
        self.in_call = self.calls <= self.options.max_calls
        if self.in_call:
            self._events.append(CallStart(self.calls - 1, self.options.new_id(), name))

    def end_call(self) -> None:
        """Mark the arguments of the current call as closed."""
        self.in_call = False

    def emit_arguments(self, text: str) -> None:
        """Emit a piece of the arguments of the current call."""
        if text and self.calls <= self.options.max_calls:
            self._events.append(CallArguments(self.calls - 1, text))

    def emit_taken(self) -> bool:
        """Emit the taken text as content; return whether it is more than white space."""
        text = "".join(self._buffer.taken_pieces)
        self._buffer.taken_pieces.clear()
        if text:
            self.emit_content(text)
        return bool(text.strip())

    def discard_taken(self) -> None:
        """Discard the taken text, which is markup of an emitted call."""
        self._buffer.taken_pieces.clear()

    # Text

    def wait_for_text(self) -> Generator[None, None, bool]:
        """Wait for more text; return False at the end of the text."""
        known = len(self._buffer.data) - self._buffer.position
        while len(self._buffer.data) - self._buffer.position == known:
            if self._buffer.ended:
                return False
            yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """Return the next character, empty at the end of the text."""
        if self._buffer.position == len(self._buffer.data) and not (yield from self.wait_for_text()):
            return ""
        return self._buffer.data[self._buffer.position]

    def take(self, count: int) -> str:
        """Take the next characters, which must be available."""
        source = self._buffer
        taken = source.data[source.position : source.position + count]
        if taken:
            source.position += count
            source.taken_pieces.append(taken)
        return taken

    def put_back(self, count: int) -> None:
        """Put back the last characters of the last taken piece."""
        if not count:
            return
        source = self._buffer
        piece = source.taken_pieces[-1]
        source.taken_pieces[-1] = piece[:-count]
        if source.position >= count:
            source.position -= count
        else:  # more text has arrived since
            source.data, source.position = piece[-count:] + source.data[source.position :], 0

    def skip_space(self) -> ParserSteps:
        """Take white space."""
        yield from self.take_match_ahead(_SPACE)

    def take_literal(self, *choices: str) -> Generator[None, None, str]:
        """Take the longest of `choices` that follows; return an empty string if none does."""
        longest = max(map(len, choices))
        while True:
            source = self._buffer
            ahead = source.data[source.position : source.position + longest]
            undecided = any(len(ahead) < len(choice) and choice.startswith(ahead) for choice in choices)
            if undecided and (yield from self.wait_for_text()):
                continue
            found = max((choice for choice in choices if ahead.startswith(choice)), key=len, default="")
            return self.take(len(found)) if found else ""

    def follows(self, literal: str) -> Generator[None, None, bool]:
        """Return whether this text follows. Takes nothing."""
        found = yield from self.take_literal(literal)
        self.put_back(len(found))
        return bool(found)

    def look_ahead(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Return the next characters, at most MAX_NAME, as soon as `pattern` matches their beginning. Takes nothing."""
        while True:
            ahead = self._buffer.data[self._buffer.position : self._buffer.position + MAX_NAME]
            if pattern.match(ahead) or len(ahead) == MAX_NAME or not (yield from self.wait_for_text()):
                return ahead

    def take_truncated_tag(self, tags: Sequence[str]) -> bool:
        """Take the rest of a text that ends within one of the tags; return whether it does."""
        source = self._buffer
        rest = source.data[source.position :]
        if not (source.ended and rest and any(tag.startswith(rest) for tag in tags)):
            return False
        self.take(len(rest))
        return True

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """Take the match of `pattern` in the available text."""
        source = self._buffer
        found = pattern.match(source.data, source.position)
        return self.take(found.end() - source.position) if found else ""

    def take_match_ahead(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Take the match of `pattern`, waiting for text as long as all of it matches."""
        parts: list[str] = []
        while True:
            parts.append(self.take_match(pattern))
            if self._buffer.position < len(self._buffer.data) or not (yield from self.wait_for_text()):
                return "".join(parts)

    def take_while(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Take at most MAX_NAME characters that match `pattern`, a pattern of one character."""
        taken: list[str] = []
        while len(taken) < MAX_NAME:
            character = yield from self.peek()
            if not character or not pattern.match(character):
                break
            taken.append(self.take(1))
        return "".join(taken)

    def pass_until(
        self, markers: tuple[str, ...], out: Callable[[str], None], *, drops_cut: bool = False
    ) -> Generator[None, None, str]:
        """Pass text to `out` up to the first of `markers`; take and return the marker, empty at the end of the text.

        No marker may be a prefix of another. drops_cut: take the beginning of a marker at the end of the text.
        """
        known = _compiled(markers)
        firsts, pattern = known.firsts, known.pattern
        while True:
            source = self._buffer
            data, position = source.data, source.position
            at = end = len(data)
            if first := firsts.search(data, position):
                if found := pattern.search(data, first.start()):
                    at, end = found.span()
                elif drops_cut or not source.ended:
                    at = end = len(data) - partial_marker_length(data, markers, first.start())
            if at > position:
                source.position = at
                out(data[position:at])
            if end > at:
                return self.take(end - at)
            if not (yield from self.wait_for_text()):
                if source.position < len(source.data) and not drops_cut:
                    continue  # the rest is not a marker
                self.take(len(source.data) - source.position)
                return ""

    # JSON

    def take_string(self) -> Generator[None, None, str | None]:
        """Take a JSON string; return its value, None if it is not one."""
        if (yield from self.peek()) != '"':
            return None
        parts = [self.take(1)]
        while True:
            parts.append(self.take_match(_IN_STRING))
            source = self._buffer
            if source.position < len(source.data) and source.data[source.position] == '"':
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
        """Take a JSON object or array and pass it to `out` in pieces; return False if its brackets do not match.

        Only brackets and strings are checked.
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
                        break  # the text ends, possibly after a backslash
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
                if rest := self.take(len(self._buffer.data) - self._buffer.position):  # a backslash
                    out(rest)
                return False

    def take_arguments(self) -> Generator[None, None, bool]:
        """Take and emit the JSON object of a call's arguments; return whether it is closed."""
        closed = yield from self.take_brackets(self.emit_arguments)
        if closed:
            self.end_call()
        return closed

    def peek_object(self) -> Generator[None, None, bool]:
        """Return whether `{` and a quote or `}` follow, or the text ends after `{`. Takes nothing."""
        while True:
            source = self._buffer
            ahead = source.data[source.position :]
            rest = ahead[1:].lstrip(" \t\r\n")
            if ahead[:1] not in ("{", ""):
                return False
            if rest or len(ahead) > MAX_HELD_SPACE or not (yield from self.wait_for_text()):
                return rest[:1] in ('"', "}") or bool(ahead and not rest and source.ended)
