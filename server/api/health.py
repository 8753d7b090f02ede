"""`GET /health`, `/ready`, `/version` and `/metrics`."""

from __future__ import annotations

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.api.router import ApiRouter, Operation
from windlass.server.app.state import ServerState, require_admin, state_of
from windlass.server.observability.metrics import CONTENT_TYPE
from windlass.server.schemas.response_parts import Status, Version

router = ApiRouter("Health", "State of the server.")

_STATUS = Operation(response=Status, unready="The engine is not ready, or the connection was refused.")


@router.endpoint("GET", "/health", _STATUS)
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


@router.endpoint("GET", "/ready", _STATUS)
async def ready(request: Request) -> Response:
    """200 while new work is accepted."""
    state = state_of(request)
    accepting = state.engine.state == "ready" and not state.draining
    return _status(state, accepting, "draining" if state.draining else state.engine.state)


@router.endpoint("GET", "/version", Operation(response=Version))
async def version(request: Request) -> Response:
    """Version of the server."""
    return Response(to_json({"version": request.app.version}), media_type="application/json")


@router.endpoint("GET", "/metrics", Operation(response=None, errors=(403,)))
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
