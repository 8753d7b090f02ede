"""Answers of `/v1/messages`, whole and as the events of a stream. They document what is written by hand."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from windlass.server.protocol.answers import Rotary
from windlass.server.protocol.base import StrictModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageTokensDetails(StrictModel):
    """Of the tokens that were generated."""

    thinking_tokens: Annotated[
        int, Field(description="Generated tokens up to the end of the thinking, its markers included.")
    ]


class MessageUsage(StrictModel):
    """Token counts."""

    input_tokens: Annotated[int, Field(description="Tokens of the input that were not found in the prefix cache.")]
    cache_creation_input_tokens: Annotated[int, Field(description="Always 0: no cache is paid for.")]
    cache_read_input_tokens: Annotated[int, Field(description="Tokens of the input that were found in it.")]
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None = None


class AnsweredText(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str


class AnsweredThinking(StrictModel):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, Field(description="Always empty: this server signs none.")]


class AnsweredToolUse(StrictModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], Field(description="Its arguments.")]


AnsweredBlock = Annotated[AnsweredText | AnsweredThinking | AnsweredToolUse, Field(discriminator="type")]


class MessageAnswer(StrictModel):
    """The answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage
    rotary: Rotary | None = None


class TokenCount(StrictModel):
    """What an input comes to."""

    input_tokens: int


class MessageErrorDetail(StrictModel):
    """What went wrong, in words; `param` and `code` are as in errors of the other endpoints."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "api_error",
    ]
    message: str
    param: str | None
    code: str
    details: dict[str, Any] | None = None


class MessageError(StrictModel):
    """Every answer of these endpoints other than success has this shape, and so has the event that ends a failed stream."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None


class BegunMessage(StrictModel):
    """The message as a stream opens it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[Any], Field(max_length=0, description="Empty: events bring it.")]
    stop_reason: None
    stop_sequence: None
    usage: MessageUsage


class MessageStart(StrictModel):
    """The message begins."""

    type: Literal["message_start"]
    message: BegunMessage


class BlockStart(StrictModel):
    """A block begins, empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnsweredBlock


class TextDelta(StrictModel):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(StrictModel):
    """More of the thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(StrictModel):
    """More of the JSON text of a call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(StrictModel):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputDelta, Field(discriminator="type")]


class BlockStop(StrictModel):
    """A block is whole."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnding(StrictModel):
    """How the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(StrictModel):
    """The message has ended."""

    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage
    rotary: Rotary | None = None


class MessageSign(StrictModel):
    """`ping`: the server is there, more will come. `message_stop`: nothing more will."""

    type: Literal["ping", "message_stop"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageSign | MessageError,
            Field(discriminator="type"),
        ]
    ]
):
    """The JSON of an event of a stream; `event:` repeats its `type`."""
