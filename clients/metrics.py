"""The server's metrics as numbers: reads Prometheus' text format, version 0.0.4. Does no input or output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n"}


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
        """Read the text; raises ValueError for a line that is none of the format."""
        lines = (line.strip() for line in text.split("\n"))
        return cls(samples=tuple(_sample(line) for line in lines if line and not line.startswith("#")))


def _sample(line: str) -> MetricSample:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        raise ValueError(f"{line[:80]!r} is not a line of Prometheus' text format")
    name, labels, value = match.groups()
    try:
        number = float(value)  # NaN, +Inf and -Inf too
    except ValueError:
        raise ValueError(f"the value of {name} is not a number") from None
    return MetricSample(name=name, value=number, labels=_labels(labels or ""))


def _labels(text: str) -> dict[str, str]:
    labels, position = {}, 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError(f"{text[position:][:80]!r} is not a label of Prometheus' text format")
        labels[match[1]] = _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[1]), match[2])
        position = match.end()
    return labels
