"""What runs under which rotary scaling, for /metrics. Names are kinds and the operator's profiles, so their number is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from windlass.server.options.profiles import DEFAULT_NAME


class CountedTokens(Protocol):
    """Counts of one request, which grow while it runs."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...


class ScalingCollector(Collector):
    """Read at each scrape off the counts of the requests that run, so that a token costs nothing here."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, CountedTokens]] = {}
        self._prompt: Counter[str] = Counter({DEFAULT_NAME: 0})
        self._generated: Counter[str] = Counter()
        self._serial = 0

    @contextmanager
    def running(self, scaling: str, tokens: CountedTokens) -> Iterator[None]:
        """A request runs under the scaling of this name until the block ends."""
        self._serial += 1
        key = self._serial
        self._running[key] = scaling, tokens
        try:
            yield
        finally:
            del self._running[key]
            self._prompt[scaling] += tokens.prompt_tokens
            self._generated[scaling] += tokens.completion_tokens

    def collect(self) -> Iterator[Metric]:
        prompt, generated, running = Counter(self._prompt), Counter(self._generated), Counter[str]()
        for name, tokens in self._running.values():
            running[name] += 1
            prompt[name] += tokens.prompt_tokens
            generated[name] += tokens.completion_tokens
        shown = GaugeMetricFamily(
            "windlass_scaling_requests_running", "Requests that run, by rotary scaling.", labels=["scaling"]
        )
        counted = CounterMetricFamily(
            "windlass_scaling_tokens",
            "Tokens of prompts and of answers, by rotary scaling.",
            labels=["scaling", "kind"],
        )
        for name in sorted(prompt):
            shown.add_metric([name], running[name])
            counted.add_metric([name, "prompt"], prompt[name])
            counted.add_metric([name, "generated"], generated[name])
        yield from (shown, counted)
