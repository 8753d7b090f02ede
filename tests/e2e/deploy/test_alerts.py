"""Alert rules: tests of promtool, error codes of the server, and options."""

from __future__ import annotations

import re

import pytest
import yaml
from e2e_helpers.prometheus import ALERTS, PANELS, ROOT, needs_prometheus, promtool
from typer.main import get_command

from windlass.engine.errors import DeadlineError, EngineDeadError, QueueFullError, RequestError
from windlass.server.cli import main as cli
from windlass.server.errors import internal_error, to_api_error

TESTS = ROOT / "tests" / "e2e" / "deploy" / "alerts_test.yml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}


@needs_prometheus
def test_rules_pass_their_tests():
    result = promtool("test", "rules", TESTS)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_prometheus
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" > 0.05", " > 0.5"),
        (" > 10\n", " > 20\n"),
        (" > 0.9 and", " > 0.99 and"),
        ('code="queue_full"', 'code="internal"'),
        ("sum by (job, instance) (rate(windlass_recomputed", "sum by (job) (rate(windlass_recomputed"),
        ("rate(windlass_prompt_tokens_total[1m]) == 0", "rate(windlass_prompt_tokens_total[1m]) >= 0"),
        ("deriv(windlass_num_requests_waiting[5m]) > 0", "deriv(windlass_num_requests_waiting[5m]) < 0"),
        ("for: 30s", "for: 5m"),
    ],
)
def test_changed_rule_fails_the_tests(old, new, tmp_path):
    changed = ALERTS.read_text(encoding="utf-8").replace(old, new)
    assert changed != ALERTS.read_text(encoding="utf-8")
    (tmp_path / "alerts.yml").write_text(changed, encoding="utf-8")
    tests = TESTS.read_text(encoding="utf-8").replace("../../../deploy/prometheus/", "")
    (tmp_path / "test.yml").write_text(tests, encoding="utf-8")
    assert promtool("test", "rules", tmp_path / "test.yml").returncode != 0


def test_example_configuration_scrapes_often_enough_for_the_rules():
    """A rate needs two samples in its window; four tolerate lost ones."""
    page = (ROOT / "docs" / "guides" / "monitoring.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    (job,) = yaml.safe_load(example)["scrape_configs"]
    windows = re.findall(r"\[(\d+)m\]", ALERTS.read_text(encoding="utf-8"))
    assert int(job["scrape_interval"].removesuffix("s")) <= 60 * min(map(int, windows)) / 4


def test_every_rule_is_tested_firing_and_silent():
    fires, silent = set(), set()
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case.get("exp_alerts") else silent).add(case["alertname"])
        instances = {re.search(r'instance="([^"]+)"', series["series"])[1] for series in test["input_series"]}
        alarmed = {
            alert["exp_labels"]["instance"] for c in test["alert_rule_test"] for alert in c.get("exp_alerts", [])
        }
        if instances - alarmed:
            silent |= {case["alertname"] for case in test["alert_rule_test"]}
    assert fires == silent == set(RULES)


def test_options_named_by_alerts_and_panels_exist():
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    named = set(re.findall(r"--[a-z][\w-]+", ALERTS.read_text(encoding="utf-8")))
    named |= {word for panel in PANELS for word in re.findall(r"--[a-z][\w-]+", panel["description"])}
    assert len(named) > 5 and not named - options


def test_error_rate_counts_errors_of_the_server_only():
    counted = re.search(r'code=~"([^"]+)"', RULES["WindlassErrorRate"]["expr"])[1]
    faults = [internal_error(), to_api_error(DeadlineError("late")), to_api_error(EngineDeadError("dead"))]
    for error in faults:
        assert error.status >= 500 and re.fullmatch(counted, error.code), error.code
    full = to_api_error(QueueFullError("full"))
    refused = to_api_error(RequestError("no", "prompt", "context_length_exceeded"))
    for code in (full.code, refused.code, "client_disconnected", "draining", "400"):
        assert not re.fullmatch(counted, code), code
    assert f'code="{full.code}"' in RULES["WindlassQueueFull"]["expr"]
