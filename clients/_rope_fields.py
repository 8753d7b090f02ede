"""Which fields each kind of `rope_scaling` takes, and how each value is checked, as the server does. Knows no model."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_YARN = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_LONGROPE = (
    "short_factor",
    "long_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "short_mscale",
    "long_mscale",
)
DUAL_CHUNK = (
    "chunk_size",
    "local_size",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "log_n",
    "length_scores",
)
FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "alpha"),
    "yarn": _YARN,
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": _LONGROPE,
    "proportional": ("factor",),
    "learned": (),
    "dual_chunk": DUAL_CHUNK,
    "self_extend": ("group_size", "window", "original_max_position_embeddings", "log_n"),
    "rerope": ("window", "factor", "original_max_position_embeddings", "log_n"),
    "log_n": ("original_max_position_embeddings",),
}
ALIASES = {"su": "longrope", "mrope": "default"}
REQUIRED = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
GROUPS = ("full_attention", "sliding_attention")
_MAX_LIST = 4096


def check_together(kind: str, values: Mapping[str, Any], param: str) -> None:
    """Refuse values that are fine alone but not together."""
    if kind == "dynamic":
        if "factor" not in values and "alpha" not in values:
            raise ValueError(f"{param}.factor is missing: 'dynamic' needs it, or alpha for a fixed stretch")
        if "alpha" in values and values.get("factor", 1.0) != 1.0:
            raise ValueError(f"{param}.factor would be ignored beside alpha: leave one of them out")
    elif kind == "yarn":
        if "factor" not in values and "original_max_position_embeddings" not in values:
            raise ValueError(f"{param}.factor is missing: 'yarn' needs it, or original_max_position_embeddings")
        if values.get("beta_fast", 32.0) < values.get("beta_slow", 1.0):
            raise ValueError(f"{param}.beta_fast should not be below beta_slow (they default to 32 and 1)")
    elif kind == "dual_chunk":
        if values.get("factor", 1.0) < 1:
            raise ValueError(f"{param}.factor should be at least 1")
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            if name in values and "factor" not in values:
                raise ValueError(f"{param}.{name} would be ignored without factor: give both or neither")
        if values.get("beta_fast", 32.0) < values.get("beta_slow", 1.0):
            raise ValueError(f"{param}.beta_fast should not be below beta_slow (they default to 32 and 1)")
        if values.get("local_size", 1) >= values.get("chunk_size", math.inf):
            raise ValueError(f"{param}.local_size should be smaller than chunk_size")
    elif kind == "rerope":
        if values.get("factor", 1.0) < 1:
            raise ValueError(f"{param}.factor should be at least 1")
    elif kind == "llama3":
        if values["high_freq_factor"] < values["low_freq_factor"]:
            raise ValueError(f"{param}.high_freq_factor should not be below low_freq_factor")
    elif kind == "longrope":
        if len(values["short_factor"]) != len(values["long_factor"]):
            raise ValueError(f"{param}.long_factor should hold as many numbers as short_factor")
        if ("short_mscale" in values) != ("long_mscale" in values):
            missing = "long_mscale" if "short_mscale" in values else "short_mscale"
            raise ValueError(f"{param}.{missing} is missing: give short_mscale and long_mscale together")
        if "short_mscale" in values and "attention_factor" in values:
            raise ValueError(f"{param}.attention_factor would be ignored beside short_mscale and long_mscale")


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{where} should be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{where} should be a finite number")
    return number


def _above(least: float, *, allowed: bool = False) -> Callable[[Any, str], float]:
    def read(value: Any, where: str) -> float:
        number = _number(value, where)
        if number < least or (number == least and not allowed):
            raise ValueError(f"{where} should be {'at least' if allowed else 'above'} {least:g}, got {number:g}")
        return number

    return read


def _length(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or not 2 <= number < 2**53:
        raise ValueError(f"{where} should be a whole number of tokens, at least 2, got {number:g}")
    return int(number)


def _tokens(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or not 1 <= number < 2**53:
        raise ValueError(f"{where} should be a whole number of tokens, at least 1, got {number:g}")
    return int(number)


def _group(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or not 2 <= number < 2**31:
        raise ValueError(f"{where} should be a whole number, at least 2, got {number:g}")
    return int(number)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} should be True or False, not {type(value).__name__}")
    return value


def _items(value: Any, where: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{where} should be a list of numbers, not {type(value).__name__}")
    items = list(value)
    if not 1 <= len(items) <= _MAX_LIST:
        raise ValueError(f"{where} should hold 1 to {_MAX_LIST} numbers, got {len(items)}")
    return items


def _positives(value: Any, where: str) -> list[float]:
    return [_positive(item, f"{where}[{index}]") for index, item in enumerate(_items(value, where))]


def _sections(value: Any, where: str) -> list[int]:
    counts = [_number(item, f"{where}[{index}]") for index, item in enumerate(_items(value, where))]
    if any(count != int(count) or count < 0 for count in counts):
        raise ValueError(f"{where} should hold whole numbers of pairs, none below 0")
    return [int(count) for count in counts]


_positive, _not_negative = _above(0), _above(0, allowed=True)

READERS: dict[str, Callable[[Any, str], Any]] = {
    "rope_theta": _above(1),
    "factor": _positive,
    "alpha": _positive,
    "original_max_position_embeddings": _length,
    "attention_factor": _positive,
    "beta_fast": _positive,
    "beta_slow": _positive,
    "mscale": _not_negative,
    "mscale_all_dim": _not_negative,
    "truncate": _flag,
    "chunk_size": _length,
    "local_size": _tokens,
    "window": _tokens,
    "group_size": _group,
    "log_n": _flag,
    "length_scores": _flag,
    "low_freq_factor": _positive,
    "high_freq_factor": _positive,
    "short_factor": _positives,
    "long_factor": _positives,
    "short_mscale": _positive,
    "long_mscale": _positive,
    "mrope_section": _sections,
    "mrope_interleaved": _flag,
}
