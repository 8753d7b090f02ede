"""The pages with measured numbers show the numbers that lie beside them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def stale_keys():
    spec = importlib.util.spec_from_file_location("stale_keys", ROOT / "benchmarks" / "stale_keys.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_the_page_on_stale_keys_has_the_tables_of_its_numbers(stale_keys):
    page = (DOCS / "stale-keys.md").read_text(encoding="utf-8")
    report = json.loads((DOCS / "stale_keys.json").read_text(encoding="utf-8"))
    for part in stale_keys.table(report).split("\n\n"):
        assert part in page
    assert report["date"] in page


def test_the_numbers_say_what_the_page_says():
    models = json.loads((DOCS / "stale_keys.json").read_text(encoding="utf-8"))["models"]
    assert len(models) >= 5
    for comparisons in models.values():
        first = {c["way"]: c for c in reversed(comparisons)}
        stale = first.pop("transformers, cached")
        assert stale["agree"] < stale["rows"] and stale["relative"] > 0.01
        assert len(first) >= 3
        for comparison in first.values():
            assert comparison["relative"] < 1e-5 and comparison["agree"] == comparison["rows"]


def test_the_sweep_page_and_the_report_show_one_measurement():
    page = (DOCS / "rope_sweep.md").read_text(encoding="utf-8")
    report = (DOCS / "sweep.html").read_text(encoding="utf-8")
    (date,) = re.findall(r"Measured (\d{4}-\d\d-\d\d)", page)
    assert f"Measured {date}" in report
    rows = [re.split(r" *\| *", line.strip("| ")) for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", report)
    assert [cell.strip("*") for row in rows for cell in row if cell] == [cell for cell in cells if cell]
