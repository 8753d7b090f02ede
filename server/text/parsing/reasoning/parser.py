"""A stage of parsing that separates thinking from the text behind it, which it hands to the next parser.

Every character is looked at a bounded number of times, however the text is cut into pieces.
"""

from __future__ import annotations

from windlass.server.text.parsing.events import Event, OutputParser, Reasoning
from windlass.server.text.parsing.reasoning.formats import Place, ThinkingFormat

SPACE = " \t\r\n"
MOST_SPACE = 64  # characters of white space that may stand before an opening marker


class ThinkingParser:
    """See `OutputParser`. White space around the thinking and between it and the answer belongs to neither.

    place: where the text begins. rest: reads the answer.
    thinking: whether what comes next is thinking, or may turn out to open it. thought: whether there was any thinking.
    """

    def __init__(self, format: ThinkingFormat, place: Place, rest: OutputParser) -> None:
        self._format = format
        self._rest: OutputParser = rest
        self._place = place
        self._opened = place == "inside"
        self._at_start = place != "behind"  # an opening marker may come
        self._held = ""  # may be the beginning of a marker
        self._spaces: list[str] = []  # white space that is thinking only if more thinking follows
        self._said = False  # some thinking was told

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    @property
    def thinking(self) -> bool:
        return self._place != "behind"

    @property
    def thought(self) -> bool:
        return self._opened

    def feed(self, text: str) -> list[Event]:
        if self._at_start:
            text, self._held = self._start(self._held + text)
        if not text:
            return []
        return self._think(text) if self.thinking else self._rest.feed(text)

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._place == "behind":
            return self._rest.finish()
        if self._at_start and not self._opened:  # it ended before it could be told from an opening marker
            return [*self._rest.feed(held), *self._rest.finish()]
        return [*self._tell(held), *self._rest.finish()]

    def _start(self, text: str) -> tuple[str, str]:
        """The text behind an opening marker, if there is one; and what must wait as long as that is open."""
        visible = text.lstrip(SPACE)
        if len(text) - len(visible) <= MOST_SPACE:
            for marker in self._format.opens:
                if visible.startswith(marker):
                    self._place, self._at_start, self._opened = "inside", False, True
                    return visible[len(marker) :], ""
            if any(marker.startswith(visible) for marker in self._format.opens):
                return "", text
        self._at_start = False
        if not self._opened:
            self._place = "behind"
        return text, ""

    def _think(self, text: str) -> list[Event]:
        buffer = self._held + text
        found = first_marker(buffer, self._format.closes)
        if found is None:
            safe = len(buffer) - partial_marker(buffer, self._format.closes)
            self._held = buffer[safe:]
            return self._tell(buffer[:safe])
        start, end = found
        self._held = ""
        events = self._tell(buffer[:start])
        self._place = "behind"
        self._rest = AnswerText(self._rest, self._format.wrapper)
        return events + self._rest.feed(buffer[end:])

    def _tell(self, text: str) -> list[Event]:
        body = text.rstrip(SPACE)
        if not body:
            if text and self._said:
                self._spaces.append(text)
            return []
        told = "".join((*self._spaces, body)) if self._said else body.lstrip(SPACE)
        self._spaces = [text[len(body) :]]
        self._said = True
        return [Reasoning(told)]


class AnswerText:
    """What stands behind the thinking: without white space at its beginning, and without the wrapper, if there is one."""

    def __init__(self, rest: OutputParser, wrapper: tuple[str, str] | None) -> None:
        self._rest = rest
        self._wrapper = wrapper  # until it has come, or cannot come any more
        self._closing = ""  # the end of the wrapper, once its beginning has come
        self._started = False
        self._held = ""

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    def feed(self, text: str) -> list[Event]:
        buffer, self._held = self._held + text, ""
        if not self._started:
            buffer = buffer.lstrip(SPACE)
            if self._wrapper is not None and buffer.startswith(self._wrapper[0]):
                buffer = buffer[len(self._wrapper[0]) :].lstrip(SPACE)
                self._closing, self._wrapper = self._wrapper[1], None
            if self._wrapper is not None and self._wrapper[0].startswith(buffer):
                self._held = buffer
                return []
            self._started = bool(buffer)
        if self._closing:
            at = buffer.find(self._closing)
            if at < 0:
                safe = len(buffer) - partial_marker(buffer, (self._closing,))
                buffer, self._held = buffer[:safe], buffer[safe:]
            else:
                buffer = buffer[:at] + buffer[at + len(self._closing) :]
                self._closing = ""
        return self._rest.feed(buffer) if buffer else []

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        return [*(self._rest.feed(held) if held else ()), *self._rest.finish()]


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, int] | None:
    """Start and end of the marker that begins first."""
    found = [(at, at + len(marker)) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def partial_marker(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of a marker."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(len(marker) > length and text.endswith(marker[:length]) for marker in markers):
            return length
    return 0
