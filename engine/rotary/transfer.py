"""What a rotation that was resolved for one model is on another: for a draft model beside the one it drafts for.

A scaling multiplies each frequency of the unscaled rotation by a ratio that depends on the frequency (its wavelength
against the trained length, or its place between the fastest and the slowest). So the ratios of one model, read off at the
logarithm of the other's frequencies, scale the other alike, whatever the sizes of their heads. What comes out need not be
exact: a draft model's rotation decides how many of its proposals are accepted, and nothing else. Imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from windlass.engine.rotary.distances import PLAIN_DISTANCES, Distances
from windlass.engine.rotary.groups import RotaryGroup
from windlass.engine.rotary.scaling import RotaryBase, RotarySpec, resolve


class DraftRotaryMapper:
    """From the specs of a model to those of its draft model. source, target: their rotary groups without a request's scaling."""

    def __init__(self, source: Sequence[RotaryGroup], target: Sequence[RotaryGroup]) -> None:
        self._source, self._target = tuple(source), tuple(target)
        self._own = tuple(resolve(group.scaling, group.base, group.base.trained_len) for group in source)
        self._default = tuple(resolve(group.scaling, group.base, group.base.trained_len) for group in target)
        names = [group.name for group in source]
        self._origin = [names.index(group.name) if group.name in names else 0 for group in target]

    def __call__(self, specs: Sequence[RotarySpec]) -> tuple[RotarySpec, ...]:
        """The draft model's specs, one per group of its own, where the model runs under `specs`.

        Where that is the model's own rotation, it is the draft model's own, which may be another kind.
        """
        found = []
        for group, origin, default in zip(self._target, self._origin, self._default, strict=True):
            distances, spec = specs[origin].distances, replace(specs[origin], distances=PLAIN_DISTANCES)
            own = spec == replace(self._own[origin], distances=PLAIN_DISTANCES)
            moved = default if own else _map_spec(spec, self._source[origin].base, group.base, default)
            found.append(
                replace(moved, distances=distances if _supports_distances(group.base, distances) else PLAIN_DISTANCES)
            )
        return tuple(found)


def _supports_distances(base: RotaryBase, distances: Distances) -> bool:
    """Whether the rule of the model makes sense on its draft model too, which otherwise goes on by its own distances."""
    return base.fixed_distances_reason is None and max(distances.most, distances.near or 0) <= base.trained_len


def _map_spec(spec: RotarySpec, source: RotaryBase, target: RotaryBase, default: RotarySpec) -> RotarySpec:
    if source.inv_freq is not None or target.inv_freq is not None:
        return default  # learned frequencies have no scale in common
    known = sorted(
        (math.log(plain), scaled / plain)
        for plain, scaled in zip(source.unscaled(), spec.inv_freq, strict=True)
        if plain > 0
    )
    if not known:
        return default
    log_frequencies, ratios = [log_frequency for log_frequency, _ in known], [ratio for _, ratio in known]
    scaled = tuple(f * _interpolate(math.log(f), log_frequencies, ratios) if f > 0 else f for f in target.unscaled())
    return RotarySpec(scaled, spec.rotary_scale)


def _interpolate(log_frequency: float, log_frequencies: Sequence[float], ratios: Sequence[float]) -> float:
    """The ratio at a place, on the line between its neighbours; at and past the ends that of the end."""
    at = bisect_left(log_frequencies, log_frequency)
    if at == 0 or at == len(log_frequencies):
        return ratios[0] if at == 0 else ratios[-1]
    share = (log_frequency - log_frequencies[at - 1]) / (log_frequencies[at] - log_frequencies[at - 1])
    return ratios[at - 1] + share * (ratios[at] - ratios[at - 1])
