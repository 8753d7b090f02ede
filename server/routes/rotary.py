"""`/v1/rotary`, `/v1/rotary/inspect` and `/v1/rotary/curves`: what the model rotates by, and what a scaling makes of it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.rotary.frequencies import wavelength
from windlass.engine.rotary.rope_scaling import RotaryGroup, RotarySpec
from windlass.engine.rotary.rotary_policy import RotaryPlan, joint_fingerprint
from windlass.server.answers.rotary_layouts import groups_object, ladder_object
from windlass.server.errors import bad_request
from windlass.server.exchange.body import read_body
from windlass.server.exchange.state import ServerState
from windlass.server.generation.request_rotation import (
    check_rotates,
    planner_of,
    read_rotation,
)
from windlass.server.protocol.rotary import (
    RotaryCurves,
    RotaryCurvesRequest,
    RotaryInspection,
    RotaryInspectRequest,
    RotarySettings,
)
from windlass.server.routes.common import BODY_ERRORS, answers, body_of, loaded_model, state_of

router = APIRouter()


@router.get("/v1/rotary", responses=answers(RotarySettings))
async def rotary(request: Request) -> Response:
    """The model's own rotation, this server's default and profiles, and what requests may set."""
    state = state_of(request)
    info, settings = loaded_model(state), state.settings
    check_rotates(info)
    planner = planner_of(settings, info)
    default = planner.plan(1 if planner.auto else info.max_model_len)
    return _json(
        {
            "model": groups_object(info.model_rotary_groups),
            "default": {**groups_object(info.rotary_groups), "policy": default.policy},
            "profiles": {name: scaling.to_dict() for name, scaling in settings.rope_profiles.items()},
            "policy": settings.rope_policy,
            "rope_update": settings.rope_update,
            "rope_exact": settings.rope_exact,
            "max_model_len": info.max_model_len,
            "auto": ladder_object(info),
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
    return _json(await state.text.on_thread(_inspect, *_planned(state, body)))


@router.post(
    "/v1/rotary/curves",
    openapi_extra=body_of(RotaryCurvesRequest),
    responses=answers(RotaryCurves, errors=BODY_ERRORS),
)
async def curves(request: Request) -> Response:
    """What a scaling comes to by position and distance: cosines and sines, RoFormer's bound, and pairs that hardly turn."""
    state = state_of(request)
    body = await read_body(request, RotaryCurvesRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    plan, length = _planned(state, body)
    names = [group.name for group in plan.groups_in(plan.stage(length))]
    if body.group is not None and body.group not in names:
        raise bad_request(f"group: this model has {' and '.join(names)}, not {body.group!r}", "group", "invalid_value")
    group = names.index(body.group) if body.group is not None else 0
    return _json(await state.text.on_thread(_curves, plan, length, group, body.positions, body.distances))


def _planned(state: ServerState, body: RotaryInspectRequest) -> tuple[RotaryPlan, int]:
    """What a request would run under, and the length that is asked about."""
    info = loaded_model(state)
    check_rotates(info)
    rotation = read_rotation(body.rope_scaling, body.rope_update, state.settings, info)
    length = min(info.max_model_len, rotation.longest or info.max_model_len) if body.length is None else body.length
    return rotation.plan(length), length


def _curves(plan: RotaryPlan, length: int, index: int, positions: list[int], distances: list[int]) -> dict[str, Any]:
    import numpy as np  # here: nobody else in this process needs it

    from windlass.engine.rotary.curves import angles, decay_bound, mean_cosine, slow_pairs

    stage = plan.stage(length)
    group, spec = plan.groups_in(stage)[index], stage.specs[index]
    frequencies = np.array(spec.inv_freq)
    turning = angles(np.array(positions, float), frequencies)
    apart = np.array(distances, float)
    return {
        "group": group.name,
        "rope_type": group.scaling.rope_type,
        "length": length,
        "fingerprint": spec.fingerprint,
        "trained_length": group.base.trained_len,
        "rotary_dim": group.base.rotary_dim,
        "slow_pairs": slow_pairs(spec.inv_freq, group.base.trained_len),
        "positions": positions,
        "cos": np.cos(turning).tolist(),
        "sin": np.sin(turning).tolist(),
        "distances": distances,
        "decay_bound": (decay_bound(apart, frequencies) / ((len(frequencies) + 1) / 2)).tolist(),
        "mean_cosine": mean_cosine(apart, frequencies).tolist(),
    }


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
        "wavelengths": [wavelength(w) for w in spec.inv_freq],
        "attention_factor": spec.rotary_scale,
        "softmax_scale": spec.distances.score_factor,
        "distances": spec.distances.described() or None,
        "effective_length": effective_length,
        "fingerprint": spec.fingerprint,
    }


def _json(payload: dict[str, Any]) -> Response:
    return Response(to_json(payload), media_type="application/json")
