"""Answers of `/v1/responses`. They document what is written by hand."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from windlass.server.protocol.answers import Rotary
from windlass.server.protocol.base import StrictModel
from windlass.server.protocol.chat import ChatTokenLogprob, Effort
from windlass.server.protocol.responses.items import RefusalPart, TextPart

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(StrictModel):
    """Of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: Annotated[int, Field(description="Always 0: no cache is paid for.")]


class OutputTokensDetails(StrictModel):
    """Of the tokens that were generated."""

    reasoning_tokens: int


class ResponseUsage(StrictModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(StrictModel):
    """Text of a message. `logprobs`: of its tokens, where they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0, description="Always empty.")]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(StrictModel):
    """Text of the thinking."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(StrictModel):
    """What the model said."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(StrictModel):
    """What the model thought."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Annotated[list[Any], Field(max_length=0, description="Always empty: `content` has the thinking itself.")]
    content: list[ReasoningText]
    encrypted_content: Annotated[None, Field(description="Always null: this server encrypts none.")]


class OutputCall(StrictModel):
    """A call that the model made. `arguments`: JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class ResponseFailure(StrictModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str
    param: str | None
    type: str


class IncompleteDetails(StrictModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ReasoningShown(StrictModel):
    """What was asked for of the thinking."""

    effort: Effort | None
    summary: None


class TextShown(StrictModel):
    """The form that was asked for."""

    format: Annotated[
        dict[str, Any], Field(description="`text`, `json_object` or `json_schema` under `type`, as asked.")
    ]


class ToolShown(StrictModel):
    """A function that was on offer."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="The JSON schema of its arguments.")]
    strict: bool | None


class NamedFunction(StrictModel):
    """The function that the model had to call."""

    type: Literal["function"]
    name: str


class AllowedFunctions(StrictModel):
    """The functions that the model might call (`auto`) or had to call one of (`required`)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class ResponseAnswer(StrictModel):
    """The answer. `output`: items in the order they were written.

    `status`: `completed`, `incomplete` (then `incomplete_details.reason` says why) or, in a stream, `in_progress` and `failed`.
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextShown
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions
    tools: list[ToolShown]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    rotary: Rotary | None = None


class InputTokens(StrictModel):
    """The tokens of an input, the chat template's own included."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(StrictModel):
    """What became of a response."""

    id: str
    object: Literal["response"]
    deleted: bool


class ListedMessage(StrictModel):
    """A message of an input."""

    id: str
    type: Literal["message"]
    status: Literal["completed"]
    role: Literal["user", "assistant", "system", "developer"]
    content: list[TextPart | RefusalPart]


class ListedCall(OutputCall):
    """A call of an input."""

    status: Literal["completed"]


class ListedCallOutput(StrictModel):
    """The result of a call, in one string."""

    id: str
    type: Literal["function_call_output"]
    status: Literal["completed"]
    call_id: str
    output: str


class ListedReasoning(StrictModel):
    """The thinking of an earlier turn."""

    id: str
    type: Literal["reasoning"]
    status: Literal["completed"]
    summary: list[TextPart | RefusalPart]
    content: list[TextPart | RefusalPart] | None = None


ListedItem = Annotated[ListedMessage | ListedCall | ListedCallOutput | ListedReasoning, Field(discriminator="type")]


class ItemList(StrictModel):
    """A page of items."""

    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
