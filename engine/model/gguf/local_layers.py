"""Which layers of a GGUF model see a window only, in the names of config.json. It opens no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.rotary.fields import format_value
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION

WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"


def local_layers(keys: ArchitectureKeys, count: int, interval: int) -> list[str]:
    """What each layer sees: as a list of flags says, or everything in every n-th."""
    pattern = keys.raw(PATTERN)
    if pattern is None or (isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1):
        local = [(i + 1) % (pattern or interval) != 0 for i in range(count)]
    elif isinstance(pattern, list):
        local = [bool(flag) for flag in pattern]
    else:
        raise LoadError(f"{keys.key(PATTERN)} must be a list of flags or an interval, got {format_value(pattern)}")
    if len(local) < count:
        raise LoadError(f"{keys.key(PATTERN)} has {len(local)} entries for {count} layers: get another conversion")
    return [SLIDING_ATTENTION if one else FULL_ATTENTION for one in local[:count]]


def local_and_global(interval: int) -> Callable[[ArchitectureKeys, Mapping[str, Any]], dict[str, Any]]:
    """Layers that see a window, and every n-th that sees everything where the file does not say which; or no windows."""

    def more(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
        window, count = keys.count(WINDOW), config["num_hidden_layers"]
        kinds = local_layers(keys, count, interval) if window else [FULL_ATTENTION] * count
        return {"sliding_window": window or None, "layer_types": kinds}

    return more
