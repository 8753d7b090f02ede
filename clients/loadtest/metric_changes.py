"""What a run changed in the server's Prometheus metrics. Servers without any are fine."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# Of the process and the language, not of the work it did.
_OTHERS = ("process_", "python_", "go_", "http_")
_KINDS = ("counter", "gauge", "histogram", "summary")


def changes(before: str | None, after: str | None) -> dict[str, float]:
    """Differences of counters (and of the sums and counts of histograms), last values of gauges, by metric name.

    Of a server that was started anew in between, what it has counted since.

    Samples that differ in labels only are added up. Empty where the server has no metrics or they cannot be read.
    """
    first, last = _read(before), _read(after)
    result = {}
    for name, (kind, value) in last.items():
        if kind != "gauge":
            begun = first.get(name, (kind, 0.0))[1]
            value -= begun if begun <= value else 0.0  # a counter that is lower began anew with its server
        if math.isfinite(value):
            result[name] = value
    return result


def _read(text: str | None) -> dict[str, tuple[str, float]]:
    found: dict[str, tuple[str, float]] = {}
    try:
        families: Any = list(text_string_to_metric_families(text or ""))
    except (ValueError, KeyError, IndexError):
        return {}
    for family in families:
        if family.name.startswith(_OTHERS):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")) or "quantile" in sample.labels:
                continue
            # Some servers declare a counter by its name without _total, which leaves its samples without a type.
            if family.type not in _KINDS and not sample.name.endswith("_total"):
                continue
            _, value = found.get(sample.name, (family.type, 0.0))
            found[sample.name] = (family.type, value + sample.value)
    return found
