"""The queries of vLLM's dashboard (its prometheus_grafana example), answered by a real Prometheus and server."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import httpx
import pytest
from e2e_helpers.prometheus import Prometheus, needs_prometheus, write_config
from helpers.real_server import serve

MODEL = '{model_name="demo"}'
LATENCIES = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
RATES = """
prompt_tokens_total generation_tokens_total request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_max_num_generation_tokens_sum
"""


def expressions() -> list[str]:
    """The queries of the dashboard with values of its variables."""
    found = [
        f"histogram_quantile({share}, sum by(le) (rate(vllm:{name}_bucket{MODEL}[1m])))"
        for name in LATENCIES
        for share in (0.99, 0.95, 0.9, 0.5)
    ]
    found += [f"rate(vllm:{name}_sum{MODEL}[1m]) / rate(vllm:{name}_count{MODEL}[1m])" for name in LATENCIES]
    found += [f"rate(vllm:{name}{MODEL}[1m])" for name in RATES.split()]
    found += [f"vllm:{name}{MODEL}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    found += [
        f"sum by(le) (increase(vllm:{name}_bucket{MODEL}[1m]))"
        for name in ("request_prompt_tokens", "request_generation_tokens")
    ]
    return [*found, f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}[1m]))"]


@pytest.mark.slow
@needs_prometheus
def test_every_query_has_an_answer(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    with serve("--metrics-names", "vllm") as server:
        config = write_config(tmp_path, tmp_path / "key", server.url.removeprefix("http://"))
        text = re.sub(r"scrape_(interval|timeout): \S+", r"scrape_\1: 1s", config.read_text(encoding="utf-8"))
        config.write_text(text, encoding="utf-8")
        with Prometheus(config, tmp_path) as prometheus:
            prometheus.wait_ready()
            asked = expressions()
            assert len(asked) == 27

            def unanswered() -> list[str]:
                body = {"prompt": "The king said", "max_tokens": 20, "ignore_eos": True}
                assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
                time.sleep(0.5)
                values = {expression: prometheus.query(expression) for expression in asked}
                return [name for name, found in values.items() if not found or any(map(math.isnan, found))]

            prometheus.eventually(lambda: not unanswered(), "every expression has a value", otherwise=unanswered)
