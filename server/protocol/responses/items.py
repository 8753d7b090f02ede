"""Items of a response's input and output: messages, calls, results of calls, and thinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field, Tag, ValidationError
from pydantic_core import to_json

from windlass.server.protocol.base import StrictModel
from windlass.server.protocol.generation_request import only_empty
from windlass.server.protocol.kinds import OTHER, OtherKind, by_type, texts
from windlass.server.protocol.tools import MAX_ARGUMENTS, whole_arguments

MAX_ITEMS = 16384
MAX_PARTS = 4096

Id = Annotated[str, Field(max_length=256)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
INCOMPLETE = "incomplete"
_STATUS = frozenset({"status", "created_by", "caller"})


class TextPart(StrictModel):
    """Text. What answers have beside it may come back, without effect."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "logprobs", "parsed", "prompt_cache_breakpoint", "cache_control"}
    )

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(StrictModel):
    """What another model said in place of an answer; it counts as text."""

    type: Literal["refusal"]
    refusal: str


_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class _OtherPart(OtherKind):
    what = "parts"
    instead = "input_text, output_text and refusal"


Part = Annotated[
    Annotated[TextPart, Tag("[input_text]")]
    | Annotated[TextPart, Tag("[output_text]")]
    | Annotated[TextPart, Tag("[text]")]
    | Annotated[TextPart, Tag("[summary_text]")]
    | Annotated[TextPart, Tag("[reasoning_text]")]
    | Annotated[RefusalPart, Tag("[refusal]")]
    | Annotated[_OtherPart, Tag(OTHER)],
    by_type((*_TEXTS, "refusal")),
]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), texts("input_text")]


def text_of(parts: list[Any]) -> str:
    """The text of parts, which are joined by line breaks as those of a chat's messages are."""
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in parts)


class MessageItem(StrictModel):
    """What somebody said. `content`: a string or parts."""

    ignored: ClassVar[frozenset[str]] = _STATUS | {"phase"}

    type: Literal["message"] = "message"
    id: Id | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


def _whole_arguments(value: str) -> str:
    """The same as JSON text, as items of answers have it; it is bounded as they are."""
    whole = whole_arguments(value)
    return whole if isinstance(whole, str) else str(whole_arguments(to_json(whole).decode()))


class CallItem(StrictModel):
    """A call that the assistant made. `arguments`: the JSON text of an object; other text becomes `{"arguments": "the text"}`.
    One that is `incomplete` was cut short; it has no effect, unless there is a result of it.
    """

    ignored: ClassVar[frozenset[str]] = _STATUS - {"status"} | {"parsed_arguments", "async"}

    type: Literal["function_call"] = "function_call"
    id: Id | None = None
    status: Any = None
    call_id: CallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, AfterValidator(_whole_arguments)] = Field(default="", max_length=MAX_ARGUMENTS)
    namespace: Annotated[str | None, only_empty("namespaces are")] = None


class CallOutputItem(StrictModel):
    """The result of a call: a string, or parts of text."""

    ignored: ClassVar[frozenset[str]] = _STATUS | {"name", "namespace"}

    type: Literal["function_call_output"] = "function_call_output"
    id: Id | None = None
    call_id: CallId
    output: Parts


class ReasoningItem(StrictModel):
    """The thinking of an earlier turn. `encrypted_content` has no effect: this server encrypts none."""

    ignored: ClassVar[frozenset[str]] = _STATUS | {"encrypted_content"}

    type: Literal["reasoning"] = "reasoning"
    id: Id | None = None
    summary: Parts = Field(default_factory=list)
    content: Parts | None = None


class ItemReference(StrictModel):
    """An item of a response that is kept, by its id."""

    type: Literal["item_reference"]
    id: Id


def _kind(item: dict[str, Any]) -> str:
    return "message" if "role" in item else ""


class _OtherItem(OtherKind):
    what = "items"
    instead = "message, function_call, function_call_output, reasoning and item_reference"


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem
InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[item_reference]")]
    | Annotated[_OtherItem, Tag(OTHER)],
    by_type(("message", "function_call", "function_call_output", "reasoning", "item_reference"), _kind),
]


def known_items(items: list[InputItem]) -> list[Item]:
    """The same: one of another kind has not been accepted, and what references name stands in their place."""
    return cast(list[Item], items)


_KINDS: dict[str, type[MessageItem] | type[CallItem] | type[ReasoningItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "reasoning": ReasoningItem,
}


def kept_items(output: Sequence[dict[str, Any]]) -> list[Item]:
    """The items of an answer, made into those of a later request's input.

    A call that was cut short is left out, and one that no request could send back: its arguments are too long.
    """
    found = [_kept(item) for item in output if item["type"] != "function_call" or item["status"] == "completed"]
    return [item for item in found if item is not None]


def _kept(item: dict[str, Any]) -> Item | None:
    try:
        return _KINDS[item["type"]].model_validate(item)
    except ValidationError:
        return None
