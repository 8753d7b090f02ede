"""Prometheus metrics of one app, with names of their own and with those of vLLM.

Histograms have no locks, as only the event loop observes; gauges and counters are read from statistics of the engine.
"""

from __future__ import annotations

import asyncio
import collections
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from windlass.engine.client.engine_client import EngineClient, engine_name
from windlass.engine.errors import EngineError
from windlass.engine.interface.outputs import STEP_TOKENS, EngineStats
from windlass.server.config.engine_options import DEFAULT_NAME
from windlass.server.config.settings import MetricsNames

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

    def __init__(self, *observers: Histogram) -> None:
        self._observers = observers

    def observe(self, value: float, count: int = 1) -> None:
        for observer in self._observers:
            observer.observe(value, count)


HistogramObserver = Histogram | FanOutObserver


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


_SUBSECOND_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_FIRST_TOKEN_BUCKETS = (*_SUBSECOND_BUCKETS, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LENGTH_BUCKETS = tuple(step * 10**power for power in range(8) for step in (1, 2, 5))
_SAMPLE_BUCKETS = (1, 2, 5, 10, 20)
_VLLM_GAUGES = SHARED_GAUGES | {"gpu_cache_usage_perc": ("kv_cache_usage", "Older name of kv_cache_usage_perc.")}

_VLLM_COUNTERS = SHARED_COUNTERS | {
    "gpu_prefix_cache_queries": ("prefix_cache_queries", "Older name of prefix_cache_queries."),
    "gpu_prefix_cache_hits": ("prefix_cache_hits", "Older name of prefix_cache_hits."),
}

_VLLM_REASONS = ("stop", "length", "abort", "error")


class VllmMetrics(Collector):
    """`vllm:` metrics of one app. Engines are labelled "0" and so on; observations of the server have "all" if there are several.

    model_name: label of the model. max_adapters: that may be loaded at once, 0 without adapters. adapters: returns the names of
    adapters with running requests.
    """

    def __init__(
        self,
        engine: EngineClient,
        model_name: str,
        *,
        max_adapters: int = 0,
        adapters: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._engine = engine
        self._max_adapters = max_adapters
        self._adapters = adapters
        self._labels = {"model_name": model_name, "engine": "all" if engine.has_replicas else "0"}
        self._finished = collections.Counter(dict.fromkeys(_VLLM_REASONS, 0))
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.stats: EngineStats | None = None
        self.time_to_first_token = self._seconds(
            "time_to_first_token", "Time from the arrival of a request to its first output.", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._seconds(
            "inter_token_latency", "Time between two tokens of one sample.", _TOKEN_BUCKETS
        )
        self.time_per_output_token = self._seconds(
            "time_per_output_token", "Older name of inter_token_latency_seconds.", _TOKEN_BUCKETS
        )
        self.e2e = self._seconds(
            "e2e_request_latency", "Time from the arrival of a request to the end of an answer.", _REQUEST_BUCKETS
        )
        self.per_output_token = self._seconds(
            "request_time_per_output_token", "Mean time between two tokens of an answer.", _TOKEN_BUCKETS
        )
        self.engine_samples = {
            "queue_seconds": self._seconds(
                "request_queue_time", "Time from the arrival at the engine to the first step.", _REQUEST_BUCKETS
            ),
            "prefill_seconds": self._seconds(
                "request_prefill_time", "Time from the first step to the first token.", _REQUEST_BUCKETS
            ),
            "decode_seconds": self._seconds(
                "request_decode_time", "Time from the first token to the end.", _REQUEST_BUCKETS
            ),
            "inference_seconds": self._seconds(
                "request_inference_time", "Time from the first step of a request to its end.", _REQUEST_BUCKETS
            ),
        }
        self._prompt_tokens = self._lengths("request_prompt_tokens", "Prompt tokens of an answer.")
        self._generation_tokens = self._lengths("request_generation_tokens", "Generated tokens of an answer.")
        self._longest_output = self._lengths(
            "request_max_num_generation_tokens", "Generated tokens of the longest answer to a prompt."
        )
        self._max_tokens = self._lengths(
            "request_params_max_tokens", "Largest number of tokens that an answer could have had."
        )
        self._n = self._register(
            Histogram("vllm:request_params_n", "Number of answers to a prompt.", _SAMPLE_BUCKETS, labels=self._labels)
        )

    def finished(
        self, reason: str, *, prompt_tokens: int, generation_tokens: int, max_tokens: int, decode_seconds: float
    ) -> None:
        """Count a completed output. decode_seconds: between its first token and its last."""
        self.count_finished(reason)
        self._prompt_tokens.observe(prompt_tokens)
        self._generation_tokens.observe(generation_tokens)
        self._max_tokens.observe(max_tokens)
        if generation_tokens > 1:
            self.per_output_token.observe(decode_seconds / (generation_tokens - 1))

    def count_finished(self, reason: str) -> None:
        """Count an end without further data: one of `stop`, `length`, `abort` and `error`."""
        self._finished[reason if reason in _VLLM_REASONS else "error"] += 1

    def observe_prompt_finished(self, samples: int, longest_output: int) -> None:
        """Count a prompt whose outputs have all ended; longest_output: tokens of the longest one."""
        self._n.observe(samples)
        self._longest_output.observe(longest_output)

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        success = CounterMetricFamily(
            "vllm:request_success",
            "Answers that ended, by reason: stop, length, abort (the client left) or error.",
            labels=[*names, "finished_reason"],
        )
        for reason, count in self._finished.items():
            success.add_metric([*values, reason], count)
        yield success
        yield from self._cache_config()
        if self._max_adapters:
            yield self._lora_requests()
        if self.stats is None:
            return
        engines = [engine_name(engine, number) for number, engine in enumerate(self._engine.engines)]
        parts = zip(engines, self.stats.engines or (self.stats,), strict=False)
        known = [({**self._labels, "engine": engine}, part) for engine, part in parts if part is not None]
        rows = [(list(labels.values()), part) for labels, part in known]
        yield from stats_families("vllm:", names, rows, _VLLM_GAUGES, _VLLM_COUNTERS)
        text, each = "Tokens computed in a step. Starts again with the engine.", []
        for labels, part in known:
            steps = part.step_tokens or (0,) * (len(STEP_TOKENS) + 1)
            each.append(
                histogram_family("vllm:iteration_tokens_total", text, labels, STEP_TOKENS, steps, part.step_tokens_sum)
            )
        for more in each[1:]:
            each[0].samples += more.samples
        yield from each[:1]

    def _lora_requests(self) -> Metric:
        # The server does not know which requests wait in the engine: all count as running.
        labels = {
            "max_lora": str(self._max_adapters),
            "running_lora_adapters": ",".join(self._adapters()),
            "waiting_lora_adapters": "",
        }
        text = "Unix time; the labels list the adapters of running requests. Waiting requests count as running."
        info = GaugeMetricFamily("vllm:lora_requests_info", text, labels=list(labels))
        info.add_metric(list(labels.values()), time.time())
        return info

    def _cache_config(self) -> Iterator[Metric]:
        info = self._engine.info
        if info is None:
            return
        labels = {
            "block_size": str(info.block_size),
            "cache_dtype": info.kv_cache_dtype,
            "num_gpu_blocks": str(min(info.num_kv_blocks)),
            **self._labels,
        }
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; the labels have the block size, the number of blocks on any device, and the dtype of the KV cache.",
            labels=list(labels),
        )
        config.add_metric(list(labels.values()), 1)
        yield config

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._register(Histogram(f"vllm:{name}_seconds", text, buckets, labels=self._labels))

    def _lengths(self, name: str, text: str) -> Histogram:
        return self._register(
            Histogram(f"vllm:{name}", text, _LENGTH_BUCKETS, labels=self._labels, longest=self._longest_context)
        )

    def _register(self, histogram: Histogram) -> Histogram:
        self.registry.register(histogram)
        return histogram

    def _longest_context(self) -> float | None:
        info = self._engine.info
        return None if info is None else info.max_model_len


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
            "windlass_scaling_requests_running",
            "Running requests by rotary scaling: the name of a profile, a kind, auto, or default without rope_scaling.",
            labels=["scaling"],
        )
        counted = CounterMetricFamily(
            "windlass_scaling_tokens",
            "Tokens of generation requests, by rotary scaling and kind (prompt, generated), counted as they are generated. The "
            "last tokens of an aborted request may be missing here.",
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
    "kv_blocks": ("kv_blocks_total", "Blocks of the KV cache, over all KV groups."),
    "kv_blocks_used": ("kv_blocks_used", "Blocks held by live requests, over all KV groups."),
    "adapters_loaded": ("adapters_loaded", "LoRA adapters loaded."),
    "adapter_bytes": ("adapter_bytes", "Memory of the loaded LoRA adapters, in bytes."),
    "rotary_specs_live": ("rotary_specs_live", "Distinct rotary scalings in use."),
}

_COUNTERS = SHARED_COUNTERS | {
    "engine_steps": ("num_steps", "Steps of the engine."),
    "key_moves": ("key_moves", "Cached tokens whose keys were rotated to other frequencies (rope_update rotate)."),
    "spec_decode_model_num_drafts": ("spec_decode_model_num_drafts", "Proposals of the draft model or the MTP layer."),
    "spec_decode_model_num_draft_tokens": (
        "spec_decode_model_num_draft_tokens",
        "Tokens in the proposals of the draft model or the MTP layer.",
    ),
    "spec_decode_model_num_accepted_tokens": (
        "spec_decode_model_num_accepted_tokens",
        "Tokens proposed by the draft model or the MTP layer that were accepted.",
    ),
    "context_shifts": ("context_shifts", "Context shifts: times that a sequence dropped its oldest tokens."),
    "dropped_tokens": ("dropped_tokens", "Tokens dropped by context shifts."),
    "reused_passages": ("reused_passages", "Cached passages reused at another offset of a prompt."),
    "reused_tokens": ("reused_tokens", "Tokens of reused passages that were not computed again."),
}

# Cached blocks in files and in host memory: fields of `PersistStats`.
_PERSIST_GAUGES = {
    "kv_persist_waiting_blocks": (
        "persist.waiting_blocks",
        "Blocks that wait to be written to files of the cache (--kv-persist).",
    ),
    "kv_persist_known_blocks": ("persist.known_blocks", "Blocks in files that this engine may use."),
    "kv_persist_disk_bytes": ("persist.disk_bytes", "Bytes of all files in the folder of --kv-persist."),
    "kv_host_blocks": ("persist.host_blocks", "Blocks in the host tier (--kv-host-memory)."),
    "kv_host_bytes": ("persist.host_bytes", "Bytes of the blocks in the host tier."),
}

_PERSIST_COUNTERS = {
    "kv_persist_written_blocks": ("persist.written_blocks", "Blocks written to files."),
    "kv_persist_written_bytes": ("persist.written_bytes", "Bytes written to files."),
    "kv_persist_read_blocks": ("persist.read_blocks", "Blocks read from files."),
    "kv_persist_read_bytes": ("persist.read_bytes", "Bytes read from files."),
    "kv_persist_restored_tokens": (
        "persist.restored_tokens",
        "Prompt tokens whose blocks were restored from files or the host tier.",
    ),
    "kv_persist_damaged_blocks": ("persist.damaged_blocks", "Files whose contents do not match their checksum."),
    "kv_persist_foreign_blocks": (
        "persist.foreign_blocks",
        "Complete files that hold another block than their name states.",
    ),
    "kv_persist_lost_blocks": (
        "persist.lost_blocks",
        "Blocks evicted before they were written: the disk is slower than the model.",
    ),
    "kv_persist_evicted_blocks": (
        "persist.evicted_blocks",
        "Files that this server deleted to respect the size limit.",
    ),
    "kv_persist_failures": ("persist.failures", "Failures to read, write or copy blocks."),
    "kv_host_saved_blocks": (
        "persist.host_saved_blocks",
        "Blocks copied to the host tier when the GPU's cache evicted them.",
    ),
    "kv_host_saved_bytes": ("persist.host_saved_bytes", "Bytes copied to the host tier."),
    "kv_host_read_blocks": ("persist.host_read_blocks", "Blocks copied back from the host tier."),
    "kv_host_read_bytes": ("persist.host_read_bytes", "Bytes copied back from the host tier."),
    "kv_host_lost_blocks": (
        "persist.host_lost_blocks",
        "Blocks that the GPU's cache evicted without a copy.",
    ),
    "kv_host_evicted_blocks": (
        "persist.host_evicted_blocks",
        "Blocks removed from the host tier to make space for others.",
    ),
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
        restarts = CounterMetricFamily("windlass_engine_restarts", "Restarts after the engine died.", labels=names)
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
            "Positions computed again, by reason: preemption, full_prefix_hit, rope_update, or cache_reuse (starts of passages).",
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
            "windlass_request_success",
            "Answers finished, by reason: stop or length.",
            ["finished_reason"],
            registry=self.registry,
        )
        for reason in _FINISH_REASONS:
            self._success.labels(reason)
        self._failed = Counter(
            "windlass_request_errors",
            "Generation requests that failed, by error code; client_disconnected: the client left.",
            ["code"],
            registry=self.registry,
        )
        for code in _SERVER_ERROR_CODES:
            self._failed.labels(code)
        self._adapters = Counter(
            "windlass_adapter_requests",
            f"Requests that ran with an adapter; names after the first {MAX_ADAPTER_LABELS} are counted as other.",
            ["adapter"],
            registry=self.registry,
        )
        self._adapters.labels("other")
        self._adapter_names: set[str] = set()
        first_token = self._histogram(
            "time_to_first_token", "Time from the arrival of a request to its first output.", _LONG_LATENCY_BUCKETS
        )
        token = self._histogram("inter_token_latency", "Time between two tokens of one sample.", _LATENCY_BUCKETS)
        self.event_loop_lag = self._histogram(
            "event_loop_lag",
            "Delay of the event loop of the HTTP server, measured ten times a second. A stall of more than a second is logged "
            "with its stack.",
            _LATENCY_BUCKETS,
        )
        e2e = self._histogram(
            "e2e_request_latency", "Time from the arrival of a request to the end of an answer.", _LONG_LATENCY_BUCKETS
        )
        self.time_to_first_token: HistogramObserver = first_token
        self.inter_token_latency: HistogramObserver = token
        self._e2e: HistogramObserver = e2e
        self._engine_samples: dict[str, list[HistogramObserver]] = {
            "queue_seconds": [
                self._histogram(
                    "request_queue_time",
                    "Time from the arrival at the engine to the first step.",
                    _LONG_LATENCY_BUCKETS,
                )
            ],
            "prefill_seconds": [
                self._histogram(
                    "request_prefill_time", "Time from the first step to the first token.", _LONG_LATENCY_BUCKETS
                )
            ],
            "decode_seconds": [
                self._histogram("request_decode_time", "Time from the first token to the end.", _LONG_LATENCY_BUCKETS)
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
