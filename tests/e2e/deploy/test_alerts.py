"""The alert rules: promtool tries them, and they agree with the server's codes, the dashboard and the page."""

from __future__ import annotations

import re

import pytest
import yaml
from e2e_helpers.dashboard import PANELS
from e2e_helpers.prometheus import ALERTS, ROOT, needs_prometheus, promtool

from windlass.engine.errors import DeadlineError, EngineDeadError, QueueFullError, RequestError
from windlass.server.errors import internal_error, to_api_error

TESTS = ROOT / "tests" / "e2e" / "deploy" / "alerts_test.yml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}


@needs_prometheus
def test_the_rules_do_what_their_tests_say():
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
def test_the_tests_notice_a_changed_rule(old, new, tmp_path):
    changed = ALERTS.read_text(encoding="utf-8").replace(old, new)
    assert changed != ALERTS.read_text(encoding="utf-8")
    (tmp_path / "alerts.yml").write_text(changed, encoding="utf-8")
    tests = TESTS.read_text(encoding="utf-8").replace("../../../deploy/prometheus/", "")
    (tmp_path / "test.yml").write_text(tests, encoding="utf-8")
    assert promtool("test", "rules", tmp_path / "test.yml").returncode != 0


def test_every_rule_has_a_test_where_it_fires_and_one_where_it_does_not():
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


def test_options_that_alerts_and_panels_name_exist():
    options = set(re.findall(r"--[a-z][\w-]+", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")))
    named = set(re.findall(r"--[a-z][\w-]+", ALERTS.read_text(encoding="utf-8")))
    named |= {word for panel in PANELS for word in re.findall(r"--[a-z][\w-]+", panel["description"])}
    assert len(named) > 5 and not named - options


def test_the_error_rate_counts_the_servers_faults_and_not_the_clients():
    counted = re.search(r'code=~"([^"]+)"', RULES["WindlassErrorRate"]["expr"])[1]
    faults = [internal_error(), to_api_error(DeadlineError("late")), to_api_error(EngineDeadError("dead"))]
    for error in faults:
        assert error.status >= 500 and re.fullmatch(counted, error.code), error.code
    full = to_api_error(QueueFullError("full"))
    refused = to_api_error(RequestError("no", "prompt", "context_length_exceeded"))
    for code in (full.code, refused.code, "client_disconnected", "draining", "400"):
        assert not re.fullmatch(counted, code), code
    assert f'code="{full.code}"' in RULES["WindlassQueueFull"]["expr"]
