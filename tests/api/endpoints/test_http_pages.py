"""Web pages of other origins cannot use a server without keys through a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from helpers.live_server import Live, live_server

from windlass.server.config.api_keys import ApiKey

BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(lora_folder=tmp_path_factory.mktemp("adapters"), attention_maps=True) as live:
        yield live


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://page.example"},
        {"origin": "null"},  # of a page that gives no referrer
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:1"},
    ],
)
def test_cross_origin_simple_requests_are_refused(live: Live, headers: dict[str, str]) -> None:
    live.engine.reset()
    paths = [path for path, methods in live.http.get("/openapi.json").json()["paths"].items() if "post" in methods]
    assert PATH in paths and "/v1/load_lora_adapter" in paths and len(paths) > 15
    for path in paths:
        response = live.http.post(path, content=BODY, headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert "content-type: application/json" in error["message"], path
    assert not live.engine.requests


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a program
        {"sec-fetch-site": "none"},
        {"origin": "http://page.example", "content-type": "application/json"},  # the browser has asked before
        {"origin": "null", "content-type": "application/json"},
        {
            "sec-fetch-site": "same-origin",
            "content-type": "application/json",
            "origin": "http://elsewhere",
        },  # a proxy's
    ],
)
def test_other_requests_are_answered(live: Live, headers: dict[str, str]) -> None:
    assert live.http.post(PATH, content=BODY, headers=headers).status_code == 200


def test_key_does_not_permit_simple_requests() -> None:
    """A proxy may have added the key."""
    with live_server(callers=(ApiKey.plain("secret"),)) as live:
        headers = {"origin": "http://page.example", "authorization": "Bearer secret"}
        assert live.http.post(PATH, content=BODY, headers=headers).status_code == 400
        headers["content-type"] = "application/json"
        assert live.http.post(PATH, content=BODY, headers=headers).status_code == 200


def test_a_real_browser(live: Live) -> None:
    from helpers.browser import chromium

    live.engine.reset()
    send = """async ([url, body]) => { await fetch(url, {method: "POST", mode: "no-cors", body: new Blob([body])}); }"""
    with chromium() as browser, live_server() as other:
        page = browser.new_page()
        page.goto(f"{other.url}/health")
        page.evaluate(send, [f"{live.url}{PATH}", BODY.decode()])
        assert not live.engine.requests
