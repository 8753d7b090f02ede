"""Reports: statistics of samples, their display, and files that are complete at any time."""

from __future__ import annotations

import json
import statistics
from collections import abc
from pathlib import Path
from typing import Any


def spread(samples: abc.Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum; ValueError for no samples."""
    if not samples:
        raise ValueError("no samples")
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def three_digits(value: float) -> str:
    """Three digits, or a whole number with commas."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def save(report: dict[str, Any], file: Path) -> None:
    """Write a report, replacing an earlier one at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(file)
