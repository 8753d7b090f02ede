"""`/docs` and `/redoc` in a real browser: all operations, no requests to other hosts, and requests with a key."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest
from helpers.described import description
from helpers.live_server import Live, live_server
from playwright.sync_api import Browser, Page

from windlass.server.app.web_pages import DOCS_PATHS

OPERATIONS = {(method, path) for method, path, _ in description().operations()}


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    with live_server(api_keys=("k",)) as live:
        yield live


class Watched:
    """A page, its requests and its errors."""

    def __init__(self, browser: Browser) -> None:
        self.page: Page = browser.new_page()
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self.page.on("requestfinished", lambda request: self.requested.append(request.url))
        # Requests that the policy of the page forbids are not sent.
        self.page.on("requestfailed", lambda request: request.failure == "csp" or self.requested.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))

    def outside(self, live: Live) -> list[str]:
        return [url for url in self.requested if not url.startswith((live.url, "data:", "blob:"))]


def test_files_need_no_key_and_have_a_policy(locked: Live) -> None:
    for path in sorted(DOCS_PATHS):
        response = locked.http.get(path)
        assert response.status_code == 200 and response.content, path
        assert "default-src 'none'" in response.headers["content-security-policy"]
        again = locked.http.get(path, headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == 304 and again.content == b""
    assert locked.http.get("/docs/../auth.py").status_code == locked.http.get("/docs/other").status_code == 401
    assert locked.http.get("/openapi.json").status_code == 401


def test_files_are_sent_uncompressed_on_request(locked: Live) -> None:
    with locked.http.stream("GET", "/docs/swagger-ui.css") as response:
        packed = b"".join(response.iter_raw())
    assert response.headers["content-encoding"] == "gzip"
    plain = locked.http.get("/docs/swagger-ui.css", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.content == gzip.decompress(packed)


@pytest.mark.slow
def test_swagger_shows_all_operations_and_sends_a_request_with_a_key(browser: Browser, locked: Live) -> None:
    watched = Watched(browser)
    page = watched.page
    page.goto(f"{locked.url}/docs")
    page.locator("#ask").wait_for()
    page.fill("#key", "wrong")
    page.click("#ask button")
    page.locator("#trouble").wait_for()
    assert "not valid" in page.inner_text("#trouble")
    watched.complaints.clear()  # of the browser about two responses with status 401
    page.fill("#key", "k")
    page.click("#ask button")
    page.locator(".opblock").first.wait_for()
    shown = {
        (
            block.locator(".opblock-summary-method").inner_text().lower(),
            block.locator("[data-path]").get_attribute("data-path"),
        )
        for block in page.locator(".opblock").all()
    }
    assert shown == OPERATIONS

    block = page.locator("#operations-Completions-create_completion")
    block.locator(".opblock-summary").click()
    block.locator(".try-out__btn").click()
    assert json.loads(block.locator("textarea").input_value())["model"] == "toy"  # the example
    block.locator(".execute").click()
    block.locator(".live-responses-table").wait_for()
    assert block.locator(".live-responses-table .response-col_status").last.inner_text().startswith("200")
    assert '"text_completion"' in block.locator(".live-responses-table").inner_text()
    assert locked.engine.requests
    assert watched.outside(locked) == [] and watched.complaints == []


@pytest.mark.slow
def test_redoc_shows_all_operations(browser: Browser) -> None:
    with live_server() as live:
        watched = Watched(browser)
        watched.page.goto(f"{live.url}/redoc")
        watched.page.locator('[id="tag/Rotary/operation/inspect"]').wait_for(state="attached")
        for _, path, operation in description().operations():
            place = f'[id="tag/{operation["tags"][0]}/operation/{operation["operationId"]}"]'
            assert watched.page.locator(place).count() == 1, path
        assert watched.outside(live) == [] and len(watched.requested) >= 4
        assert all("cdn.redoc.ly" in complaint for complaint in watched.complaints)  # its logo, which is not requested


@pytest.mark.slow
def test_pages_work_below_the_path_of_a_proxy(browser: Browser) -> None:
    with live_server(root_path="/llm") as live:
        watched = Watched(browser)
        watched.page.goto(f"{live.url}/llm/docs")
        watched.page.locator(".opblock").first.wait_for()
        assert watched.page.locator(".opblock").count() == len(OPERATIONS)
        assert watched.complaints == []
