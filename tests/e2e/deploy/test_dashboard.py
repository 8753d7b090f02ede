"""The provisioned dashboard, checked without Grafana: fields, data source, rates, legends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from e2e_helpers.prometheus import DASHBOARD, GRAFANA, PANELS, as_grafana_asks

pytest.importorskip("grafana_foundation_sdk", reason="needs the extra e2e: pip install -e '.[e2e]'")
pytest.importorskip("promql_parser", reason="needs the extra e2e: pip install -e '.[e2e]'")

import promql_parser
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

TITLES = [panel["title"] for panel in PANELS]


def lost_values(before: Any, after: Any, path: str) -> Iterator[str]:
    """Paths of the values that differ or are missing."""
    if isinstance(before, dict):
        for name, value in before.items():
            yield from lost_values(value, after[name], f"{path}.{name}") if name in after else [f"{path}.{name}"]
    elif isinstance(before, list):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from lost_values(old, new, f"{path}[{index}]")
    elif before != after:
        yield path


def through_the_sdk(dashboard: Any) -> Any:
    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def test_sdk_of_grafana_knows_every_field():
    assert list(lost_values(DASHBOARD, through_the_sdk(DASHBOARD), "dashboard")) == []


def test_sdk_drops_unknown_fields():
    text = json.dumps(DASHBOARD).replace('"fillOpacity"', '"fill"', 1).replace('"graphMode"', '"mode"', 1)
    wrong = json.loads(text)
    assert len(list(lost_values(wrong, through_the_sdk(wrong), "dashboard"))) == 2


def test_every_query_uses_the_provisioned_data_source():
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    for panel in PANELS:
        assert panel["datasource"] == wanted, panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == wanted and target["expr"], panel["title"]
            assert target["instant"] is not target["range"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel["title"]


def test_dashboard_is_provisioned_from_its_mount():
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/windlass.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    assert f"{provider['options']['path']}/windlass.json" in (GRAFANA / "grafana.ini").read_text()


def test_rates_use_the_interval_of_grafana():
    """A fixed window shorter than a few scrapes shows nothing; two windows are longer on purpose."""
    fixed = {title for title, panel in zip(TITLES, PANELS, strict=True) if "[5m]" in json.dumps(panel["targets"])}
    assert fixed == {"First token, p95"}
    windows = re.findall(r"\[([^\]]+)\]", " ".join(t["expr"] for panel in PANELS for t in panel["targets"]))
    assert set(windows) == {"$__rate_interval", "5m", "10m"}


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_legends_use_labels_of_the_query(panel):
    for target in panel["targets"]:
        tree = promql_parser.parse(as_grafana_asks(target["expr"]))
        kept = tree.modifier.labels if isinstance(tree, promql_parser.AggregateExpr) and tree.modifier else []
        assert set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])) == set(kept), target["expr"]
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)
