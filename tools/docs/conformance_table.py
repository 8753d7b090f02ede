"""Print the table of docs/conformance.md from the runs of `windlass rope conform --json`.

python tools/docs/conformance_table.py benchmarks/results/conformance.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(report: dict[str, Any]) -> str:
    """A table of the servers' commands, then a table per model with a row per server and check."""
    parts = [_servers(report)]
    for model, words in report["models"].items():
        lines = [
            f"{words}:",
            "",
            "| server | check | verdict | distance | allowed | what was seen |",
            "|---|---|---|---|---|---|",
        ]
        for run in report["runs"]:
            if run["model"] == model:
                lines += [_row(run["server"], check) for check in run["checks"]]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _servers(report: dict[str, Any]) -> str:
    lines = ["| server | version | date | command |", "|---|---|---|---|"]
    for run in report["runs"]:
        lines.append(
            f"| {run['server']} | {run['version']} | {run['date']} | `{run['command']}`, asked with `{run['asked']}` |"
        )
    return "\n".join(lines)


def _row(server: str, check: dict[str, Any]) -> str:
    figures = ["–" if check[key] is None else f"{check[key]:.4f}" for key in ("effect", "bound")]
    seen = " ".join(check["detail"].replace("|", "\\|").split())
    return f"| {server} | `{check['name']}` | {check['verdict']} | {' | '.join(figures)} | {seen} |"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
