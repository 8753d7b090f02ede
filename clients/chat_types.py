"""The assistant's turn as frozen dataclasses: what it says, thinks and calls, whole and in the pieces of a stream.

Knows field names; knows nothing of HTTP. Fields a newer server adds are ignored, fields an older one lacks are None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from windlass.clients._parse import loads


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A function to be called. arguments: JSON text, as the model wrote it."""

    name: str = ""
    arguments: str = ""

    @property
    def values(self) -> Any:
        """The arguments as values, an object as a dict; raises ValueError where they are not JSON, such as cut ones."""
        return loads(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the assistant asks for."""

    function: FunctionCall
    id: str = ""
    type: str = "function"

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    def reply(self, content: str) -> dict[str, Any]:
        """The message that brings this call's result back to the model."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """What a chunk adds to one call. The first one bears id and name; arguments come in pieces."""

    index: int = 0
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """What the assistant said. It may stand among the messages of the next request as it is.

    reasoning_content: what it thought before, where the server tells the two apart. tool_calls: what it asks for;
    function_call: the same to a request with `functions`.
    """

    role: str = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    _read: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The content as the `answer_type` that was asked for; None without one, and where the turn calls tools instead.

        Raises ValueError where the content does not hold: it was cut short (`finish_reason` "length"), mostly.
        """
        return None if self._read is None or (not self.content and self.tool_calls) else self._read(self.content or "")

    def to_dict(self) -> dict[str, Any]:
        """The message as a request takes it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": _plain(call.function)} for call in self.tool_calls
            ]
        if self.function_call is not None:
            message["function_call"] = _plain(self.function_call)
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """What a chunk adds to the message; the first one bears the role."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None


def _plain(call: FunctionCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}
