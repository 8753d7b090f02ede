"""The table of a load test with mixed scalings, from the file that `windlass bench serve --json` leaves.

python benchmarks/mixed_scalings.py docs/mixed_scalings.json          # prints the table
"""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any


def table(run: dict[str, Any]) -> str:
    """A row for each part of the load: requests sent and completed, the lengths of their prompts, tokens answered."""
    asked = run["requests"]
    lines = ["| requests under | sent | completed | prompt tokens | answered tokens |", "|---|--:|--:|--:|--:|"]
    for label in sorted({str(one["label"]) for one in asked}):
        own = [one for one in asked if str(one["label"]) == label]
        done = [one for one in own if one["outcome"] == "completed"]
        lengths = [one["input_tokens"] for one in done]
        span = "" if not lengths else f"{min(lengths):,}" if len(lengths) == 1 else f"{min(lengths):,}–{max(lengths):,}"
        answered = sum(one["output_tokens"] for one in done)
        lines.append(f"| {label} | {len(own)} | {len(done)} | {span} | {answered} |")
    return "\n".join(lines)


def overlapping(run: dict[str, Any]) -> int:
    """Pairs of completed requests under different scalings that the server had at the same time."""
    done = [one for one in run["requests"] if one["outcome"] == "completed"]
    return sum(
        a["label"] != b["label"] and a["sent"] < b["ended"] and b["sent"] < a["ended"] for a, b in combinations(done, 2)
    )


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(table(found))
    print(f"\n{overlapping(found)} pairs under different scalings at the same time")
