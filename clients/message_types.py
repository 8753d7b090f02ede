"""Responses of /v1/messages as frozen dataclasses, and the events of their streams."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from windlass.clients._parse import ResponseModel
from windlass.clients.types import Rotary


class MessageUsage(ResponseModel):
    """Token counts. input_tokens: without those from the prefix cache."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class ContentBlock(ResponseModel):
    """A block of a message: `text`, `thinking` or `tool_use`. input: the arguments of a call."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] = field(default_factory=dict)

    def reply(self, content: str, *, is_error: bool = False) -> dict[str, Any]:
        """The block of the user's next message that returns the result of this call to the model."""
        result = {"type": "tool_result", "tool_use_id": self.id, "content": content}
        return {**result, "is_error": True} if is_error else result

    def to_dict(self) -> dict[str, Any]:
        """The block in the form that a request accepts."""
        if self.type == "tool_use":
            return {"type": self.type, "id": self.id, "name": self.name, "input": self.input}
        if self.type == "thinking":
            return {"type": self.type, "thinking": self.thinking, "signature": ""}
        return {"type": self.type, "text": self.text}


class Message(ResponseModel):
    """A message of the assistant. The next request accepts it among its messages.

    stop_reason: end_turn, max_tokens, stop_sequence (see the field of that name) or tool_use.
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
        """The text of all text blocks."""
        return "".join(block.text for block in self.content)

    @property
    def reasoning(self) -> str:
        """The text of all thinking blocks."""
        return "".join(block.thinking for block in self.content)

    @property
    def calls(self) -> tuple[ContentBlock, ...]:
        """The tool_use blocks."""
        return tuple(block for block in self.content if block.type == "tool_use")

    def _to_request(self) -> dict[str, Any]:
        return {"role": self.role, "content": [block.to_dict() for block in self.content]}


class MessageDelta(ResponseModel):
    """An addition to a block or, at the end, to the message."""

    type: str | None = None
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageEvent(ResponseModel):
    """An event of a stream. index: of its block."""

    type: str
    index: int | None = None
    message: Message | None = None
    content_block: ContentBlock | None = None
    delta: MessageDelta | None = None
    usage: MessageUsage | None = None
    rotary: Rotary | None = None

    @property
    def text(self) -> str:
        """New text of the message in this event."""
        return self.delta.text if self.delta is not None else ""
