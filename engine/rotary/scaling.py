"""Rotary scaling: the object a person writes, what the model brings, and the frequencies the two resolve to.

Responsible for the meaning of one `rope_scaling` object in Hugging Face's names, old and new. It knows nothing of
batches, caches or tensors, and it imports no torch: the API process validates requests with it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from windlass.engine.errors import RequestError
from windlass.engine.rotary import frequencies
from windlass.engine.rotary.fields import Value, read_fields, read_rope_type

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
GROUP_NAMES = (FULL_ATTENTION, SLIDING_ATTENTION)
NESTED = "nested"  # `rope_type` of an object that names groups

# Beyond these a request could only produce infinities or noise, never text.
_MAX_FREQUENCY = 1e6
_MAX_ATTENTION_FACTOR = 1e4


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One `rope_scaling` object, checked and in canonical form; hashable, picklable, compared by value.

    rope_type: default, linear, ntk, dynamic, yarn, llama3 or longrope; "nested" when the object names groups.
    parameters: the given fields in canonical order, numbers as float (`original_max_position_embeddings` as int).
    groups: for a nested object, the flat scaling of each named group; then `parameters` is empty.
    """

    rope_type: str = "default"
    parameters: tuple[tuple[str, Value], ...] = ()
    groups: tuple[tuple[str, RopeScaling], ...] = ()

    @classmethod
    def from_dict(cls, obj: Mapping[str, Any], *, param: str = "rope_scaling") -> RopeScaling:
        """Read a flat object, or one nested by group name; raises RequestError naming the field as `param`.field."""
        if not isinstance(obj, Mapping):
            raise RequestError(f"{param} must be an object such as {{'rope_type': 'yarn', 'factor': 4}}", param)
        obj = dict(obj)
        if any(name in obj for name in GROUP_NAMES):
            return cls._nested_from_dict(obj, param)
        rope_type = read_rope_type(obj, param)
        return cls(rope_type, read_fields(obj, rope_type, param))

    @classmethod
    def _nested_from_dict(cls, obj: dict[str, Any], param: str) -> RopeScaling:
        for key in obj:
            if key not in GROUP_NAMES:
                raise RequestError(
                    f"{param}.{str(key)[:60]} stands beside group names: put it inside {' or '.join(GROUP_NAMES)}",
                    f"{param}.{str(key)[:60]}",
                )
        groups = []
        for name in GROUP_NAMES:
            if obj.get(name) is None:
                continue
            inner = cls.from_dict(obj[name], param=f"{param}.{name}")
            if inner.groups:
                raise RequestError(f"{param}.{name} must be flat, without group names inside", f"{param}.{name}")
            groups.append((name, inner))
        if not groups:
            raise RequestError(f"{param} names groups but gives none an object", param)
        return cls(NESTED, (), tuple(groups))

    def to_dict(self) -> dict[str, Any]:
        """The canonical JSON object; `from_dict` of it gives an equal RopeScaling."""
        if self.groups:
            return {name: inner.to_dict() for name, inner in self.groups}
        given = {key: list(value) if isinstance(value, tuple) else value for key, value in self.parameters}
        return {"rope_type": self.rope_type, **given}

    def get(self, name: str) -> Any:
        """The value of a given field, or None."""
        for key, value in self.parameters:
            if key == name:
                return value
        return None

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
    """What the model brings to a rotary group.

    rotary_dim: how many of head_dim elements are rotated, even. trained_len: the model's own context length M.
    """

    rope_theta: float
    head_dim: int
    rotary_dim: int
    trained_len: int


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Everything the rotation of one request in one group depends on.

    inv_freq: rotary_dim/2 radians per token, float64. rotary_scale: the attention factor A on cos and sin, so that
    scores over the rotated dimensions grow by A². softmax_scale: a further factor on the whole score.
    fingerprint: sha256 over all three; two specs share cached keys only if it is equal.
    """

    inv_freq: tuple[float, ...]
    rotary_scale: float = 1.0
    softmax_scale: float = 1.0

    @property
    def fingerprint(self) -> str:
        values = (self.rotary_scale, self.softmax_scale, *self.inv_freq)
        return hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).hexdigest()


def original_len(scaling: RopeScaling, base: RotaryBase) -> int:
    """`original_max_position_embeddings` of the scaling, else the model's trained length."""
    given = scaling.get("original_max_position_embeddings")
    return base.trained_len if given is None else int(given)


def effective_length(scaling: RopeScaling, base: RotaryBase, length: int) -> float:
    """The length at which frequencies frozen for `length` tokens are formed.

    For dynamic the grid point M * 2^(k/4) at or above `length` (M itself below M). Every other kind has no grid:
    `length` itself.
    """
    if scaling.rope_type == "dynamic" and scaling.get("alpha") is None:
        return base.trained_len * frequencies.grid_ratio(base.trained_len, length)
    return float(length)


def resolve(scaling: RopeScaling, base: RotaryBase, length: int, *, param: str = "rope_scaling") -> RotarySpec:
    """Frequencies and factors of a flat scaling on one group of a model.

    length: the longest the request can become, in tokens; kinds that depend on length are frozen for it.
    Raises RequestError where the object does not fit the model; ValueError for a nested object (pick its groups first).
    """
    if scaling.groups:
        raise ValueError("a nested scaling is resolved group by group: see config_names.apply_scaling")
    _check_lists(scaling, base, param)
    try:
        inv_freq, rotary_scale = _formulas(scaling, base, length)
    except (OverflowError, ZeroDivisionError):
        inv_freq, rotary_scale = (math.inf,), 1.0
    if not all(0 <= w <= _MAX_FREQUENCY for w in inv_freq):
        raise RequestError(
            f"{param} gives frequencies outside 0 .. {_MAX_FREQUENCY:g} radians per token: use a more moderate "
            "factor or rope_theta",
            param,
        )
    if not 1 / _MAX_ATTENTION_FACTOR <= rotary_scale <= _MAX_ATTENTION_FACTOR:
        raise RequestError(
            f"{param} gives an attention factor of {rotary_scale:g}: it must lie between {1 / _MAX_ATTENTION_FACTOR:g} "
            f"and {_MAX_ATTENTION_FACTOR:g}",
            f"{param}.attention_factor",
        )
    return RotarySpec(inv_freq, rotary_scale)


def check(scaling: RopeScaling, base: RotaryBase, *, param: str = "rope_scaling") -> None:
    """Raise RequestError, naming the field, if a flat scaling cannot be used on this group at some length."""
    lengths = (1, base.trained_len * 64) if scaling.depends_on_length else (1,)
    if scaling.rope_type == "longrope":
        lengths = (1, original_len(scaling, base) + 1)
    for length in lengths:
        resolve(scaling, base, length, param=param)


def _check_lists(scaling: RopeScaling, base: RotaryBase, param: str) -> None:
    for name in ("short_factor", "long_factor"):
        given = scaling.get(name)
        if given is not None and len(given) != base.rotary_dim // 2:
            raise RequestError(
                f"{param}.{name} must hold {base.rotary_dim // 2} numbers, one per rotated pair of this model, "
                f"got {len(given)}",
                f"{param}.{name}",
            )


def _formulas(scaling: RopeScaling, base: RotaryBase, length: int) -> tuple[tuple[float, ...], float]:
    """(inv_freq, attention factor) of a flat scaling whose fields fit the model."""
    given = dict(scaling.parameters)
    theta = cast(float, given.get("rope_theta", base.rope_theta))
    dim = base.rotary_dim
    original = original_len(scaling, base)
    # Absent factors follow from the two lengths, as in transformers.
    factor = cast(float, given.get("factor", base.trained_len / original))
    match scaling.rope_type:
        case "default":
            return frequencies.default(theta, dim), 1.0
        case "linear":
            return frequencies.linear(theta, dim, factor), 1.0
        case "ntk":
            return frequencies.ntk(theta, dim, factor), 1.0
        case "dynamic":
            alpha = cast("float | None", given.get("alpha"))
            if alpha is None:
                alpha = frequencies.dynamic_stretch(factor, frequencies.grid_ratio(base.trained_len, length))
            return frequencies.ntk(theta, dim, alpha), 1.0
        case "yarn":
            inv_freq = frequencies.yarn(
                theta,
                dim,
                factor,
                original,
                beta_fast=cast(float, given.get("beta_fast", 32.0)),
                beta_slow=cast(float, given.get("beta_slow", 1.0)),
                truncate=bool(given.get("truncate", True)),
            )
            attention = given.get("attention_factor")
            if attention is None:
                mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
                attention = frequencies.yarn_attention_factor(factor, mscale, all_dim)
            return inv_freq, cast(float, attention)
        case "llama3":
            low, high = cast(float, given["low_freq_factor"]), cast(float, given["high_freq_factor"])
            return frequencies.llama3(theta, dim, factor, low, high, original), 1.0
        case "longrope":
            side = "short" if length <= original else "long"
            inv_freq = frequencies.longrope(theta, dim, cast("tuple[float, ...]", given[f"{side}_factor"]))
            attention = given.get(f"{side}_mscale", given.get("attention_factor"))
            if attention is None:
                attention = frequencies.longrope_attention_factor(factor, original)
            return inv_freq, cast(float, attention)
    raise AssertionError(f"unreachable: {scaling.rope_type} has no formula")
