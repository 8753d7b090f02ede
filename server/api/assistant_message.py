"""The assistant's message as a chat message, content blocks and stream deltas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.serving.deltas import Delta, TokenUsage
from windlass.server.serving.job import ResponseOptions
from windlass.server.serving.response_format import JsonList, chat_logprobs
from windlass.server.serving.response_writer import ByteBudget
from windlass.server.text.stream_parser import (
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    ParsingPlan,
    PlainTextParser,
    Reasoning,
    TracksThinking,
)

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _CallParts:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class MessageBuilder:
    """One choice of a chat. keep: whether the message is put together (`message`), as whole answers need it.

    thinking_tokens: how many tokens the thinking took, None where it is not told apart.
    """

    parser: OutputParser
    legacy_function_call: bool
    collect: bool
    has_calls: bool = False
    has_text: bool = False
    incomplete: bool = False  # the end came within the arguments of a call
    thinking_tokens: int | None = field(init=False)
    _pending_tokens: int = 0  # tokens that may turn out to have opened the thinking
    _stage: TracksThinking | None = field(init=False)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_CallParts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stage = self.parser if isinstance(self.parser, TracksThinking) else None
        self.thinking_tokens = None if self._stage is None else 0

    def parse(self, delta: Delta) -> list[Event]:
        """The events that the text of a delta brings, those of one kind in a row joined."""
        events: list[Event] = []
        pieces, tokens = delta.pieces or (delta.text,), len(delta.token_ids)
        for number in range(max(len(pieces), tokens)):
            piece = pieces[number] if number < len(pieces) else ""
            if self._stage is not None and number < tokens:
                self._pending_tokens += self._stage.thinking
            if piece:
                events += self.parser.feed(piece)
            if self._pending_tokens:
                self._count_thinking()
        if delta.finish_reason is not None:
            events += self.parser.finish()
        events = _merge_adjacent(events)
        for event in events:
            self.has_calls = self.has_calls or isinstance(event, CallStart)
            self.has_text = self.has_text or isinstance(event, Content)
            if self.collect:
                self._collect(event)
        # A model that ends by itself has said all that it wanted to, however it is written.
        if delta.finish_reason == "length" or isinstance(delta.stop_reason, str):
            self.incomplete = self.parser.in_call
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason as a chat tells it: a turn that ends by itself and calls, ended to call. Not where a stop string cut one."""
        if reason != "stop" or not self.has_calls or self.incomplete:
            return reason
        return "function_call" if self.legacy_function_call else "tool_calls"

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
        return (
            {"function_call": function}
            if self.legacy_function_call
            else {"tool_calls": [{**head, "function": function}]}
        )

    def final_delta(self) -> dict[str, Any]:
        """The `delta` of the last chunk. Content is null only where there are calls, so it may become empty text here."""
        return {} if self.has_text or self.has_calls else {"content": ""}

    def message(self) -> dict[str, Any]:
        """The message of a whole answer. Content is null where there are calls and no text."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            functions = [{"name": call.name, "arguments": "".join(call.arguments)} for call in self._calls]
            if self.legacy_function_call:
                message["function_call"] = functions[0]
            else:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": function}
                    for call, function in zip(self._calls, functions, strict=True)
                ]
        return message

    def _count_thinking(self) -> None:
        assert self._stage is not None and self.thinking_tokens is not None
        if self._stage.has_thought:
            self.thinking_tokens += self._pending_tokens
        if self._stage.has_thought or not self._stage.thinking:
            self._pending_tokens = 0

    def _collect(self, event: Event) -> None:
        if isinstance(event, Content):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        elif isinstance(event, CallStart):
            self._calls.append(_CallParts(event.id, event.name))
        else:
            self._calls[event.index].arguments.append(event.text)


def _merge_adjacent(events: Sequence[Event]) -> list[Event]:
    """The same with fewer, longer events."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            merged[-1] = CallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


BlockKind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """One of the answer's blocks; its index is its place. call_id, name: of a call, whose text is its arguments.

    cut: the answer ended before the block did. logprobs: of the tokens of a text, where they are asked for.
    """

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    incomplete: bool = False
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

    collects = True

    def __init__(
        self, tokenizer: Tokenizer, token_usage: TokenUsage, options: ResponseOptions, parsing: ParsingPlan | None
    ) -> None:
        self.token_usage = token_usage
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.rotary: dict[str, object] | None = None
        self.budget = ByteBudget(options.max_bytes)
        self.started = False
        self._tokenizer = tokenizer
        self._options = options
        self._builder = MessageBuilder(
            PlainTextParser() if parsing is None else parsing.new_parser(), False, collect=False
        )
        self._open_block: AnswerBlock | None = None
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text has not come yet

    # ---- to be filled in ---------------------------------------------------------------------------------------------
    @abstractmethod
    def opening_events(self) -> bytes:
        """The events that open the stream."""

    @abstractmethod
    def block_start_events(self, block: AnswerBlock) -> bytes:
        """The events of a block that begins."""

    @abstractmethod
    def block_delta_events(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> bytes:
        """The events of more text of a block."""

    @abstractmethod
    def block_stop_events(self, block: AnswerBlock) -> bytes:
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
        if not self.started:
            self.started = True
            events = self.opening_events()
        return events + b"".join(self._process(delta, collect=self.collects))

    def add(self, delta: Delta) -> None:
        """Keep what a delta brings. Raises ApiError where the answer becomes too large."""
        for _ in self._process(delta, collect=True, emit=False):
            pass

    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        raise AssertionError("these answers have none")  # no body of theirs asks for any

    def _process(self, delta: Delta, *, collect: bool, emit: bool = True) -> Iterator[bytes]:
        before = self._builder.thinking_tokens or 0
        events = self._builder.parse(delta)
        if self._builder.thinking_tokens is not None:
            self.token_usage.reasoning_tokens = (
                (self.token_usage.reasoning_tokens or 0) + self._builder.thinking_tokens - before
            )
        if self._options.logprobs is not None:
            self._logprobs += delta.logprobs
        for event in events:
            if not self._continues_open_block(event):
                yield from self._close(emit)
                self._open_block = self._new_block(event)
                if emit:
                    yield self.block_start_events(self._open_block)
            block = self._open_block
            assert block is not None
            text = "" if isinstance(event, CallStart) else event.text
            logprobs = self._logprobs_of(block)
            if collect:
                self._collect(block, text, logprobs)
            if emit and text:
                yield self.block_delta_events(block, text, logprobs)
        if delta.finish_reason is not None:
            yield from self._finish(delta, emit)

    def _finish(self, delta: Delta, emit: bool) -> Iterator[bytes]:
        if not self.blocks:  # an answer has at least a text, if an empty one
            self._open_block = self._new_block(Content(""))
            if emit:
                yield self.block_start_events(self._open_block)
        self.finish_reason = self._builder.finish_reason(delta.finish_reason)
        self.stop_reason = delta.stop_reason
        if delta.rotary is not None:
            self.rotary = delta.rotary
        in_call = self._open_block is not None and self._open_block.kind == "call"
        yield from self._close(
            emit, incomplete=self._builder.incomplete if in_call else delta.finish_reason == "length"
        )

    # ---- blocks ------------------------------------------------------------------------------------------------------
    def _continues_open_block(self, event: Event) -> bool:
        """Whether the event belongs to the block that is open."""
        kind = None if self._open_block is None else self._open_block.kind
        if isinstance(event, Content):
            return kind == "text"
        if isinstance(event, Reasoning):
            return kind == "thinking"
        return isinstance(event, CallArguments)

    def _new_block(self, event: Event) -> AnswerBlock:
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

    def _close(self, emit: bool, *, incomplete: bool = False) -> Iterator[bytes]:
        if self._open_block is not None:
            self._open_block.incomplete = incomplete
            if emit:
                yield self.block_stop_events(self._open_block)
        self._open_block = None

    def _logprobs_of(self, block: AnswerBlock) -> JsonList | None:
        """Log-probabilities that go with the text that has just come; those of what is no text are left out."""
        if block.logprobs is None:
            self._logprobs.clear()
            return None
        found = JsonList()
        top, names = self._options.logprobs or 0, self._options.tokens_as_ids
        found.extend(chat_logprobs(self._tokenizer, self._logprobs, top, names=names)["content"])
        self._logprobs.clear()
        return found

    def _collect(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> None:
        block.append(text)
        self.budget.add(len(text) + (0 if logprobs is None else logprobs.size))
        if logprobs is not None and block.logprobs is not None:
            block.logprobs.take(logprobs)
