"""Bodies and answers of `/tokenize`, `/detokenize` and `/apply_template`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from windlass.server.protocol.base import FreeForm, StrictModel
from windlass.server.protocol.chat import MAX_MESSAGES, ChatMessage
from windlass.server.protocol.tools import Tools


class TokenizeRequest(StrictModel):
    """Either `prompt` or `messages`, these with `tools` as in a chat.

    `return_offsets`: character spans of the tokens in the text (default true).
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"messages": {"type": "null"}, "prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"prompt": {"type": "null"}, "messages": {"type": "array"}}},
            ]
        }
    )

    hints: ClassVar[dict[str, str]] = {"content": "it is called prompt here"}  # llama.cpp's name

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    return_offsets: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: FreeForm | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("source", "give either prompt or messages")
        return self


Span = Annotated[list[int], Field(min_length=2, max_length=2)]


class TokenizeAnswer(StrictModel):
    """`offsets[i]` is the [start, end) of token i in the tokenized text, in characters."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    offsets: list[Span] | None = None
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """`tokens`: ids, special ones kept unless `skip_special_tokens`. `return_token_strs`: also the text of each alone."""

    model: str | None = None
    # What is inside is looked at beside the event loop: there may be millions of them.
    tokens: Annotated[
        list[Any], Field(max_length=2**21, json_schema_extra={"items": {"type": "integer", "minimum": 0}})
    ]
    skip_special_tokens: bool | None = None
    return_offsets: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeAnswer(StrictModel):
    """`offsets[i]` is the [start, end) of what token i adds to the text, in characters; `token_strs[i]` its own text."""

    prompt: str
    offsets: list[Span] | None = None
    token_strs: list[str] | None = None


class TemplateRequest(StrictModel):
    """A conversation, with `tools` as in a chat."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: FreeForm | None = None


class TemplateAnswer(StrictModel):
    """The text that a chat of these messages continues."""

    prompt: str
