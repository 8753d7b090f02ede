"""A real, headless Chromium for tests of HTML pages: the system's own, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers.live_server import Live
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, or a skip that says what to install."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    expect.set_options(timeout=30_000)  # as long as it waits for everything else: the machine may be busy
    with sync_playwright() as playwright:
        # No sandbox: test machines and containers run as root, and the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Seen:
    """A page that must ask no other host and complain of nothing, and what it complained of."""

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
        """It is as it should be at the end, where `there` can be seen. there: the chat's button by default."""
        expect(there or self.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        assert self.complaints == [] and self.outside == []
        self.page.close()
