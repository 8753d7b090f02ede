"""`--metrics-names`: vLLM's names, labels and buckets, with the native values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import Live, live_server
from helpers.scripted_engine import model_info
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from windlass.engine.errors import DeadlineError
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.outputs import STEP_TOKENS, EngineStats
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters

LABELS = {"model_name": "toy", "engine": "0"}
STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    kv_cache_usage=0.25,
    num_preemptions=4,
    prefix_cache_queries=100,
    prefix_cache_hits=60,
    prompt_tokens=11,
    generation_tokens=12,
    spec_decode_num_drafts=5,
    spec_decode_num_draft_tokens=15,
    spec_decode_num_accepted_tokens=9,
    queue_seconds=(0.5, 1.5),
    prefill_seconds=(0.25,),
    decode_seconds=(2.0,),
    inference_seconds=(2.25,),
    step_tokens=(5, 1, *[0] * (len(STEP_TOKENS) - 1)),
    step_tokens_sum=13,
)

# Series of vLLM's own dashboard (its prometheus_grafana example), each with model_name: parts of histograms, and counters.
# Other dashboards and autoscalers use those below.
DASHBOARD = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
prompt_tokens_total generation_tokens_total
inter_token_latency_seconds_bucket inter_token_latency_seconds_sum inter_token_latency_seconds_count
num_requests_running num_requests_waiting
time_to_first_token_seconds_bucket time_to_first_token_seconds_sum time_to_first_token_seconds_count
kv_cache_usage_perc request_prompt_tokens_bucket request_generation_tokens_bucket request_success_total
request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_max_num_generation_tokens_sum
"""
OTHERS = """
time_per_output_token_seconds_bucket request_inference_time_seconds_bucket request_time_per_output_token_seconds_bucket
request_params_max_tokens_bucket request_params_n_bucket iteration_tokens_total_bucket num_preemptions_total
prefix_cache_queries_total prefix_cache_hits_total gpu_cache_usage_perc cache_config_info
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
"""


@pytest.fixture(scope="module")
def both() -> Iterator[Live]:
    with live_server(metrics_names="both") as live:
        yield live


def scrape(live: Live) -> list[Sample]:
    text = live.http.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    return [sample for family in families for sample in family.samples]


def value(samples: list[Sample], name: str, **labels: str) -> float:
    (found,) = (s.value for s in samples if s.name == name and labels.items() <= s.labels.items())
    return found


def bounds(samples: list[Sample], name: str) -> list[float]:
    return [float(s.labels["le"]) for s in samples if s.name == f"vllm:{name}_bucket"]


@pytest.mark.parametrize(("names", "prefixes"), [("windlass", {"windlass"}), ("vllm", {"vllm"})])
def test_the_option_selects_names(names: Any, prefixes: set[str]) -> None:
    with live_server(metrics_names=names) as live:
        live.complete(max_tokens=3)
        assert {sample.name.replace(":", "_").partition("_")[0] for sample in scrape(live)} == prefixes


def test_every_series_of_dashboards_exists_from_the_start(both: Live) -> None:
    samples = scrape(both)
    for name in (DASHBOARD + OTHERS).split():
        found = [s for s in samples if s.name == f"vllm:{name}"]
        assert found and all(LABELS.items() <= s.labels.items() for s in found), name
    reasons = {s.labels["finished_reason"] for s in samples if s.name == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}
    config = next(s for s in samples if s.name == "vllm:cache_config_info")
    assert (config.labels["block_size"], config.labels["num_gpu_blocks"], config.value) == ("16", "64", 1)


def test_values_equal_the_native_metrics() -> None:
    with live_server(metrics_names="both") as live:
        live.engine.engine_stats = STATS
        scrape(live)
        live.engine.engine_stats = EngineStats(**{  # samples are returned once
            **{name: getattr(STATS, name) for name in STATS.__slots__ if not name.endswith("_seconds")}
        })  # fmt: skip
        live.engine.delay = 0.01
        live.complete("abc", max_tokens=5, n=2)
        stopped = live.complete("abcd", max_tokens=9, stop="c")["usage"]["completion_tokens"]
        live.engine.refuse = lambda request: DeadlineError("late")
        live.refuse("/v1/completions", {"prompt": "a"}, 504)
        samples = scrape(live)

        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
                     "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
                     "generation_tokens_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
                     "spec_decode_num_accepted_tokens_total"):  # fmt: skip
            assert value(samples, f"vllm:{name}") == value(samples, f"windlass_{name}") > 0, name
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time",
                     "request_prefill_time", "request_decode_time"):  # fmt: skip
            for part in ("sum", "count"):
                ours = value(samples, f"windlass_{name}_seconds_{part}")
                assert value(samples, f"vllm:{name}_seconds_{part}") == ours > 0, name
        for reason, count in (("length", 2), ("stop", 1)):
            for prefix in ("windlass_", "vllm:"):
                assert value(samples, f"{prefix}request_success_total", finished_reason=reason) == count
        assert value(samples, "vllm:request_success_total", finished_reason="error") == 1
        assert value(samples, "vllm:request_inference_time_seconds_sum") == 2.25
        assert value(samples, "vllm:iteration_tokens_total_sum") == 13
        assert value(samples, "vllm:iteration_tokens_total_count") == 6
        assert value(samples, "vllm:iteration_tokens_total_bucket", le="1.0") == 5

        prompts = [len(request.prompt_token_ids) for request in live.engine.requests]
        sums = {
            "request_prompt_tokens": (3, 2 * prompts[0] + prompts[1]),
            "request_generation_tokens": (3, 5 + 5 + stopped),
            "request_max_num_generation_tokens": (2, 5 + stopped),
            "request_params_max_tokens": (3, 5 + 5 + 9),
            "request_params_n": (2, 2 + 1),
        }
        for name, (count, total) in sums.items():
            assert value(samples, f"vllm:{name}_count") == count, name
            assert value(samples, f"vllm:{name}_sum") == total, name
        # Three outputs with gaps of some 0.01 s, each counted once.
        assert value(samples, "vllm:request_time_per_output_token_seconds_count") == 3
        assert value(samples, "vllm:request_time_per_output_token_seconds_sum") > 0.02


def test_length_buckets_end_at_the_longest_context(both: Live) -> None:
    samples = scrape(both)
    assert bounds(samples, "request_prompt_tokens") == [1, 2, 5, 10, 20, 50, 100, 200, float("inf")]
    assert bounds(samples, "iteration_tokens_total") == [*STEP_TOKENS, float("inf")]
    both.engine.info = model_info(max_model_len=10)
    try:
        assert bounds(scrape(both), "request_prompt_tokens") == [1, 2, 5, 10, float("inf")]
    finally:
        both.engine.info = model_info()


def test_steps_by_number_of_tokens() -> None:
    counters = SchedulerCounters()
    for tokens in (1, 1, 2, 8, 9, 16384, 16385):
        counters.count_step(tokens)
    stats = counters.snapshot(num_running=0, num_waiting=0, kv_blocks_total=1, kv_blocks_used=0, kv_cache_usage=0.0)
    assert stats.num_steps == sum(stats.step_tokens) == 7
    assert stats.step_tokens_sum == 1 + 1 + 2 + 8 + 9 + 16384 + 16385
    assert stats.step_tokens == (2, 2, 1, *[0] * 9, 1, 1)


def test_active_adapters_are_labels(tmp_path: Path) -> None:
    sources = tuple(AdapterSource(number, name, str(tmp_path)) for number, name in ((1, "poet"), (2, "clerk")))
    with live_server(metrics_names="vllm", adapters=sources, max_loras=3) as live:

        def labels() -> dict[str, str]:
            (sample,) = (s for s in scrape(live) if s.name == "vllm:lora_requests_info")
            assert abs(sample.value - time.time()) < 60
            return sample.labels

        expected = {"max_lora": "3", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        assert labels() == expected
        poet, clerk = map(live.state.adapters.find, ("poet", "clerk"))
        with live.state.adapters.using(poet), live.state.adapters.using(clerk), live.state.adapters.using(poet):
            assert labels() == {**expected, "running_lora_adapters": "clerk,poet"}
        assert labels() == expected
    with live_server(metrics_names="vllm") as live:
        assert not [s for s in scrape(live) if s.name == "vllm:lora_requests_info"]
