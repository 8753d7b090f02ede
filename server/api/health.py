"""`GET /health`, `/ready`, `/version` and `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.app.state import ServerState, require_admin, state_of
from windlass.server.observability.metrics import CONTENT_TYPE
from windlass.server.schemas.openapi import openapi_responses
from windlass.server.schemas.response_parts import Status, Version

router = APIRouter(tags=["Health"])

_STATUS_RESPONSES = openapi_responses(Status)

_STATUS_RESPONSES[503] = {**_STATUS_RESPONSES[200], "description": "It is not"}


@router.get("/health", responses=_STATUS_RESPONSES)
async def health(request: Request) -> Response:
    """200 while process and engine are alive, draining included; tells what has lately gone wrong."""
    state = state_of(request)
    degraded = state.conditions.current()
    details: dict[str, object] = {"degraded": degraded} if degraded else {}
    # Anybody may ask: the name alone, in a folder that the operator knows.
    if (report := state.engine.crash_report) is not None:
        details["crash_report"] = report.name
    if state.engine.has_replicas:
        engines = state.engine.engines
        details["replicas"] = {"total": len(engines), "ready": sum(engine.state == "ready" for engine in engines)}
    return _status(state, state.engine.state == "ready", state.engine.state, details)


@router.get("/ready", responses=_STATUS_RESPONSES)
async def ready(request: Request) -> Response:
    """200 while new work is accepted."""
    state = state_of(request)
    accepting = state.engine.state == "ready" and not state.draining
    return _status(state, accepting, "draining" if state.draining else state.engine.state)


@router.get("/version", responses=openapi_responses(Version))
async def version(request: Request) -> Response:
    """Version of the server."""
    return Response(to_json({"version": request.app.version}), media_type="application/json")


@router.get("/metrics", responses=openapi_responses(None, media_type="text/plain", errors=(403,)))
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    require_admin(request)
    return Response(await state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


def _status(state: ServerState, ok: bool, status: str, details: dict[str, object] | None = None) -> Response:
    headers = {} if ok else {"retry-after": str(state.settings.retry_after_seconds)}
    return Response(
        to_json({"status": status, **(details or {})}),
        status_code=200 if ok else 503,
        media_type="application/json",
        headers=headers,
    )
