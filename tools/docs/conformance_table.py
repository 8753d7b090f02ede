"""Write the tables of docs/internals/evidence.md from the runs of `windlass rope conform --json`.

python tools/docs/conformance_table.py benchmarks/results/conformance.json

The tables are between `<!-- conformance -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "internals" / "evidence.md"

_TABLES = re.compile(r"<!-- conformance -->\n(.*?)<!-- end -->", re.DOTALL)


def tables(report: dict[str, Any]) -> str:
    """A table per model that several programs served, with a row per server."""
    parts = []
    for model, description in report["models"].items():
        if len({run["server"].partition(",")[0] for run in report["runs"] if run["model"] == model}) < 2:
            continue
        lines = [f"{description}:", "", "| server | holds | differs | not shown | not askable |", "|---" * 5 + "|"]
        for run in report["runs"]:
            if run["model"] == model:
                lines.append(f"| {run['server']} | {' | '.join(_cells(run['checks']))} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def updated(page: str, report: dict[str, Any]) -> str:
    """The page with the tables of a report."""
    made = f"<!-- conformance -->\n\n{tables(report)}\n\n<!-- end -->"
    return _TABLES.sub(lambda _: made, page)


def _cells(checks: list[dict[str, Any]]) -> list[str]:
    """The number of checks that hold with their largest distance, and the names of the others by verdict."""
    held = [check for check in checks if check["verdict"] == "holds"]
    distances = [check["effect"] for check in held if check["effect"] is not None]
    largest = f"{max(distances):.4f}" if distances else "same text"
    cells = [f"{len(held)} ({largest})" if held else "–"]
    for verdict in ("differs", "not shown", "not askable"):
        names = [_named(check) for check in checks if check["verdict"] == verdict]
        cells.append(", ".join(names) or "–")
    return cells


def _named(check: dict[str, Any]) -> str:
    return f"`{check['name']}`" + (f" {check['effect']:.4f}" if check["effect"] else "")


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
