"""The provisioned Grafana dashboard: its panels and their queries."""

from __future__ import annotations

import json
from typing import Any

from e2e_helpers.prometheus import ROOT

FOLDER = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((FOLDER / "dashboards" / "windlass.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def as_grafana_asks(expression: str) -> str:
    """With a value for the variable that Grafana fills in by itself."""
    return expression.replace("$__rate_interval", "1m")


def expressions() -> list[str]:
    """Every query, as Grafana would ask it."""
    return [as_grafana_asks(target["expr"]) for panel in PANELS for target in panel["targets"]]
