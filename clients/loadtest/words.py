"""Numbers and settings as text for a report. Formats; computes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def milliseconds(value: float | None) -> str:
    """Three significant digits or whole milliseconds, without the unit; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def duration(value: float | None) -> tuple[str, str]:
    """Milliseconds as (number, unit), in seconds from ten of them on."""
    if value is None:
        return "–", ""
    return (milliseconds(value), "ms") if abs(value) < 10_000 else (f"{value / 1000:,.1f}", "s")


def number(value: float | int | None) -> str:
    """Whole numbers with separators, others to three significant digits, – for None."""
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.2e}"


def per_second(value: float | None) -> str:
    """A rate: three significant digits or whole, – for None."""
    return number(None if value is None else float(value))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of nested settings, inner names behind a dot; absent values are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", plain(value)


def plain(value: Any) -> str:
    """One setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def metric_means(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, mean) of every histogram among a server's metrics: its `_sum` over its `_count`, seconds as milliseconds."""
    found = []
    for name, total in metrics.items():
        stem, _, labels = name.partition("{")
        if not stem.endswith("_sum"):
            continue
        stem = stem.removesuffix("_sum")
        count = metrics.get(name.replace("_sum", "_count", 1) if labels == "" else f"{stem}_count{{{labels}")
        if count:
            mean = total / count
            label = stem + ("{" + labels if labels else "")
            found.append((label, f"{milliseconds(mean * 1000)} ms" if stem.endswith("_seconds") else number(mean)))
    return found
