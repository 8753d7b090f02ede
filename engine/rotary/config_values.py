"""Reads single values of a config.json with messages that name the key. Knows no family and imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError

Config = Mapping[str, Any]


def read_size(config: Config, key: str, default: int | None = None) -> int:
    """A positive integer; `default` where the file has none or null, LoadError where there is no default either."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def read_number(config: Config, key: str) -> float | None:
    """A positive, finite number, or None where the file says nothing."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise LoadError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def read_object(config: Config, key: str) -> Config | None:
    """An object that is not empty, or None."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise LoadError(f"config.json: {key} must be an object, got {value!r}")
    return value or None


def read_list(config: Config, key: str, length: int) -> list[Any] | None:
    """A list with at least one entry per layer, cut to `length`; None where the file has none or an empty one."""
    value = config.get(key)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) < length:
        raise LoadError(f"config.json: {key} must be a list with one entry for each of the {length} layers")
    return value[:length]
