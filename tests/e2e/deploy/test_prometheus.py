"""A Prometheus with the configuration of deploy/ scrapes real servers; dashboard and alerts use existing metrics."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
import yaml
from e2e_helpers.dashboard import PANELS, as_grafana_asks, expressions
from e2e_helpers.prometheus import ALERTS, Prometheus, needs_prometheus, promtool, write_config
from e2e_helpers.promql import uses
from helpers.real_server import serve
from helpers.served import Served
from helpers.toy_tokenizers import byte_level
from prometheus_client.parser import text_string_to_metric_families

KEY = "a key with spaces, # and $"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
ASKED = [*expressions(), *(rule["expr"] for rule in RULES)]

# Labels and series that Prometheus adds.
TARGET_LABELS = {"job", "instance"}
OWN_SERIES = {"up": {"job": {"windlass"}, "instance": set()}, "ALERTS": {"alertname": set(), "alertstate": {"firing"}}}


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


@pytest.mark.parametrize("expression", ASKED)
def test_every_queried_metric_and_label_exists(expression, printed):
    asked = uses(expression)
    assert asked.names and not asked.names - set(printed)
    for label, names in asked.labels:
        for name in names:
            assert label in printed[name] or (label in TARGET_LABELS and name != "ALERTS"), f"{name} has no {label}"
    for name, label, operator, value in asked.matchers:
        known = printed[name][label]
        if operator == "MatchOp.Equal":
            assert not known or value in known, f"{name}: no {label} is {value!r}"
        else:
            assert operator == "MatchOp.Re"
            # Alternatives without a match would hide a misspelling. Ranges of status codes are not names.
            names = [word for word in value.split("|") if re.fullmatch(r"\w+", word)]
            assert not known or not set(names) - known, f"{name}: {value!r} is not in {known}"


def test_the_dashboard_shows_every_metric(printed):
    shown = {name for expression in expressions() for name in uses(expression).names}
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
    key_file.write_text("\n")  # what the compose file makes of an unset key
    config = write_config(tmp_path, key_file, locked.address, open_server)
    check = promtool("check", "config", config)
    assert check.returncode == 0, check.stdout + check.stderr
    with Prometheus(config, tmp_path) as prometheus:
        prometheus.wait_ready()

        # Without a key: the server that asks for none gives its metrics, the other one refuses.
        def health() -> dict[str, str]:
            return {address: target["health"] for address, target in prometheus.targets().items()}

        prometheus.eventually(lambda: health() == {locked.address: "down", open_server: "up"}, "one target is up")
        assert "401" in prometheus.targets()[locked.address]["lastError"]

        # The key is read again at every scrape, and a server without keys does not mind it.
        key_file.write_text(f"{KEY}\n")
        prometheus.eventually(lambda: set(health().values()) == {"up"}, "both targets are up")

        locked.work()
        generated = f'increase(windlass_generation_tokens_total{{instance="{locked.address}"}}[1m]) > 0'
        prometheus.eventually(lambda: prometheus.query(generated), "the work of the server is seen")

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
            locked.work()  # on a busy machine the first requests may lie too far back by now
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
    records = [{"record": f"panel:{index}", "expr": text} for index, text in enumerate(expressions())]
    rules = tmp_path / "dashboard.yml"
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": records}]}))
    result = promtool("check", "rules", rules)
    assert result.returncode == 0 and f"{len(records)} rules found" in result.stdout, result.stdout + result.stderr
