"""How every request of these endpoints begins: its body is read, its model is found, and it is let in or not."""

from __future__ import annotations

import time
from typing import TypeVar

from starlette.requests import Request

from windlass.server.exchange.body import read_body
from windlass.server.exchange.request_id import request_id, set_request_id
from windlass.server.protocol.retrieval import PromptRequest
from windlass.server.routes.common import caller_of, state_of
from windlass.server.routes.retrieval.job import PoolingJob, check_prompt_request

B = TypeVar("B", bound=PromptRequest)


async def begin(request: Request, model: type[B]) -> tuple[B, PoolingJob]:
    """The body and the job that it asks for; raises ApiError or RequestError naming the field at fault."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, model, stall_seconds=state.settings.body_stall_seconds)
    if body.request_id is not None:
        set_request_id(request.scope, body.request_id)
    state.check_model(body.model)
    info = state.admit(caller_of(request))
    job = check_prompt_request(
        state, body, info, request_id=request_id(request.scope), caller=caller_of(request), arrival=arrival
    )
    return body, job


def usage(tokens: int) -> dict[str, int]:
    """OpenAI's, of a request that generates nothing."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}
