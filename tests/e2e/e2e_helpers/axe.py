"""Accessibility checks of a page with axe-core (tests/e2e/browser/axe; MPL-2.0; the npm package axe-core 4.14.1)."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the extra e2e: pip install -e '.[e2e]'")

from playwright.sync_api import Page

_FILE = Path(__file__).parents[1] / "browser" / "axe" / "axe.min.js.gz"


@cache
def _source() -> str:
    return gzip.decompress(_FILE.read_bytes()).decode()


def violations(page: Page) -> list[str]:
    """What axe finds wrong with the page as it is now, a line each."""
    page.evaluate(_source())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:160]} {node['failureSummary'][:300]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
