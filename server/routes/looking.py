"""`GET /v1/cache` and `POST /v1/attention`: for people who look on. They generate nothing."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.introspection import AttentionQuery, AttentionSnapshot, CacheQuery
from windlass.server.errors import ApiError, bad_request
from windlass.server.exchange.body import read_body
from windlass.server.exchange.slices import LargeJson
from windlass.server.exchange.state import ServerState
from windlass.server.generation.prompts import check_token_ids
from windlass.server.generation.request_rotation import read_rotation
from windlass.server.protocol.looking import AttentionMap, AttentionRequest, CachePages
from windlass.server.routes.common import (
    BODY_ERRORS,
    answers,
    body_of,
    caller_of,
    loaded_model,
    require_admin,
    state_of,
    while_connected,
)

router = APIRouter()

_COUNTERS = (
    "num_running",
    "num_waiting",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "context_shifts",
    "dropped_tokens",
    "reused_passages",
    "reused_tokens",
    "key_moves",
)


@router.get("/v1/cache", responses=answers(CachePages, errors=(403,)))
async def cache_pages(request: Request) -> Response:
    """Which pages of the cache are held, kept or free, by whom, and the counters beside them."""
    require_admin(request)
    state = state_of(request)
    return LargeJson(await state.shown_cache.get(lambda: _cache(state)))


async def _cache(state: ServerState) -> tuple[bytes, float]:
    """The answer, and the seconds that it cost the engine."""
    info = loaded_model(state)
    # Asked for together, both are answered between the same two steps.
    picture, fresh = await asyncio.gather(state.engine.inspect(CacheQuery()), state.metrics.refresh())
    stats = fresh or state.metrics.last_stats
    counters = {name: getattr(stats, name) for name in _COUNTERS} if stats is not None else {}
    shown = asdict(picture)
    cost = shown.pop("seconds")
    answer = {"time": time.monotonic(), "bytes_per_token": info.kv_bytes_per_token, **shown, "counters": counters}
    return to_json(answer), cost


@router.post(
    "/v1/attention",
    openapi_extra=body_of(AttentionRequest),
    responses=answers(AttentionMap, errors=(*BODY_ERRORS, 403)),
)
async def attention(request: Request) -> Response:
    """What a head of a layer attends to in a short text, under a rotary scaling. Other requests wait for its one pass."""
    state = state_of(request)
    require_admin(request)
    _check_shown(state)
    body = await read_body(request, AttentionRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    if state.adapters.find(body.model) is not None:
        raise bad_request("attention is shown of the model itself, without an adapter: leave model out", "model")
    info = state.admit()
    if body.tokens is not None:
        check_token_ids(body.tokens, info.vocab_size, "tokens")
        token_ids = body.tokens
    else:
        assert body.prompt is not None
        (prompt,) = await state.text.encode(
            [body.prompt],
            add_special_tokens=True,
            max_model_len=info.max_model_len,
            truncate=None,
            param="prompt",
            caller=caller_of(request),
        )
        token_ids = prompt.token_ids
    scaling = read_rotation(body.rope_scaling, None, state.settings, info).scaling
    question = AttentionQuery(tuple(token_ids), body.layer, body.head, scaling)
    # One at a time: each holds up the steps of everybody else.
    inspect = state.attention_turn.run(lambda: state.engine.inspect(question))
    picture = await while_connected(request, inspect)
    return LargeJson(await state.text.on_thread(_shown, state.settings.served_model_name, question, picture))


def _check_shown(state: ServerState) -> None:
    """Raise ApiError 403 unless this server shows attention."""
    if not state.settings.attention_maps:
        raise ApiError(
            403,
            "this server shows no attention: start it with --attention-maps",
            code="attention_off",
        )


def _shown(model: str, question: AttentionQuery, picture: AttentionSnapshot) -> bytes:
    weights = picture.rows(picture.weights)
    scores = [[x if x > -math.inf else None for x in row] for row in picture.rows(picture.scores)]
    answer: dict[str, Any] = {
        "model": model,
        "layer": question.layer,
        "head": question.head,
        "num_layers": picture.num_layers,
        "num_heads": picture.num_heads,
        "tokens": question.token_ids,
        "fingerprint": picture.fingerprint,
        "weights": weights,
        "scores": scores,
        "weight_by_distance": _by_distance(weights),
        "score_by_distance": _by_distance(scores),
    }
    return to_json(answer)


def _by_distance(rows: list[list[Any]]) -> list[float | None]:
    """The mean of each diagonal; None where all of it is hidden."""
    found: list[float | None] = []
    for back in range(len(rows)):
        seen = [row[i - back] for i, row in enumerate(rows) if i >= back and row[i - back] is not None]
        found.append(sum(seen) / len(seen) if seen else None)
    return found
