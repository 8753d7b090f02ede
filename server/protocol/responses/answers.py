"""Answers of `/v1/responses`. They document what is written by hand."""

from __future__ import annotations

from typing import Any

from windlass.server.protocol.answers import Rotary
from windlass.server.protocol.base import StrictModel


class InputTokensDetails(StrictModel):
    """`cached_tokens`: input tokens found in the prefix cache. `cache_write_tokens` is always 0: no cache is paid for."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(StrictModel):
    """`reasoning_tokens`: generated tokens up to the end of the thinking, its markers included."""

    reasoning_tokens: int


class ResponseUsage(StrictModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(StrictModel):
    """The answer. `output`: items of type `reasoning`, `message` and `function_call`, in the order they were written.

    `status`: `completed`, `incomplete` (then `incomplete_details.reason` says why) or, in a stream, `failed`.
    """

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str]
    rotary: Rotary | None = None


class DeletedResponse(StrictModel):
    """What became of a response."""

    id: str
    object: str = "response"
    deleted: bool


class ItemList(StrictModel):
    """A page of items."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
