"""Reads a model's rotary groups from config.json, under the names of transformers 5 and under the older ones.

Responsible for names, defaults and the choice of groups; what a scaling means is `scaling`'s business. It knows no
weights and no tensors. A rotary group is a set of layers that rotate alike; most models have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.rotary.scaling import (
    FULL_ATTENTION,
    GROUP_NAMES,
    SLIDING_ATTENTION,
    RopeScaling,
    RotaryBase,
    check,
)

# Kinds whose frequencies refer to a length before scaling; a top-level `original_max_position_embeddings` is theirs.
_WITH_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class RotaryGroup:
    """Layers that rotate alike. name: "full_attention" or "sliding_attention"; scaling never carries rope_theta
    (base has it) unless a request or the operator gave one."""

    name: str
    base: RotaryBase
    scaling: RopeScaling


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What a transformers config class fills in where config.json says nothing (read in transformers 5.23)."""

    max_position_embeddings: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    hidden_size: int = 4096
    num_attention_heads: int = 32
    rope_theta: float = 10_000.0
    local_theta: float | None = None  # set: sliding layers always have a theta of their own


_DEFAULTS = {
    "llama": _Defaults(max_position_embeddings=2048),
    "mistral": _Defaults(max_position_embeddings=131_072),
    "qwen2": _Defaults(max_position_embeddings=32_768),
    "qwen3": _Defaults(max_position_embeddings=32_768, head_dim=128),
    "gemma3_text": _Defaults(
        max_position_embeddings=131_072,
        head_dim=256,
        hidden_size=2304,
        num_attention_heads=8,
        rope_theta=1_000_000.0,
        local_theta=10_000.0,
    ),
}


def read_rotary_groups(config: Mapping[str, Any]) -> tuple[RotaryGroup, ...]:
    """The rotary groups of a model, the full-attention group first; one group where all layers rotate alike.

    Raises LoadError for anything that is not understood: an unknown model_type, rope_type or field, a layer type
    without parameters, a wrong value.
    """
    family = config.get("model_type")
    defaults = _DEFAULTS.get(family) if isinstance(family, str) else None
    if defaults is None:
        raise LoadError(f"config.json: model_type {family!r} is not supported: known are {', '.join(_DEFAULTS)}")
    kinds = _layer_kinds(config, defaults)
    given = _given_by_layer_type(config, kinds, defaults)
    groups = tuple(_read_group(config, defaults, name, given[name]) for name in GROUP_NAMES if name in kinds)
    first = groups[0]
    if all((group.base, group.scaling) == (first.base, first.scaling) for group in groups):
        return (first,)
    return groups


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
                    f"{param}.{name}: this model has no such rotary group, it has {', '.join(names)}", f"{param}.{name}"
                )
        params = {name: f"{param}.{name}" for name in chosen}
    else:
        target = FULL_ATTENTION if FULL_ATTENTION in names else names[0]
        chosen, params = {target: scaling}, {target: param}
    for group in groups:
        if group.name in chosen:
            check(chosen[group.name], group.base, param=params[group.name])
    return tuple(replace(group, scaling=chosen.get(group.name, group.scaling)) for group in groups)


def _layer_kinds(config: Mapping[str, Any], defaults: _Defaults) -> set[str]:
    """Which of the group names occur among the layers."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or not layer_types:
            raise LoadError("config.json: layer_types must be a list with one name per layer")
        unknown = sorted({str(kind) for kind in layer_types} - set(GROUP_NAMES))
        if unknown:
            raise LoadError(f"config.json: layer_types has {unknown[0]!r}: known are {', '.join(GROUP_NAMES)}")
        return set(layer_types)
    if defaults.local_theta is None:
        # Whatever windows the layers have, only `rope_parameters` nested by layer type could tell them apart.
        nested = set(GROUP_NAMES) & set(_mapping(config, "rope_parameters") or ())
        return nested or {FULL_ATTENTION}
    # Gemma 3 without layer_types: every sixth layer is global.
    pattern = _integer(config, "sliding_window_pattern", 6)
    layers = _integer(config, "num_hidden_layers", 26)
    kinds = {FULL_ATTENTION} if layers >= pattern else set()
    return kinds | ({SLIDING_ATTENTION} if pattern > 1 else set())


def _given_by_layer_type(config: Mapping[str, Any], kinds: set[str], defaults: _Defaults) -> dict[str, dict[str, Any]]:
    """The rope object of each layer type as written, theta included where it is known."""
    new = _mapping(config, "rope_parameters")
    old = _mapping(config, "rope_scaling")
    if old is not None and any(isinstance(value, Mapping) for value in old.values()):
        if new is not None:
            raise LoadError("config.json: rope_parameters and rope_scaling are both given: keep one")
        new, old = old, None
    own_local = defaults.local_theta is not None
    if new is not None and any(isinstance(value, Mapping) for value in new.values()):
        unknown = sorted(set(map(str, new)) - set(GROUP_NAMES))
        if unknown:
            raise LoadError(
                f"config.json: rope_parameters has {unknown[0]!r} beside layer types: "
                f"known are {', '.join(GROUP_NAMES)}"
            )
        given = {name: dict(value) for name, value in new.items() if isinstance(value, Mapping)}
    else:
        given = {FULL_ATTENTION: dict(new or {})}
        if not own_local:
            given[SLIDING_ATTENTION] = dict(new or {})
    if own_local:
        given.setdefault(FULL_ATTENTION, {})
        given.setdefault(SLIDING_ATTENTION, {})
    for name in kinds:
        if name not in given:
            raise LoadError(f"config.json: rope_parameters says nothing about the {name} layers")
    if old:
        for name in (FULL_ATTENTION,) if own_local else tuple(given):
            given[name] = _merged(given[name], dict(old))
    theta = config.get("rope_theta")
    local = config.get("rope_local_base_freq") if own_local else theta
    for name, value in ((FULL_ATTENTION, theta), (SLIDING_ATTENTION, local)):
        if name in given and given[name].get("rope_theta") is None and value is not None:
            given[name]["rope_theta"] = value
    return given


def _merged(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """An old `rope_scaling` written into a new config: allowed while `rope_parameters` scales nothing itself."""
    if new.get("rope_type", new.get("type", "default")) != "default":
        if all(new.get(key) == value for key, value in old.items()):
            return new
        raise LoadError("config.json: rope_parameters and rope_scaling both scale, and differently: keep one")
    kept = {key: new[key] for key in ("rope_theta", "partial_rotary_factor") if new.get(key) is not None}
    return {**kept, **old}


def _read_group(config: Mapping[str, Any], defaults: _Defaults, name: str, given: dict[str, Any]) -> RotaryGroup:
    given = {key: value for key, value in given.items() if value is not None}
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    kind = given.get("rope_type", given.get("type"))
    if kind is None:
        kind = given["rope_type"] = "default"
    _drop_without_effect(given, kind)
    top_level = config.get("original_max_position_embeddings")
    if top_level is not None and kind in (*_WITH_ORIGINAL_LENGTH, "su"):
        given["original_max_position_embeddings"] = top_level
    fallback = defaults.rope_theta if name == FULL_ATTENTION or defaults.local_theta is None else defaults.local_theta
    given.setdefault("rope_theta", fallback)
    base = _read_base(config, defaults, partial)
    label = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    label = f"{label}.{name}" if name in (config.get(label) or ()) else label
    try:
        scaling = RopeScaling.from_dict(given, param=label)
        base = replace(base, rope_theta=float(scaling.get("rope_theta")))
        scaling = scaling.without("rope_theta")
        check(scaling, base, param=label)
    except RequestError as error:
        raise LoadError(f"config.json: {error.message}") from None
    return RotaryGroup(name, base, scaling)


def _drop_without_effect(given: dict[str, Any], kind: Any) -> None:
    """Remove what published configs carry and no implementation reads for this kind."""
    if kind in ("default", "linear", "dynamic", "ntk"):
        given.pop("original_max_position_embeddings", None)
    if kind == "default" and given.get("factor") == 1:
        given.pop("factor")
    if kind == "yarn" and isinstance(given.get("finetuned"), bool):
        given.pop("finetuned")  # a note about the weights


def _read_base(config: Mapping[str, Any], defaults: _Defaults, partial: Any) -> RotaryBase:
    """Dimensions and trained length; theta is filled in by the caller."""
    heads = _integer(config, "num_attention_heads", defaults.num_attention_heads)
    hidden = _integer(config, "hidden_size", defaults.hidden_size)
    head_dim = _integer(config, "head_dim", defaults.head_dim or hidden // heads)
    rotary_dim = head_dim
    if partial is not None:
        if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
            raise LoadError(f"config.json: partial_rotary_factor must lie in (0, 1], got {partial!r}")
        rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise LoadError(
            f"config.json: {rotary_dim} rotated dimensions (of a head_dim of {head_dim}) cannot form pairs: "
            "an even number is needed"
        )
    trained_len = _integer(config, "max_position_embeddings", defaults.max_position_embeddings)
    return RotaryBase(defaults.rope_theta, head_dim, rotary_dim, trained_len)


def _integer(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise LoadError(f"config.json: {key} must be an object, got {value!r}")
    return value or None
