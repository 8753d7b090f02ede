"""What happened on a server between two looks at its metrics. Numbers in and numbers out; knows no terminal and no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windlass.clients.metrics import Metrics

_PREFIX = "windlass_"
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLook:
    """What a server said at one moment. at: seconds on the monotonic clock. state: in the words of its /health."""

    at: float
    state: str
    metrics: Metrics

    @property
    def is_windlass(self) -> bool:
        """Whether the metrics bear the names that are read here."""
        return self.metrics.value(_PREFIX + "engine_up") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Of one rotary scaling: requests that run under it, and tokens a second of their prompts and answers."""

    name: str
    running: int
    prompt_rate: float
    generated_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of the time between two looks, `seconds` apart; rates are a second. None: the server says nothing of it.

    prefix_hits: share of the prompt tokens looked up that were found. Latencies: seconds at each of QUANTILES, None where
    nothing was observed in this time.
    """

    seconds: float
    state: str
    running: int | None
    waiting: int | None
    prompt_rate: float | None
    generated_rate: float | None
    finished_rate: float
    failed_rate: float
    blocks: int | None
    blocks_used: int | None
    cache_usage: float | None
    prefix_hits: float | None
    first_token: tuple[float, ...] | None
    between_tokens: tuple[float, ...] | None
    loop_lag: tuple[float, ...] | None
    restarts: int
    preempted: float
    scalings: tuple[Scaling, ...]


def figures(before: MetricsLook, after: MetricsLook) -> Figures:
    """before, after: two looks at one server, in this order."""
    seconds = max(after.at - before.at, 1e-9)
    first, last = before.metrics, after.metrics

    def grown(name: str, **labels: str) -> float | None:
        """The sum over engines, any of which may have begun again."""
        found = [s for s in last.samples if s.name == _PREFIX + name and s.labels.items() >= labels.items()]
        growths = [_growth(first.value(s.name, **s.labels), s.value) or 0.0 for s in found]
        return sum(growths) if found else None

    def rate(name: str, **labels: str) -> float | None:
        growth = grown(name, **labels)
        return None if growth is None else growth / seconds

    def gauge(name: str) -> int | None:
        value = last.value(_PREFIX + name)
        return None if value is None else round(value)

    looked_up = grown("prefix_cache_queries_total")
    return Figures(
        seconds=seconds,
        state=after.state,
        running=gauge("num_requests_running"),
        waiting=gauge("num_requests_waiting"),
        prompt_rate=rate("prompt_tokens_total"),
        generated_rate=rate("generation_tokens_total"),
        finished_rate=rate("request_success_total") or 0.0,
        failed_rate=rate("request_errors_total") or 0.0,
        blocks=gauge("kv_blocks"),
        blocks_used=gauge("kv_blocks_used"),
        cache_usage=max((s.value for s in last.samples if s.name == _PREFIX + "kv_cache_usage_perc"), default=None),
        prefix_hits=(grown("prefix_cache_hits_total") or 0.0) / looked_up if looked_up else None,
        first_token=_quantiles(first, last, "time_to_first_token_seconds"),
        between_tokens=_quantiles(first, last, "inter_token_latency_seconds"),
        loop_lag=_quantiles(first, last, "event_loop_lag_seconds"),
        restarts=gauge("engine_restarts_total") or 0,
        preempted=grown("num_preemptions_total") or 0.0,
        scalings=tuple(
            Scaling(
                name=name,
                running=round(last.value(_PREFIX + "scaling_requests_running", scaling=name) or 0),
                prompt_rate=rate("scaling_tokens_total", scaling=name, kind="prompt") or 0.0,
                generated_rate=rate("scaling_tokens_total", scaling=name, kind="generated") or 0.0,
            )
            for name in _labels(last, "scaling_requests_running", "scaling")
        ),
    )


def _growth(before: float | None, after: float | None) -> float | None:
    """Of a counter; one that has become less began again at 0, with its process."""
    if after is None:
        return None
    return after - before if before is not None and after >= before else after


def _labels(metrics: Metrics, name: str, label: str) -> list[str]:
    found = (sample.labels.get(label) for sample in metrics.samples if sample.name == _PREFIX + name)
    return sorted({value for value in found if value is not None})


def _quantiles(before: Metrics, after: Metrics, name: str) -> tuple[float, ...] | None:
    earlier, later = _buckets(before, name), _buckets(after, name)
    if any(later[bound] < earlier.get(bound, 0.0) for bound in later):
        earlier = {}
    bounds = sorted(later)
    counts = [later[bound] - earlier.get(bound, 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    return tuple(quantile(share, bounds, counts) for share in QUANTILES)


def _buckets(metrics: Metrics, name: str) -> Mapping[float, float]:
    wanted = f"{_PREFIX}{name}_bucket"
    return {float(sample.labels["le"]): sample.value for sample in metrics.samples if sample.name == wanted}


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float:
    """As Prometheus' histogram_quantile has it: evenly spread inside a bucket; past the last bound, that bound.

    bounds: ascending, the last one infinite. counts: of all observations up to each bound, the last one more than 0.
    """
    wanted = share * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= wanted)
    if math.isinf(bounds[index]):
        return bounds[index - 1] if index else math.nan
    low = bounds[index - 1] if index else 0.0
    under = counts[index - 1] if index else 0.0
    inside = counts[index] - under
    return low + (bounds[index] - low) * (wanted - under) / inside if inside else bounds[index]
