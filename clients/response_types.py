"""Responses of /v1/responses and /v1/messages as frozen dataclasses, and the events of their streams."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from windlass.clients._parse import ResponseModel, loads
from windlass.clients.types import Rotary


class InputTokensDetails(ResponseModel):
    """cached_tokens: input tokens that came from the prefix cache."""

    cached_tokens: int | None = None


class OutputTokensDetails(ResponseModel):
    """reasoning_tokens: generated tokens up to the end of the reasoning."""

    reasoning_tokens: int | None = None


class ResponseUsage(ResponseModel):
    """Token counts of a response."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: InputTokensDetails | None = None
    output_tokens_details: OutputTokensDetails | None = None


class ResponsePart(ResponseModel):
    """A part of a message or of reasoning. logprobs: of the tokens of a text, if requested."""

    type: str
    text: str = ""
    logprobs: tuple[dict[str, Any], ...] | None = None


class ResponseItem(ResponseModel):
    """An item of a response: `message`, `reasoning`, `function_call` or `custom_tool_call`; in an input also results of calls.

    The next request accepts it in its input. arguments: JSON text of a call. input: of a custom tool. output: the result of a
    call.
    """

    type: str
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: tuple[ResponsePart, ...] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | None = None

    @property
    def text(self) -> str:
        """The text of a message or of reasoning."""
        return "".join(part.text for part in self.content or ())

    @property
    def values(self) -> Any:
        """The parsed arguments of a call; raises ValueError if they are not JSON, for example because they were cut short."""
        return loads(self.arguments or "")

    def reply(self, output: str) -> dict[str, Any]:
        """The item that returns the result of this call to the model."""
        kind = "custom_tool_call_output" if self.type == "custom_tool_call" else "function_call_output"
        return {"type": kind, "call_id": self.call_id, "output": output}

    def to_dict(self) -> dict[str, Any]:
        """The item in the form that a request accepts."""
        names = ("id", "role", "call_id", "name", "namespace", "arguments", "input", "output")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.content is not None:
            given["content"] = [{"type": part.type, "text": part.text} for part in self.content]
        if self.type == "reasoning":
            given["summary"] = []
        return {"type": self.type, **{name: value for name, value in given.items() if value is not None}}


class Response(ResponseModel):
    """A response. status: completed, incomplete (see incomplete_details) or failed (see error)."""

    id: str
    status: str
    model: str = ""
    created_at: int = 0
    output: tuple[ResponseItem, ...] = ()
    usage: ResponseUsage | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    rotary: Rotary | None = None
    request_id: str | None = None

    @property
    def text(self) -> str:
        """The text of all messages."""
        return "".join(item.text for item in self.output if item.type == "message")

    @property
    def reasoning(self) -> str:
        """The text of all reasoning items."""
        return "".join(item.text for item in self.output if item.type == "reasoning")

    @property
    def calls(self) -> tuple[ResponseItem, ...]:
        """The calls of functions and of custom tools."""
        return tuple(item for item in self.output if item.type in ("function_call", "custom_tool_call"))


class ResponseEvent(ResponseModel):
    """An event of a stream. delta: a piece of text, reasoning or arguments, depending on the type."""

    type: str
    sequence_number: int = 0
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    delta: str | None = None
    item: ResponseItem | None = None
    response: Response | None = None

    @property
    def text(self) -> str:
        """New text of the response in this event."""
        return self.delta or "" if self.type == "response.output_text.delta" else ""


class ResponseItems(ResponseModel):
    """A page of the input items of a response."""

    data: tuple[ResponseItem, ...]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


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
