"""Rotary groups: the sets of layers of one model that rotate alike, and what a scaling makes of them.

Responsible for which group a flat or a nested scaling speaks of. It knows no layers, no config.json and no tensors, and
imports no torch: the API process applies requests with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.errors import RequestError
from windlass.engine.rotary.fields import INVALID, KINDS
from windlass.engine.rotary.scaling import DISTANCE_KINDS, FULL_ATTENTION, RopeScaling, RotaryBase, check, resolve


@dataclass(frozen=True, slots=True)
class RotaryGroup:
    """Layers that rotate alike. name: "full_attention" or "sliding_attention"; scaling never carries rope_theta
    (base has it) unless a request or the operator gave one."""

    name: str
    base: RotaryBase
    scaling: RopeScaling

    def parameters(self) -> dict[str, Any]:
        """The scaling's fields as a JSON object without `rope_type`, theta included."""
        given = self.scaling.to_dict()
        given.pop("rope_type")
        if self.base.unrotated is not None:
            return given
        if self.scaling.rope_type in DISTANCE_KINDS:  # whose sizes nobody can tell from the model's length by heart
            sizes = resolve(self.scaling, self.base, 1).distances.described()
            given |= {name: size for name, size in sizes.items() if name in KINDS[self.scaling.rope_type]}
        # Learned frequencies follow from no base.
        return given if self.base.inv_freq is not None else {"rope_theta": self.base.rope_theta, **given}


def main_group(groups: tuple[RotaryGroup, ...]) -> RotaryGroup:
    """The group that a flat scaling speaks of: that of full attention, or the first."""
    return next((group for group in groups if group.name == FULL_ATTENTION), groups[0])


def apply_scaling(
    groups: tuple[RotaryGroup, ...], scaling: RopeScaling | None, *, param: str = "rope_scaling"
) -> tuple[RotaryGroup, ...]:
    """The groups under a request's or the operator's scaling; None leaves the model's own.

    A flat scaling replaces that of the full-attention group (or of the only group); a nested one replaces those it
    names. A group's theta stays unless the scaling gives one. Raises RequestError where it does not fit the model.
    """
    if scaling is None:
        return groups
    names = [group.name for group in groups]
    if scaling.groups:
        chosen = dict(scaling.groups)
        for name in chosen:
            if name not in names:
                raise RequestError(
                    f"{param}.{name}: this model has no such rotary group, it has {', '.join(names)}",
                    f"{param}.{name}",
                    INVALID,
                )
        params = {name: f"{param}.{name}" for name in chosen}
    else:
        target = main_group(groups).name
        chosen, params = {target: scaling}, {target: param}
    for group in groups:
        if group.name in chosen:
            check(chosen[group.name], group.base, param=params[group.name])
    return tuple(replace(group, scaling=chosen.get(group.name, group.scaling)) for group in groups)
