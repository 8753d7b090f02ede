"""Reads single values of a config.json with messages that name the key. Knows no family and imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.rotary.fields import format_value

Config = Mapping[str, Any]


def read_size(config: Config, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
    """A positive integer up to `most`; `default` where the file has none or null, LoadError without a default either."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise LoadError(f"config.json: {key} must be a positive integer up to {most}, got {format_value(value)}")
    return value


def read_number(config: Config, key: str) -> float | None:
    """A positive, finite number, or None where the file says nothing."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise LoadError(f"config.json: {key} must be a positive number, got {format_value(value)}")
    return float(value)


def read_flag(config: Config, key: str, default: bool = False) -> bool:
    """True or false; `default` where the file has none or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadError(f"config.json: {key} must be true or false, got {format_value(value)}")
    return value


def read_object(config: Config, key: str) -> Config | None:
    """An object that is not empty, or None."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise LoadError(f"config.json: {key} must be an object, got {format_value(value)}")
    return value or None


def read_list(config: Config, key: str, length: int) -> list[Any] | None:
    """A list with at least one entry per layer, cut to `length`; None where the file has none or an empty one."""
    value = config.get(key)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) < length:
        raise LoadError(f"config.json: {key} must be a list with one entry for each of the {length} layers")
    return value[:length]
