"""A Prometheus with the configuration of deploy/ scrapes real servers. Dashboards and alerts use existing metrics."""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from e2e_helpers.prometheus import (
    ALERTS,
    PANELS,
    Prometheus,
    as_grafana_asks,
    needs_prometheus,
    promtool,
    write_config,
)
from helpers.real_server import serve
from helpers.served import Served
from helpers.toy_tokenizers import byte_level
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("promql_parser", reason="needs the extra e2e: pip install -e '.[e2e]'")

import promql_parser as promql

KEY = "a key with spaces, # and $"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
QUERIES = [as_grafana_asks(target["expr"]) for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [*QUERIES, *(rule["expr"] for rule in RULES)]

# Labels and series that Prometheus adds.
TARGET_LABELS = {"job", "instance"}
OWN_SERIES = {"up": {"job": {"windlass"}, "instance": set()}, "ALERTS": {"alertname": set(), "alertstate": {"firing"}}}


@dataclass
class Uses:
    """names: every metric. labels: (label, metrics that must have it). matchers: (metric, label, operator, value)."""

    names: set[str] = field(default_factory=set)
    labels: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    matchers: set[tuple[str, str, str, str]] = field(default_factory=set)


def uses(expression: str) -> Uses:
    """Return the metrics and labels of a PromQL expression; raise ValueError for other texts."""
    found = Uses()
    _walk(promql.parse(expression), found)
    return found


def _walk(node: Any, found: Uses) -> frozenset[str]:
    """Return the metrics below a node."""
    match node:
        case promql.VectorSelector():
            assert node.name, "a selector without a metric's name"
            found.names.add(node.name)
            for matcher in node.matchers.matchers:
                found.labels.add((matcher.name, frozenset({node.name})))
                found.matchers.add((node.name, matcher.name, str(matcher.op), matcher.value))
            return frozenset({node.name})
        case promql.MatrixSelector():
            return _walk(node.vector_selector, found)
        case promql.AggregateExpr():
            names = _all([node.expr] if node.param is None else [node.expr, node.param], found)
            _expect(node.modifier, names, found)
            return names
        case promql.BinaryExpr():
            names = _all([node.lhs, node.rhs], found)
            _expect(node.modifier.matching if node.modifier else None, names, found)
            return names
        case promql.Call():
            return _all(node.args, found)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _walk(node.expr, found)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
    raise AssertionError(f"unknown node: {node!r}")


def _all(nodes: Iterable[Any], found: Uses) -> frozenset[str]:
    return frozenset().union(*[_walk(node, found) for node in nodes])


def _expect(modifier: Any, names: frozenset[str], found: Uses) -> None:
    if modifier is not None:
        found.labels.update((label, names) for label in modifier.labels)


@dataclass
class Locked:
    """A server with the bundled model that requires a key."""

    url: str
    http: httpx.Client

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def scrape(self) -> str:
        answer = self.http.get("/metrics")
        assert answer.status_code == 200
        return answer.text

    def work(self) -> None:
        """Send requests with several samples, a cached prefix and an error of the client."""
        prompt = "In the beginning God created the heaven and the earth. " * 3
        for n in (1, 1, 2):
            body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "n": n, "seed": 3}
            assert self.http.post("/v1/completions", json=body).status_code == 200
        refused = self.http.post("/v1/completions", json={"prompt": [1] * 100_000, "max_tokens": 1})
        assert refused.status_code == 400


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"another\n{KEY}\n")
    with (
        serve("--kv-cache-memory", "64MiB", "--api-key-file", str(keys)) as server,
        httpx.Client(base_url=server.url, headers=AUTHORIZED, timeout=60, trust_env=False) as http,
    ):
        yield Locked(server.url, http)


@pytest.fixture(scope="module")
def printed(locked: Locked) -> dict[str, dict[str, set[str]]]:
    """The series of a new server: name → label → values."""
    series: dict[str, dict[str, set[str]]] = {name: dict(labels) for name, labels in OWN_SERIES.items()}
    for family in text_string_to_metric_families(locked.scrape()):
        for sample in family.samples:
            labels = series.setdefault(sample.name, defaultdict(set))
            for label, value in sample.labels.items():
                labels[label].add(value)
    return series


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_queried_metric_and_label_exists(expression, printed):
    used = uses(expression)
    assert used.names and not used.names - set(printed)
    for label, names in used.labels:
        for name in names:
            assert label in printed[name] or (label in TARGET_LABELS and name != "ALERTS"), f"{name} has no {label}"
    for name, label, operator, value in used.matchers:
        known = printed[name][label]
        if operator == "MatchOp.Equal":
            assert not known or value in known, f"{name}: no {label} is {value!r}"
        else:
            assert operator == "MatchOp.Re"
            # Alternatives without a match would hide a misspelling. Ranges of status codes are not names.
            names = [word for word in value.split("|") if re.fullmatch(r"\w+", word)]
            assert not known or not set(names) - known, f"{name}: {value!r} is not in {known}"


def test_dashboard_shows_every_metric(printed):
    shown = {name for expression in QUERIES for name in uses(expression).names}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in printed if not name.endswith("_created")}
    assert len(families) > 20
    assert families == shown


@needs_prometheus
def test_promtool_accepts_the_metrics(locked):
    """The exposition of a server after some requests, with the series of codes and reasons."""
    locked.work()
    result = promtool("check", "metrics", text=locked.scrape())
    assert result.returncode == 0 and not result.stdout + result.stderr


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server without a key, with a scripted engine."""
    model = tmp_path_factory.mktemp("model") / "toy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    byte_level().save(str(model / "tokenizer.json"))
    with Served(model) as served:
        yield served.wait_ready().removeprefix("http://")


@needs_prometheus
@pytest.mark.slow
def test_prometheus_scrapes_real_servers_and_answers_the_dashboard(locked, open_server, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("\n")  # as the compose file writes an unset key
    config = write_config(tmp_path, key_file, locked.address, open_server)
    check = promtool("check", "config", config)
    assert check.returncode == 0, check.stdout + check.stderr
    with Prometheus(config, tmp_path) as prometheus:
        prometheus.wait_ready()

        # Without a key, only the server that requires none returns its metrics.
        def health() -> dict[str, str]:
            return {address: target["health"] for address, target in prometheus.targets().items()}

        prometheus.eventually(lambda: health() == {locked.address: "down", open_server: "up"}, "one target is up")
        assert "401" in prometheus.targets()[locked.address]["lastError"]

        # The key is read again at every scrape, and ignored by a server without keys.
        key_file.write_text(f"{KEY}\n")
        prometheus.eventually(lambda: set(health().values()) == {"up"}, "both targets are up")

        locked.work()
        generated = f'increase(windlass_generation_tokens_total{{instance="{locked.address}"}}[1m]) > 0'
        prometheus.eventually(lambda: prometheus.query(generated), "the generated tokens are counted")

        def without_data() -> set[str]:
            return {
                f"{panel['title']}: {target['legendFormat']}"
                for panel in PANELS
                for target in panel["targets"]
                if not any(map(math.isfinite, prometheus.query(as_grafana_asks(target["expr"]))))
            }

        def every_panel_has_data() -> bool:
            if not without_data():
                return True
            locked.work()  # on a busy machine the first requests may be older than the interval
            return False

        prometheus.eventually(every_panel_has_data, "every panel has data", otherwise=without_data)
        prometheus.eventually(lambda: prometheus.query("sum(windlass_engine_up)") == [2.0], "both engines are ready")

        groups = prometheus.api("rules")["groups"]
        loaded = {rule["name"]: rule for group in groups for rule in group["rules"]}
        assert set(loaded) == {rule["alert"] for rule in RULES}
        prometheus.eventually(
            lambda: all(r["health"] == "ok" for g in prometheus.api("rules")["groups"] for r in g["rules"]),
            "every alert has been evaluated without an error",
        )


@needs_prometheus
def test_promtool_accepts_the_rules_and_the_dashboards_queries(tmp_path):
    result = promtool("check", "rules", ALERTS)
    assert result.returncode == 0, result.stdout + result.stderr
    records = [{"record": f"panel:{index}", "expr": text} for index, text in enumerate(QUERIES)]
    rules = tmp_path / "dashboard.yml"
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": records}]}))
    result = promtool("check", "rules", rules)
    assert result.returncode == 0 and f"{len(records)} rules found" in result.stdout, result.stdout + result.stderr


# ---- the dashboard of vLLM -----------------------------------------------------------------------------------------------
MODEL = '{model_name="demo"}'
LATENCIES = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
RATES = """
prompt_tokens_total generation_tokens_total request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_max_num_generation_tokens_sum
"""


def vllm_queries() -> list[str]:
    """Queries of vLLM's dashboard (its prometheus_grafana example) with values of its variables."""
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
def test_every_query_of_the_dashboard_of_vllm_has_a_value(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    with serve("--metrics-names", "vllm") as server:
        config = write_config(tmp_path, tmp_path / "key", server.url.removeprefix("http://"))
        text = re.sub(r"scrape_(interval|timeout): \S+", r"scrape_\1: 1s", config.read_text(encoding="utf-8"))
        config.write_text(text, encoding="utf-8")
        with Prometheus(config, tmp_path) as prometheus:
            prometheus.wait_ready()
            queries = vllm_queries()
            assert len(queries) == 27

            def unanswered() -> list[str]:
                server.complete("The king said", max_tokens=20, ignore_eos=True)
                time.sleep(0.5)
                values = {expression: prometheus.query(expression) for expression in queries}
                return [name for name, found in values.items() if not found or any(map(math.isnan, found))]

            prometheus.eventually(lambda: not unanswered(), "every expression has a value", otherwise=unanswered)
