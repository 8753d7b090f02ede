"""Answers of /v1/messages as frozen dataclasses, and the events of their streams.

Knows field names; knows nothing of HTTP. Fields a newer server adds are ignored, fields an older one lacks are None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windlass.clients.types import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageUsage:
    """Token counts. input_tokens: those that were not found in the prefix cache."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentBlock:
    """A block of an answer: `text`, `thinking` or `tool_use`. input: a call's arguments, as far as there are any."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] = field(default_factory=dict)

    def reply(self, content: str, *, is_error: bool = False) -> dict[str, Any]:
        """The block, of the user's next message, that brings the result of this call back to the model."""
        result = {"type": "tool_result", "tool_use_id": self.id, "content": content}
        return {**result, "is_error": True} if is_error else result

    def to_dict(self) -> dict[str, Any]:
        """The block as a request takes it."""
        if self.type == "tool_use":
            return {"type": self.type, "id": self.id, "name": self.name, "input": self.input}
        if self.type == "thinking":
            return {"type": self.type, "thinking": self.thinking, "signature": ""}
        return {"type": self.type, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An answer. It may stand among the messages of the next request as it is.

    stop_reason: end_turn, max_tokens, stop_sequence (then stop_sequence is the one) or tool_use.
    """

    id: str
    content: tuple[ContentBlock, ...] = ()
    role: str = "assistant"
    model: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = MessageUsage()
    rotary: Rotary | None = None
    request_id: str | None = None

    @property
    def text(self) -> str:
        """The text of all blocks of text."""
        return "".join(block.text for block in self.content)

    @property
    def reasoning(self) -> str:
        """What the model thought."""
        return "".join(block.thinking for block in self.content)

    @property
    def calls(self) -> tuple[ContentBlock, ...]:
        """The calls that the model asks for."""
        return tuple(block for block in self.content if block.type == "tool_use")

    def to_dict(self) -> dict[str, Any]:
        """The message as a request takes it."""
        return {"role": self.role, "content": [block.to_dict() for block in self.content]}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """What an event adds to a block or, at the end, to the message."""

    type: str | None = None
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEvent:
    """An event of a stream. index: of the block that it is about."""

    type: str
    index: int | None = None
    message: Message | None = None
    content_block: ContentBlock | None = None
    delta: MessageDelta | None = None
    usage: MessageUsage | None = None
    rotary: Rotary | None = None

    @property
    def text(self) -> str:
        """What the event adds to the text of the answer."""
        return self.delta.text if self.delta is not None else ""
