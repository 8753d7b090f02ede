"""`POST /infill`: fill-in-the-middle as editors ask for it, in llama.cpp's form."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.answers.infill import InfillWriter
from windlass.server.exchange.body import read_body
from windlass.server.exchange.request_id import request_id, set_request_id
from windlass.server.exchange.streaming import Exchange, StreamForm
from windlass.server.generation.deltas import Tally
from windlass.server.generation.translation.infill import completion_of_infill, line_limits_of
from windlass.server.protocol.infill import Infill, InfillEvent, InfillRequest
from windlass.server.routes.common import GENERATION_ERRORS, answers, body_of, caller_of, state_of
from windlass.server.routes.fill_in.gaps import fill_in_of, fitted_prompt
from windlass.server.routes.pipeline import check, run
from windlass.server.text.service import Prompt

router = APIRouter()


@router.post(
    "/infill",
    openapi_extra=body_of(InfillRequest),
    responses=answers(Infill, events=InfillEvent, errors=GENERATION_ERRORS, done=False),
)
async def infill(request: Request) -> Response:
    """Fill the gap between two texts, in the form of llama.cpp's server, which editors' plugins speak."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, InfillRequest, stall_seconds=state.settings.body_stall_seconds)
    if body.request_id is not None:
        set_request_id(request.scope, body.request_id)
    state.check_model(body.model)
    info = state.admit(caller_of(request))
    translated = completion_of_infill(body)
    with translated.names.told():
        job = check(
            state,
            translated.body,
            info,
            request_id=request_id(request.scope),
            caller=caller_of(request),
            arrival=arrival,
            default_max_tokens=state.settings.default_max_tokens,
            logprobs=None,
            chat=False,
            line_limits=line_limits_of(body),
        )
    fill_in_of(job, "input_prefix")

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with translated.names.told():
            fitted = await fitted_prompt(job, body)

            def make_writer(prompts: Sequence[Prompt], tally: Tally) -> InfillWriter:
                return InfillWriter(
                    tally,
                    job.options,
                    model=job.model_name,
                    fields=body.response_fields,
                    truncated=fitted.truncated,
                )

            await run(exchange, job, [fitted.prompt], param="input_prefix", make_writer=make_writer)

    return Exchange(state, work, deadline=job.deadline, form=StreamForm(done=b""))
