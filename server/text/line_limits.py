"""Ends an answer by its lines: before one that is indented too little, and after a while at the end of one.

What editors ask for who show an answer in the middle of a text. Knows text and seconds; knows no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_BLANKS = " \t"


@dataclass(frozen=True, slots=True)
class LineLimits:
    """indent: the fewest blanks that a line begins with, the first one apart; 0 for no such limit.

    seconds: after which an answer with a whole line ends; None for no such limit.
    """

    indent: int = 0
    seconds: float | None = None


@dataclass(slots=True)
class LineWatch:
    """Follows one answer. The blanks that a line begins with are held back until it is known whether the line stays."""

    limits: LineLimits
    ended: bool = False
    _held: str | None = field(default=None)  # blanks of a line that has begun; None within a line
    _lines: int = 0

    def feed(self, text: str, seconds: float) -> str:
        """What of `text` may be sent. seconds: since the answer's first token. `ended` tells whether nothing may follow."""
        if self.ended:
            return ""
        sent = self._within(text) if self.limits.indent else text
        self._lines += text.count("\n")
        late = self.limits.seconds is not None and seconds > self.limits.seconds
        self.ended = self.ended or (late and self._lines > 0)
        return sent

    def flush(self) -> str:
        """What was held back, at an end that others found."""
        held, self._held = self._held, None
        return "" if self.ended else held or ""

    def _within(self, text: str) -> str:
        """The text up to the first line that is indented too little."""
        sent: list[str] = []
        position = 0
        while position < len(text):
            if self._held is None:
                end = text.find("\n", position) + 1
                if not end:
                    sent.append(text[position:])
                    break
                sent.append(text[position:end])
                self._held, position = "", end
                continue
            end = position
            while end < len(text) and text[end] in _BLANKS:
                end += 1
            self._held += text[position:end]
            position = end
            if position < len(text):
                if len(self._held) < self.limits.indent:
                    self.ended = True
                    break
                sent.append(self._held)
                self._held = None
        return "".join(sent)
