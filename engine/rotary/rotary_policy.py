"""Rotary policy: the frequencies of a request as it grows, under `frozen`, `recompute` or `rotate`.

A context of n tokens uses the frequencies of length n, where n counts the token being computed; under `frozen`, those of
the longest length that the request can reach. Nothing depends on chunks, batches or earlier requests. The scheduler
decides what happens to cached keys at a change. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from windlass.engine.errors import RequestError
from windlass.engine.rotary.auto_scaling import AUTO, AutoScalingThresholds, ScalingThreshold
from windlass.engine.rotary.rope_scaling import (
    RopeScaling,
    RotaryGroup,
    RotarySpec,
    apply_scaling,
    effective_length,
    last_length,
    resolve,
)

RopeUpdate = Literal["frozen", "recompute", "rotate"]

ROPE_UPDATES: tuple[RopeUpdate, ...] = ("frozen", "recompute", "rotate")
_KEY_MOVING_KINDS = ("dual_chunk", "self_extend", "rerope")  # rotate keys at other positions than their own


@dataclass(frozen=True, slots=True)
class AutoScalingChoice:
    """A scaling chosen by length.

    length: tokens that it was chosen for; None if it follows the current length. step: the threshold chosen. up_to:
    tokens up to which the choice is the same; None: no limit.
    """

    length: int | None
    step: ScalingThreshold
    up_to: int | None

    def described(self) -> dict[str, Any]:
        """The choice as in API responses."""
        named = {} if self.step.profile is None else {"profile": self.step.profile}
        return {"length": self.length, "up_to": self.up_to, **named}


@dataclass(frozen=True, slots=True)
class RotaryStage:
    """Specs, one per rotary group, that hold for contexts of up to `last_length` tokens (None: for all longer ones).

    effective_lengths: lengths that the frequencies are computed for, per group; None for kinds without one.
    single_length: the specs are those of a single length, so that other requests hardly ever share keys under them.
    choice: of automatic scaling, if it is used.
    """

    specs: tuple[RotarySpec, ...]
    last_length: int | None
    effective_lengths: tuple[float | None, ...]
    single_length: bool = False
    choice: AutoScalingChoice | None = None


@dataclass(frozen=True, slots=True)
class RotaryReport:
    """Rotation of one sample as in API responses: the main group's scaling, and that of each group if there are several.

    fingerprint: of the frequencies and factors of all groups together. effective_length: tokens that the last frequencies
    were computed for; None for kinds without a length. moves: number of re-rotations of the cached keys. auto: the choice
    of automatic scaling, if it was used.
    """

    rope_type: str
    parameters: dict[str, Any]
    policy: RopeUpdate
    effective_length: float | None
    fingerprint: str
    moves: int = 0
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    auto: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RotaryPlan:
    """The rotation of one request from its first to its last token.

    groups: the model's rotary groups under the request's scaling. policy: "frozen" if nothing depends on length.
    longest: maximum number of tokens of the request that are held at once. exact: dynamic changes with every token past
    M, not on its grid. ladder: thresholds of automatic scaling, if it is used; then `groups` are those of `longest`.
    """

    groups: tuple[RotaryGroup, ...]
    policy: RopeUpdate
    longest: int
    exact: bool = False
    ladder: AutoScalingThresholds | None = None

    def stage(self, length: int) -> RotaryStage:
        """The specs of a context of `length` tokens, or of `longest` if that is shorter."""
        length = self.longest if self.policy == "frozen" else min(length, self.longest)
        specs: list[RotarySpec] = []
        ends: list[int | None] = []
        lengths: list[float | None] = []
        single, groups, step = False, self.groups, None
        if self.ladder is not None:
            step = self.ladder.step(length)
            groups = self.ladder.groups_under(step)
            ends.append(step.up_to)
        for group in groups:
            scaling, base = group.scaling, group.base
            # A score factor that depends on the length is fixed when the request arrives, under every policy.
            resolved = length if scaling.depends_on_length else self.longest
            specs.append(resolve(scaling, base, resolved, exact=self.exact))
            lengths.append(effective_length(scaling, base, length, exact=self.exact))
            ends.append(last_length(scaling, base, length, exact=self.exact))
            single |= self.exact and scaling.rope_type == "dynamic" and lengths[-1] == length > base.trained_len
        end = min((end for end in ends if end is not None), default=None)
        last = end if end is not None and end < self.longest and self.policy != "frozen" else None
        choice = None if step is None else AutoScalingChoice(length if self.policy == "frozen" else None, step, end)
        return RotaryStage(tuple(specs), last, tuple(lengths), single, choice)

    def groups_in(self, stage: RotaryStage) -> tuple[RotaryGroup, ...]:
        """The model's rotary groups under the scaling of a stage of this plan."""
        if self.ladder is None or stage.choice is None:
            return self.groups
        return self.ladder.groups_under(stage.choice.step)

    def report(self, stage: RotaryStage, moves: int) -> RotaryReport:
        """The report of a sample that ended in `stage` and whose keys were re-rotated `moves` times."""
        groups = self.groups_in(stage)
        described: list[dict[str, Any]] = [
            {
                "rope_type": group.scaling.rope_type,
                "parameters": group.parameters(),
                "effective_length": effective,
                "fingerprint": spec.fingerprint,
            }
            for group, spec, effective in zip(groups, stage.specs, stage.effective_lengths, strict=True)
        ]
        several = dict(zip((group.name for group in groups), described, strict=True)) if len(described) > 1 else {}
        main = {**described[0], "fingerprint": joint_fingerprint(stage.specs)}
        auto = None if stage.choice is None else stage.choice.described()
        return RotaryReport(**main, policy=self.policy, moves=moves, groups=several, auto=auto)


def joint_fingerprint(specs: Sequence[RotarySpec]) -> str:
    """Fingerprint of all rotary groups together: that of the only one, or a digest of all."""
    if len(specs) == 1:
        return specs[0].fingerprint
    return hashlib.sha256("".join(spec.fingerprint for spec in specs).encode()).hexdigest()


def make_plan(
    groups: tuple[RotaryGroup, ...], longest: int, rope_update: RopeUpdate | None, *, exact: bool = False
) -> RotaryPlan:
    """The plan of a request of at most `longest` tokens.

    rope_update: None: `recompute` if a group has longrope, whose frequencies change once; otherwise `frozen`.
    """
    if not any(group.scaling.depends_on_length for group in groups):
        rope_update = "frozen"
    elif rope_update is None:
        longrope = any(group.scaling.rope_type == "longrope" for group in groups)
        rope_update = "recompute" if longrope else "frozen"
    return RotaryPlan(groups, rope_update, longest, exact and rope_update == "recompute")


def make_auto_plan(
    ladder: AutoScalingThresholds, longest: int, rope_update: RopeUpdate | None, *, exact: bool = False
) -> RotaryPlan:
    """The plan of a request of at most `longest` tokens whose scaling is chosen by length.

    rope_update: None: `frozen` for all kinds: one choice for prompt and output together. Under the other policies the
    choice follows the current length. Raises RequestError if no threshold covers the request.
    """
    step = ladder.step(longest)
    groups = ladder.groups_under(step)
    policy: RopeUpdate = rope_update or "frozen"
    if policy == "rotate" and any(_moves_keys(step.scaling) for step in ladder.steps):
        policy = "recompute"  # re-rotation cannot move keys to positions within chunks
    if len(ladder.steps) == 1 and not any(group.scaling.depends_on_length for group in groups):
        policy = "frozen"
    return RotaryPlan(groups, policy, longest, exact and policy == "recompute", ladder)


def _moves_keys(scaling: RopeScaling | None) -> bool:
    """Whether a scaling rotates keys at other positions than their own."""
    if scaling is None:
        return False
    return scaling.rope_type in _KEY_MOVING_KINDS or any(_moves_keys(inner) for _, inner in scaling.groups)


@dataclass(frozen=True, slots=True)
class RotaryPlanner:
    """Plans the rotation of requests, in the engine and in previews of it.

    groups, update: the model's rotary groups and the default policy; update None: the default of the kinds. ladder: the
    thresholds that `AUTO` chooses from; None if nothing can be scaled. auto: whether `AUTO` is the default scaling.
    """

    groups: tuple[RotaryGroup, ...]
    update: RopeUpdate | None = None
    ladder: AutoScalingThresholds | None = None
    auto: bool = False

    def chooses(self, scaling: RopeScaling | None) -> bool:
        """Whether a request with this `rope_scaling` gets its scaling by length."""
        return scaling == AUTO or (scaling is None and self.auto)

    def plan(
        self,
        longest: int,
        scaling: RopeScaling | None = None,
        update: RopeUpdate | None = None,
        *,
        exact: bool = False,
    ) -> RotaryPlan:
        """The plan of a request of at most `longest` tokens with these options. Raises RequestError if they do not fit."""
        if self.chooses(scaling):
            if self.ladder is None:
                raise RequestError(
                    "rope_scaling auto: this model has no rotation that could be scaled: leave it out",
                    "rope_scaling",
                    "unsupported_value",
                )
            return make_auto_plan(self.ladder, longest, update or self.update, exact=exact)
        return make_plan(apply_scaling(self.groups, scaling), longest, update or self.update, exact=exact)


class RotaryRows(Protocol):
    """Rows of the rotary tables, enough for `max_num_seqs` sequences."""

    def acquire(self, specs: tuple[RotarySpec, ...], /) -> int: ...
    def release(self, row: int, /) -> None: ...
