"""Answers of /v1/responses as frozen dataclasses, and the events of their streams.

Knows field names; knows nothing of HTTP. Fields a newer server adds are ignored, fields an older one lacks are None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windlass.clients._parse import loads
from windlass.clients.types import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTokensDetails:
    """cached_tokens: input tokens that came from the prefix cache."""

    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTokensDetails:
    """reasoning_tokens: generated tokens up to the end of the thinking."""

    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseUsage:
    """Token counts of a response."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: InputTokensDetails | None = None
    output_tokens_details: OutputTokensDetails | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePart:
    """A part of a message or of thinking. logprobs: of a text's tokens, where they were asked for."""

    type: str
    text: str = ""
    logprobs: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseItem:
    """An item of a response: `message`, `reasoning` or `function_call`, or of an input also `function_call_output`.

    It may stand in the input of the next request as it is. arguments: of a call, JSON text. output: the result of one.
    """

    type: str
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: tuple[ResponsePart, ...] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    @property
    def text(self) -> str:
        """The text of a message or of thinking."""
        return "".join(part.text for part in self.content or ())

    @property
    def values(self) -> Any:
        """The arguments of a call as values; raises ValueError where they are not JSON, such as cut ones."""
        return loads(self.arguments or "")

    def reply(self, output: str) -> dict[str, Any]:
        """The item that brings the result of this call back to the model."""
        return {"type": "function_call_output", "call_id": self.call_id, "output": output}

    def to_dict(self) -> dict[str, Any]:
        """The item as a request takes it."""
        plain = {"id": self.id, "role": self.role, "call_id": self.call_id, "name": self.name}
        given: dict[str, Any] = {**plain, "arguments": self.arguments, "output": self.output}
        if self.content is not None:
            given["content"] = [{"type": part.type, "text": part.text} for part in self.content]
        if self.type == "reasoning":
            given["summary"] = []
        return {"type": self.type, **{name: value for name, value in given.items() if value is not None}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
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
        """What the model thought."""
        return "".join(item.text for item in self.output if item.type == "reasoning")

    @property
    def calls(self) -> tuple[ResponseItem, ...]:
        """The calls that the model asks for."""
        return tuple(item for item in self.output if item.type == "function_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEvent:
    """An event of a stream. delta: a piece of text, thinking or arguments, as the type says."""

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
        """What the event adds to the text of the answer."""
        return self.delta or "" if self.type == "response.output_text.delta" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseItems:
    """A page of the items that a response answered."""

    data: tuple[ResponseItem, ...]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
