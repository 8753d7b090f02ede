"""Events of a stream of `/v1/responses`. They document what is written by hand."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from windlass.server.protocol.base import StrictModel
from windlass.server.protocol.chat import ChatTokenLogprob
from windlass.server.protocol.responses.answers import OutputItem, OutputText, ReasoningText, ResponseAnswer


class _Event(StrictModel):
    sequence_number: int


class _OfItem(_Event):
    item_id: str
    output_index: int


class _OfPart(_OfItem):
    content_index: int


class StateEvent(_Event):
    """The response begins, or has ended: the last event of a stream is one of `completed`, `incomplete` and `failed`."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseAnswer


class ItemEvent(_Event):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(_OfPart):
    """A part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDeltaEvent(_OfPart):
    """More text of a message."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(_OfPart):
    """The text of a message is whole."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDeltaEvent(_OfPart):
    """More of the thinking."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(_OfPart):
    """The thinking is whole."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(_OfItem):
    """More of the JSON text of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_OfItem):
    """The arguments of a call are whole."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class FailedEvent(_Event):
    """The request failed before its response was created."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        Annotated[
            StateEvent
            | ItemEvent
            | PartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ReasoningDeltaEvent
            | ReasoningDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent
            | FailedEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """The JSON of an event of a stream; `event:` repeats its `type`."""
