"""A stage of parsing that separates thinking from the answer where either may follow the other, as Gemma 4 writes them.

The markers are special tokens, so that they never stand for themselves, but within the arguments of a call.
"""

from __future__ import annotations

from windlass.server.text.parsing.events import Event, OutputParser, Reasoning
from windlass.server.text.parsing.reasoning.formats import Place, ThinkingFormat
from windlass.server.text.parsing.reasoning.parser import MOST_SPACE, SPACE, first_marker, partial_marker

_BETWEEN = "\n\n"  # thoughts that were apart


class ChannelParser:
    """See `OutputParser` and `ThinkingParser`. White space around the thinking belongs to neither, as long as no answer began.

    Every channel is thinking, whether the label names it or not.
    """

    def __init__(self, format: ThinkingFormat, place: Place, rest: OutputParser) -> None:
        self._format = format
        self._rest = rest
        self._inside = self._opened = place == "inside"
        self._may_open = place == "before"
        self._labelled = False  # an opening marker was the last that came
        self._held = ""  # may be the beginning of a marker or the label
        self._spaces: list[str] = []  # white space that is thinking only if more thinking follows
        self._said = False  # some thinking was told
        self._apart = False  # what is thought next is apart from it
        self._lead = ""  # white space that is the answer's only if no thinking follows
        self._started = False  # the answer has

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    @property
    def thinking(self) -> bool:
        return self._inside or self._may_open

    @property
    def thought(self) -> bool:
        return self._opened

    def feed(self, text: str) -> list[Event]:
        buffer, self._held = self._held + text, ""
        events: list[Event] = []
        while buffer:
            if self._labelled:
                label = self._format.label
                if len(buffer) < len(label) and label.startswith(buffer):
                    self._held = buffer
                    break
                buffer, self._labelled = buffer.removeprefix(label), False
                continue
            markers = (*self._format.opens, *self._format.closes, *(self._format.interrupts if self._inside else ()))
            found = first_marker(buffer, markers)
            if found is None:
                safe = len(buffer) - partial_marker(buffer, markers)
                events += self._pass(buffer[:safe])
                self._held = buffer[safe:]
                break
            start, end = found
            events += self._pass(buffer[:start])
            if not self._take(buffer[start:end]):
                events += self._rest.feed(buffer[start:end])
            buffer = buffer[end:]
        return events

    def finish(self) -> list[Event]:
        events = [] if self._labelled else self._pass(self._held)
        if self._lead:
            events += self._rest.feed(self._lead)
        return events + self._rest.finish()

    def _take(self, marker: str) -> bool:
        """Take a marker; False where it is text, or the answer's."""
        if self._inside:
            self._labelled = marker in self._format.opens
            self._inside = self._labelled
            self._apart = not self._inside
            self._started = self._started or marker in self._format.interrupts
            return marker not in self._format.interrupts
        if self._rest.in_call:
            return False
        if marker in self._format.opens:
            self._inside = self._opened = self._labelled = True
            self._may_open, self._lead = False, ""
        return True

    def _pass(self, text: str) -> list[Event]:
        """Text without markers, which is thinking or the answer's."""
        if self._inside:
            return self._tell(text)
        if not self._started:
            visible = text.lstrip(SPACE)
            if not self._opened:
                self._lead += text[: len(text) - len(visible)]
            if not visible and len(self._lead) <= MOST_SPACE:
                return []
            text, self._lead = self._lead + visible, ""
            self._started, self._may_open = True, False
        return self._rest.feed(text) if text else []

    def _tell(self, text: str) -> list[Event]:
        body = text.rstrip(SPACE)
        if not body:
            if text and self._said and not self._apart:
                self._spaces.append(text)
            return []
        if not self._said or self._apart:
            told = (_BETWEEN if self._said else "") + body.lstrip(SPACE)
        else:
            told = "".join((*self._spaces, body))
        self._spaces = [text[len(body) :]]
        self._said, self._apart = True, False
        return [Reasoning(told)]
