"""`GET /health`, `/ready`, `/version`, `/metrics` and `/v1/cache`, and `POST /v1/attention`."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError, to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.introspection import MAX_ATTENTION_TOKENS, AttentionQuery, AttentionSnapshot, CacheQuery
from windlass.server.api.router import BODY_ERRORS, ApiRouter, json_response
from windlass.server.app.request_body import read_body
from windlass.server.app.state import ServerState, caller_of, loaded_model, owner_of, require_admin, state_of
from windlass.server.errors import ApiError, bad_request
from windlass.server.observability.metrics import CONTENT_TYPE
from windlass.server.schemas.base import RequestedModel, RopeScalingField, StrictModel, optional
from windlass.server.serving.prompts import check_token_ids
from windlass.server.serving.request_rotation import parse_rotation
from windlass.server.serving.streaming import LargeJsonResponse, run_while_connected

health_router = ApiRouter("Health", "State of the server.")
inside_router = ApiRouter("Inside", "Contents of the cache, and attention weights.")


class ReplicaCount(StrictModel):
    """Engines of a server with several."""

    total: int = Field(description="Number of engines that serve the model.")
    ready: int = Field(description="Number of engines that accept requests.")


class Status(StrictModel):
    """State of the server: `draining` during a shutdown, else the state of its engine."""

    status: Literal["starting", "ready", "restarting", "failed", "closed", "draining"] = Field(
        description="State of the server."
    )
    degraded: list[Literal["engine_restarted", "event_loop_stalled", "text_process_lost"]] | None = optional(
        "Only for `/health`: faults of the last minute from which the server recovered. Absent if there were none."
    )
    crash_report: str | None = optional(
        "Only for `/health`: file name of the last crash report of the engine, in `WINDLASS_CRASH_DIR`. "
        "Absent if there is none."
    )
    replicas: ReplicaCount | None = optional("Only for `/health`: number of engines. Absent if there is one engine.")


class Version(StrictModel):
    """Version number of the server."""

    version: str = Field(description="Version of the server.")


_UNREADY = "The engine is not ready, or the connection was refused."


@health_router.endpoint("GET", "/health", limited=False, response=Status, unready=_UNREADY)
async def health(request: Request) -> Response:
    """200 while the process and the engine are alive, draining included; lists recent faults."""
    state = state_of(request)
    answer = Status.model_construct(status=state.engine.state)
    if degraded := state.conditions.current():
        answer.degraded = degraded
    # Any client may ask: only the name, in a folder that the operator knows.
    if (report := state.engine.crash_report) is not None:
        answer.crash_report = report.name
    if state.engine.has_replicas:
        engines = state.engine.engines
        ready = sum(engine.state == "ready" for engine in engines)
        answer.replicas = ReplicaCount(total=len(engines), ready=ready)
    return _response(state, answer, state.engine.state == "ready")


@health_router.endpoint("GET", "/ready", limited=False, response=Status, unready=_UNREADY)
async def ready(request: Request) -> Response:
    """200 while new work is accepted."""
    state = state_of(request)
    answer = Status.model_construct(status="draining" if state.draining else state.engine.state)
    return _response(state, answer, answer.status == "ready")


@health_router.endpoint("GET", "/version", limited=False, response=Version)
async def version(request: Request) -> Response:
    """Version of the server."""
    return json_response(Version(version=request.app.version))


@health_router.endpoint("GET", "/metrics", limited=False, response=None, errors=(403,))
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    require_admin(request)
    return Response(await state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


def _response(state: ServerState, answer: Status, ok: bool) -> Response:
    headers = {} if ok else {"retry-after": str(state.settings.retry_after_seconds)}
    return json_response(answer, status=200 if ok else 503, headers=headers)


_COUNTERS = (
    *("num_running", "num_waiting", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens"),
    *("generation_tokens", "context_shifts", "dropped_tokens", "reused_passages", "reused_tokens", "key_moves"),
)


class CacheGroup(StrictModel):
    """Blocks of one KV group. Entry i of the lists is a cell of `blocks_per_cell` blocks, from block i *
    `blocks_per_cell` on.

    The blocks of a cell that are not `held`, `shared` or `idle` are free, like all blocks after the first
    `num_shown`.
    """

    num_blocks: int = Field(description="Number of blocks of the group.")
    num_shown: int = Field(description="Number of blocks that the lists cover. The blocks after them are free.")
    blocks_per_cell: int = Field(description="Number of blocks per entry of the lists.")
    window: int | None = Field(description="Number of tokens that the layers attend to. Null: all.")
    held: list[int] = Field(description="Number of blocks of each cell that one request holds.")
    shared: list[int] = Field(description="Number of blocks of each cell that several requests hold.")
    idle: list[int] = Field(
        description="Number of blocks of each cell that no request holds and an equal prompt can reuse."
    )
    owners: list[int] = Field(description="Index into `sequences` of one that holds a block of the cell, or -1.")
    engine: int = Field(default=0, description="Index of the replica that has the cache.")
    states: bool = Field(
        default=False, description="Whether a block holds a recurrent state instead of keys and values."
    )


class CacheSequence(StrictModel):
    """A running sequence."""

    num_tokens: int = Field(description="Number of tokens, prompt and output.")
    num_prompt_tokens: int = Field(description="Number of prompt tokens.")
    num_cached_tokens: int = Field(description="Number of prompt tokens that were found in the prefix cache.")
    num_blocks: int = Field(description="Number of blocks that the sequence holds.")
    num_shifts: int = Field(description="Number of times that oldest tokens were dropped.")
    num_reused_tokens: int = Field(
        description="Number of prompt tokens from passages that were cached at other positions."
    )


class CachePages(StrictModel):
    """Current contents of the cache."""

    time: float = Field(description="Monotonic time in seconds, for rates of the counters.")
    block_size: int = Field(description="Number of tokens per block.")
    bytes_per_token: int = Field(description="Memory per token in all layers, in bytes.")
    groups: list[CacheGroup] = Field(description="Blocks of each KV group.")
    sequences: list[CacheSequence] = Field(description="Running sequences, at most 64 per engine.")
    counters: dict[str, float] = Field(description="Counters and gauges that `/metrics` also has.")


class AttentionRequest(StrictModel):
    """A text of 2 to 256 tokens, as `prompt` or as `tokens`, and a head of the model."""

    model: RequestedModel = None
    prompt: Annotated[str, Field(max_length=16384)] | None = optional("Text of 2 to 256 tokens.")
    tokens: (
        Annotated[
            list[Any],
            Field(max_length=MAX_ATTENTION_TOKENS, json_schema_extra={"items": {"type": "integer", "minimum": 0}}),
        ]
        | None
    ) = optional("Token ids in place of `prompt`.")
    layer: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0, description="Index of the layer, from 0. Default: 0."
    )
    head: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0, description="Index of the head in the layer, from 0. Default: 0."
    )
    rope_scaling: RopeScalingField = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.tokens is None):
            raise PydanticCustomError("source", "give either prompt or tokens")
        return self


class AttentionMap(StrictModel):
    """Attention of one head. Row i of `weights` and `scores` has the tokens 0 to i. Null: a masked token."""

    model: str = Field(description="Name of the served model.")
    layer: int = Field(description="Index of the layer, from 0.")
    head: int = Field(description="Index of the head in the layer, from 0.")
    num_layers: int = Field(description="Number of layers of the model.")
    num_heads: int = Field(description="Number of heads of the layer.")
    tokens: list[int] = Field(description="Token ids of the text.")
    fingerprint: str = Field(description="Fingerprint of the rotation.")
    weights: list[list[float]] = Field(description="Attention weights after the softmax.")
    scores: list[list[float | None]] = Field(
        description="Attention scores before the softmax, scaled and, if the model does so, capped."
    )
    weight_by_distance: list[float] = Field(description="Mean weight by distance in tokens, from 0.")
    score_by_distance: list[float | None] = Field(
        description="Mean score by distance in tokens, from 0. Null if no token at this distance is visible."
    )


@inside_router.endpoint("GET", "/v1/cache", limited=False, response=CachePages, errors=(403,))
async def cache_pages(request: Request) -> Response:
    """Current contents of the cache: blocks by their state and owner, running sequences, and counters."""
    require_admin(request)
    state = state_of(request)
    return LargeJsonResponse(await state.cache_view.get(lambda: _cache_json(state)))


async def _cache_json(state: ServerState) -> tuple[bytes, float]:
    """The answer, and the time that it cost the engine in seconds."""
    info = loaded_model(state)
    # Sent together, both are answered between the same two steps.
    snapshot, fresh = await asyncio.gather(state.engine.inspect(CacheQuery()), state.metrics.refresh())
    stats = fresh or state.metrics.last_stats
    counters = {name: getattr(stats, name) for name in _COUNTERS} if stats is not None else {}
    fields = asdict(snapshot)
    cost = fields.pop("seconds")
    answer = {"time": time.monotonic(), "bytes_per_token": info.kv_bytes_per_token, **fields, "counters": counters}
    return to_json(answer), cost


@inside_router.endpoint(
    "POST",
    "/v1/attention",
    body=AttentionRequest,
    response=AttentionMap,
    errors=(*BODY_ERRORS, 403),
    examples={
        "scaled": (
            "A head under a scaling",
            {
                "prompt": "In the beginning",
                "layer": 0,
                "head": 1,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
        )
    },
)
async def attention(request: Request) -> Response:
    """Compute the attention of one head in a short text, under a rotary scaling. Other requests wait for its forward
    pass.
    """
    state = state_of(request)
    require_admin(request)
    if not state.settings.attention_maps:
        message = "attention maps are disabled: start the server with --attention-maps"
        raise ApiError(403, message, code="attention_off")
    body = await read_body(request, AttentionRequest)
    state.check_model(body.model)
    if state.adapters.find(body.model) is not None:
        raise bad_request("attention maps are not available for adapters: remove model", "model")
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
    state.callers.charge_prompt_tokens(owner_of(request), len(token_ids))
    scaling = parse_rotation(body.rope_scaling, None, state.settings, info).scaling
    attention_query = AttentionQuery(tuple(token_ids), body.layer, body.head, scaling)
    # One at a time, as each delays the steps of all other requests.
    inspect = state.attention_executor.run(lambda: state.engine.inspect(attention_query))
    snapshot = await run_while_connected(request, inspect)
    return LargeJsonResponse(
        await state.text.run_in_thread(_attention_json, state.settings.served_model_name, attention_query, snapshot)
    )


def _attention_json(model: str, attention_query: AttentionQuery, snapshot: AttentionSnapshot) -> bytes:
    weights = snapshot.rows(snapshot.weights)
    scores = [[x if x > -math.inf else None for x in row] for row in snapshot.rows(snapshot.scores)]
    return AttentionMap.model_construct(
        model=model,
        layer=attention_query.layer,
        head=attention_query.head,
        num_layers=snapshot.num_layers,
        num_heads=snapshot.num_heads,
        tokens=list(attention_query.token_ids),
        fingerprint=snapshot.fingerprint,
        weights=weights,
        scores=scores,
        weight_by_distance=_mean_by_distance(weights),
        score_by_distance=_mean_by_distance(scores),
    ).json_bytes()


def _mean_by_distance(rows: list[list[Any]]) -> list[float | None]:
    """Mean of each diagonal, None if all of it is masked."""
    found: list[float | None] = []
    for distance in range(len(rows)):
        values = [row[i - distance] for i, row in enumerate(rows) if i >= distance and row[i - distance] is not None]
        found.append(sum(values) / len(values) if values else None)
    return found
