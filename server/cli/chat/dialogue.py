"""What a chat has said so far and how its next answer is asked for. Does no input or output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Dialogue:
    """exchanges: questions with their answers, in order. system: what the model is told first, None for nothing.

    params: fields of the next requests. rope: their rotary scaling, an object or a profile's name; None: the server's own.
    """

    system: str | None = None
    exchanges: list[tuple[str, str]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | str | None = None

    def messages(self, question: str) -> list[dict[str, str]]:
        """What a request for an answer to `question` sends: all that was said before it, too."""
        told = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered in self.exchanges:
            told += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*told, {"role": "user", "content": question}]

    def options(self) -> dict[str, Any]:
        """The other fields of a request."""
        return self.params if self.rope is None else {**self.params, "rope_scaling": self.rope}
