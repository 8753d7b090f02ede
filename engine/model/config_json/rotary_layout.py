"""Rotary groups and layer windows of a model, from config.json.

Accepts the keys of transformers 5 and older ones (`rotary_pct`, `rotary_dim`, `rotary_emb_base`, `rope_ratio`,
`global_rope_theta`, `local_rope_theta`, `attn_config.rope_theta`, `dual_chunk_attention_config`). Two keys that contradict each
other are an error. A rotary group is a set of layers that rotate alike; most models have one. Frequencies are computed in
`rotary`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.model.config_json.config_rules import (
    Config,
    ConfigRules,
    LayerFacts,
    read_list,
    read_number,
    read_object,
    read_size,
)
from windlass.engine.rotary.rope_scaling import (
    FULL_ATTENTION,
    GROUP_NAMES,
    SLIDING_ATTENTION,
    RopeScaling,
    RotaryBase,
    RotaryGroup,
    check,
)
from windlass.engine.rotary.scaling_fields import ALIASES, format_value

# Other names of numbers.
_OLDER_NAMES = {
    "rotary_emb_base": "rope_theta",  # GPT-NeoX
    "global_rope_theta": "rope_theta",  # ModernBERT
    "local_rope_theta": "rope_local_base_freq",  # ModernBERT
    "rotary_pct": "partial_rotary_factor",  # GPT-NeoX, StableLM
}

LEGACY_ROPE_KEYS = (
    *_OLDER_NAMES,
    "rotary_dim",  # GPT-J, CodeGen, MiniMax: dimensions rather than a share of them
    "rope_ratio",  # ChatGLM: theta is 10,000 times it
    "attn_config",  # DBRX
    "dual_chunk_attention_config",  # Qwen2.5-1M
)

_CHATGLM_THETA = 10_000.0


def normalize_rope_keys(config: Config, head_dim: int) -> dict[str, Any]:
    """The config with `rope_theta`, `rope_local_base_freq` and `partial_rotary_factor` in place of older names.

    Raises LoadError for an invalid value and for two names with different values.
    """
    result = dict(config)

    def put(name: str, older: str, value: float | dict[str, Any] | None) -> None:
        if value is None:
            return
        given = result.get(name)
        if given is not None and given != value:
            raise LoadError(
                f"config.json: {name} is {format_value(given)} and {older} makes it {format_value(value)}: keep one"
            )
        result[name] = value

    for older, name in _OLDER_NAMES.items():
        put(name, older, read_number(config, older))
    ratio = read_number(config, "rope_ratio")
    put("rope_theta", "rope_ratio", None if ratio is None else _CHATGLM_THETA * ratio)
    attention = config.get("attn_config")
    if isinstance(attention, Mapping):
        put("rope_theta", "attn_config.rope_theta", read_number(attention, "rope_theta"))
    chunks = read_object(config, "dual_chunk_attention_config")
    if chunks is not None:
        put("rope_scaling", "dual_chunk_attention_config", _dual_chunks(chunks))
    if config.get("rotary_dim") is not None:
        put("partial_rotary_factor", "rotary_dim", rotary_share(read_size(config, "rotary_dim"), head_dim))
    return result


def rotary_share(rotary_dim: int, head_dim: int) -> float:
    """`partial_rotary_factor` of a model that rotates this many dimensions; it is read back as int(head_dim * share)."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 2)


def _dual_chunks(given: Config) -> dict[str, Any]:
    """The scaling in a separate object of Qwen2.5-1M: scores grow with the length of the request.

    Skipping keys to save time (`sparse_attention_…`) is not part of the model: attention reads all keys.
    """
    names = ("chunk_size", "local_size", "original_max_position_embeddings")
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    return {"rope_type": "dual_chunk", **chosen, "length_scores": True}


_MOST_LAYERS = 10_000  # far above any model, and few enough for loops


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """One layer. group: the name of its rotary group, None if it does not rotate (NoPE). window: number of keys that a query
    attends to, including its own; None: all."""

    group: str | None
    window: int | None


def read_layer_pattern(config: Config, rules: ConfigRules) -> tuple[LayerPattern, ...]:
    """One entry per layer. Raises LoadError for a pattern that the family does not have or that is ambiguous."""
    count = read_size(config, "num_hidden_layers", rules.sizes.layers, most=_MOST_LAYERS)
    windowed = config.get("sliding_window", rules.sliding_window) is not None
    rotates = _rotating(config, rules, count)
    facts = LayerFacts(count, _layer_types(config, count, rules.other_layers), rotates, windowed)
    kinds, groups = rules.layer_pattern(config, facts)
    return tuple(
        LayerPattern(
            group=group if rotating else None,
            window=read_size(config, "sliding_window", rules.sliding_window)
            if windowed and kind == SLIDING_ATTENTION
            else None,
        )
        for kind, group, rotating in zip(kinds, groups, rotates, strict=True)
    )


def _layer_types(config: Config, count: int, others: tuple[str, ...]) -> list[str] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not types:
        raise LoadError("config.json: layer_types must be a list with one name per layer")
    known = (*GROUP_NAMES, *others)
    unknown = sorted({str(kind) for kind in types} - set(known))
    if unknown:
        raise LoadError(f"config.json: layer_types has {format_value(unknown[0])}: supported are {', '.join(known)}")
    if len(types) != count:
        raise LoadError(f"config.json: layer_types must name {count} layers, each {' or '.join(known)}")
    return types


def _rotating(config: Config, rules: ConfigRules, count: int) -> list[bool]:
    """Whether each layer rotates, from one of three keys: a list of flags, an interval, or a list of thetas with zeros."""
    thetas = read_list(config, "layer_rope_theta", count)
    if thetas is not None:
        return [theta != 0 for theta in thetas]
    flags = read_list(config, "no_rope_layers", count)  # despite its name, 1 marks a layer that rotates
    if flags is not None:
        if any(isinstance(flag, str) or flag not in (0, 1) for flag in flags):
            raise LoadError("config.json: no_rope_layers must hold 1 for layers that rotate and 0 for the others")
        return [bool(flag) for flag in flags]
    interval = config.get("no_rope_layer_interval", rules.no_rope_layer_interval)
    if interval in (None, 0):
        return [True] * count
    interval = read_size(config, "no_rope_layer_interval", rules.no_rope_layer_interval)
    return [(i + 1) % interval != 0 for i in range(count)]


# Kinds whose frequencies refer to a length before scaling: a top-level `original_max_position_embeddings` applies to them.
_WITH_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")
_MOST_HEAD_DIM = 1 << 16  # there is a frequency for every two dimensions


@dataclass(frozen=True, slots=True)
class RotaryLayout:
    """Rotary groups and layer pattern of a model.

    groups: the full-attention group first; a single one if all layers rotate equally. layers: window and group name of each
    layer, from config.json. layer_groups: index into groups for each layer, None if it does not rotate. temperature: (beta,
    length) if queries grow with their position (Ministral 3), else None.
    """

    groups: tuple[RotaryGroup, ...]
    layers: tuple[LayerPattern, ...]
    layer_groups: tuple[int | None, ...]
    temperature: tuple[float, int] | None = None

    def with_own_distances(self, reason: str) -> RotaryLayout:
        """A copy for a model whose distances no scaling may change. reason: text after "this model, "."""
        return replace(
            self,
            groups=tuple(
                replace(group, base=replace(group.base, fixed_distances_reason=reason)) for group in self.groups
            ),
        )

    def without_rotation(self, reason: str) -> RotaryLayout:
        """A copy for a model without rotation. reason: what distinguishes positions, text after "this model …, "."""
        groups = tuple(replace(group, base=replace(group.base, unrotated=reason)) for group in self.groups)
        return replace(self, groups=groups)


def read_rotary_layout(config: Config, rules: ConfigRules) -> RotaryLayout:
    """The rotary groups of a model of the family with these rules, and the group of each layer.

    Learned frequencies are left empty: `model_description.with_learned_frequencies` reads them. Raises LoadError for an unknown
    rope_type or field, a layer type without parameters, and an invalid value.
    """
    config = normalize_rope_keys(config, _head_dim(config, rules))
    layers = read_layer_pattern(config, rules)
    # A model without rotation has one group, which is not used.
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
    """Why a scaling may not change distances on this model; None if it may."""
    if any(layer.window is not None for layer in layers):
        return "some of whose layers see a window only"
    if len(groups) > 1:
        return "whose layers rotate in several ways"
    return "whose scores follow positions already" if temperature is not None else None


def _given_by_layer_type(
    config: Config, names: list[str], layers: tuple[LayerPattern, ...], rules: ConfigRules
) -> dict[str, dict[str, Any]]:
    """The rope object of each layer type from the file, including theta if it is known."""
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
                f"config.json: rope_parameters has {format_value(unknown[0])} in addition to layer types: "
                f"supported are {', '.join(GROUP_NAMES)}"
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
            raise LoadError(f"config.json: rope_parameters has no entry for the {name} layers")
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
    """`layer_rope_theta` by group; 0 marks a layer without rotation."""
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
    if given.get("llama_4_scaling_beta") == 0:  # Devstral 2: the temperature is 1 everywhere
        return None
    beta = read_number(given, "llama_4_scaling_beta")
    if beta is None:
        return None
    if not rules.query_temperature:
        raise LoadError("config.json: llama_4_scaling_beta is not supported for this model_type")
    trained_len = read_size(config, "max_position_embeddings", rules.sizes.context)
    return beta, read_size(given, "original_max_position_embeddings", trained_len)


_SHORTEST_TRAINING = 2048  # tokens: no model with a linear scaling was trained for fewer before


def scaled_length_notices(layout: RotaryLayout) -> tuple[str, ...]:
    """A notice on a length that the scaling allows and `max_position_embeddings` does not name.

    A dynamic scaling starts at that length. Older files with a linear one often give the length before the scaling; then the
    length divided by the factor would be shorter than any model was trained for.
    """
    group = layout.groups[0]
    kind, factor, length = group.scaling.rope_type, group.scaling.get("factor"), group.base.trained_len
    if not isinstance(factor, int | float) or factor <= 1:
        return ()
    if kind != "dynamic" and (kind != "linear" or length / factor >= _SHORTEST_TRAINING):
        return ()
    return (
        f"config.json: max_position_embeddings is {length}, and the {kind} scaling by {factor:g} allows {int(length * factor)} "
        f"tokens: set `max_model_len` to {int(length * factor)} to use them",
    )


def _merged(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """An old `rope_scaling` added to a new config: allowed if `rope_parameters` has no scaling."""
    if new.get("rope_type", new.get("type", "default")) != "default":
        if all(new.get(key) == value for key, value in old.items()):
            return new
        raise LoadError("config.json: rope_parameters and rope_scaling both scale, and differently: keep one")
    unscaled = {key: new[key] for key in ("rope_theta", "partial_rotary_factor") if new.get(key) is not None}
    return {**unscaled, **old}


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
    base = _read_base(config, rules, partial, kind, _head_dim(config, rules, name))
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
    """Remove keys of published configs that no implementation reads for this kind."""
    given.pop("llama_4_scaling_beta", None)  # not part of the rotation: see _temperature
    given.pop("max_position_embeddings", None)  # Ministral 3 repeats the top-level value
    if kind in ("default", "linear", "dynamic", "ntk", "proportional", "learned"):
        given.pop("original_max_position_embeddings", None)
    if kind == "default" and given.get("factor") == 1:
        given.pop("factor")
    if kind == "yarn" and isinstance(given.get("finetuned"), bool):
        given.pop("finetuned")  # a note about the weights
    if kind == "dynamic" and given.get("alpha") is not None:
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):  # HunYuan has YaRN's fields too
            given.pop(key, None)


def _head_dim(config: Config, rules: ConfigRules, name: str | None = None) -> int:
    """Head dimension of the layers of the group with this name; None: of those without another one."""
    heads = read_size(config, "num_attention_heads", rules.sizes.heads)
    hidden = read_size(config, "hidden_size", rules.sizes.hidden)
    own = read_size(config, rules.head_dim_key, rules.sizes.head_dim or hidden // heads, most=_MOST_HEAD_DIM)
    if rules.full_head_dim_key is None or name != FULL_ATTENTION:
        return own
    return read_size(config, rules.full_head_dim_key, rules.full_head_dim or own, most=_MOST_HEAD_DIM)


def _read_base(config: Config, rules: ConfigRules, partial: Any, kind: Any, head_dim: int) -> RotaryBase:
    """Dimensions and trained length; theta is filled in by the caller."""
    partial = rules.partial_rotary_factor if partial is None else partial
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise LoadError(f"config.json: partial_rotary_factor must be in (0, 1], got {format_value(partial)}")
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
    trained_len = read_size(config, "max_position_embeddings", rules.sizes.context)
    return RotaryBase(rules.rope_theta, head_dim, rotary_dim, trained_len, rotating, scales_scores=rules.scales_scores)
