"""Histograms without locks for the event loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class HistogramObserver(Protocol):
    """An object that records observations."""

    def observe(self, value: float, count: int = 1) -> None: ...


class Histogram(Collector):
    """Counts of observations by bucket.

    name: of the metric. labels: of all its samples. longest: called at each scrape, returns the bound above which buckets are
    combined; None: all are printed.
    """

    def __init__(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        *,
        labels: Mapping[str, str] | None = None,
        longest: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = dict(labels or {})
        self._longest = longest
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` observations of `value` each."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        longest = self._longest()
        yield histogram_family(self._name, self._text, self._labels, self._bounds, self._counts, self._sum, longest)


class FanOutObserver:
    """Passes each observation to several histograms."""

    def __init__(self, *observers: HistogramObserver) -> None:
        self._observers = observers

    def observe(self, value: float, count: int = 1) -> None:
        for observer in self._observers:
            observer.observe(value, count)


def histogram_family(
    name: str,
    text: str,
    labels: Mapping[str, str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
    longest: float | None = None,
) -> HistogramMetricFamily:
    """A histogram as a metric family. counts: by bucket, and one more above all bounds; total: sum of the values."""
    found = HistogramMetricFamily(name, text, labels=list(labels))
    so_far = 0
    buckets = []
    for bound, count in zip(bounds, counts, strict=False):
        so_far += count
        if longest is None or bound <= longest:
            buckets.append((str(float(bound)), float(so_far)))
    buckets.append(("+Inf", float(sum(counts))))
    found.add_metric(list(labels.values()), buckets, total)
    return found
