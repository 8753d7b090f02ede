"""Reads a model's rotary groups from config.json, under the names of transformers 5 and under the older ones.

Responsible for names, defaults and the choice of groups; what a scaling means is `scaling`'s business. It knows no
weights and no tensors. A rotary group is a set of layers that rotate alike; most models have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.model.config_json.layer_pattern import LayerPattern, read_layer_pattern
from windlass.engine.model.config_json.older_names import normalize_rope_keys
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config, read_list, read_number, read_object, read_size
from windlass.engine.rotary.fields import ALIASES, format_value
from windlass.engine.rotary.groups import RotaryGroup
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
_MOST_HEAD_DIM = 1 << 16  # there is a frequency for every two numbers of a head


@dataclass(frozen=True, slots=True)
class RotaryLayout:
    """The rotation of a whole model, and what else depends on the pattern of its layers.

    groups: the full-attention group first; one where all layers rotate alike. layers: per layer its window and group
    name as config.json has them. layer_groups: per layer an index into groups, None where it does not rotate.
    temperature: (beta, length) where queries grow with their position (Ministral 3), else None.
    """

    groups: tuple[RotaryGroup, ...]
    layers: tuple[LayerPattern, ...]
    layer_groups: tuple[int | None, ...]
    temperature: tuple[float, int] | None = None

    def with_own_distances(self, reason: str) -> RotaryLayout:
        """The same of a model on which no scaling may change how far keys seem. reason: why, behind "this model, "."""
        return replace(
            self,
            groups=tuple(
                replace(group, base=replace(group.base, fixed_distances_reason=reason)) for group in self.groups
            ),
        )

    def without_rotation(self, reason: str) -> RotaryLayout:
        """The same of a model none of whose layers rotates. reason: what tells its positions apart, behind "this model …, "."""
        groups = tuple(replace(group, base=replace(group.base, unrotated=reason)) for group in self.groups)
        return replace(self, groups=groups)


def read_rotary_layout(config: Config, rules: ConfigRules) -> RotaryLayout:
    """The rotary groups of a model of the family with these rules, and the group of each layer.

    Learned frequencies are left empty: `loading.learned_frequencies` reads them. Raises LoadError for anything that is
    not understood: an unknown rope_type or field, a layer type without parameters, a wrong value.
    """
    config = normalize_rope_keys(config, _head_dim(config, rules))
    layers = read_layer_pattern(config, rules)
    # A model none of whose layers rotates keeps one group, which nothing uses.
    names = [name for name in GROUP_NAMES if any(layer.group == name for layer in layers)] or [FULL_ATTENTION]
    given = _given_by_layer_type(config, names, layers, rules)
    temperature = _temperature(given[names[0]], config, rules)
    groups = tuple(_read_group(config, rules, name, given[name]) for name in names)
    if all((group.base, group.scaling) == (groups[0].base, groups[0].scaling) for group in groups):
        groups, names = groups[:1], [names[0]] * len(names)
        index = dict.fromkeys(GROUP_NAMES, 0)
    else:
        index = {name: i for i, name in enumerate(names)}
    reason = _no_distance_scaling_reason(groups, layers, temperature)
    chosen = tuple(None if layer.group is None else index[layer.group] for layer in layers)
    layout = RotaryLayout(groups, layers, chosen, temperature)
    return layout if reason is None else layout.with_own_distances(reason)


def _no_distance_scaling_reason(
    groups: tuple[RotaryGroup, ...], layers: tuple[LayerPattern, ...], temperature: tuple[float, int] | None
) -> str | None:
    """Why a scaling may not change how far keys seem on this model; None where it may."""
    if any(layer.window is not None for layer in layers):
        return "some of whose layers see a window only"
    if len(groups) > 1:
        return "whose layers rotate in several ways"
    return "whose scores follow positions already" if temperature is not None else None


def _given_by_layer_type(
    config: Config, names: list[str], layers: tuple[LayerPattern, ...], rules: ConfigRules
) -> dict[str, dict[str, Any]]:
    """The rope object of each layer type as written, theta included where it is known."""
    new = read_object(config, "rope_parameters")
    old = read_object(config, "rope_scaling")
    if old is not None and any(isinstance(value, Mapping) for value in old.values()):
        if new is not None:
            raise LoadError("config.json: rope_parameters and rope_scaling are both given: keep one")
        new, old = old, None
    if new is None and old is None:
        new = rules.rope_parameters or None
    own_local = rules.local_rope_theta is not None or config.get("rope_local_base_freq") is not None
    if new is not None and any(isinstance(value, Mapping) for value in new.values()):
        unknown = sorted(set(map(str, new)) - set(GROUP_NAMES))
        if unknown:
            raise LoadError(
                f"config.json: rope_parameters has {format_value(unknown[0])} beside layer types: "
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
    for name in names:
        if name not in given:
            raise LoadError(f"config.json: rope_parameters says nothing about the {name} layers")
    if old:
        for name in (FULL_ATTENTION,) if own_local or rules.scales_full_attention_only else tuple(given):
            given[name] = _merged(given[name], dict(old))
    theta = config.get("rope_theta")
    local = config.get("rope_local_base_freq") if own_local else theta
    for name, value in ((FULL_ATTENTION, theta), (SLIDING_ATTENTION, local)):
        if name in given and given[name].get("rope_theta") is None and value is not None:
            given[name]["rope_theta"] = value
    for name, value in _thetas_by_layer(config, layers).items():
        given[name]["rope_theta"] = value
    return given


def _thetas_by_layer(config: Config, layers: tuple[LayerPattern, ...]) -> dict[str, Any]:
    """`layer_rope_theta` by group; 0 marks a layer that does not rotate."""
    thetas = read_list(config, "layer_rope_theta", len(layers))
    found: dict[str, Any] = {}
    for layer, theta in zip(layers, thetas or (), strict=False):
        if layer.group is not None and found.setdefault(layer.group, theta) != theta:
            raise LoadError(
                f"config.json: layer_rope_theta gives the {layer.group} layers both {format_value(found[layer.group])} and "
                f"{format_value(theta)}: layers of one kind must share a theta"
            )
    return found


def _temperature(given: dict[str, Any], config: Config, rules: ConfigRules) -> tuple[float, int] | None:
    """Ministral 3: queries times 1 + beta ln(1 + floor(position / length)), named in the rope object."""
    beta = read_number(given, "llama_4_scaling_beta")
    if beta is None:
        return None
    if not rules.query_temperature:
        raise LoadError("config.json: llama_4_scaling_beta is not supported for this model_type")
    trained_len = read_size(config, "max_position_embeddings", rules.max_position_embeddings)
    return beta, read_size(given, "original_max_position_embeddings", trained_len)


def _merged(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """An old `rope_scaling` written into a new config: allowed while `rope_parameters` scales nothing itself."""
    if new.get("rope_type", new.get("type", "default")) != "default":
        if all(new.get(key) == value for key, value in old.items()):
            return new
        raise LoadError("config.json: rope_parameters and rope_scaling both scale, and differently: keep one")
    kept = {key: new[key] for key in ("rope_theta", "partial_rotary_factor") if new.get(key) is not None}
    return {**kept, **old}


def _read_group(config: Config, rules: ConfigRules, name: str, given: dict[str, Any]) -> RotaryGroup:
    given = {key: value for key, value in given.items() if value is not None}
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    kind = given.get("rope_type", given.get("type"))
    if kind is None:
        kind = given["rope_type"] = "default"
    if kind in rules.longrope_names:
        given.pop("type", None)
        kind = given["rope_type"] = "longrope"
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    _drop_without_effect(given, kind)
    original = config.get("original_max_position_embeddings", rules.original_max_position_embeddings)
    if original is not None and kind in _WITH_ORIGINAL_LENGTH:
        given["original_max_position_embeddings"] = original
    fallback = rules.rope_theta if name == FULL_ATTENTION else rules.local_rope_theta or rules.rope_theta
    theta = given.pop("rope_theta", fallback) if kind == "learned" else given.setdefault("rope_theta", fallback)
    base = _read_base(config, rules, partial, kind, _head_dim_of(config, rules, name))
    label = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    label = f"{label}.{name}" if name in (config.get(label) or ()) else label
    try:
        scaling = RopeScaling.from_dict(given, param=label)
        if kind == "learned":
            return RotaryGroup(name, replace(base, inv_freq=()), scaling)
        base = replace(base, rope_theta=float(scaling.get("rope_theta") or theta))
        scaling = scaling.without("rope_theta")
        check(scaling, base, param=label)
    except RequestError as error:
        raise LoadError(f"config.json: {error.message}") from None
    return RotaryGroup(name, base, scaling)


def _drop_without_effect(given: dict[str, Any], kind: Any) -> None:
    """Remove what published configs carry and no implementation reads for this kind."""
    given.pop("llama_4_scaling_beta", None)  # not the rotation's: see _temperature
    given.pop("max_position_embeddings", None)  # Ministral 3 repeats the top-level value
    if kind in ("default", "linear", "dynamic", "ntk", "proportional", "learned"):
        given.pop("original_max_position_embeddings", None)
    if kind == "default" and given.get("factor") == 1:
        given.pop("factor")
    if kind == "yarn" and isinstance(given.get("finetuned"), bool):
        given.pop("finetuned")  # a note about the weights
    if kind == "dynamic" and given.get("alpha") is not None:
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):  # HunYuan writes YaRN's fields as well
            given.pop(key, None)


def _head_dim(config: Config, rules: ConfigRules) -> int:
    heads = read_size(config, "num_attention_heads", rules.num_attention_heads)
    hidden = read_size(config, "hidden_size", rules.hidden_size)
    return read_size(config, rules.head_dim_key, rules.head_dim or hidden // heads, most=_MOST_HEAD_DIM)


def _head_dim_of(config: Config, rules: ConfigRules, name: str) -> int:
    """That of the layers of a group."""
    own = _head_dim(config, rules)
    if rules.full_head_dim_key is None or name != FULL_ATTENTION:
        return own
    return read_size(config, rules.full_head_dim_key, rules.full_head_dim or own, most=_MOST_HEAD_DIM)


def _read_base(config: Config, rules: ConfigRules, partial: Any, kind: Any, head_dim: int) -> RotaryBase:
    """Dimensions and trained length; theta is filled in by the caller."""
    partial = rules.partial_rotary_factor if partial is None else partial
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise LoadError(f"config.json: partial_rotary_factor must lie in (0, 1], got {format_value(partial)}")
    proportional = kind == "proportional"
    rotary_dim = head_dim if proportional else int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise LoadError(
            f"config.json: {rotary_dim} rotated dimensions (of a head_dim of {head_dim}) cannot form pairs: "
            "an even number is needed"
        )
    rotating = int(partial * head_dim // 2) if proportional and partial < 1 else None
    if rotating == 0:
        raise LoadError(
            f"config.json: partial_rotary_factor {format_value(partial)} of a head_dim of {head_dim} leaves no pair"
        )
    trained_len = read_size(config, "max_position_embeddings", rules.max_position_embeddings)
    return RotaryBase(rules.rope_theta, head_dim, rotary_dim, trained_len, rotating, scales_scores=rules.scales_scores)
