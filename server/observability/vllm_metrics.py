"""Metrics with the names, labels and buckets of vLLM."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from windlass.engine.client.engine_client import EngineClient, engine_name
from windlass.engine.interface.outputs import STEP_TOKENS, EngineStats
from windlass.server.observability.metric_families import (
    SHARED_COUNTERS,
    SHARED_GAUGES,
    Histogram,
    histogram_family,
    stats_families,
)

_SUBSECOND_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)

_FIRST_TOKEN_BUCKETS = (*_SUBSECOND_BUCKETS, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)

_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)

_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

_LENGTH_BUCKETS = tuple(step * 10**power for power in range(8) for step in (1, 2, 5))

_SAMPLE_BUCKETS = (1, 2, 5, 10, 20)

_GAUGES = SHARED_GAUGES | {"gpu_cache_usage_perc": ("kv_cache_usage", "Older name of kv_cache_usage_perc.")}

_COUNTERS = SHARED_COUNTERS | {
    "gpu_prefix_cache_queries": ("prefix_cache_queries", "Older name of prefix_cache_queries."),
    "gpu_prefix_cache_hits": ("prefix_cache_hits", "Older name of prefix_cache_hits."),
}

_REASONS = ("stop", "length", "abort", "error")


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
        self._finished = Counter(dict.fromkeys(_REASONS, 0))
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
            "request_time_per_output_token",
            "Mean time between two tokens of an answer.",
            _TOKEN_BUCKETS,
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
        self._finished[reason if reason in _REASONS else "error"] += 1

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
        yield from stats_families("vllm:", names, rows, _GAUGES, _COUNTERS)
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
