"""Automatic scaling (`rope_scaling: "auto"`): thresholds by length, and the least scaling that a request needs.

A model's own thresholds start with the trained length and continue with its own kind of scaling (YaRN for a model without
one), doubling the factor each time. Kinds that depend on the length themselves (dynamic, longrope) have one threshold
without an end. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.rotary import frequencies
from windlass.engine.rotary.rope_scaling import (
    DISTANCE_KINDS,
    RopeScaling,
    RotaryBase,
    RotaryGroup,
    apply_scaling,
    effective_length,
    main_group,
    original_len,
    runnable_kinds,
)

AUTO_NAME = "auto"
AUTO = RopeScaling(AUTO_NAME)  # instead of a scaling: the least that the length needs
MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class ScalingThreshold:
    """Scaling of requests of up to `up_to` tokens (None: of any length).

    scaling: None for the model's own. profile: name of the configured profile that it comes from, if any.
    """

    up_to: int | None
    scaling: RopeScaling | None = None
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class AutoScalingThresholds:
    """Thresholds in order of length. groups: the model's own rotary groups."""

    groups: tuple[RotaryGroup, ...]
    steps: tuple[ScalingThreshold, ...]

    @property
    def end(self) -> int | None:
        """The longest request that any threshold covers; None: no limit."""
        return self.steps[-1].up_to

    def step(self, length: int) -> ScalingThreshold:
        """The first threshold that covers `length` tokens. Raises RequestError if there is none."""
        for step in self.steps:
            if step.up_to is None or length <= step.up_to:
                return step
        raise RequestError(
            f"rope_scaling auto: prompt and output have {length} tokens, the last threshold of this server is "
            f"{self.end}: ask for fewer tokens, or name a scaling",
            "rope_scaling",
            "context_length_exceeded",
        )

    def groups_under(self, step: ScalingThreshold) -> tuple[RotaryGroup, ...]:
        """The model's rotary groups with the scaling of a threshold."""
        return apply_scaling(self.groups, step.scaling)


def model_thresholds(groups: tuple[RotaryGroup, ...], longest: int) -> AutoScalingThresholds:
    """A model's own thresholds, as many as requests of up to `longest` tokens need."""
    main = main_group(groups)
    if main.scaling.depends_on_length or main.scaling.rope_type in DISTANCE_KINDS:
        return AutoScalingThresholds(groups, (ScalingThreshold(None),))
    least, growing, reach = _first_threshold(main.scaling, main.base)
    grows_factor = growing.get("factor") is not None and growing.get("alpha") is None
    name = "factor" if grows_factor else "alpha"
    steps = [ScalingThreshold(reach, least)]
    while reach < longest and len(steps) < MAX_STEPS:
        reach *= 2
        growing = _with(growing, name, 2 * growing.get(name))
        steps.append(ScalingThreshold(reach, growing))
    return AutoScalingThresholds(groups, tuple(steps))


def checked_thresholds(
    groups: tuple[RotaryGroup, ...], steps: Sequence[ScalingThreshold], param: str
) -> AutoScalingThresholds:
    """Check an operator's thresholds on a model. Raises LoadError, naming them as `param`, if they are inconsistent."""
    if not 1 <= len(steps) <= MAX_STEPS:
        raise LoadError(f"{param} has {len(steps)} steps: give 1 to {MAX_STEPS}")
    before, factor = 0, 0.0
    for number, step in enumerate(steps, start=1):
        where = f"{param}: step {number}"
        if step.up_to is None and number < len(steps):
            raise LoadError(f"{where} has no up_to, which only the last may leave out")
        if step.up_to is not None and step.up_to <= before:
            raise LoadError(f"{where} holds up to {step.up_to} tokens, the one before it {before}: lengths must go up")
        try:
            scaled = apply_scaling(groups, step.scaling, param=where)
        except RequestError as error:
            raise LoadError(error.message) from None
        main = main_group(scaled)
        stretch = _stretch(main.scaling, main.base, step.up_to)
        if main.scaling.rope_type in DISTANCE_KINDS:  # these extend the context without a factor
            stretch = max(stretch, factor)
        if stretch < factor * (1 - 1e-9):
            raise LoadError(
                f"{where} scales by {stretch:g}, the one before it by {factor:g}: factors must not go down, since the "
                "longer request needs no less"
            )
        before, factor = before if step.up_to is None else step.up_to, max(stretch, factor)
    return AutoScalingThresholds(groups, tuple(steps))


def make_thresholds(
    groups: tuple[RotaryGroup, ...], steps: Sequence[ScalingThreshold], longest: int, param: str
) -> AutoScalingThresholds | None:
    """The operator's thresholds, or the model's own without any; None for a model that does not rotate. Raises LoadError."""
    if steps:
        return checked_thresholds(groups, steps, param)
    return None if main_group(groups).base.unrotated is not None else model_thresholds(groups, longest)


def _first_threshold(own: RopeScaling, base: RotaryBase) -> tuple[RopeScaling | None, RopeScaling, int]:
    """(scaling of the first threshold, scaling whose factor is doubled from there on, tokens that the first covers)."""
    trained = base.trained_len
    if own.rope_type in ("default", "learned"):
        if "yarn" in runnable_kinds(base):
            return None, RopeScaling("yarn", (("factor", 1.0),)), trained
        # Learned frequencies have no base, so their pairs are distinguished by wavelength, as in Llama 3.1.
        bounds = (("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
        return None, RopeScaling("llama3", (("factor", 1.0), *bounds)), trained
    if own.rope_type in ("yarn", "llama3"):
        original = original_len(own, base)
        if original >= trained:
            # The model was trained for the length before scaling: the scaling in config.json is for longer texts only.
            return RopeScaling(), _with(own, "factor", 1.0), original
        return None, _with(own, "factor", own.get("factor") or trained / original), trained
    if own.get("alpha") is not None:
        return None, own, trained
    return None, _with(own, "factor", own.get("factor") or 1.0), trained


def _with(scaling: RopeScaling, name: str, value: Any) -> RopeScaling:
    """The scaling with another value of a field, in canonical form."""
    return RopeScaling.from_dict({**scaling.to_dict(), name: value})


def _stretch(scaling: RopeScaling, base: RotaryBase, up_to: int | None) -> float:
    """The factor by which a flat scaling slows the slowest pairs, for requests of `up_to` tokens."""
    factor: float | None = scaling.get("factor")
    match scaling.rope_type:
        case "dynamic":
            alpha: float | None = scaling.get("alpha")
            if alpha is not None:
                return alpha
            reach = effective_length(scaling, base, base.trained_len if up_to is None else up_to)
            assert factor is not None and reach is not None
            return frequencies.dynamic_stretch(factor, reach / base.trained_len)
        case "longrope":
            original = original_len(scaling, base)
            return 1.0 if up_to is not None and up_to <= original else factor or base.trained_len / original
        case "yarn":
            return factor or base.trained_len / original_len(scaling, base)
    return 1.0 if factor is None else factor
