"""What each named caller has had, for /metrics. Names are the operator's, so their number is bounded; no key is shown."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from windlass.server.exchange.callers import LIMITS, Callers


class CallerCollector(Collector):
    """Read from `callers` at each scrape."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("windlass_caller_requests", "Requests let in, by caller.", labels=["caller"])
        tokens = CounterMetricFamily(
            "windlass_caller_tokens", "Tokens of prompts and of answers, by caller.", labels=["caller", "kind"]
        )
        refused = CounterMetricFamily(
            "windlass_caller_refused", "Requests refused with 429, by caller and limit.", labels=["caller", "limit"]
        )
        for name, usage in sorted(self._callers.usage.items()):
            requests.add_metric([name], usage.requests)
            tokens.add_metric([name, "prompt"], usage.prompt_tokens)
            tokens.add_metric([name, "generated"], usage.generated_tokens)
            for limit in LIMITS:
                refused.add_metric([name, limit], usage.refused[limit])
        yield from (requests, tokens, refused)
