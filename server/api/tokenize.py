"""`POST /tokenize`, `/detokenize` and `/apply_template`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.api.router import BODY_ERRORS, ApiRouter
from windlass.server.app.request_body import read_body
from windlass.server.app.state import ServerState, caller_of, state_of
from windlass.server.errors import response_too_large
from windlass.server.schemas.base import (
    AddSpecialTokens,
    RequestedModel,
    RequestModel,
    StrictModel,
    TemplateVariables,
    optional,
)
from windlass.server.schemas.chat import MAX_MESSAGES, ChatMessage
from windlass.server.schemas.tools import Tools
from windlass.server.serving.prompts import check_token_ids, check_tokenized_characters
from windlass.server.serving.streaming import LargeJsonResponse, run_while_connected
from windlass.server.serving.structured_output import tools_for_template
from windlass.server.text.service import ChatOptions, TokenizeOptions

router = ApiRouter("Tokens", "Text to token ids and back.")


class _TemplateFields(RequestModel):
    model: RequestedModel = None
    tools: Tools | None = optional("Functions that the model may call. Default: none.")
    add_generation_prompt: bool | None = optional("Whether the template opens the assistant's turn. Default: true.")
    continue_final_message: bool | None = optional(
        "Whether the answer continues the last message, which must be the assistant's. Excludes "
        "`add_generation_prompt`. Default: false."
    )
    chat_template_kwargs: TemplateVariables = None


class TokenizeRequest(_TemplateFields):
    """A text, or a conversation as rendered by the chat template."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"messages": {"type": "null"}, "prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"prompt": {"type": "null"}, "messages": {"type": "array"}}},
            ]
        }
    )

    hints: ClassVar[dict[str, str]] = {"content": "it is called prompt here"}  # llama.cpp's name

    prompt: str | None = optional("Text to tokenize.")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = (
        optional("Turns of the conversation, oldest first.")
    )
    add_special_tokens: AddSpecialTokens = None
    return_token_strs: bool | None = optional("Whether the tokens' texts are returned. Default: false.")
    return_offsets: bool | None = optional("Whether the tokens' character offsets are returned. Default: true.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("source", "give either prompt or messages")
        return self


Span = Annotated[list[int], Field(min_length=2, max_length=2)]


class TokenizeAnswer(StrictModel):
    """Token ids of a text."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int | None = Field(description="Context length in tokens. Null until the model has loaded.")
    tokens: list[int] = Field(description="Token ids.")
    offsets: list[Span] | None = optional(
        "Start and end of each token in the text, in characters; the end is exclusive."
    )
    token_strs: list[str] | None = optional("Texts of the tokens, if requested.")


class DetokenizeRequest(RequestModel):
    """Token ids to decode."""

    model: RequestedModel = None
    # The ids are checked in a thread: there may be millions of them.
    tokens: Annotated[
        list[Any], Field(max_length=2**21, json_schema_extra={"items": {"type": "integer", "minimum": 0}})
    ] = Field(description="Token ids.")
    skip_special_tokens: bool | None = optional("Whether special tokens are omitted from the text. Default: false.")
    return_offsets: bool | None = optional("Whether the tokens' character offsets are returned. Default: true.")
    return_token_strs: bool | None = optional("Whether the tokens' texts are returned. Default: false.")


class DetokenizeAnswer(StrictModel):
    """Text of token ids."""

    prompt: str = Field(description="The text.")
    offsets: list[Span] | None = optional(
        "Start and end of the text that each token adds, in characters; the end is exclusive."
    )
    token_strs: list[str] | None = optional("Texts of the tokens, if requested.")


class TemplateRequest(_TemplateFields):
    """A conversation to render."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="Turns of the conversation, oldest first."
    )


class TemplateAnswer(StrictModel):
    """Rendered text, which a chat of these messages continues."""

    prompt: str = Field(description="The conversation as rendered by the chat template.")


_QUESTION = {"messages": [{"role": "user", "content": "Where does the river begin?"}]}


@router.endpoint(
    "POST",
    "/tokenize",
    body=TokenizeRequest,
    response=TokenizeAnswer,
    errors=BODY_ERRORS,
    examples={
        "text": ("A text", {"prompt": "The king said"}),
        "chat": ("A conversation, rendered by the chat template", {**_QUESTION, "return_token_strs": True}),
    },
)
async def tokenize(request: Request) -> Response:
    """Tokenize a text, or a conversation as rendered by the chat template."""
    state = state_of(request)
    body = await read_body(request, TokenizeRequest)
    state.check_model(body.model)
    _check_characters(state, body)
    return LargeJsonResponse(await run_while_connected(request, _tokenize(state, body, caller_of(request))))


async def _tokenize(state: ServerState, body: TokenizeRequest, caller: str) -> bytes:
    info = state.engine.info
    options: TokenizeOptions = {
        # A chat template contains the special tokens.
        "add_special_tokens": (body.messages is None) if body.add_special_tokens is None else body.add_special_tokens,
        "offsets": body.return_offsets is not False,
        "token_strs": bool(body.return_token_strs),
        "max_model_len": None if info is None else info.max_model_len,
    }
    if body.messages is not None:
        return await state.text.tokenize_chat(body.messages, _chat_options(body), caller=caller, **options)
    assert body.prompt is not None
    return await state.text.tokenize(body.prompt, caller=caller, **options)


def _chat_options(body: TokenizeRequest | TemplateRequest) -> ChatOptions:
    return {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "variables": body.chat_template_kwargs,
        "tools": tools_for_template(body.tools),
    }


@router.endpoint(
    "POST",
    "/apply_template",
    aliases=("/apply-template",),
    body=TemplateRequest,
    response=TemplateAnswer,
    errors=BODY_ERRORS,
    examples={"plain": ("A conversation", _QUESTION)},
)
async def apply_template(request: Request) -> Response:
    """Render a conversation with the chat template: the text that a chat of these messages continues."""
    state = state_of(request)
    body = await read_body(request, TemplateRequest)
    state.check_model(body.model)
    _check_characters(state, body)
    rendering = state.text.render(body.messages, caller=caller_of(request), **_chat_options(body))
    text = await run_while_connected(request, rendering)
    answer = await state.text.run_in_thread(TemplateAnswer(prompt=text).json_bytes)
    if len(answer) > state.settings.max_response_bytes:
        raise response_too_large(len(answer), state.settings.max_response_bytes)
    return LargeJsonResponse(answer)


@router.endpoint(
    "POST",
    "/detokenize",
    body=DetokenizeRequest,
    response=DetokenizeAnswer,
    errors=BODY_ERRORS,
    examples={"plain": ("Token ids", {"tokens": [10, 11, 12]})},
)
async def detokenize(request: Request) -> Response:
    """Decode token ids."""
    state = state_of(request)
    body = await read_body(request, DetokenizeRequest)
    state.check_model(body.model)
    info = state.engine.info
    vocab_size = max(state.tokenizer.vocab_size, 0 if info is None else info.vocab_size)
    await state.text.run_in_thread(check_token_ids, body.tokens, vocab_size, "tokens")
    answer = state.text.detokenize(
        body.tokens,
        skip_special_tokens=bool(body.skip_special_tokens),
        offsets=body.return_offsets is not False,
        token_strs=bool(body.return_token_strs),
        caller=caller_of(request),
    )
    return LargeJsonResponse(await run_while_connected(request, answer))


def _check_characters(state: ServerState, body: TokenizeRequest | TemplateRequest) -> None:
    if isinstance(body, TokenizeRequest) and body.prompt is not None:
        check_tokenized_characters(state, len(body.prompt), "prompt")
    else:
        characters = sum(len(message.content or "") for message in body.messages or ())
        check_tokenized_characters(state, characters, "messages")
