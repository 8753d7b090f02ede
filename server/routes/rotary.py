"""`GET /v1/rotary` and `POST /v1/rotary/inspect`: what the model rotates by, and what a scaling would make of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.errors import LoadError
from windlass.engine.request import ModelInfo
from windlass.engine.rotary.config_names import RotaryGroup, apply_scaling, read_rotary_groups
from windlass.engine.rotary.scaling import RopeScaling, resolve
from windlass.server.body import read_body
from windlass.server.errors import ApiError, unavailable
from windlass.server.protocol.text import RotaryInspectRequest
from windlass.server.routes.common import BODY_ERRORS, answers, body_of, state_of
from windlass.server.sampling import rope_scaling_of
from windlass.server.state import ServerState

router = APIRouter()


@router.get("/v1/rotary", responses=answers(None, media_type="application/json", errors=(404, 503)))
async def rotary(request: Request) -> Response:
    """The model's own rotation, this server's default scaling, and how long a request may become."""
    state = state_of(request)
    info = _loaded(state)
    groups = await state.text.run(_model_groups, info)
    main = groups[0]
    return _json(
        {
            "model": {
                **main.scaling.to_dict(),
                "rope_theta": main.base.rope_theta,
                "rotary_dim": main.base.rotary_dim,
                "original_max_position_embeddings": main.base.trained_len,
                "groups": {group.name: _describe(group) for group in groups},
            },
            "default": info.rope_scaling.to_dict(),
            "profiles": {},
            "policy": "frozen",
            "max_model_len": info.max_model_len,
        }
    )


@router.post(
    "/v1/rotary/inspect",
    openapi_extra=body_of(RotaryInspectRequest),
    responses=answers(None, media_type="application/json", errors=(*BODY_ERRORS, 503)),
)
async def inspect(request: Request) -> Response:
    """The frequencies and factors a request would run under, computed from the model's own numbers."""
    state = state_of(request)
    body = await read_body(request, RotaryInspectRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    info = _loaded(state)
    scaling = rope_scaling_of(body.rope_scaling)
    length = info.max_model_len if body.length is None else body.length
    return _json(await state.text.run(_inspect, info, scaling, length))


def _inspect(info: ModelInfo, scaling: RopeScaling | None, length: int) -> dict[str, Any]:
    groups = apply_scaling(_model_groups(info), info.rope_scaling)
    groups = apply_scaling(groups, scaling)
    resolved = {group.name: _resolved(group, length) for group in groups}
    main = resolved[groups[0].name]
    return {**main, "length": length, "groups": resolved} if len(groups) > 1 else {**main, "length": length}


def _resolved(group: RotaryGroup, length: int) -> dict[str, Any]:
    spec = resolve(group.scaling, group.base, length)
    parameters = group.scaling.to_dict()
    return {
        "rope_type": parameters.pop("rope_type"),
        "parameters": {"rope_theta": group.base.rope_theta, **parameters},
        "inv_freq": list(spec.inv_freq),
        "wavelengths": [2 * math.pi / w if w else None for w in spec.inv_freq],  # tokens per turn; null: never turns
        "attention_factor": spec.rotary_scale,
        "softmax_scale": spec.softmax_scale,
        "fingerprint": spec.fingerprint,
    }


def _describe(group: RotaryGroup) -> dict[str, Any]:
    return {**group.scaling.to_dict(), "rope_theta": group.base.rope_theta, "rotary_dim": group.base.rotary_dim}


def _model_groups(info: ModelInfo) -> tuple[RotaryGroup, ...]:
    try:
        return read_rotary_groups(json.loads((Path(info.path) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, LoadError):
        raise ApiError(404, "this model's config.json cannot be read any more", code="no_rotary_config") from None


def _loaded(state: ServerState) -> ModelInfo:
    info = state.engine.info
    if info is None:
        raise unavailable(
            f"the engine is {state.engine.state}",
            code="engine_unavailable",
            retry_after=state.settings.retry_after_seconds,
        )
    return info


def _json(payload: dict[str, Any]) -> Response:
    return Response(to_json(payload), media_type="application/json")
