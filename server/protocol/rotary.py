"""Body and answers of `/v1/rotary` and `/v1/rotary/inspect`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.server.protocol.answers import ModelRotary, RotaryChosen, RotaryLadderShown, ScalingValue
from windlass.server.protocol.base import RopeScalingField, RopeUpdateField, StrictModel


class RotaryInspectRequest(StrictModel):
    """`rope_scaling` and `rope_update` as a request would give them (null: the server's default); `length`: tokens,
    which matter to dynamic and longrope only (null: the context's)."""

    model: str | None = None
    rope_scaling: RopeScalingField = None
    rope_update: RopeUpdateField | None = None
    length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


class DefaultRotary(ModelRotary):
    """The rotation of requests that set none."""

    policy: RopeUpdate


class RotarySettings(StrictModel):
    """What the model rotates by, this server's default and profiles, and what requests may set."""

    model: ModelRotary
    default: DefaultRotary
    profiles: dict[str, dict[str, Any]]
    policy: Literal["allow", "profiles", "off"]
    rope_update: RopeUpdate | None
    rope_exact: bool
    max_model_len: int
    auto: Annotated[RotaryLadderShown | None, Field(description="What `rope_scaling` `auto` chooses from, by length.")]


class InspectedGroup(StrictModel):
    """The frequencies and factors of a group of layers."""

    rope_type: str
    parameters: dict[str, ScalingValue]
    inv_freq: list[float]
    wavelengths: list[float | None]
    attention_factor: float
    softmax_scale: float
    distances: Annotated[
        dict[str, int] | None,
        Field(
            description="How far keys seem, where a kind changes that: `chunk_size` and `local_size` of `dual_chunk`, "
            "`window` of `self_extend` and `rerope`, `group_size` of the former, and `log_n_length`, "
            "beyond which scores grow; `null`: as many tokens as there are between."
        ),
    ] = None
    effective_length: float | None
    fingerprint: str


class RotaryInspection(InspectedGroup):
    """The first group's frequencies and factors; `groups`: those of every group, where there are several."""

    policy: RopeUpdate
    length: int
    auto: Annotated[RotaryChosen | None, Field(description="Under `auto`: what the scaling was chosen by.")] = None
    groups: dict[str, InspectedGroup] | None = None


Place = Annotated[int, Field(ge=0, le=2**31 - 1)]


class RotaryCurvesRequest(RotaryInspectRequest):
    """As an inspection, and where to look: cosines and sines at `positions`, curves at `distances`.

    `group`: of layers, where a model has several; the first by default.
    """

    group: Annotated[str, Field(max_length=64)] | None = None
    positions: Annotated[list[Place], Field(max_length=128, fail_fast=True, default_factory=list)]
    distances: Annotated[list[Place], Field(max_length=512, fail_fast=True, default_factory=list)]


class RotaryCurves(StrictModel):
    """What the frequencies of one group of layers come to. A row of `cos` and `sin` is a position, a column a rotated pair."""

    group: str
    rope_type: str
    length: int
    fingerprint: str
    trained_length: int
    rotary_dim: int
    slow_pairs: Annotated[int, Field(description="Pairs that turn less than once within `trained_length` tokens.")]
    positions: list[int]
    cos: list[list[float]]
    sin: list[list[float]]
    distances: list[int]
    decay_bound: Annotated[
        list[float],
        Field(description="RoFormer's bound on a score by distance, over its own value at distance 0."),
    ]
    mean_cosine: Annotated[
        list[float], Field(description="The score of equal vectors of ones by distance, over its value at distance 0.")
    ]
