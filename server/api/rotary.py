"""`/v1/rotary`, `/v1/rotary/inspect` and `/v1/rotary/curves`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.rotary.frequencies import wavelength
from windlass.engine.rotary.rope_scaling import (
    DISTANCE_KINDS,
    RotaryBase,
    RotaryGroup,
    RotarySpec,
    main_group,
    runnable_kinds,
)
from windlass.engine.rotary.rotary_policy import RopeUpdate, RotaryPlan, joint_fingerprint
from windlass.server.api.models import ModelRotary, RotaryLadderShown
from windlass.server.api.router import BODY_ERRORS, ApiRouter, json_response
from windlass.server.app.request_body import read_body
from windlass.server.app.state import ServerState, loaded_model, state_of
from windlass.server.errors import bad_request
from windlass.server.schemas.base import RequestedModel, RopeScalingField, RopeUpdateField, StrictModel, optional
from windlass.server.schemas.response_parts import EffectiveLength, RotaryChosen, ScalingValue
from windlass.server.serving.request_rotation import (
    auto_scaling_object,
    build_planner,
    check_has_rotary,
    groups_object,
    parse_rotation,
)

router = ApiRouter("Rotary", "Rotary frequencies of the model, and effects of a scaling.")


class RotaryInspectRequest(StrictModel):
    """A rotary scaling, as requests set it, and a context length."""

    model: RequestedModel = None
    rope_scaling: RopeScalingField = None
    rope_update: RopeUpdateField = None
    length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = optional(
        "Length of the context in tokens, for `dynamic` and `longrope` scaling. Default: the model's context."
    )


class DefaultRotary(ModelRotary):
    """Default scaling and its update policy."""

    policy: RopeUpdate = Field(description="What happens to cached keys when the text grows into other frequencies.")


class RotarySettings(StrictModel):
    """Scaling of the model, default and profiles of the server, and what requests may set."""

    model: ModelRotary = Field(description="Scaling of the model itself.")
    default: DefaultRotary = Field(description="Scaling of requests that set none.")
    profiles: dict[str, dict[str, Any]] = Field(
        description="Scalings by profile name, as `rope_scaling` may give them."
    )
    policy: Literal["allow", "profiles", "off"] = Field(
        description="What requests may set: any scaling (`allow`), names of profiles only, or none (`off`)."
    )
    rope_update: RopeUpdate | None = Field(
        description="Update policy of requests that set none. Null: that of each kind of scaling."
    )
    rope_exact: bool = Field(description="Whether requests may set `rope_update.exact`.")
    max_model_len: int = Field(description="Context length in tokens.")
    auto: RotaryLadderShown | None = Field(
        description="Scalings that `rope_scaling: auto` chooses from. Null: this model cannot be scaled."
    )
    kinds: dict[str, dict[str, list[float]]] = Field(
        description="Kinds of scaling that this model supports, with a useful range of each field: the lowest value, the "
        "highest and a start. Fields with lists and seldom used fields are not listed."
    )


class InspectedGroup(StrictModel):
    """Frequencies and factors of a group of layers."""

    rope_type: str = Field(description="Kind of the scaling.")
    parameters: dict[str, ScalingValue] = Field(description="Parameters of the scaling, including `rope_theta`.")
    inv_freq: list[float] = Field(description="Frequency of each rotated pair, in radians per token.")
    wavelengths: list[float | None] = Field(
        description="Wavelength of each rotated pair, in tokens. Null if it is infinite or larger than 1.8e308."
    )
    attention_factor: float = Field(description="Factor on cosines and sines.")
    softmax_scale: float = Field(description="Factor on attention scores.")
    distances: dict[str, int] | None = optional(
        "How the scaling changes distances: `chunk_size` and `local_size` of `dual_chunk`, `window` "
        "of `self_extend` and `rerope`, `group_size` of `self_extend`, and `log_n_length`, from "
        "which scores grow. Null: distances are unchanged."
    )
    effective_length: EffectiveLength
    fingerprint: str = Field(description="Digest of frequencies and factors. Equal fingerprints mean equal rotations.")


class RotaryInspection(InspectedGroup):
    """Frequencies and factors of the first group, and of every group if there are several."""

    policy: RopeUpdate = Field(description="What happens to cached keys when the text grows into other frequencies.")
    length: int = Field(description="Length of the context in tokens.")
    auto: RotaryChosen | None = optional("With `auto`: how the scaling was chosen.")
    groups: dict[str, InspectedGroup] | None = optional(
        "Values per group of layers. Absent if all layers rotate alike."
    )


Position = Annotated[int, Field(ge=0, le=2**31 - 1)]


class RotaryCurvesRequest(RotaryInspectRequest):
    """A rotary scaling, and the positions and distances at which it is evaluated."""

    group: Annotated[str, Field(max_length=64)] | None = optional(
        "Name of a group of layers. Default: the first group."
    )
    positions: Annotated[list[Position], Field(max_length=128, fail_fast=True, default_factory=list)] = Field(
        description="Token positions, from 0, at which cosines and sines are returned. Default: none."
    )
    distances: Annotated[list[Position], Field(max_length=512, fail_fast=True, default_factory=list)] = Field(
        description="Distances in tokens at which the curves are returned. Default: none."
    )


class RotaryCurves(StrictModel):
    """Effects of the frequencies of one group of layers."""

    group: str = Field(description="Name of the group of layers.")
    rope_type: str = Field(description="Kind of the scaling.")
    length: int = Field(description="Length of the context in tokens.")
    fingerprint: str = Field(description="Digest of frequencies and factors. Equal fingerprints mean equal rotations.")
    trained_length: int = Field(description="Context that the model was trained for, in tokens.")
    rotary_dim: int = Field(description="Number of rotated dimensions per head.")
    slow_pairs: int = Field(description="Number of pairs that turn less than once within `trained_length` tokens.")
    positions: list[int] = Field(description="Requested positions.")
    cos: list[list[float]] = Field(
        description="Cosines of position times frequency: a row per position, a column per rotated pair."
    )
    sin: list[list[float]] = Field(
        description="Sines of position times frequency: a row per position, a column per rotated pair."
    )
    distances: list[int] = Field(description="Requested distances.")
    decay_bound: list[float] = Field(
        description="RoFormer's upper bound of a score by distance, divided by its value at distance 0."
    )
    mean_cosine: list[float] = Field(
        description="Score of two vectors of ones by distance, divided by its value at distance 0."
    )


@router.endpoint("GET", "/v1/rotary", response=RotarySettings)
async def rotary(request: Request) -> Response:
    """The model's rotary scaling, the server's default and profiles, and what requests may set."""
    state = state_of(request)
    info, settings = loaded_model(state), state.settings
    check_has_rotary(info)
    planner = build_planner(settings, info)
    default = planner.plan(1 if planner.auto else info.max_model_len)
    answer = {
        "model": groups_object(info.model_rotary_groups),
        "default": {**groups_object(info.rotary_groups), "policy": default.policy},
        "profiles": {name: scaling.to_dict() for name, scaling in settings.rope_profiles.items()},
        "policy": settings.rope_policy,
        "rope_update": settings.rope_update,
        "rope_exact": settings.rope_exact,
        "max_model_len": info.max_model_len,
        "auto": auto_scaling_object(info),
        "kinds": _kinds(main_group(info.rotary_groups).base),
    }
    return Response(to_json(answer), media_type="application/json")


@router.endpoint(
    "POST",
    "/v1/rotary/inspect",
    body=RotaryInspectRequest,
    response=RotaryInspection,
    errors=BODY_ERRORS,
    examples={
        "scaled": ("A scaling", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        "length": (
            "A scaling that depends on the length",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "length": 30000},
        ),
    },
)
async def inspect(request: Request) -> Response:
    """Compute the frequencies and factors of a rotary scaling for this model."""
    state = state_of(request)
    body = await read_body(request, RotaryInspectRequest)
    state.check_model(body.model)
    return json_response(await state.text.run_in_thread(_inspection, *_requested_plan(state, body)))


@router.endpoint(
    "POST",
    "/v1/rotary/curves",
    body=RotaryCurvesRequest,
    response=RotaryCurves,
    errors=BODY_ERRORS,
    examples={
        "scaled": (
            "A scaling",
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
                "positions": [0, 1, 100],
                "distances": [0, 10, 1000],
            },
        )
    },
)
async def curves(request: Request) -> Response:
    """Compute the effects of a scaling by position and distance: cosines and sines, RoFormer's bound, and slow pairs."""
    state = state_of(request)
    body = await read_body(request, RotaryCurvesRequest)
    state.check_model(body.model)
    plan, length = _requested_plan(state, body)
    names = [group.name for group in plan.groups_in(plan.stage(length))]
    if body.group is not None and body.group not in names:
        raise bad_request(f"group: this model has {' and '.join(names)}, not {body.group!r}", "group", "invalid_value")
    group = names.index(body.group) if body.group is not None else 0
    return json_response(await state.text.run_in_thread(_curves, plan, length, group, body.positions, body.distances))


def _kinds(base: RotaryBase) -> dict[str, dict[str, list[float]]]:
    """The kinds that a group supports, with a useful range of each field: lowest, highest, start."""
    factor, trained = [1.0, 64.0, 4.0], float(base.trained_len)
    found: dict[str, dict[str, list[float]]] = {
        "default": {},
        **{kind: {"factor": factor} for kind in ("linear", "ntk", "dynamic", "proportional")},
        "yarn": {"factor": factor, "beta_fast": [1.0, 128.0, 32.0], "beta_slow": [0.25, 16.0, 1.0]},
        "llama3": {
            "factor": factor,
            "low_freq_factor": [0.5, 8.0, 1.0],
            "high_freq_factor": [1.0, 32.0, 4.0],
        },
        "dual_chunk": {},
        "self_extend": {"group_size": [2.0, 64.0, 4.0], "window": [1.0, trained, max(1.0, trained // 4)]},
        "rerope": {"window": [1.0, trained, max(1.0, trained // 2)]},
        "log_n": {},
    }
    refused = DISTANCE_KINDS if base.fixed_distances_reason is not None else ()
    supported = runnable_kinds(base)
    return {kind: fields for kind, fields in found.items() if kind in supported and kind not in refused}


def _requested_plan(state: ServerState, body: RotaryInspectRequest) -> tuple[RotaryPlan, int]:
    """The rotary plan of a request, and its context length."""
    info = loaded_model(state)
    check_has_rotary(info)
    rotation = parse_rotation(body.rope_scaling, body.rope_update, state.settings, info)
    length = min(info.max_model_len, rotation.longest or info.max_model_len) if body.length is None else body.length
    return rotation.plan(length), length


def _curves(plan: RotaryPlan, length: int, index: int, positions: list[int], distances: list[int]) -> RotaryCurves:
    import numpy as np  # imported here: nothing else in this process needs it

    from windlass.engine.rotary.curves import angles, decay_bound, mean_cosine, slow_pairs

    stage = plan.stage(length)
    group, spec = plan.groups_in(stage)[index], stage.specs[index]
    frequencies = np.array(spec.inv_freq)
    position_angles = angles(np.array(positions, float), frequencies)
    distance_values = np.array(distances, float)
    return RotaryCurves(
        group=group.name,
        rope_type=group.scaling.rope_type,
        length=length,
        fingerprint=spec.fingerprint,
        trained_length=group.base.trained_len,
        rotary_dim=group.base.rotary_dim,
        slow_pairs=slow_pairs(spec.inv_freq, group.base.trained_len),
        positions=positions,
        cos=np.cos(position_angles).tolist(),
        sin=np.sin(position_angles).tolist(),
        distances=distances,
        decay_bound=(decay_bound(distance_values, frequencies) / ((len(frequencies) + 1) / 2)).tolist(),
        mean_cosine=mean_cosine(distance_values, frequencies).tolist(),
    )


def _inspection(plan: RotaryPlan, length: int) -> RotaryInspection:
    stage = plan.stage(length)
    groups = plan.groups_in(stage)
    resolved = {
        group.name: _inspected_group(group, spec, effective)
        for group, spec, effective in zip(groups, stage.specs, stage.effective_lengths, strict=True)
    }
    main = {**dict(resolved[groups[0].name]), "fingerprint": joint_fingerprint(stage.specs)}
    answer = RotaryInspection.model_construct(**main, policy=plan.policy, length=length)
    if stage.choice is not None:
        answer.auto = RotaryChosen.model_validate(stage.choice.described())
    if len(resolved) > 1:
        answer.groups = resolved
    return answer


def _inspected_group(group: RotaryGroup, spec: RotarySpec, effective_length: float | None) -> InspectedGroup:
    return InspectedGroup.model_construct(
        rope_type=group.scaling.rope_type,
        parameters=group.parameters(),
        inv_freq=list(spec.inv_freq),
        wavelengths=[wavelength(w) for w in spec.inv_freq],
        attention_factor=spec.rotary_scale,
        softmax_scale=spec.distances.score_factor,
        distances=spec.distances.described() or None,
        effective_length=effective_length,
        fingerprint=spec.fingerprint,
    )
