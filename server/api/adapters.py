"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.api.router import BODY_ERRORS, ApiRouter
from windlass.server.app.request_body import read_body
from windlass.server.app.state import require_admin, state_of
from windlass.server.schemas.base import StrictModel, optional
from windlass.server.serving.streaming import run_while_connected

AdapterName = Annotated[str, Field(min_length=1, max_length=128)]

router = ApiRouter("Adapters", "LoRA adapters, loaded and unloaded while the server runs.")

_ERRORS = (*BODY_ERRORS, 403)


class LoadAdapterRequest(StrictModel):
    """The adapter to load."""

    lora_name: AdapterName = Field(description="Name of the adapter, which requests give as their `model`.")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Directory in PEFT's format, inside the server's adapter folder or relative to it."
    )


class UnloadAdapterRequest(StrictModel):
    """The adapter to unload."""

    lora_name: AdapterName = Field(description="Name of the adapter, which requests give as their `model`.")


class AdapterAnswer(StrictModel):
    """State of the adapter."""

    id: str = Field(description="Name of the adapter.")
    object: Literal["lora_adapter"] = "lora_adapter"
    status: Literal["loaded", "unloaded", "draining"] = Field(
        description="`draining`: requests still use the adapter; it is unloaded when they end."
    )
    rank: int | None = optional("Largest rank of the loaded adapter's matrices, else null.")
    targets: list[str] | None = optional("Kinds of layers that the loaded adapter changes, else null.")


@router.endpoint(
    "POST",
    "/v1/load_lora_adapter",
    body=LoadAdapterRequest,
    response=AdapterAnswer,
    errors=_ERRORS,
    examples={"plain": ("A directory in the adapter folder", {"lora_name": "poet", "lora_path": "poet"})},
)
async def load_adapter(request: Request) -> Response:
    """Load an adapter. Requests then give its name as their model."""
    require_admin(request)
    state = state_of(request)
    body = await read_body(request, LoadAdapterRequest)
    state.admit()
    adapter = await run_while_connected(request, state.adapters.load(body.lora_name, body.lora_path))
    answer = AdapterAnswer(id=body.lora_name, status="loaded")
    if adapter.info is not None:
        answer.rank, answer.targets = adapter.info.rank, list(adapter.info.targets)
    return Response(to_json(answer), media_type="application/json")


@router.endpoint(
    "POST",
    "/v1/unload_lora_adapter",
    body=UnloadAdapterRequest,
    response=AdapterAnswer,
    errors=_ERRORS,
    examples={"plain": ("A loaded adapter", {"lora_name": "poet"})},
)
async def unload_adapter(request: Request) -> Response:
    """Unload an adapter: refuse new requests for it, and answer when its last request has ended, or after a time limit."""
    require_admin(request)
    state = state_of(request)
    body = await read_body(request, UnloadAdapterRequest)
    unloaded = await run_while_connected(request, state.adapters.unload(body.lora_name))
    answer = AdapterAnswer(id=body.lora_name, status="unloaded" if unloaded else "draining")
    return Response(to_json(answer), media_type="application/json")
