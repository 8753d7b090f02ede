"""Blocks of a message's content, and the messages themselves."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from windlass.server.protocol.base import FreeForm, StrictModel
from windlass.server.protocol.kinds import OTHER, OtherKind, by_type, texts

MAX_BLOCKS = 4096

CallId = Annotated[str, Field(min_length=1, max_length=256)]
_BOOKKEEPING = frozenset({"cache_control"})


class TextBlock(StrictModel):
    """Text. `citations`, which answers of other servers have, are without effect."""

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING | {"citations", "parsed_output"}

    type: Literal["text"]
    text: str


class ThinkingBlock(StrictModel):
    """The thinking of an earlier turn. `signature` has no effect: this server signs none."""

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING | {"signature"}

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(StrictModel):
    """Thinking that another server keeps to itself; nothing of it reaches the model."""

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(StrictModel):
    """A call that the assistant made."""

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING | {"caller", "toolset_name"}

    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: FreeForm


class _OtherText(OtherKind):
    what = "blocks"
    instead = "text"


_TextBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")] | Annotated[_OtherText, Tag(OTHER)],
    by_type(("text",)),
]
Texts = Annotated[list[_TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), texts("text")]


class ToolResultBlock(StrictModel):
    """The result of a call. Of one with `is_error` the model is told that it is an error."""

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING | {"toolset_name"}

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts | None = None
    is_error: bool | None = None


class _OtherBlock(OtherKind):
    what = "blocks"
    instead = "text, thinking, tool_use and tool_result"


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[_OtherBlock, Tag(OTHER)],
    by_type(("text", "thinking", "redacted_thinking", "tool_use", "tool_result")),
]


class InputMessage(StrictModel):
    """One turn. `content`: a string or blocks. An answer may be sent back as it is: what it has besides has no effect."""

    ignored: ClassVar[frozenset[str]] = _BOOKKEEPING | {
        *("id", "type", "model", "stop_reason", "stop_sequence", "usage", "rotary"),
        *("container", "context_management", "diagnostics", "input_transformations", "stop_details"),  # of Anthropic's
    }

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True), texts("text")]


def text_of(blocks: Any) -> str:
    """The text of blocks, which are joined by line breaks as the parts of a chat's messages are."""
    return "\n".join(block.text for block in blocks)
