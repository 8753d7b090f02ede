"""The assistant's turn as events tell it: the message of a whole answer, and the `delta` of each chunk of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.server.generation.deltas import Delta
from windlass.server.text.parsing.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    Reasoning,
    TellsThinking,
)


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
