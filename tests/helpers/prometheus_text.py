"""What a page of metrics in Prometheus' text format says."""

from __future__ import annotations

import re


def total(text: str, name: str) -> float:
    """The sum of a metric over its labels; 0.0 for one that has no samples yet. Fails for one that the page does not know."""
    family = re.sub("_(sum|count|bucket)$", "", name)
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP ")}
    assert helped & {name, family}, f"there is no metric {name}"
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
