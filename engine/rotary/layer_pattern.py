"""Which rotary group each layer of a model belongs to, and whether it sees the whole context or a window of it.

Responsible for the pattern of layers, derived here and nowhere else. It knows no frequencies and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.errors import LoadError
from windlass.engine.rotary.config_values import Config, read_flag, read_list, read_size
from windlass.engine.rotary.family_defaults import FamilyDefaults
from windlass.engine.rotary.scaling import FULL_ATTENTION, GROUP_NAMES, SLIDING_ATTENTION

_MOST_LAYERS = 10_000  # far above any model, and below what would keep a loop busy


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """One layer. group: the name of its rotary group, None where it does not rotate (NoPE). window: keys a query sees,
    itself included; None: all."""

    group: str | None
    window: int | None


def read_layer_pattern(config: Config, defaults: FamilyDefaults) -> tuple[LayerPattern, ...]:
    """One entry per layer. Raises LoadError for a pattern the family does not have or that says nothing clear."""
    count = read_size(config, "num_hidden_layers", defaults.num_hidden_layers, most=_MOST_LAYERS)
    rotates = _rotating(config, defaults, count)
    given = _layer_types(config, count)
    match defaults.pattern:
        case "gemma":
            if config.get("sliding_window", defaults.sliding_window) is None:
                # Local layers would turn by their own theta without a window; nothing says which layers those are.
                raise LoadError("config.json: sliding_window is null, and local layers need one: give its size")
            types = given or _every(read_size(config, "sliding_window_pattern", 6), count)
            groups = types
        case "qwen":
            first = 0 if config.get("max_window_layers") == 0 else read_size(config, "max_window_layers", 28)
            windows = read_flag(config, "use_sliding_window")
            types = given or [SLIDING_ATTENTION if windows and i >= first else FULL_ATTENTION for i in range(count)]
            groups = types
            if not windows:
                types = [FULL_ATTENTION] * count
        case "smollm":
            types = given or [FULL_ATTENTION if one else SLIDING_ATTENTION for one in rotates]
            groups = [FULL_ATTENTION] * count
            if not config.get("use_sliding_window", False):
                types = [FULL_ATTENTION] * count
        case "window" | "full":
            types = [SLIDING_ATTENTION if defaults.pattern == "window" else FULL_ATTENTION] * count
            groups = [FULL_ATTENTION] * count
            window = config.get("sliding_window", defaults.sliding_window) if defaults.pattern == "window" else None
            if given and given != (types if window is not None else groups):
                raise LoadError(
                    f"config.json: layer_types mixes windows in a way that model_type {config.get('model_type')!r} "
                    "does not: remove it"
                )
    return tuple(
        LayerPattern(
            group=group if rotating else None,
            window=_window(config, defaults) if kind == SLIDING_ATTENTION else None,
        )
        for kind, group, rotating in zip(types, groups, rotates, strict=True)
    )


def _layer_types(config: Config, count: int) -> list[str] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not types:
        raise LoadError("config.json: layer_types must be a list with one name per layer")
    unknown = sorted({str(kind) for kind in types} - set(GROUP_NAMES))
    if unknown:
        raise LoadError(f"config.json: layer_types has {unknown[0]!r}: known are {', '.join(GROUP_NAMES)}")
    if len(types) != count:
        raise LoadError(f"config.json: layer_types must name {count} layers, each {' or '.join(GROUP_NAMES)}")
    return types


def _every(interval: int, count: int) -> list[str]:
    return [SLIDING_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(count)]


def _rotating(config: Config, defaults: FamilyDefaults, count: int) -> list[bool]:
    """Whether each layer rotates. Three names: a list of ones and zeros, an interval, or a list of thetas with zeros."""
    thetas = read_list(config, "layer_rope_theta", count)
    if thetas is not None:
        return [theta != 0 for theta in thetas]
    flags = read_list(config, "no_rope_layers", count)  # named for what it is not: 1 marks a layer that rotates
    if flags is not None:
        if any(isinstance(flag, str) or flag not in (0, 1) for flag in flags):
            raise LoadError("config.json: no_rope_layers must hold 1 for layers that rotate and 0 for the others")
        return [bool(flag) for flag in flags]
    interval = config.get("no_rope_layer_interval", defaults.no_rope_interval)
    if interval in (None, 0):
        return [True] * count
    interval = read_size(config, "no_rope_layer_interval", defaults.no_rope_interval)
    return [(i + 1) % interval != 0 for i in range(count)]


def _window(config: Config, defaults: FamilyDefaults) -> int | None:
    if config.get("sliding_window", defaults.sliding_window) is None:
        return None
    return read_size(config, "sliding_window", defaults.sliding_window)
