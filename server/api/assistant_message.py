"""The assistant's message as a chat message, as content blocks and as stream events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.serving.job import Delta, GenerationJob, TokenUsage
from windlass.server.serving.response_writer import JsonList, Writer, chat_logprobs
from windlass.server.text.stream_parser import (
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    PlainTextParser,
    Reasoning,
    TracksThinking,
)


@dataclass(slots=True)
class _CallParts:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class MessageBuilder:
    """Message of one choice of a chat.

    token_usage: its thinking tokens are counted if the parser recognizes thinking. collect: whether the message is
    assembled (`message`), as for complete responses.
    """

    parser: OutputParser
    token_usage: TokenUsage
    legacy_function_call: bool = False
    collect: bool = False
    has_calls: bool = False
    has_text: bool = False
    incomplete: bool = False  # the answer ended within the arguments of a call
    _pending_tokens: int = 0  # tokens that may belong to the start marker of the thinking
    _stage: TracksThinking | None = field(init=False)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_CallParts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stage = self.parser if isinstance(self.parser, TracksThinking) else None

    def parse(self, delta: Delta) -> list[Event]:
        """Parse the text of a delta; adjacent events of one kind are merged."""
        if self._stage is not None and self.token_usage.reasoning_tokens is None:
            self.token_usage.reasoning_tokens = 0
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
        # If the model ended the answer itself, even a malformed call is complete.
        if delta.finish_reason == "length" or isinstance(delta.stop_reason, str):
            self.incomplete = self.parser.in_call
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason of a chat: a turn that ends by itself after calls ended because of them, unless a stop
        string cut a call.
        """
        if reason != "stop" or not self.has_calls or self.incomplete:
            return reason
        return "function_call" if self.legacy_function_call else "tool_calls"

    def delta(self, event: Event) -> dict[str, Any]:
        """The `delta` of a chunk for this event."""
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
        """The `delta` of the last chunk. Content is null only if there are calls, so it may become empty text here."""
        return {} if self.has_text or self.has_calls else {"content": ""}

    def message(self) -> dict[str, Any]:
        """The message of a complete answer. Content is null if there are calls and no text."""
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
        assert self._stage is not None and self.token_usage.reasoning_tokens is not None
        if self._stage.has_thought:
            self.token_usage.reasoning_tokens += self._pending_tokens
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
    """Merge adjacent events of the same kind."""
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
    """A block of the answer: consecutive text, thinking, or one call, whose text is its arguments.

    incomplete: the answer ended within the block. logprobs: of the tokens of a text, if requested.
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


class BlockWriter(Writer):
    """Writes the only answer of a prompt as blocks.

    collects: whether a stream stores its blocks, because later events repeat them.
    """

    collects = True

    def __init__(self, job: GenerationJob, token_usage: TokenUsage) -> None:
        super().__init__(job, token_usage)
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.rotary: dict[str, object] | None = None
        self.started = False
        parser = PlainTextParser() if job.parsing is None else job.parsing.new_parser()
        self._builder = MessageBuilder(parser, token_usage)
        self._open_block: AnswerBlock | None = None
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text is still held back

    # ---- implemented by subclasses -----------------------------------------------------------------------------------
    @abstractmethod
    def opening_events(self) -> bytes:
        """The events that open the stream."""

    @abstractmethod
    def block_start_events(self, block: AnswerBlock) -> bytes:
        """The events that start a block."""

    @abstractmethod
    def block_delta_events(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> bytes:
        """The events for a piece of a block."""

    @abstractmethod
    def block_stop_events(self, block: AnswerBlock) -> bytes:
        """The events that end a block."""

    # ---- deltas of a generation --------------------------------------------------------------------------------------
    def event(self, delta: Delta) -> bytes:
        events = b""
        if not self.started:
            self.started = True
            events = self.opening_events()
        return events + b"".join(self._process(delta, collect=self.collects))

    def add(self, delta: Delta) -> None:
        for _ in self._process(delta, collect=True, emit=False):
            pass

    def _process(self, delta: Delta, *, collect: bool, emit: bool = True) -> Iterator[bytes]:
        events = self._builder.parse(delta)
        if self.job.logprobs is not None:
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
        if not self.blocks:  # an answer has at least one text, which may be empty
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
        """Whether the event belongs to the open block."""
        kind = None if self._open_block is None else self._open_block.kind
        if isinstance(event, Content):
            return kind == "text"
        if isinstance(event, Reasoning):
            return kind == "thinking"
        return isinstance(event, CallArguments)

    def _new_block(self, event: Event) -> AnswerBlock:
        index = len(self.blocks)
        if isinstance(event, Content):
            block = AnswerBlock(index, "text", logprobs=None if self.job.logprobs is None else JsonList())
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
        """Log-probabilities of the text of this event. Those of other tokens are dropped."""
        if block.logprobs is None:
            self._logprobs.clear()
            return None
        found = JsonList()
        found.extend(chat_logprobs(self.job.state.tokenizer, self._logprobs, self.job.logprobs or 0)["content"])
        self._logprobs.clear()
        return found

    def _collect(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> None:
        block.append(text)
        self.budget.add(len(text) + (0 if logprobs is None else logprobs.size))
        if logprobs is not None and block.logprobs is not None:
            block.logprobs.take(logprobs)
