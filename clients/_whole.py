"""What is known of an answer while its stream is read, and whole answers of the streams of items and blocks.

Knows what each event adds to; knows nothing of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from windlass.clients._accumulate import joined_text
from windlass.clients._parse import loads
from windlass.clients.chat_types import FunctionCall, ToolCall
from windlass.clients.message_types import ContentBlock, Message, MessageEvent, MessageUsage
from windlass.clients.response_types import Response, ResponseEvent
from windlass.clients.rotary_types import Rotary
from windlass.clients.types import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)

A_co = TypeVar("A_co", covariant=True)


class Whole(Protocol[A_co]):
    """Add what comes in order; `answer` is what it makes. The other names are those of a stream.

    ending: the stream's last event, as errors call it. ended: whether an event said that nothing follows.
    """

    @property
    def ending(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def tool_calls(self) -> tuple[ToolCall, ...]: ...
    @property
    def parsed(self) -> Any: ...
    @property
    def finish_reasons(self) -> dict[int, str]: ...
    @property
    def begun(self) -> int: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def rotary(self) -> Rotary | None: ...

    def add(self, chunk: Any) -> None: ...

    def answer(self, request_id: str | None) -> A_co: ...


# What the two APIs call blocks.
_KINDS = {"message": "text", "reasoning": "thinking", "function_call": "call", "tool_use": "call"}


@dataclass(slots=True)
class _BlockPieces:
    kind: str
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return joined_text(self.pieces)


class _InBlocks:
    """What both kinds of streams share: blocks in a row, of kinds text, thinking and call."""

    parsed = None

    def __init__(self) -> None:
        self.ended = False
        self.begun = 0
        self.rotary: Rotary | None = None
        self._blocks: dict[int, _BlockPieces] = {}

    @property
    def text(self) -> str:
        """The text so far."""
        return self._of_kind("text")

    @property
    def reasoning(self) -> str:
        """The thinking so far."""
        return self._of_kind("thinking")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls so far, the last one possibly in part."""
        return tuple(
            ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.text))
            for block in self._blocks.values()
            if block.kind == "call"
        )

    def _of_kind(self, kind: str) -> str:
        return "".join(block.text for block in self._blocks.values() if block.kind == kind)


class ResponseAccumulator(_InBlocks):
    """Events of /v1/responses. The last one bears the whole response."""

    ending = "response.completed"

    def __init__(self) -> None:
        super().__init__()
        self._response: Response | None = None

    def add(self, chunk: ResponseEvent) -> None:
        """Take what an event brings."""
        self.begun = 1
        index = chunk.output_index or 0
        if chunk.type == "response.output_item.added" and chunk.item is not None:
            item = chunk.item
            self._blocks[index] = _BlockPieces(_KINDS.get(item.type, item.type), item.call_id or "", item.name or "")
        elif chunk.delta is not None and index in self._blocks:
            self._blocks[index].pieces.append(chunk.delta)
        elif chunk.type in ("response.completed", "response.incomplete") and chunk.response is not None:
            self._response, self.rotary, self.ended = chunk.response, chunk.response.rotary, True

    @property
    def finish_reasons(self) -> dict[int, str]:
        """The status of the response, once it has one."""
        return {} if self._response is None else {0: self._response.status}

    @property
    def usage(self) -> Usage | None:
        """The counts, in the names of chats."""
        found = None if self._response is None else self._response.usage
        if found is None:
            return None
        read, thought = found.input_tokens_details, found.output_tokens_details
        return Usage(
            prompt_tokens=found.input_tokens,
            completion_tokens=found.output_tokens,
            total_tokens=found.total_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=None if read is None else read.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=None if thought is None else thought.reasoning_tokens
            ),
        )

    def answer(self, request_id: str | None) -> Response:
        """The whole response."""
        assert self._response is not None
        return replace(self._response, request_id=request_id)


class MessageAccumulator(_InBlocks):
    """Events of /v1/messages."""

    ending = "message_stop"

    def __init__(self) -> None:
        super().__init__()
        self._message = Message(id="")
        self._usage: MessageUsage | None = None

    def add(self, chunk: MessageEvent) -> None:
        """Take what an event brings."""
        if chunk.message is not None:
            self.begun, self._message, self._usage = 1, chunk.message, chunk.message.usage
        elif chunk.content_block is not None:
            block = chunk.content_block
            self._blocks[chunk.index or 0] = _BlockPieces(
                _KINDS.get(block.type, block.type), block.id or "", block.name or ""
            )
        elif chunk.type == "content_block_delta" and chunk.delta is not None and chunk.index in self._blocks:
            delta = chunk.delta
            self._blocks[chunk.index].pieces.append(delta.text or delta.thinking or delta.partial_json)
        elif chunk.type == "message_delta" and chunk.delta is not None:
            delta = chunk.delta
            self._message = replace(self._message, stop_reason=delta.stop_reason, stop_sequence=delta.stop_sequence)
            self._usage, self.rotary = chunk.usage or self._usage, chunk.rotary
        self.ended = chunk.type == "message_stop"

    @property
    def finish_reasons(self) -> dict[int, str]:
        """The stop reason, once there is one."""
        reason = self._message.stop_reason
        return {} if reason is None else {0: reason}

    @property
    def usage(self) -> Usage | None:
        """The counts so far, in the names of chats."""
        found = self._usage
        if found is None:
            return None
        prompt = found.input_tokens + found.cache_read_input_tokens + found.cache_creation_input_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=found.output_tokens,
            total_tokens=prompt + found.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=found.cache_read_input_tokens),
        )

    def answer(self, request_id: str | None) -> Message:
        """The whole message. The input of a call that was cut short is empty."""
        content = tuple(map(_content, self._blocks.values()))
        usage = self._usage or MessageUsage()
        return replace(self._message, content=content, usage=usage, rotary=self.rotary, request_id=request_id)


def _content(block: _BlockPieces) -> ContentBlock:
    if block.kind == "call":
        try:
            found = loads(block.text) if block.text else {}
        except ValueError:
            found = {}
        given = found if isinstance(found, dict) else {}
        return ContentBlock(type="tool_use", id=block.id, name=block.name, input=given)
    if block.kind == "thinking":
        return ContentBlock(type="thinking", thinking=block.text)
    return ContentBlock(type=block.kind, text=block.text)
