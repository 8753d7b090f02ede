"""`POST /tokenize`, `/detokenize` and `/apply_template`. They need the tokenizer only, so they work while the engine starts."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.errors import answer_too_large, bad_request
from windlass.server.exchange.body import read_body
from windlass.server.exchange.slices import LargeJson
from windlass.server.exchange.state import ServerState
from windlass.server.generation.prompts import check_token_ids
from windlass.server.generation.tool_use import tools_for_template
from windlass.server.protocol.chat import ChatMessage
from windlass.server.protocol.text import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TemplateAnswer,
    TemplateRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from windlass.server.routes.common import BODY_ERRORS, answers, body_of, caller_of, state_of, while_connected

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest), responses=answers(TokenizeAnswer, errors=BODY_ERRORS))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    state = state_of(request)
    body = await read_body(request, TokenizeRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    _check_length(state, body)
    return LargeJson(await while_connected(request, _tokenize(state, body, caller_of(request))))


async def _tokenize(state: ServerState, body: TokenizeRequest, caller: str) -> bytes:
    if body.messages is not None:
        text = await _render(state, body, body.messages, caller)
        add_special_tokens, param = bool(body.add_special_tokens), "messages"
    else:
        assert body.prompt is not None
        text, add_special_tokens, param = body.prompt, body.add_special_tokens is not False, "prompt"
    info = state.engine.info
    return await state.text.tokenize(
        text,
        add_special_tokens=add_special_tokens,
        offsets=body.return_offsets is not False,
        token_strs=bool(body.return_token_strs),
        max_model_len=None if info is None else info.max_model_len,
        param=param,
        caller=caller,
    )


async def _render(
    state: ServerState, body: TokenizeRequest | TemplateRequest, messages: Sequence[ChatMessage], caller: str
) -> str:
    return await state.text.render(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
        tools=tools_for_template(body.tools),
        caller=caller,
    )


@router.post(
    "/apply_template", openapi_extra=body_of(TemplateRequest), responses=answers(TemplateAnswer, errors=BODY_ERRORS)
)
@router.post("/apply-template", include_in_schema=False)  # as llama.cpp spells it
async def apply_template(request: Request) -> Response:
    """A conversation as the chat template writes it: the text that a chat of these messages continues."""
    state = state_of(request)
    body = await read_body(request, TemplateRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    _check_length(state, body)
    text = await while_connected(request, _render(state, body, body.messages, caller_of(request)))
    answer = await state.text.on_thread(to_json, {"prompt": text})
    if len(answer) > state.settings.max_response_bytes:
        raise answer_too_large(len(answer), state.settings.max_response_bytes)
    return LargeJson(answer)


@router.post(
    "/detokenize", openapi_extra=body_of(DetokenizeRequest), responses=answers(DetokenizeAnswer, errors=BODY_ERRORS)
)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body = await read_body(request, DetokenizeRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    info = state.engine.info
    vocab_size = max(state.tokenizer.vocab_size, 0 if info is None else info.vocab_size)
    await state.text.on_thread(check_token_ids, body.tokens, vocab_size, "tokens")
    answer = state.text.detokenize(
        body.tokens,
        skip_special_tokens=bool(body.skip_special_tokens),
        offsets=body.return_offsets is not False,
        token_strs=bool(body.return_token_strs),
        caller=caller_of(request),
    )
    return LargeJson(await while_connected(request, answer))


def _check_length(state: ServerState, body: TokenizeRequest | TemplateRequest) -> None:
    most = state.settings.max_tokenize_chars
    if isinstance(body, TokenizeRequest) and body.prompt is not None:
        size, param = len(body.prompt), "prompt"
    else:
        size, param = sum(len(message.content or "") for message in body.messages or ()), "messages"
    if size > most:
        raise bad_request(
            f"{param} holds {size} characters, at most {most} are tokenized at once", param, "string_too_long"
        )
