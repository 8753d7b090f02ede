"""`GET /v1/rotary` and `POST /v1/rotary/inspect`: what the model rotates by, and what a scaling would make of it."""

from __future__ import annotations

import math
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.api.request import ModelInfo
from windlass.engine.rotary.groups import RotaryGroup
from windlass.engine.rotary.policy import RotaryPlan, joint_fingerprint
from windlass.engine.rotary.scaling import RotarySpec
from windlass.server.errors import unavailable
from windlass.server.exchange.body import read_body
from windlass.server.exchange.state import ServerState
from windlass.server.generation.request_rotation import (
    check_rotates,
    describe_groups,
    describe_ladder,
    planner_of,
    read_rotation,
)
from windlass.server.protocol.rotary import RotaryInspection, RotaryInspectRequest, RotarySettings
from windlass.server.routes.common import BODY_ERRORS, answers, body_of, state_of

router = APIRouter()


@router.get("/v1/rotary", responses=answers(RotarySettings))
async def rotary(request: Request) -> Response:
    """The model's own rotation, this server's default and profiles, and what requests may set."""
    state = state_of(request)
    info, settings = _loaded(state), state.settings
    check_rotates(info)
    planner = planner_of(settings, info)
    default = planner.plan(1 if planner.auto else info.max_model_len)
    return _json(
        {
            "model": describe_groups(info.model_rotary_groups),
            "default": {**describe_groups(info.rotary_groups), "policy": default.policy},
            "profiles": {name: scaling.to_dict() for name, scaling in settings.rope_profiles.items()},
            "policy": settings.rope_policy,
            "rope_update": settings.rope_update,
            "rope_exact": settings.rope_exact,
            "max_model_len": info.max_model_len,
            "auto": describe_ladder(info),
        }
    )


@router.post(
    "/v1/rotary/inspect",
    openapi_extra=body_of(RotaryInspectRequest),
    responses=answers(RotaryInspection, errors=BODY_ERRORS),
)
async def inspect(request: Request) -> Response:
    """The frequencies and factors a request would run under, computed from the model's own numbers."""
    state = state_of(request)
    body = await read_body(request, RotaryInspectRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    info = _loaded(state)
    check_rotates(info)
    rotation = read_rotation(body.rope_scaling, body.rope_update, state.settings, info)
    length = min(info.max_model_len, rotation.longest or info.max_model_len) if body.length is None else body.length
    return _json(await state.text.on_thread(_inspect, rotation.plan(length), length))


def _inspect(plan: RotaryPlan, length: int) -> dict[str, Any]:
    stage = plan.stage(length)
    groups = plan.groups_in(stage)
    resolved = {
        group.name: _resolved(group, spec, effective)
        for group, spec, effective in zip(groups, stage.specs, stage.effective_lengths, strict=True)
    }
    main = {**resolved[groups[0].name], "fingerprint": joint_fingerprint(stage.specs)}
    answer = {**main, "policy": plan.policy, "length": length}
    if stage.choice is not None:
        answer["auto"] = stage.choice.described()
    return {**answer, "groups": resolved} if len(resolved) > 1 else answer


def _resolved(group: RotaryGroup, spec: RotarySpec, effective_length: float | None) -> dict[str, Any]:
    return {
        "rope_type": group.scaling.rope_type,
        "parameters": group.parameters(),
        "inv_freq": list(spec.inv_freq),
        "wavelengths": [2 * math.pi / w if w else None for w in spec.inv_freq],  # tokens per turn; null: never turns
        "attention_factor": spec.rotary_scale,
        "softmax_scale": spec.distances.score_factor,
        "distances": spec.distances.described() or None,
        "effective_length": effective_length,
        "fingerprint": spec.fingerprint,
    }


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
