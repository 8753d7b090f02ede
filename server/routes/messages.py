"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.answers.messages import PING, MessageWriter
from windlass.server.errors import ApiError, error_body
from windlass.server.exchange.body import read_body
from windlass.server.exchange.slices import LargeJson
from windlass.server.exchange.state import ServerState
from windlass.server.exchange.streaming import Exchange, StreamForm
from windlass.server.generation.deltas import Tally
from windlass.server.generation.translation.messages import chat_of_messages
from windlass.server.generation.translation.names import Translated
from windlass.server.protocol.messages.answers import MessageAnswer, MessageEvent, TokenCount
from windlass.server.protocol.messages.request import CountTokensRequest, MessageRequest
from windlass.server.routes.common import (
    BODY_ERRORS,
    GENERATION_ERRORS,
    answers,
    body_of,
    caller_of,
    state_of,
    while_connected,
)
from windlass.server.routes.conversation import check_chat, count_chat, prepare
from windlass.server.routes.pipeline import run
from windlass.server.text.service import Prompt

router = APIRouter()

MANY_MESSAGES = 500  # from which making a chat of them leaves the event loop


@router.post(
    "/v1/messages",
    openapi_extra=body_of(MessageRequest),
    responses=answers(MessageAnswer, events=MessageEvent, errors=GENERATION_ERRORS, named=True),
)
async def create_message(request: Request) -> Response:
    """Answer a conversation, in the form of Anthropic's Messages API."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, MessageRequest, stall_seconds=state.settings.body_stall_seconds)
    translated = await _translated(state, body)
    with translated.names.told():
        chat = await check_chat(state, request, translated.body, arrival=arrival)

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with translated.names.told():
            prompts, job = await prepare(chat)

            def make_writer(prompts: Sequence[Prompt], tally: Tally) -> MessageWriter:
                message = {"id": f"msg_{uuid.uuid4().hex}", "model": job.model_name}
                return MessageWriter(state.tokenizer, tally, job.options, job.parsing, message=message)

            await run(exchange, job, prompts, param="messages", make_writer=make_writer)

    def failure(error: ApiError) -> bytes:
        return b"event: error\ndata: " + to_json(error_body(error, request.scope)) + b"\n\n"

    return Exchange(state, work, deadline=chat.job.deadline, form=StreamForm(failure, done=b"", keep_alive=PING))


async def _translated(state: ServerState, body: MessageRequest | CountTokensRequest) -> Translated:
    made = body, state.thinking
    many = len(body.messages) > MANY_MESSAGES
    return await state.text.on_thread(chat_of_messages, *made) if many else chat_of_messages(*made)


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=body_of(CountTokensRequest),
    responses=answers(TokenCount, errors=BODY_ERRORS),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens an input comes to, without generating. It needs the tokenizer only, so it works while the engine starts."""
    state = state_of(request)
    body = await read_body(request, CountTokensRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    translated = await _translated(state, body)
    with translated.names.told():
        count = await while_connected(request, count_chat(state, translated.body, caller_of(request)))
    return LargeJson(to_json({"input_tokens": count}))
