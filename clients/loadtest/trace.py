"""Reads a recorded load from a JSONL file, one request a line. Knows the file's form; sends nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.clients.loadtest.errors import LoadTestError
from windlass.clients.loadtest.finite import fits_json

_ALIASES = {
    "input_length": "input_len",
    "input_tokens": "input_len",
    "output_length": "max_tokens",
    "output_len": "max_tokens",
    "output_tokens": "max_tokens",
}
_FIELDS = ("timestamp", "input_len", "prompt", "max_tokens", "rope_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One recorded request.

    timestamp: seconds, on any clock that all lines share; None in a trace without times. Either `prompt` (text, or token
    ids) or `input_len` (tokens, drawn at random). max_tokens: tokens to generate. rope_scaling: sent where `has_scaling`.
    """

    line: int
    max_tokens: int
    timestamp: float | None = None
    input_len: int | None = None
    prompt: str | tuple[int, ...] | None = None
    rope_scaling: Any = None
    has_scaling: bool = False


def read_trace(path: Path) -> list[TraceEntry]:
    """The requests of a trace, by time. Raises LoadTestError naming the file and the line at fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"cannot read the trace {path}: {error}") from error
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(json.loads(line), number))
        except (ValueError, RecursionError) as error:
            what = f"is not JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)
            raise LoadTestError(f"{path}, line {number}: {what}") from None
        timed, first = entries[-1].timestamp is not None, entries[0].timestamp is not None
        if timed != first:
            raise LoadTestError(
                f"{path}, line {number}: {'has a' if timed else 'has no'} timestamp unlike line {entries[0].line}: "
                f"all lines need one, or none"
            )
    if not entries:
        raise LoadTestError(f"the trace {path} holds no requests: write one JSON object a line")
    return sorted(entries, key=lambda entry: entry.timestamp or 0.0)


def _entry(data: Any, line: int) -> TraceEntry:
    if not isinstance(data, Mapping):
        raise ValueError('should be an object such as {"timestamp": 0.5, "input_len": 100, "max_tokens": 20}')
    found: dict[str, Any] = {}
    for name, value in data.items():
        known = _ALIASES.get(name, name)
        if known not in _FIELDS:
            raise ValueError(f"does not know the field {name!r}: the fields are {', '.join(_FIELDS)}")
        if known in found:
            raise ValueError(f"gives {known} twice, as {name!r} too")
        found[known] = value
    if ("prompt" in found) == ("input_len" in found):
        raise ValueError("wants either a prompt or an input_len")
    if "max_tokens" not in found:
        raise ValueError("has no max_tokens")
    for name, (fits, what) in _CHECKS.items():
        if name in found and not fits(found[name]):
            raise ValueError(f"{name} should be {what}")
    prompt = found.get("prompt")
    return TraceEntry(
        **{**found, "prompt": tuple(prompt) if isinstance(prompt, list) else prompt},
        line=line,
        has_scaling="rope_scaling" in found,
    )


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e15


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_whole(item, 0) for item in value)
    return isinstance(value, str) and bool(value)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "timestamp": (_is_time, "seconds, as a number"),
    "input_len": (lambda value: _whole(value, 1), "a whole number of tokens from 1"),
    "max_tokens": (lambda value: _whole(value, 1), "a whole number of tokens from 1"),
    "prompt": (_is_prompt, "text or a list of token ids, and not empty"),
    "rope_scaling": (
        lambda value: value is None or (isinstance(value, dict | str) and fits_json(value)),
        "an object of JSON, the name of a profile, or null",
    ),
}
