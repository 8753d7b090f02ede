"""Answers of `/v1/messages`. They document what is written by hand."""

from __future__ import annotations

from typing import Any

from windlass.server.protocol.answers import Rotary
from windlass.server.protocol.base import StrictModel


class MessageTokensDetails(StrictModel):
    """`thinking_tokens`: generated tokens up to the end of the thinking, its markers included."""

    thinking_tokens: int


class MessageUsage(StrictModel):
    """Token counts. `input_tokens` are those not found in the prefix cache; `cache_read_input_tokens` those that were."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None = None


class MessageAnswer(StrictModel):
    """The answer. `content`: blocks of type `thinking`, `text` and `tool_use`, in the order they were written.

    `stop_reason`: `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`.
    """

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None = None
    usage: MessageUsage
    rotary: Rotary | None = None


class TokenCount(StrictModel):
    """What an input comes to."""

    input_tokens: int


class MessageErrorDetail(StrictModel):
    """What went wrong, in words; `param` and `code` are as in errors of the other endpoints."""

    type: str
    message: str
    param: str | None
    code: str


class MessageError(StrictModel):
    """Every answer of these endpoints other than success has this shape."""

    type: str = "error"
    error: MessageErrorDetail
    request_id: str | None
