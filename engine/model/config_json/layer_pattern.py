"""Which rotary group each layer of a model belongs to, and whether it sees the whole context or a window of it.

Responsible for the names that say so in every family's config.json; what a family makes of them is its own pattern. It
knows no frequencies and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.patterns import LayerFacts
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config, read_list, read_size
from windlass.engine.rotary.fields import format_value
from windlass.engine.rotary.scaling import GROUP_NAMES, SLIDING_ATTENTION

_MOST_LAYERS = 10_000  # far above any model, and below what would keep a loop busy


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """One layer. group: the name of its rotary group, None where it does not rotate (NoPE). window: keys a query sees,
    itself included; None: all."""

    group: str | None
    window: int | None


def read_layer_pattern(config: Config, rules: ConfigRules) -> tuple[LayerPattern, ...]:
    """One entry per layer. Raises LoadError for a pattern the family does not have or that says nothing clear."""
    count = read_size(config, "num_hidden_layers", rules.num_hidden_layers, most=_MOST_LAYERS)
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
        raise LoadError(f"config.json: layer_types has {format_value(unknown[0])}: known are {', '.join(known)}")
    if len(types) != count:
        raise LoadError(f"config.json: layer_types must name {count} layers, each {' or '.join(known)}")
    return types


def _rotating(config: Config, rules: ConfigRules, count: int) -> list[bool]:
    """Whether each layer rotates. Three names: a list of ones and zeros, an interval, or a list of thetas with zeros."""
    thetas = read_list(config, "layer_rope_theta", count)
    if thetas is not None:
        return [theta != 0 for theta in thetas]
    flags = read_list(config, "no_rope_layers", count)  # named for what it is not: 1 marks a layer that rotates
    if flags is not None:
        if any(isinstance(flag, str) or flag not in (0, 1) for flag in flags):
            raise LoadError("config.json: no_rope_layers must hold 1 for layers that rotate and 0 for the others")
        return [bool(flag) for flag in flags]
    interval = config.get("no_rope_layer_interval", rules.no_rope_layer_interval)
    if interval in (None, 0):
        return [True] * count
    interval = read_size(config, "no_rope_layer_interval", rules.no_rope_layer_interval)
    return [(i + 1) % interval != 0 for i in range(count)]
