"""An answer as a row of blocks: pieces of thinking, of text, and calls, in the order in which the model writes them.

That is how `/v1/responses` (items) and `/v1/messages` (content blocks) lay out their answers. Knows no layout itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.answers.base import AnswerOptions
from windlass.server.answers.logprob_layouts import chat_logprobs
from windlass.server.answers.pieces import JsonList
from windlass.server.answers.rotary_layouts import sample_object
from windlass.server.answers.turn import Turn
from windlass.server.errors import answer_too_large
from windlass.server.generation.deltas import Delta, Tally
from windlass.server.text.parsing.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    ParsingPlan,
    PlainText,
    Reasoning,
)

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """One of the answer's blocks; its index is its place. call_id, name: of a call, whose text is its arguments.

    cut: the answer ended before the block did. logprobs: of the tokens of a text, where they are asked for.
    """

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    cut: bool = False
    logprobs: JsonList | None = None
    _parts: list[str] = field(default_factory=list)

    def append(self, text: str) -> None:
        self._parts.append(text)

    @property
    def text(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class BlockWriter(ABC):
    """Writes one answer of one prompt. parsing: how its text is taken apart; None where all of it is text.

    keeps: whether a stream keeps its blocks, because it repeats them.
    """

    keeps = True

    def __init__(self, tokenizer: Tokenizer, tally: Tally, options: AnswerOptions, parsing: ParsingPlan | None) -> None:
        self.tally = tally
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.rotary: dict[str, object] | None = None
        self.size = 0
        self.begun = False
        self._tokenizer = tokenizer
        self._options = options
        self._turn = Turn(PlainText() if parsing is None else parsing.make(), False, keep=False)
        self._open: AnswerBlock | None = None
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text has not come yet

    # ---- to be filled in ---------------------------------------------------------------------------------------------
    @abstractmethod
    def head(self) -> bytes:
        """The events that open the stream."""

    @abstractmethod
    def opened(self, block: AnswerBlock) -> bytes:
        """The events of a block that begins."""

    @abstractmethod
    def grown(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> bytes:
        """The events of more text of a block."""

    @abstractmethod
    def closed(self, block: AnswerBlock) -> bytes:
        """The events of a block that ends."""

    @abstractmethod
    def last_event(self) -> bytes:
        """The events that end the stream."""

    @abstractmethod
    def pieces(self) -> list[bytes]:
        """The whole answer's JSON."""

    # ---- what a generation brings ------------------------------------------------------------------------------------
    def event(self, delta: Delta) -> bytes:
        """The events of one delta. Raises ApiError where what is kept becomes too large."""
        events = b""
        if not self.begun:
            self.begun = True
            events = self.head()
        return events + b"".join(self._written(delta, keep=self.keeps))

    def add(self, delta: Delta) -> None:
        """Keep what a delta brings. Raises ApiError where the answer becomes too large."""
        for _ in self._written(delta, keep=True, tell=False):
            pass

    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        raise AssertionError("these answers have none")  # no body of theirs asks for any

    def _written(self, delta: Delta, *, keep: bool, tell: bool = True) -> Iterator[bytes]:
        before = self._turn.thinking_tokens or 0
        events = self._turn.take(delta)
        if self._turn.thinking_tokens is not None:
            self.tally.reasoning_tokens = (self.tally.reasoning_tokens or 0) + self._turn.thinking_tokens - before
        if self._options.logprobs is not None:
            self._logprobs += delta.logprobs
        for event in events:
            if not self._goes_on(event):
                yield from self._close(tell)
                self._open = self._begin(event)
                if tell:
                    yield self.opened(self._open)
            block = self._open
            assert block is not None
            text = "" if isinstance(event, CallStart) else event.text
            logprobs = self._logprobs_of(block)
            if keep:
                self._keep(block, text, logprobs)
            if tell and text:
                yield self.grown(block, text, logprobs)
        if delta.finish_reason is not None:
            yield from self._finish(delta, tell)

    def _finish(self, delta: Delta, tell: bool) -> Iterator[bytes]:
        if not self.blocks:  # an answer has at least a text, if an empty one
            self._open = self._begin(Content(""))
            if tell:
                yield self.opened(self._open)
        self.finish_reason = self._turn.finish_reason(delta.finish_reason)
        self.stop_reason = delta.stop_reason
        if delta.report is not None:
            self.rotary = sample_object(delta.report, self._options.dropped_turns)
        called = self._open is not None and self._open.kind == "call"
        yield from self._close(tell, cut=self._turn.cut if called else delta.finish_reason == "length")

    # ---- blocks ------------------------------------------------------------------------------------------------------
    def _goes_on(self, event: Event) -> bool:
        """Whether the event belongs to the block that is open."""
        kind = None if self._open is None else self._open.kind
        if isinstance(event, Content):
            return kind == "text"
        if isinstance(event, Reasoning):
            return kind == "thinking"
        return isinstance(event, CallArguments)

    def _begin(self, event: Event) -> AnswerBlock:
        index = len(self.blocks)
        if isinstance(event, Content):
            block = AnswerBlock(index, "text", logprobs=None if self._options.logprobs is None else JsonList())
        elif isinstance(event, Reasoning):
            block = AnswerBlock(index, "thinking")
        else:
            assert isinstance(event, CallStart)
            block = AnswerBlock(index, "call", event.id, event.name)
        self.blocks.append(block)
        return block

    def _close(self, tell: bool, *, cut: bool = False) -> Iterator[bytes]:
        if self._open is not None:
            self._open.cut = cut
            if tell:
                yield self.closed(self._open)
        self._open = None

    def _logprobs_of(self, block: AnswerBlock) -> JsonList | None:
        """Log-probabilities that go with the text that has just come; those of what is no text are left out."""
        if block.logprobs is None:
            self._logprobs.clear()
            return None
        found = JsonList()
        top, names = self._options.logprobs or 0, self._options.token_names
        found.extend(chat_logprobs(self._tokenizer, self._logprobs, top, names=names)["content"])
        self._logprobs.clear()
        return found

    def _keep(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> None:
        block.append(text)
        self.size += len(text) + (0 if logprobs is None else logprobs.size)
        if logprobs is not None and block.logprobs is not None:
            block.logprobs.take(logprobs)
        if self.size > self._options.max_bytes:
            raise answer_too_large(self.size, self._options.max_bytes, grown=True)
