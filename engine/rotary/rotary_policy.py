"""Rotary policy: the frequencies of a request as it grows, under `frozen`, `recompute` or `rotate`.

A context of n tokens uses the frequencies of length n, where n counts the token being computed; under `frozen`, those of the longest length the request can reach. Nothing depends on chunks, batches or earlier requests. The scheduler decides what happens to cached keys at a change. Imports no torch.
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

# Kinds that rotate keys elsewhere than where they stand.
_KEY_MOVING_KINDS = ("dual_chunk", "self_extend", "rerope")

ROPE_UPDATES: tuple[RopeUpdate, ...] = ("frozen", "recompute", "rotate")


@dataclass(frozen=True, slots=True)
class AutoScalingChoice:
    """A scaling chosen by length. length: tokens it was chosen for, None where it follows the context as that stands. step: of
    the ladder. up_to: tokens for which the choice is the same, None for any longer ones.
    """

    length: int | None
    step: ScalingThreshold
    up_to: int | None

    def described(self) -> dict[str, Any]:
        """As answers tell it."""
        named = {} if self.step.profile is None else {"profile": self.step.profile}
        return {"length": self.length, "up_to": self.up_to, **named}


@dataclass(frozen=True, slots=True)
class RotaryStage:
    """Specs, one per rotary group, that hold for contexts of up to `last_length` tokens (None: for all longer ones).

    effective_length: the length the frequencies are formed for, per group; None where the kind has none.
    single_length: they are those of one length only, so that hardly anybody else computes keys under them.
    choice: why they are these, where the scaling was chosen by length.
    """

    specs: tuple[RotarySpec, ...]
    last_length: int | None
    effective_lengths: tuple[float | None, ...]
    single_length: bool = False
    choice: AutoScalingChoice | None = None


@dataclass(frozen=True, slots=True)
class RotaryReport:
    """What one sample ran under, as answers tell it: the main group's scaling, and each group's where there are several.

    fingerprint: of the frequencies and factors of all groups together.
    effective_length: tokens the frequencies were formed for last, None for kinds without a length.
    moves: how often the cached keys were re-rotated.
    auto: what the scaling was chosen by, where it was chosen by length.
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
    longest: tokens that are held of the request at once, at most. exact: dynamic changes with every token past M, not on
    its grid. ladder: what the scaling is chosen from by length; then `groups` are those of the longest.
    """

    groups: tuple[RotaryGroup, ...]
    policy: RopeUpdate
    longest: int
    exact: bool = False
    ladder: AutoScalingThresholds | None = None

    def stage(self, length: int) -> RotaryStage:
        """The specs of a context of `length` tokens; of more than `longest`, those of `longest`."""
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
            # A factor on scores that goes by the length is fixed when the request arrives, whatever the policy.
            formed = length if scaling.depends_on_length else self.longest
            specs.append(resolve(scaling, base, formed, exact=self.exact))
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
        """What to tell of a sample that ended in `stage` whose keys were re-rotated `moves` times."""
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
    """What all rotary groups rotate by: the fingerprint of the only one, or a digest of all."""
    if len(specs) == 1:
        return specs[0].fingerprint
    return hashlib.sha256("".join(spec.fingerprint for spec in specs).encode()).hexdigest()


def make_plan(
    groups: tuple[RotaryGroup, ...], longest: int, rope_update: RopeUpdate | None, *, exact: bool = False
) -> RotaryPlan:
    """The plan of a request of at most `longest` tokens; rope_update None picks the default of the kinds.

    That is `recompute` where a group has longrope, whose frequencies change once, and `frozen` elsewhere.
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

    rope_update None: `frozen`, whatever the kinds: one choice for the whole of prompt and output. Under the others the choice
    follows the context as it stands. Raises RequestError where no step holds the request.
    """
    step = ladder.step(longest)
    groups = ladder.groups_under(step)
    policy: RopeUpdate = rope_update or "frozen"
    if policy == "rotate" and any(_moves_keys(step.scaling) for step in ladder.steps):
        policy = "recompute"  # keys within chunks stand elsewhere, which no turn by other frequencies makes of them
    if len(ladder.steps) == 1 and not any(group.scaling.depends_on_length for group in groups):
        policy = "frozen"
    return RotaryPlan(groups, policy, longest, exact and policy == "recompute", ladder)


def _moves_keys(scaling: RopeScaling | None) -> bool:
    """Whether a scaling rotates keys elsewhere than where they stand."""
    if scaling is None:
        return False
    return scaling.rope_type in _KEY_MOVING_KINDS or any(_moves_keys(inner) for _, inner in scaling.groups)


@dataclass(frozen=True, slots=True)
class RotaryPlanner:
    """Plans the rotation of requests, in the engine and wherever else one asks what a request will run under.

    groups, update: the model's rotary groups and the policy that requests run under which ask for nothing else; update None:
    the default of the kinds. ladder: what `AUTO` chooses from, None where nothing can be scaled. auto: requests that ask for
    nothing else have it choose.
    """

    groups: tuple[RotaryGroup, ...]
    update: RopeUpdate | None = None
    ladder: AutoScalingThresholds | None = None
    auto: bool = False

    def chooses(self, scaling: RopeScaling | None) -> bool:
        """Whether the scaling of a request that asks for this is chosen by its length."""
        return scaling == AUTO or (scaling is None and self.auto)

    def plan(
        self,
        longest: int,
        scaling: RopeScaling | None = None,
        update: RopeUpdate | None = None,
        *,
        exact: bool = False,
    ) -> RotaryPlan:
        """The plan of a request of at most `longest` tokens that asks for these; raises RequestError where they do not fit."""
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
    """Rows of the rotary tables. There are enough for `max_num_seqs` sequences."""

    def acquire(self, specs: tuple[RotarySpec, ...], /) -> int: ...
    def release(self, row: int, /) -> None: ...
