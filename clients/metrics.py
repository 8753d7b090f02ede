"""The server's metrics as numbers. Prometheus' own client reads the text; does no input or output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSample:
    """One number. name: with the suffix of its kind, such as `_total`, `_bucket`, `_sum` and `_count`."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What /metrics printed: its samples in order. docs/http.md lists the names."""

    samples: tuple[MetricSample, ...] = ()

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples of this name that bear these labels; None where there is none."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and all(sample.labels.get(key) == wanted for key, wanted in labels.items())
        ]
        return sum(found) if found else None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read Prometheus' text format; raises ValueError for any other text."""
        # Slow to import: only for those who ask.
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = list(text_string_to_metric_families(text))
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"not Prometheus' text format: {error}") from error
        found = (sample for family in families for sample in family.samples)
        return cls(samples=tuple(MetricSample(name=s.name, value=s.value, labels=s.labels) for s in found))
