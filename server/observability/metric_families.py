"""Metric families: histograms without locks for the event loop, and gauges and counters of engine statistics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from windlass.engine.interface.outputs import EngineStats

# Metrics with the same names here and in vLLM: fields of `EngineStats`, and descriptions.
SHARED_GAUGES = {
    "num_requests_running": ("num_running", "Sequences that the engine is computing."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait to be scheduled."),
    "kv_cache_usage_perc": (
        "kv_cache_usage",
        "Share of KV blocks held by live requests, 0 to 1, in the fullest KV group.",
    ),
}

SHARED_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Sequences preempted for lack of KV blocks, which start again."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens searched in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed or taken from the cache."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "spec_decode_num_drafts": (
        "spec_decode_num_drafts",
        "Proposals of speculative decoding (--speculative-ngram, --speculative-model, --speculative-mtp).",
    ),
    "spec_decode_num_draft_tokens": (
        "spec_decode_num_draft_tokens",
        "Tokens in the proposals of speculative decoding.",
    ),
    "spec_decode_num_accepted_tokens": (
        "spec_decode_num_accepted_tokens",
        "Proposed tokens that were accepted: the model would have chosen them itself.",
    ),
}


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


def stats_families(
    prefix: str,
    label_names: Sequence[str],
    engines: Sequence[tuple[Sequence[str], EngineStats]],
    gauges: Mapping[str, tuple[str, str]],
    counters: Mapping[str, tuple[str, str]],
) -> Iterator[Metric]:
    """Gauges and counters of engine statistics. engines: label values and statistics of each.

    gauges, counters: names without the prefix, to the path of a field of `EngineStats` and a description.
    """
    kinds: tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], Mapping[str, tuple[str, str]]], ...]
    kinds = ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters))
    for kind, fields in kinds:
        for name, (field, text) in fields.items():
            family = kind(f"{prefix}{name}", text, labels=label_names)
            for labels, stats in engines:
                family.add_metric(labels, attrgetter(field)(stats))
            yield family
