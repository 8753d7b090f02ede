"""Rotary scaling: the `rope_scaling` object in Hugging Face's names, the rotary groups of a model, and their frequencies.

A rotary group is a set of layers with the same frequencies. Imports no torch: the API process validates requests with it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from windlass.engine.errors import RequestError
from windlass.engine.rotary import frequencies
from windlass.engine.rotary.attention_distances import PLAIN_DISTANCES, Distances, resolve_distances
from windlass.engine.rotary.scaling_fields import (
    INVALID,
    KINDS,
    UNKNOWN,
    Value,
    format_key,
    format_value,
    invalid,
    read_fields,
    read_rope_type,
)

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
GROUP_NAMES = (FULL_ATTENTION, SLIDING_ATTENTION)
NESTED = "nested"  # `rope_type` of an object that names groups
_NEED_A_BASE = ("ntk", "dynamic", "yarn", "proportional")  # kinds that change the base, which learned frequencies lack
DISTANCE_KINDS = ("dual_chunk", "self_extend", "rerope", "log_n")  # distance-based attention; needs full attention

# Beyond these limits a request could only produce infinities or noise, never text.
_MAX_FREQUENCY, _MAX_ATTENTION_FACTOR = 1e6, 1e4


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One `rope_scaling` object, checked and in canonical form; hashable, picklable, compared by value.

    rope_type: one of `KINDS`; "nested" if the object names groups. parameters: the given fields in canonical order,
    numbers as float (lengths as int). groups: for a nested object, the flat scaling of each named group; then
    `parameters` is empty.
    """

    rope_type: str = "default"
    parameters: tuple[tuple[str, Value], ...] = ()
    groups: tuple[tuple[str, RopeScaling], ...] = ()

    @classmethod
    def from_dict(cls, obj: Mapping[str, Any], *, param: str = "rope_scaling") -> RopeScaling:
        """Read a flat object, or one nested by group name. Raises RequestError naming the field as `param`.field."""
        if not isinstance(obj, Mapping):
            raise RequestError(
                f'{param} must be an object such as {{"rope_type": "yarn", "factor": 4}}, got {format_value(obj)}',
                param,
                INVALID,
            )
        obj = dict(obj)
        if any(name in obj for name in GROUP_NAMES):
            return cls._nested_from_dict(obj, param)
        rope_type = read_rope_type(obj, param)
        return cls(rope_type, read_fields(obj, rope_type, param))

    @classmethod
    def _nested_from_dict(cls, obj: dict[str, Any], param: str) -> RopeScaling:
        for key in obj:
            if key not in GROUP_NAMES:
                raise invalid(
                    f"{param}.{format_key(key)}",
                    f"is next to group names: put it inside {' or '.join(GROUP_NAMES)}",
                    UNKNOWN,
                )
        groups = []
        for name in GROUP_NAMES:
            if obj.get(name) is None:
                continue
            inner = cls.from_dict(obj[name], param=f"{param}.{name}")
            if inner.groups:
                raise invalid(f"{param}.{name}", "must be flat, without group names inside")
            groups.append((name, inner))
        if not groups:
            raise invalid(param, "names rotary groups, but gives no object for any of them")
        return cls(NESTED, (), tuple(groups))

    def to_dict(self) -> dict[str, Any]:
        """The canonical JSON object; `from_dict` of it gives an equal RopeScaling."""
        if self.groups:
            return {name: inner.to_dict() for name, inner in self.groups}
        given = {key: list(value) if isinstance(value, tuple) else value for key, value in self.parameters}
        return {"rope_type": self.rope_type, **given}

    def get(self, name: str) -> Any:
        """The value of a given field, or None."""
        return next((value for key, value in self.parameters if key == name), None)

    def without(self, name: str) -> RopeScaling:
        """The same scaling without one field."""
        return RopeScaling(self.rope_type, tuple((k, v) for k, v in self.parameters if k != name), self.groups)

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the request (dynamic without alpha, longrope)."""
        if self.groups:
            return any(inner.depends_on_length for _, inner in self.groups)
        return self.rope_type == "longrope" or (self.rope_type == "dynamic" and self.get("alpha") is None)


@dataclass(frozen=True, slots=True)
class RotaryBase:
    """Properties of the model that determine the unscaled rotation of a rotary group.

    rotary_dim: how many of head_dim elements are rotated, even. trained_len: the model's own context length M.
    rotating_pairs: on a proportional model, how many of the rotary_dim/2 pairs rotate; None: all of them.
    inv_freq: rotary_dim/2 frequencies learned with the weights, instead of rope_theta; empty until they are read from
    the checkpoint. fixed_distances_reason: why distances of this model cannot be changed; None if they can.
    scales_scores: whether YaRN's `mscale_all_dim` also multiplies whole scores, as with latent attention.
    unrotated: how a model without any rotating layer represents positions; None if some layer rotates.
    """

    rope_theta: float
    head_dim: int
    rotary_dim: int
    trained_len: int
    rotating_pairs: int | None = None
    inv_freq: tuple[float, ...] | None = None
    fixed_distances_reason: str | None = None
    scales_scores: bool = False
    unrotated: str | None = None

    def unscaled(self, theta: float | None = None) -> tuple[float, ...]:
        """The model's own frequencies, radians per token, with base `theta` if it is given; [rotary_dim/2].

        Raises ValueError if the frequencies are learned and not read yet.
        """
        if self.inv_freq is None:
            return frequencies.default(
                self.rope_theta if theta is None else theta, self.rotary_dim, self.rotating_pairs
            )
        if not self.inv_freq:
            raise ValueError("this model's frequencies are learned and have not been read from its files")
        return self.inv_freq


def runnable_kinds(base: RotaryBase) -> tuple[str, ...]:
    """The kinds of scaling that this rotary group supports, in canonical order."""
    if base.inv_freq is not None:
        return tuple(kind for kind in KINDS if kind not in _NEED_A_BASE)
    # With partial rotation, the padding zeros of "proportional" would change which dimensions form pairs.
    refused = ("learned",) if base.rotary_dim == base.head_dim else ("learned", "proportional")
    return tuple(kind for kind in KINDS if kind not in refused)


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Everything that the rotation of one request in one group depends on.

    inv_freq: rotary_dim/2 radians per token, float64. rotary_scale: the attention factor A on cos and sin, so that
    scores over the rotated dimensions grow by A². distances: rule of distance-based attention. score_scale: factor of
    whole scores. fingerprint: sha256 over all of these; two specs share cached keys only if it is equal.
    """

    inv_freq: tuple[float, ...]
    rotary_scale: float = 1.0
    distances: Distances = PLAIN_DISTANCES
    score_scale: float = 1.0

    @property
    def fingerprint(self) -> str:
        values = (self.rotary_scale, self.score_scale, *self.inv_freq)
        packed = struct.pack(f"<{len(values)}d", *values)
        if not self.distances.is_plain:
            packed += repr(self.distances).encode()
        return hashlib.sha256(packed).hexdigest()


def original_len(scaling: RopeScaling, base: RotaryBase) -> int:
    """`original_max_position_embeddings` of the scaling, else the model's trained length."""
    given = scaling.get("original_max_position_embeddings")
    return base.trained_len if given is None else int(given)


def effective_length(scaling: RopeScaling, base: RotaryBase, length: int, *, exact: bool = False) -> float | None:
    """The length for which the frequencies of a request of `length` tokens are computed; None for kinds without one.

    dynamic: the grid point M * 2^(k/4) at or above `length`, at least M; with `exact`, `length` itself, at least M.
    longrope: the original length with the short list, the model's (or `factor` times the original) with the long one.
    """
    if not scaling.depends_on_length:
        return None
    if scaling.rope_type == "longrope":
        original = original_len(scaling, base)
        if length <= original:
            return float(original)
        return max(float(base.trained_len), original * cast(float, scaling.get("factor") or 1.0))
    if exact:  # without the detour over a ratio, which may lose a token by rounding
        return float(max(length, base.trained_len))
    return base.trained_len * frequencies.grid_ratio(base.trained_len, length)


def last_length(scaling: RopeScaling, base: RotaryBase, length: int, *, exact: bool = False) -> int | None:
    """The longest request with the same frequencies as one of `length` tokens; None: no limit."""
    if scaling.rope_type == "longrope":
        original = original_len(scaling, base)
        same = all(scaling.get(f"short_{name}") == scaling.get(f"long_{name}") for name in ("factor", "mscale"))
        return original if length <= original and not same else None
    reach = effective_length(scaling, base, length, exact=exact)
    return None if reach is None else math.floor(reach)


def resolve(
    scaling: RopeScaling, base: RotaryBase, length: int, *, exact: bool = False, param: str = "rope_scaling"
) -> RotarySpec:
    """Frequencies and factors of a flat scaling on one group of a model.

    length: of the request, in tokens, for kinds that depend on it. exact: dynamic at that length instead of on its grid.
    Raises RequestError if the object does not fit the model, ValueError for a nested object.
    """
    if scaling.groups:
        raise ValueError("a nested scaling is resolved group by group by apply_scaling()")
    _check_kind(scaling, base, param)
    _check_lists(scaling, base, param)
    try:
        inv_freq, rotary_scale = _frequencies(scaling, base, length, exact)
    except (OverflowError, ZeroDivisionError):
        inv_freq, rotary_scale = (math.inf,), 1.0
    if not all(0 <= w <= _MAX_FREQUENCY for w in inv_freq):
        cause = _cause(scaling)
        field = f"{param}.{cause}" if cause else param
        raise invalid(
            field,
            f"gives frequencies outside 0 .. {_MAX_FREQUENCY:g} radians per token: use "
            f"{'a more moderate value' if cause else 'more moderate values'}",
        )
    if not 1 / _MAX_ATTENTION_FACTOR <= rotary_scale <= _MAX_ATTENTION_FACTOR:
        raise RequestError(
            f"{param} gives an attention factor of {rotary_scale:g}: it must lie between {1 / _MAX_ATTENTION_FACTOR:g} "
            f"and {_MAX_ATTENTION_FACTOR:g}",
            f"{param}.attention_factor",
            INVALID,
        )
    score_scale = _score_scale(scaling, base)
    if not score_scale <= _MAX_ATTENTION_FACTOR:
        raise invalid(
            f"{param}.mscale_all_dim",
            f"gives a factor of {score_scale:g} on scores: it must not be above {_MAX_ATTENTION_FACTOR:g}",
        )
    distances = resolve_distances(
        scaling.rope_type, dict(scaling.parameters), min(original_len(scaling, base), base.trained_len), length, param
    )
    return RotarySpec(inv_freq, rotary_scale, distances, score_scale)


def _score_scale(scaling: RopeScaling, base: RotaryBase) -> float:
    """The factor of whole scores."""
    all_dim = scaling.get("mscale_all_dim")
    if not base.scales_scores or scaling.rope_type != "yarn" or not all_dim:
        return 1.0
    factor = scaling.get("factor") or base.trained_len / original_len(scaling, base)
    return frequencies.yarn_magnitude(factor, all_dim) ** 2


def _cause(scaling: RopeScaling) -> str:
    """The field that causes frequencies out of range, if only one can, else ""."""
    if scaling.rope_type == "longrope":  # its factor affects the attention factor only
        return ""
    given = [name for name in ("factor", "alpha", "rope_theta") if scaling.get(name) is not None]
    return given[0] if len(given) == 1 else ""


def check(scaling: RopeScaling, base: RotaryBase, *, param: str = "rope_scaling") -> None:
    """Raise RequestError, naming the field, if a flat scaling cannot be used on this group at every length."""
    lengths = (1, base.trained_len * 64) if scaling.depends_on_length else (1,)
    if scaling.rope_type == "longrope":
        lengths = (1, original_len(scaling, base) + 1)
    for length in lengths:
        resolve(scaling, base, length, param=param)


def _check_kind(scaling: RopeScaling, base: RotaryBase, param: str) -> None:
    kinds = runnable_kinds(base)
    if base.unrotated is not None and (scaling.rope_type != "default" or scaling.parameters):
        raise RequestError(
            f"{param}: this model does not rotate, {base.unrotated}, so there is nothing to scale: leave it out",
            param,
            INVALID,
        )
    if scaling.rope_type not in kinds:
        raise invalid(
            f"{param}.rope_type", f"{scaling.rope_type!r} cannot run on this model: use one of {', '.join(kinds)}"
        )
    if scaling.rope_type in DISTANCE_KINDS and base.fixed_distances_reason is not None:
        raise invalid(
            f"{param}.rope_type",
            f"{scaling.rope_type!r} cannot run on this model, {base.fixed_distances_reason}: use one of "
            f"{', '.join(kind for kind in kinds if kind not in DISTANCE_KINDS)}",
        )
    if base.inv_freq is not None and scaling.rope_type == "dual_chunk" and scaling.get("factor") is not None:
        raise invalid(
            f"{param}.factor",
            "asks for YaRN, which needs a base, but this model's frequencies are learned: leave it out",
        )
    if base.inv_freq is not None and scaling.get("rope_theta") is not None:
        raise invalid(f"{param}.rope_theta", "has no effect, as this model's frequencies are learned: leave it out")


def _check_lists(scaling: RopeScaling, base: RotaryBase, param: str) -> None:
    sections = scaling.get("mrope_section")
    if sections is not None and sum(sections) != base.rotary_dim // 2:
        raise invalid(
            f"{param}.mrope_section",
            f"must add up to the {base.rotary_dim // 2} rotated pairs of this model, got {format_value(sum(sections))}",
        )
    for name in ("short_factor", "long_factor"):
        given = scaling.get(name)
        if given is not None and len(given) != base.rotary_dim // 2:
            raise invalid(
                f"{param}.{name}",
                f"must hold {base.rotary_dim // 2} numbers, one per rotated pair of this model, got {len(given)}",
            )


def _frequencies(scaling: RopeScaling, base: RotaryBase, length: int, exact: bool) -> tuple[tuple[float, ...], float]:
    """(inv_freq, attention factor) of a flat scaling whose fields fit the model."""
    given: dict[str, Any] = dict(scaling.parameters)
    theta: float = given.get("rope_theta", base.rope_theta)
    w, dim = base.unscaled(theta), base.rotary_dim
    original = original_len(scaling, base)
    # A missing factor is the ratio of the two lengths, as in transformers.
    factor: float = given.get("factor", base.trained_len / original)
    attention: float | None
    match scaling.rope_type:
        case "default" | "learned" | "log_n" | "self_extend" | "rerope":
            return w, 1.0
        case "linear":
            return frequencies.linear(w, factor), 1.0
        case "proportional":
            return frequencies.linear(w, given.get("factor", 1.0)), 1.0
        case "ntk":
            return base.unscaled(frequencies.stretched_base(theta, dim, factor)), 1.0
        case "dynamic":
            alpha: float | None = given.get("alpha")
            if alpha is None:
                reach = effective_length(scaling, base, length, exact=exact)
                assert reach is not None
                alpha = frequencies.dynamic_stretch(factor, reach / base.trained_len)
            return base.unscaled(frequencies.stretched_base(theta, dim, alpha)), 1.0
        case "dual_chunk" if "factor" not in given:
            return w, 1.0
        case "yarn" | "dual_chunk":
            ramp = {name: given[name] for name in ("beta_fast", "beta_slow", "truncate") if name in given}
            attention = given.get("attention_factor")
            if attention is None:
                attention = frequencies.yarn_attention_factor(factor, given.get("mscale"), given.get("mscale_all_dim"))
            return frequencies.yarn(w, theta, dim, factor, original, **ramp), attention
        case "llama3":
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            return frequencies.llama3(w, factor, low, high, original), 1.0
        case "longrope":
            side = "short" if length <= original else "long"
            attention = given.get(f"{side}_mscale", given.get("attention_factor"))
            if attention is None:
                attention = frequencies.longrope_attention_factor(factor, original)
            return frequencies.longrope(w, given[f"{side}_factor"]), attention
    raise AssertionError(f"unreachable: {scaling.rope_type} has no formula")


@dataclass(frozen=True, slots=True)
class RotaryGroup:
    """Layers with the same frequencies. name: "full_attention" or "sliding_attention". scaling: contains rope_theta only
    if a request or the operator has given it."""

    name: str
    base: RotaryBase
    scaling: RopeScaling

    def parameters(self) -> dict[str, Any]:
        """The scaling's fields as a JSON object, with rope_theta and without `rope_type`."""
        given = self.scaling.to_dict()
        given.pop("rope_type")
        if self.base.unrotated is not None:
            return given
        if self.scaling.rope_type in DISTANCE_KINDS:  # with default sizes, which follow from the model's length
            sizes = resolve(self.scaling, self.base, 1).distances.described()
            given |= {name: size for name, size in sizes.items() if name in KINDS[self.scaling.rope_type]}
        # Learned frequencies have no base.
        return given if self.base.inv_freq is not None else {"rope_theta": self.base.rope_theta, **given}


def main_group(groups: tuple[RotaryGroup, ...]) -> RotaryGroup:
    """The group that a flat scaling applies to: that of full attention, or the first."""
    return next((group for group in groups if group.name == FULL_ATTENTION), groups[0])


def apply_scaling(
    groups: tuple[RotaryGroup, ...], scaling: RopeScaling | None, *, param: str = "rope_scaling"
) -> tuple[RotaryGroup, ...]:
    """The groups with a request's or the operator's scaling; None leaves the model's own.

    A flat scaling replaces that of `main_group`; a nested one replaces those of the named groups. A group's theta
    remains unless the scaling gives one. Raises RequestError if the scaling does not fit the model.
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


class DraftRotaryMapper:
    """Maps the specs of a model to those of its draft model.

    The ratio of scaled to unscaled frequency is interpolated over the logarithm of the frequency. This affects only how
    many proposals are accepted. source, target: rotary groups of the two models, without a request's scaling.
    """

    def __init__(self, source: Sequence[RotaryGroup], target: Sequence[RotaryGroup]) -> None:
        self._source, self._target = tuple(source), tuple(target)
        self._own = tuple(resolve(group.scaling, group.base, group.base.trained_len) for group in source)
        self._default = tuple(resolve(group.scaling, group.base, group.base.trained_len) for group in target)
        names = [group.name for group in source]
        self._origin = [names.index(group.name) if group.name in names else 0 for group in target]

    def __call__(self, specs: Sequence[RotarySpec]) -> tuple[RotarySpec, ...]:
        """The draft model's specs, one per rotary group of the draft model, for `specs` of the model.

        The model's own rotation maps to the draft model's own, which may be of another kind.
        """
        mapped = []
        for group, origin, default in zip(self._target, self._origin, self._default, strict=True):
            distances, spec = specs[origin].distances, replace(specs[origin], distances=PLAIN_DISTANCES)
            own = spec == replace(self._own[origin], distances=PLAIN_DISTANCES)
            target = default if own else _map_spec(spec, self._source[origin].base, group.base, default)
            if not _supports_distances(group.base, distances):
                distances = PLAIN_DISTANCES
            mapped.append(replace(target, distances=distances))
        return tuple(mapped)


def _supports_distances(base: RotaryBase, distances: Distances) -> bool:
    """Whether the draft model can use the distance rule of the model; otherwise it uses plain distances."""
    return base.fixed_distances_reason is None and max(distances.most, distances.near or 0) <= base.trained_len


def _map_spec(spec: RotarySpec, source: RotaryBase, target: RotaryBase, default: RotarySpec) -> RotarySpec:
    if source.inv_freq is not None or target.inv_freq is not None:
        return default  # learned frequencies are not comparable
    pairs = sorted(
        (math.log(plain), scaled / plain)
        for plain, scaled in zip(source.unscaled(), spec.inv_freq, strict=True)
        if plain > 0
    )
    if not pairs:
        return default
    log_frequencies, ratios = [log_frequency for log_frequency, _ in pairs], [ratio for _, ratio in pairs]
    scaled = tuple(f * _interpolate(math.log(f), log_frequencies, ratios) if f > 0 else f for f in target.unscaled())
    return RotarySpec(scaled, spec.rotary_scale)


def _interpolate(log_frequency: float, log_frequencies: Sequence[float], ratios: Sequence[float]) -> float:
    """Linear interpolation of the ratio, constant outside the range."""
    at = bisect_left(log_frequencies, log_frequency)
    if at == 0 or at == len(log_frequencies):
        return ratios[0] if at == 0 else ratios[-1]
    share = (log_frequency - log_frequencies[at - 1]) / (log_frequencies[at] - log_frequencies[at - 1])
    return ratios[at - 1] + share * (ratios[at] - ratios[at - 1])
