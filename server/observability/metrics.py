"""Prometheus metrics of one app."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from windlass.engine.client.engine_client import EngineClient, engine_name
from windlass.engine.errors import EngineError
from windlass.engine.interface.outputs import EngineStats
from windlass.server.config.rope_profiles import DEFAULT_NAME
from windlass.server.config.settings import MetricsNames
from windlass.server.observability.metric_families import (
    SHARED_COUNTERS,
    SHARED_GAUGES,
    FanOutObserver,
    Histogram,
    HistogramObserver,
    stats_families,
)
from windlass.server.observability.vllm_metrics import VllmMetrics


class CountedTokens(Protocol):
    """Token counts of one request, which grow while it runs."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...


class ScalingCollector(Collector):
    """Requests and tokens by rotary scaling, read from running requests at each scrape, so that tokens cost nothing."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, CountedTokens]] = {}
        self._prompt: collections.Counter[str] = collections.Counter({DEFAULT_NAME: 0})
        self._generated: collections.Counter[str] = collections.Counter()
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
        prompt, generated, running = (
            collections.Counter(self._prompt),
            collections.Counter(self._generated),
            collections.Counter[str](),
        )
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


CONTENT_TYPE = CONTENT_TYPE_LATEST

STATS_SECONDS = 2.0  # if the engine takes longer, its last known statistics are used

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_LONG_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)

_GAUGES = SHARED_GAUGES | {
    "kv_blocks": ("kv_blocks_total", "Blocks of the KV cache."),
    "kv_blocks_used": ("kv_blocks_used", "Blocks held by live requests."),
    "adapters_loaded": ("adapters_loaded", "LoRA adapters loaded."),
    "adapter_bytes": ("adapter_bytes", "Memory of the loaded LoRA adapters."),
    "rotary_specs_live": ("rotary_specs_live", "Distinct rotary scalings in use."),
}

_COUNTERS = SHARED_COUNTERS | {
    "engine_steps": ("num_steps", "Steps of the engine."),
    "key_moves": ("key_moves", "Cached tokens whose keys were turned to other frequencies."),
    "spec_decode_model_num_drafts": ("spec_decode_model_num_drafts", "Proposals of the draft model among them."),
    "spec_decode_model_num_draft_tokens": ("spec_decode_model_num_draft_tokens", "Tokens proposed by the draft model."),
    "spec_decode_model_num_accepted_tokens": (
        "spec_decode_model_num_accepted_tokens",
        "Tokens proposed by the draft model that were accepted.",
    ),
    "context_shifts": ("context_shifts", "Times a sequence dropped its oldest tokens."),
    "dropped_tokens": ("dropped_tokens", "Tokens dropped by them."),
    "reused_passages": ("reused_passages", "Cached passages taken up at another place of a prompt."),
    "reused_tokens": ("reused_tokens", "Tokens of them that were not computed again."),
}

# Cached blocks in files and in host memory: fields of `PersistStats`.
_PERSIST_GAUGES = {
    "kv_persist_waiting_blocks": ("persist.waiting_blocks", "KV blocks that wait to be written to files."),
    "kv_persist_known_blocks": ("persist.known_blocks", "KV blocks in files that this engine may use."),
    "kv_persist_disk_bytes": ("persist.disk_bytes", "Bytes of all files in the folder of KV blocks."),
    "kv_host_blocks": ("persist.host_blocks", "KV blocks of a GPU that the host's memory holds."),
    "kv_host_bytes": ("persist.host_bytes", "Bytes of them."),
}

_PERSIST_COUNTERS = {
    "kv_persist_written_blocks": ("persist.written_blocks", "KV blocks written to files."),
    "kv_persist_written_bytes": ("persist.written_bytes", "Bytes of them."),
    "kv_persist_read_blocks": ("persist.read_blocks", "KV blocks read from files."),
    "kv_persist_read_bytes": ("persist.read_bytes", "Bytes of them."),
    "kv_persist_restored_tokens": (
        "persist.restored_tokens",
        "Prompt tokens whose KV blocks came back from files or the host's memory.",
    ),
    "kv_persist_damaged_blocks": ("persist.damaged_blocks", "Files of KV blocks that their checksum betrayed."),
    "kv_persist_foreign_blocks": ("persist.foreign_blocks", "Files that held another KV block than their name states."),
    "kv_persist_lost_blocks": ("persist.lost_blocks", "KV blocks evicted before they were written."),
    "kv_persist_evicted_blocks": ("persist.evicted_blocks", "Files of KV blocks removed to hold the cap."),
    "kv_persist_failures": ("persist.failures", "Failures to read, write or copy KV blocks."),
    "kv_host_saved_blocks": (
        "persist.host_saved_blocks",
        "KV blocks copied to the host's memory as a GPU's cache evicted them.",
    ),
    "kv_host_saved_bytes": ("persist.host_saved_bytes", "Bytes of them."),
    "kv_host_read_blocks": ("persist.host_read_blocks", "KV blocks copied back from the host's memory."),
    "kv_host_read_bytes": ("persist.host_read_bytes", "Bytes of them."),
    "kv_host_lost_blocks": (
        "persist.host_lost_blocks",
        "KV blocks that a GPU's cache evicted and no copy was made of.",
    ),
    "kv_host_evicted_blocks": ("persist.host_evicted_blocks", "KV blocks in the host's memory given up for others."),
}

MAX_ADAPTER_LABELS = 64  # names of adapters in labels, during the life of a server

_RECOMPUTE_REASONS = ("cache_reuse", "full_prefix_hit", "preemption", "rope_update")

# Exported from the start: Prometheus cannot see an increase that creates a series.
_FINISH_REASONS = ("stop", "length")

_SERVER_ERROR_CODES = (
    "deadline_exceeded",
    "engine_unavailable",
    "internal",
    "not_finite",
    "out_of_memory",
    "queue_full",
)


class _EngineCollector(Collector):
    """The last `EngineStats` as metric families, with the label `engine` if there are several engines."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        engines = self._engine.engines
        names = ["engine"] if self._engine.has_replicas else []
        labels = [[engine_name(engine, number)] if names else [] for number, engine in enumerate(engines)]
        restarts = CounterMetricFamily("windlass_engine_restarts", "Engine restarts.", labels=names)
        up = GaugeMetricFamily("windlass_engine_up", "1 while the engine is ready.", labels=names)
        for values, engine in zip(labels, engines, strict=True):
            restarts.add_metric(values, engine.restarts)
            up.add_metric(values, engine.state == "ready")
        yield from (restarts, up)
        if self.stats is None:
            return
        parts = self.stats.engines or (self.stats,)
        known = [(values, part) for values, part in zip(labels, parts, strict=False) if part is not None]
        yield from stats_families("windlass_", names, known, _GAUGES, _COUNTERS)
        yield from stats_families("windlass_", names, known, _PERSIST_GAUGES, _PERSIST_COUNTERS)
        recomputed = CounterMetricFamily(
            "windlass_recomputed_tokens",
            "Positions passed through the model again, by reason.",
            labels=[*names, "reason"],
        )
        for values, part in known:
            counts = dict.fromkeys(_RECOMPUTE_REASONS, 0) | part.recomputed_tokens
            for reason, count in sorted(counts.items()):
                recomputed.add_metric([*values, reason], count)
        yield recomputed


class ServerMetrics:
    """Observations of the routes, and the text of `/metrics`. names: which names it uses. For the rest see `VllmMetrics`."""

    def __init__(
        self,
        engine: EngineClient,
        *,
        names: MetricsNames = "windlass",
        model_name: str = "",
        max_adapters: int = 0,
        adapters: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._engine = engine
        self._names = names
        self.registry = CollectorRegistry()
        self._vllm = (
            VllmMetrics(engine, model_name, max_adapters=max_adapters, adapters=adapters)
            if names != "windlass"
            else None
        )
        self._collector = _EngineCollector(engine)
        self.registry.register(self._collector)
        self.scalings = ScalingCollector()
        self.registry.register(self.scalings)
        self._success = Counter(
            "windlass_request_success", "Outputs finished, by reason.", ["finished_reason"], registry=self.registry
        )
        for reason in _FINISH_REASONS:
            self._success.labels(reason)
        self._failed = Counter("windlass_request_errors", "Requests failed, by code.", ["code"], registry=self.registry)
        for code in _SERVER_ERROR_CODES:
            self._failed.labels(code)
        self._adapters = Counter(
            "windlass_adapter_requests", "Requests that ran with an adapter.", ["adapter"], registry=self.registry
        )
        self._adapters.labels("other")
        self._adapter_names: set[str] = set()
        first_token = self._histogram("time_to_first_token", "Arrival to first output.", _LONG_LATENCY_BUCKETS)
        token = self._histogram("inter_token_latency", "Gap between output tokens.", _LATENCY_BUCKETS)
        self.event_loop_lag = self._histogram(
            "event_loop_lag", "How late the event loop of the HTTP side was.", _LATENCY_BUCKETS
        )
        e2e = self._histogram("e2e_request_latency", "Arrival to the end of an output.", _LONG_LATENCY_BUCKETS)
        self.time_to_first_token: HistogramObserver = first_token
        self.inter_token_latency: HistogramObserver = token
        self._e2e: HistogramObserver = e2e
        self._engine_samples: dict[str, list[HistogramObserver]] = {
            "queue_seconds": [
                self._histogram("request_queue_time", "Arrival at the engine to first schedule.", _LONG_LATENCY_BUCKETS)
            ],
            "prefill_seconds": [
                self._histogram("request_prefill_time", "First schedule to first token.", _LONG_LATENCY_BUCKETS)
            ],
            "decode_seconds": [
                self._histogram("request_decode_time", "First token to the end.", _LONG_LATENCY_BUCKETS)
            ],
        }
        if (vllm := self._vllm) is not None:
            self.time_to_first_token = FanOutObserver(first_token, vllm.time_to_first_token)
            self.inter_token_latency = FanOutObserver(token, vllm.inter_token_latency, vllm.time_per_output_token)
            self._e2e = FanOutObserver(e2e, vllm.e2e)
            for attribute, histogram in vllm.engine_samples.items():
                self._engine_samples.setdefault(attribute, []).append(histogram)

    def finished(
        self,
        reason: str,
        seconds: float,
        *,
        prompt_tokens: int = 0,
        generation_tokens: int = 0,
        max_tokens: int = 0,
        decode_seconds: float = 0.0,
    ) -> None:
        """Count a successful output, `seconds` after its request arrived; decode_seconds: from first to last token."""
        self._success.labels(reason).inc()
        self._e2e.observe(seconds)
        if self._vllm is not None:
            self._vllm.finished(
                reason,
                prompt_tokens=prompt_tokens,
                generation_tokens=generation_tokens,
                max_tokens=max_tokens,
                decode_seconds=decode_seconds,
            )

    def observe_prompt_finished(self, samples: int, longest_output: int) -> None:
        """Count a prompt whose outputs were all successful; longest_output: tokens of the longest one."""
        if self._vllm is not None:
            self._vllm.observe_prompt_finished(samples, longest_output)

    def count_adapter_request(self, name: str) -> None:
        """Count a request that begins to run with this adapter; further names are counted as "other"."""
        if name not in self._adapter_names and len(self._adapter_names) >= MAX_ADAPTER_LABELS:
            name = "other"
        self._adapter_names.add(name)
        self._adapters.labels(name).inc()

    def count_error(self, code: str) -> None:
        """Count a generation request that ended with an error."""
        self._failed.labels(code).inc()
        if self._vllm is not None:
            self._vllm.count_finished("abort" if code == "client_disconnected" else "error")

    @property
    def last_stats(self) -> EngineStats | None:
        """Statistics of the last successful `refresh`."""
        return self._collector.stats

    async def refresh(self) -> EngineStats | None:
        """Fetch engine statistics for the next response; None if the engine does not respond in time.

        Only this method may fetch them: each snapshot contains the times of requests since the previous one.
        """
        try:
            async with asyncio.timeout(STATS_SECONDS):
                stats = await self._engine.stats()
        except (EngineError, TimeoutError):
            return None
        self._collector.stats = stats
        if self._vllm is not None:
            self._vllm.stats = stats
        for attribute, histograms in self._engine_samples.items():
            for seconds in getattr(stats, attribute):
                for histogram in histograms:
                    histogram.observe(seconds)
        return stats

    async def render(self) -> bytes:
        """The exposition text, with new engine statistics if the engine responds in time."""
        await self.refresh()
        ours = generate_latest(self.registry) if self._names != "vllm" else b""
        return ours + (generate_latest(self._vllm.registry) if self._vllm is not None else b"")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"windlass_{name}_seconds", text, buckets)
        self.registry.register(histogram)
        return histogram
