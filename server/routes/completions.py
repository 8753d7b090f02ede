"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.answers.base import AnswerWriter
from windlass.server.answers.completions import CompletionWriter
from windlass.server.exchange.body import read_body
from windlass.server.exchange.request_id import request_id, set_request_id
from windlass.server.exchange.streaming import Exchange
from windlass.server.generation.deltas import Tally
from windlass.server.generation.prompts import check_token_prompts, split_prompts
from windlass.server.protocol.completions import Completion, CompletionEvent, CompletionRequest
from windlass.server.routes.common import GENERATION_ERRORS, answers, body_of, caller_of, state_of
from windlass.server.routes.fill_in.gaps import check_suffix, prompts_around_gaps
from windlass.server.routes.job import GenerationJob, telling_of_scalings
from windlass.server.routes.pipeline import check, fingerprinted_envelope, run
from windlass.server.text.service import Prompt

router = APIRouter()


@router.post(
    "/v1/completions",
    openapi_extra=body_of(CompletionRequest),
    responses=answers(Completion, events=CompletionEvent, errors=GENERATION_ERRORS),
)
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, given as text or token ids."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, CompletionRequest, stall_seconds=state.settings.body_stall_seconds)
    if body.request_id is not None:
        set_request_id(request.scope, body.request_id)
    state.check_model(body.model)
    info = state.admit(caller_of(request))
    job = check(
        state,
        body,
        info,
        request_id=request_id(request.scope),
        caller=caller_of(request),
        arrival=arrival,
        default_max_tokens=state.settings.completion_max_tokens,
        logprobs=body.logprobs,
        chat=False,
        echo=bool(body.echo),
    )

    if body.suffix:
        check_suffix(job, body)

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with telling_of_scalings(job):
            prompts = await (prompts_around_gaps if body.suffix else _prompts)(job, body)
        echoes = await _echoes(job, prompts) if body.echo else None

        def make_writer(prompts: Sequence[Prompt], tally: Tally) -> AnswerWriter:
            head = fingerprinted_envelope("cmpl", "text_completion", job)
            return CompletionWriter(state.tokenizer, prompts, tally, job.options, head, echoes)

        await run(exchange, job, prompts, param="prompt", make_writer=make_writer)

    return Exchange(state, work, deadline=job.deadline)


async def _prompts(job: GenerationJob, body: CompletionRequest) -> list[Prompt]:
    state = job.state
    given = split_prompts(body.prompt, max_prompts=state.settings.max_prompts)
    truncate, keep_first = body.truncate_prompt_tokens, body.truncation_side == "right"
    if isinstance(given[0], str):
        return await state.text.encode(
            given,
            add_special_tokens=body.add_special_tokens is not False,
            max_model_len=job.size.longest_prompt,
            truncate=truncate,
            keep_first=keep_first,
            param="prompt",
            caller=job.caller,
        )
    checked = await state.text.on_thread(
        lambda: check_token_prompts(
            given, job.info.vocab_size, job.size.longest_prompt, truncate=truncate, keep_first=keep_first
        )
    )
    return [Prompt(ids) for ids in checked]


async def _echoes(job: GenerationJob, prompts: list[Prompt]) -> list[str]:
    """What `echo` repeats: the caller's own text where there is one, else what the token ids say."""
    unwritten = [prompt.token_ids for prompt in prompts if prompt.text is None]
    decoded: Iterator[str] = iter(())
    if unwritten:
        skip = job.options.skip_special_tokens
        decoded = iter(await job.state.text.decode(unwritten, skip_special_tokens=skip, caller=job.caller))
    return [next(decoded) if prompt.text is None else prompt.text for prompt in prompts]
