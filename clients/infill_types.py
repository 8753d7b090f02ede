"""What the server answers about gaps, and how its stream becomes a whole answer. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.clients.chat_types import ToolCall
from windlass.clients.rotary_types import Rotary
from windlass.clients.types import (
    PromptTokensDetails,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillTimings:
    """How long it took, in milliseconds. cache_n, prompt_n: tokens of the prompt from the cache, and computed."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """What fills a gap, or a piece of it in a stream. stop: whether the answer ends here.

    stop_type: "eos", "word" (a stop string, `stopping_word`) or "limit" (of tokens, time or indentation).
    truncated: whether any of what was given did not fit. tokens: ids, where `return_tokens` asked for them.
    """

    content: str = ""
    tokens: tuple[int, ...] = ()
    stop: bool = True
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    has_new_line: bool = False
    truncated: bool = False
    stop_type: str | None = None
    stopping_word: str = ""
    timings: InfillTimings | None = None
    rotary: Rotary | None = None
    request_id: str | None = None


class InfillAccumulator:
    """Events of /infill, put together. The names are those of a stream."""

    ending = "the event with stop: true"
    reasoning = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parsed = None

    def __init__(self) -> None:
        self.ended = False
        self.begun = 0
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._last: Infill | None = None

    def add(self, chunk: Infill) -> None:
        """Take what an event brings."""
        self.begun = 1
        self._pieces.append(chunk.content)
        self._tokens += chunk.tokens
        self._last, self.ended = chunk, chunk.stop

    @property
    def text(self) -> str:
        """What came so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def finish_reasons(self) -> dict[int, str]:
        """How it ended, once it has."""
        return {0: self._last.stop_type or ""} if self._last is not None and self.ended else {}

    @property
    def usage(self) -> Usage | None:
        """The counts so far, in the names of chats."""
        last = self._last
        if last is None:
            return None
        return Usage(
            prompt_tokens=last.tokens_evaluated,
            completion_tokens=last.tokens_predicted,
            total_tokens=last.tokens_evaluated + last.tokens_predicted,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=last.tokens_cached),
        )

    @property
    def rotary(self) -> Rotary | None:
        """What it ran under, once it has ended."""
        return None if self._last is None else self._last.rotary

    def answer(self, request_id: str | None) -> Infill:
        """The whole answer."""
        assert self._last is not None
        return replace(self._last, content=self.text, tokens=tuple(self._tokens), request_id=request_id)
