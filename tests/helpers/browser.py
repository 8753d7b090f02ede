"""The system's headless Chromium, driven by playwright, for tests of HTML pages."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from helpers.live_server import Live

pytest.importorskip("playwright", reason="needs the extra e2e: pip install -e '.[e2e]'")

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield the browser; skip with installation instructions if there is none."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    expect.set_options(timeout=30_000)  # playwright's usual timeout: the machine may be busy
    with sync_playwright() as playwright:
        # No sandbox: test machines and containers run as root, and the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


# The npm package axe-core 4.14.1 (MPL-2.0).
_AXE = Path(__file__).parents[1] / "e2e" / "browser" / "axe" / "axe.min.js.gz"


@cache
def _axe_source() -> str:
    return gzip.decompress(_AXE.read_bytes()).decode()


def violations(page: Page) -> list[str]:
    """Accessibility problems of the page in its current state, one per line."""
    page.evaluate(_axe_source())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:160]} {node['failureSummary'][:300]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


class Seen:
    """Yield a page that must not contact other hosts or report errors, and the list of reported errors."""

    def __init__(self, browser: Browser, live: Live, path: str = "/", **context: object) -> None:
        self.page: Page = browser.new_page(**context)
        self.complaints: list[str] = []
        self.outside: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: line.type in ("error", "warning") and self.complaints.append(line.text))
        self.page.on(
            "request",
            lambda sent: sent.url.startswith((live.url, "data:")) or self.outside.append(sent.url),
        )
        self.page.goto(live.url + path)

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def done(self, there: Locator | None = None) -> None:
        """It is checked at the end, when `there` (by default the button of the chat) is visible."""
        expect(there or self.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        assert self.complaints == [] and self.outside == []
        self.page.close()
