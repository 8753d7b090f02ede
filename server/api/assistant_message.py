"""The assistant's message as a chat message, content blocks and stream deltas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.errors import answer_too_large
from windlass.server.serving.deltas import Delta, Tally
from windlass.server.serving.response_format import JsonList, chat_logprobs, sample_object
from windlass.server.serving.response_writer import AnswerOptions
from windlass.server.text.stream_parser import (
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    ParsingPlan,
    PlainText,
    Reasoning,
    TellsThinking,
)

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _MadeCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Turn:
    """One choice of a chat. keep: whether the message is put together (`message`), as whole answers need it.

    thinking_tokens: how many tokens the thinking took, None where it is not told apart.
    """

    parser: OutputParser
    older_functions: bool
    keep: bool
    called: bool = False
    spoke: bool = False
    cut: bool = False  # the end came within the arguments of a call
    thinking_tokens: int | None = field(init=False)
    _uncounted: int = 0  # tokens that may turn out to have opened the thinking
    _stage: TellsThinking | None = field(init=False)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_MadeCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stage = self.parser if isinstance(self.parser, TellsThinking) else None
        self.thinking_tokens = None if self._stage is None else 0

    def take(self, delta: Delta) -> list[Event]:
        """The events that the text of a delta brings, those of one kind in a row joined."""
        events: list[Event] = []
        pieces, tokens = delta.pieces or (delta.text,), len(delta.token_ids)
        for number in range(max(len(pieces), tokens)):
            piece = pieces[number] if number < len(pieces) else ""
            if self._stage is not None and number < tokens:
                self._uncounted += self._stage.thinking
            if piece:
                events += self.parser.feed(piece)
            if self._uncounted:
                self._count()
        if delta.finish_reason is not None:
            events += self.parser.finish()
        events = _joined(events)
        for event in events:
            self.called = self.called or isinstance(event, CallStart)
            self.spoke = self.spoke or isinstance(event, Content)
            if self.keep:
                self._keep(event)
        # A model that ends by itself has said all that it wanted to, however it is written.
        if delta.finish_reason == "length" or isinstance(delta.stop_reason, str):
            self.cut = self.parser.in_call
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason as a chat tells it: a turn that ends by itself and calls, ended to call. Not where a stop string cut one."""
        if reason != "stop" or not self.called or self.cut:
            return reason
        return "function_call" if self.older_functions else "tool_calls"

    def delta(self, event: Event) -> dict[str, Any]:
        """The `delta` of a chunk with this event."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text, "reasoning": event.text}
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            head: dict[str, Any] = {"index": event.index, "id": event.id, "type": "function"}
        else:
            function = {"arguments": event.text}
            head = {"index": event.index}
        return {"function_call": function} if self.older_functions else {"tool_calls": [{**head, "function": function}]}

    def ending(self) -> dict[str, Any]:
        """The `delta` of the last chunk. Content is null only where there are calls, so it may become empty text here."""
        return {} if self.spoke or self.called else {"content": ""}

    def message(self) -> dict[str, Any]:
        """The message of a whole answer. Content is null where there are calls and no text."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            functions = [{"name": call.name, "arguments": "".join(call.arguments)} for call in self._calls]
            if self.older_functions:
                message["function_call"] = functions[0]
            else:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": function}
                    for call, function in zip(self._calls, functions, strict=True)
                ]
        return message

    def _count(self) -> None:
        assert self._stage is not None and self.thinking_tokens is not None
        if self._stage.thought:
            self.thinking_tokens += self._uncounted
        if self._stage.thought or not self._stage.thinking:
            self._uncounted = 0

    def _keep(self, event: Event) -> None:
        if isinstance(event, Content):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        elif isinstance(event, CallStart):
            self._calls.append(_MadeCall(event.id, event.name))
        else:
            self._calls[event.index].arguments.append(event.text)


def _joined(events: Sequence[Event]) -> list[Event]:
    """The same with fewer, longer events."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


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
