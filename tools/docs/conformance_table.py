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
    """A table per model, with a row per server and a column per check."""
    parts = []
    for model, description in report["models"].items():
        runs = [run for run in report["runs"] if run["model"] == model]
        names = [check["name"] for check in runs[0]["checks"]]
        lines = [
            f"{description}:",
            "",
            f"| server | {' | '.join(f'`{name}`' for name in names)} |",
            "|---" + "|--:" * len(names) + "|",
        ]
        for run in runs:
            checks = {check["name"]: check for check in run["checks"]}
            lines.append(f"| {run['server']} | {' | '.join(_cell(checks[name]) for name in names)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def updated(page: str, report: dict[str, Any]) -> str:
    """The page with the tables of a report."""
    made = f"<!-- conformance -->\n\n{tables(report)}\n\n<!-- end -->"
    return _TABLES.sub(lambda _: made, page)


def _cell(check: dict[str, Any]) -> str:
    """The distance if the check holds, otherwise the verdict, with the distance if there is one."""
    verdict, effect = check["verdict"], check["effect"]
    distance = "" if effect is None else f"{effect:.4f}"
    match verdict:
        case "holds":
            return distance or "same text"
        case "differs":
            return f"**differs{f', {distance}' if distance else ''}**"
    return verdict if not effect else f"{verdict}, {distance}"


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
