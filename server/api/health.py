"""`GET /health`, `/ready`, `/version` and `/metrics`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.api.router import ApiRouter, json_response
from windlass.server.app.state import ServerState, require_admin, state_of
from windlass.server.observability.metrics import CONTENT_TYPE
from windlass.server.schemas.base import StrictModel, optional

router = ApiRouter("Health", "State of the server.")


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


@router.endpoint("GET", "/health", limited=False, response=Status, unready=_UNREADY)
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


@router.endpoint("GET", "/ready", limited=False, response=Status, unready=_UNREADY)
async def ready(request: Request) -> Response:
    """200 while new work is accepted."""
    state = state_of(request)
    answer = Status.model_construct(status="draining" if state.draining else state.engine.state)
    return _response(state, answer, answer.status == "ready")


@router.endpoint("GET", "/version", limited=False, response=Version)
async def version(request: Request) -> Response:
    """Version of the server."""
    return json_response(Version(version=request.app.version))


@router.endpoint("GET", "/metrics", limited=False, response=None, errors=(403,))
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    require_admin(request)
    return Response(await state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


def _response(state: ServerState, answer: Status, ok: bool) -> Response:
    headers = {} if ok else {"retry-after": str(state.settings.retry_after_seconds)}
    return json_response(answer, status=200 if ok else 503, headers=headers)
