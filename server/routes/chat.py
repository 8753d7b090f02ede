"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.answers.base import AnswerWriter
from windlass.server.answers.chat import ChatWriter
from windlass.server.exchange.body import read_body
from windlass.server.exchange.streaming import Exchange
from windlass.server.generation.deltas import Tally
from windlass.server.protocol.chat import ChatCompletion, ChatEvent, ChatRequest
from windlass.server.routes.common import GENERATION_ERRORS, answers, body_of, state_of
from windlass.server.routes.conversation import check_chat, prepare
from windlass.server.routes.pipeline import fingerprinted_envelope, run
from windlass.server.text.service import Prompt

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    openapi_extra=body_of(ChatRequest),
    responses=answers(ChatCompletion, events=ChatEvent, errors=GENERATION_ERRORS),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, ChatRequest, stall_seconds=state.settings.body_stall_seconds)
    chat = await check_chat(state, request, body, arrival=arrival)

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        prompts, job = await prepare(chat)

        def make_writer(prompts: Sequence[Prompt], tally: Tally) -> AnswerWriter:
            head = fingerprinted_envelope(
                "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", job
            )
            return ChatWriter(state.tokenizer, prompts, tally, job.options, head, parsing=job.parsing)

        await run(exchange, job, prompts, param="messages", make_writer=make_writer)

    return Exchange(state, work, deadline=chat.job.deadline)
