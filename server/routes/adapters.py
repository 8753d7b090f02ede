"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: adapters come and go while the server runs."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from windlass.server.exchange.body import read_body
from windlass.server.protocol.adapters import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest
from windlass.server.routes.common import BODY_ERRORS, answers, body_of, require_admin, state_of, while_connected

router = APIRouter()

_ERRORS = (*BODY_ERRORS, 403)


@router.post(
    "/v1/load_lora_adapter",
    openapi_extra=body_of(LoadAdapterRequest),
    responses=answers(AdapterAnswer, errors=_ERRORS),
)
async def load_adapter(request: Request) -> Response:
    """Load an adapter, which requests name as their model from then on."""
    require_admin(request)
    state = state_of(request)
    body = await read_body(request, LoadAdapterRequest, stall_seconds=state.settings.body_stall_seconds)
    state.admit()
    adapter = await while_connected(request, state.adapters.load(body.lora_name, body.lora_path))
    answer = AdapterAnswer(id=body.lora_name, status="loaded")
    if adapter.info is not None:
        answer.rank, answer.targets = adapter.info.rank, list(adapter.info.targets)
    return JSONResponse(answer.model_dump())


@router.post(
    "/v1/unload_lora_adapter",
    openapi_extra=body_of(UnloadAdapterRequest),
    responses=answers(AdapterAnswer, errors=_ERRORS),
)
async def unload_adapter(request: Request) -> Response:
    """Take no further requests for an adapter, and answer when the last one that ran has ended, or after a while."""
    require_admin(request)
    state = state_of(request)
    body = await read_body(request, UnloadAdapterRequest, stall_seconds=state.settings.body_stall_seconds)
    gone = await while_connected(request, state.adapters.unload(body.lora_name))
    answer = AdapterAnswer(id=body.lora_name, status="unloaded" if gone else "draining")
    return JSONResponse(answer.model_dump())
