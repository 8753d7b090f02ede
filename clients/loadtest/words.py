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
    """(name, text) of nested settings, inner names behind a dot; absent and empty values are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None and value != [] and value != "":
            yield f"{prefix}{name}", plain(value)


def plain(value: Any) -> str:
    """One setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


_PHASES = ("queue", "prefill", "decode")


def phase_means(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, mean) of the server's histograms of the phases of a request: `_sum` over `_count`, in milliseconds."""
    found = []
    for name, total in metrics.items():
        stem = name.removesuffix("_seconds_sum")
        count = metrics.get(f"{stem}_seconds_count", 0.0)
        if stem != name and count > 0 and any(phase in stem for phase in _PHASES):
            found.append((stem, f"{milliseconds(total / count * 1000)} ms"))
    return found
