"""API keys, request ids, pages of other origins, unknown paths, models, the OpenAPI document and tokenization."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from helpers.live_server import Live, live_server

from windlass.server.app import auth
from windlass.server.config.api_keys import ApiKey
from windlass.server.config.settings import ServerSettings

KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    with live_server(api_keys=KEYS) as live:
        yield live


PATHS = [
    "/v1/models",
    "/v1/models/toy",
    "/metrics",
    "/version",
    "/openapi.json",
    "/v1/completions",
    "/nope",
    "/tokenize",
]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    "path", [*PATHS, "/health/", "//health", "/ready/x", "/HEALTH", "/health%2f..%2fmetrics", "/ui/"]
)
def test_every_path_but_two_needs_a_key(locked: Live, path: str) -> None:
    url = locked.url + path  # a path that begins with // is parsed as a host
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"authorization": "first-key"}):
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            response = locked.http.request(method, url, headers=headers)
            assert response.status_code == 401, (path, method, headers)
            assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]
    assert locked.http.get(url).json()["error"]["code"] == "invalid_api_key"


def test_health_needs_no_key(locked: Live) -> None:
    assert locked.http.get("/health").status_code == locked.http.get("/ready").status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/"])
def test_base_url_explains_itself(locked: Live, path: str) -> None:
    answer = locked.http.get(path)
    assert answer.status_code == 200 and answer.json()["models"] == "/v1/models"
    assert (answer.json()["docs"], answer.json()["page"], answer.headers["vary"]) == ("/docs", "/", "accept")
    page = locked.http.get(path, headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert f"{locked.url}{path}" in page.text
    links = {str(page.url.join(link).path) for link in re.findall(r'href="([^"]+)"', page.text)}
    assert links == {"/", "/docs", "/v1/models"}
    for method in ("POST", "DELETE"):
        assert locked.http.request(method, path, headers={"authorization": f"Bearer {KEYS[0]}"}).status_code == 405


def test_base_url_links_to_no_page_without_one() -> None:
    with live_server(ui=False) as live:
        assert "page" not in live.http.get("/v1").json()
        assert "Chat with the model" not in live.http.get("/v1", headers={"accept": "text/html"}).text
        other = live.http.get("/v1/nope", headers={"accept": "text/html"})
        assert other.status_code == 404 and other.json()["error"]["code"] == "not_found"
        # A browser sends the host that a page chose.
        hostile = live.http.get("/v1?<i>", headers={"accept": "text/html", "host": "localhost"})
        assert "<i>" not in hostile.text


@pytest.mark.parametrize("key", KEYS)
def test_every_configured_key_is_accepted(locked: Live, key: str) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} {key}".encode()}
        assert locked.http.get("/v1/models", headers=headers).status_code == 200
        assert locked.http.get("/metrics", headers=headers).status_code == 200


def test_host_header_cannot_change_the_path(locked: Live) -> None:
    url = httpx.URL(locked.url)
    for request in (
        b"GET /v1/models HTTP/1.1\r\nhost: x/health?\r\n",
        b"GET http://x/v1/models?/health HTTP/1.1\r\nhost: /health\r\n",
        b"GET http://health/v1/models HTTP/1.1\r\nhost: x\r\n",
        b"GET /v1/models?/health HTTP/1.1\r\nhost: /health\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-forwarded-prefix: /health\r\nx-original-url: /health\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer no\r\nauthorization: Bearer first-key\r\n",
    ):
        with socket.create_connection((url.host, url.port), timeout=5) as connection:
            connection.sendall(request + b"connection: close\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(a: str, b: str) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    known = auth.Callers(map(ApiKey.plain, ("a", "bb", "ccc")))
    middleware = auth.AuthMiddleware(None, callers=known)  # type: ignore[arg-type]
    for key, allowed in ((b"a", True), (b"ccc", True), (b"x" * 1000, False)):
        compared.clear()
        scope = {"headers": [(b"authorization", b"Bearer " + key)]}
        assert (middleware._caller(scope) is not None) is allowed
        assert len(compared) == 3  # all keys, whatever matched
        # Digests: the duration does not depend on the length.
        assert {len(digest) for pair in compared for digest in pair} == {64}


def test_empty_keys_are_ignored() -> None:
    with pytest.raises(ValueError, match="API key"):
        ServerSettings(served_model_name="m", api_keys=("",))


def test_request_ids(live: Live) -> None:
    seen = {live.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(seen) == 3
    for path in ("/health", "/nope", "/v1/models/other"):
        assert live.http.get(path, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 129, "é".encode(), ""):
        returned = live.http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", returned)
    response = live.post("/v1/completions", {"prompt": "a", "request_id": "b"}, headers={"x-request-id": "h"})
    assert response.headers["x-request-id"] == "b" and response.json()["id"] == "cmpl-b"
    response = live.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "h"})
    assert response.headers["x-request-id"] == "h" and response.json()["id"] == "cmpl-h"
    # The same id twice at once must not collide in the engine.
    for _ in range(2):
        live.post("/v1/completions", {"prompt": "a", "request_id": "b"})
    assert len({request.request_id for request in live.engine.requests}) == len(live.engine.requests)


def test_cors_is_off_by_default(live: Live) -> None:
    headers = {"origin": "http://page.example", "access-control-request-method": "POST"}
    response = live.http.options("/v1/completions", headers=headers)
    assert response.status_code == 204 and "access-control-allow-origin" not in response.headers
    assert "access-control-allow-origin" not in live.http.get("/health", headers=headers).headers


@pytest.mark.parametrize("origins", [("*",), ("http://page.example",)])
def test_cors_never_allows_credentials(origins: tuple[str, ...]) -> None:
    with live_server(cors_origins=origins, api_keys=("k",)) as live:
        headers = {"origin": "http://page.example", "access-control-request-method": "POST"}
        preflight = live.http.options("/v1/completions", headers=headers)
        assert preflight.status_code == 200
        refused = live.http.get("/v1/models", headers={"origin": "http://page.example"})
        assert refused.status_code == 401
        for response in (preflight, refused):
            assert response.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else origins[0])
            assert "access-control-allow-credentials" not in response.headers
        other = live.http.get("/health", headers={"origin": "http://other.example"})
        assert other.headers.get("access-control-allow-origin") == ("*" if origins == ("*",) else None)


# Headers of openai's JavaScript client and of other clients.
CLIENT_HEADERS = """authorization content-type x-api-key x-request-id x-stainless-arch x-stainless-lang x-stainless-os
    x-stainless-package-version x-stainless-retry-count x-stainless-runtime x-stainless-runtime-version
    x-stainless-timeout openai-organization anthropic-version""".split()


def test_a_preflight_allows_the_headers_of_clients() -> None:
    with live_server(cors_origins=("http://page.example",), api_keys=("k",)) as live:
        asked = {
            "origin": "http://page.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": ",".join(CLIENT_HEADERS),
        }
        answer = live.http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 200
        allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert set(CLIENT_HEADERS) <= allowed
        answer = live.http.get("/health", headers={"origin": "http://page.example"})
        readable = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
        own = {"x-request-id", "retry-after", "x-windlass-template-changes", "x-windlass-ignored"}
        assert readable == own | {"request-id"}  # the last is what Anthropic's client reads
        other = live.http.options("/v1/chat/completions", headers={**asked, "origin": "http://other.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.slow
def test_a_page_in_a_browser_calls_the_api_of_another_origin() -> None:
    from helpers.browser import chromium

    call = """async ([url, headers]) => {
        const answer = await fetch(url, {method: "POST", headers, body: JSON.stringify({prompt: "a", max_tokens: 2})});
        return [answer.status, answer.headers.get("x-request-id"), (await answer.json()).choices[0].text];
    }"""
    sent = dict.fromkeys(CLIENT_HEADERS, "1") | {"authorization": "Bearer k", "content-type": "application/json"}
    with (
        chromium() as browser,
        live_server() as page_server,
        live_server(cors_origins=(page_server.url,), api_keys=("k",)) as api,
        live_server(api_keys=("k",)) as closed,
    ):
        page = browser.new_page()
        page.goto(f"{page_server.url}/health")
        status, request_id, text = page.evaluate(call, [f"{api.url}/v1/completions", sent])
        assert (status, request_id) == (200, "1") and len(text) == 2
        with pytest.raises(Exception, match="Failed to fetch"):
            page.evaluate(call, [f"{closed.url}/v1/completions", sent])


def test_unknown_paths_and_methods(live: Live) -> None:
    assert live.http.get("/v1/nothing").status_code == 404
    response = live.http.get("/v1/completions")
    assert response.status_code == 405 and response.headers["allow"] == "OPTIONS, POST"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert live.http.get("/v1/models/").status_code in (200, 404)
    assert live.http.get("/docs/").status_code == live.http.get("/docs/other.js").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/health", "/ready", "/version", "/metrics", "/openapi.json", "/v1/models", "/v1/models/toy", "/v1/models/other",
     "/v1/rotary", "/v1/responses/resp_1", "/nope", "/v1/completions"],
)  # fmt: skip
def test_head_answers_as_get_without_a_body(live: Live, path: str) -> None:
    """A body would make the second request on the connection fail."""
    for _ in range(2):
        got, head = live.http.get(path), live.http.head(path)
        assert head.status_code == got.status_code and head.content == b"" and got.content
        same = "content-type", "content-length", "allow"
        if path != "/metrics":  # whose numbers change
            assert [head.headers.get(name) for name in same] == [got.headers.get(name) for name in same]
        assert set(head.headers) == set(got.headers)


def test_allowed_methods_of_a_path(live: Live) -> None:
    for path, allowed in (
        ("/v1/completions", "OPTIONS, POST"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/responses/resp_1", "DELETE, GET, HEAD, OPTIONS"),
        ("/openapi.json", "GET, HEAD, OPTIONS"),
    ):
        asked = live.http.options(path)
        assert (asked.status_code, asked.content, asked.headers["allow"]) == (204, b"", allowed)
        refused = live.http.request("PATCH", path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
        assert refused.json()["error"]["code"] == "method_not_allowed"
    assert live.http.options("/nope").status_code == 404


def test_models(live: Live) -> None:
    listed = live.http.get("/v1/models").json()
    (model,) = listed["data"]
    assert listed["object"] == "list" and model == live.http.get("/v1/models/toy").json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "toy", "toy")  # as Anthropic lists
    assert (model["object"], model["type"], model["display_name"]) == ("model", "model", "toy")
    created = datetime.strptime(model["created_at"], "%Y-%m-%dT%H:%M:%S%z")
    assert created.timestamp() == model["created"]
    assert (model["id"], model["max_model_len"], model["dtype"]) == ("toy", 256, "float32")
    group = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "rotary_dim": 16,
        "original_max_position_embeddings": 128,
        "max_position_embeddings": 128,
    }
    assert model["rotary"] == {**group, "groups": {"full_attention": group}}
    assert (model["vocab_size"], model["trained_len"]) == (423, 128)
    assert model["special_tokens"] == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    assert model["template"] == {
        "tools": False,
        "calls": False,
        "call_format": "plain_json",
        "developer": False,
        "thinking": None,
        "thinking_choices": [],
    }
    for path in ("/v1/models/other", "/v1/models/toy/x"):
        response = live.http.get(path)
        assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_model_object_has_template_capabilities(caplog: pytest.LogCaptureFixture) -> None:
    source = (
        "{% if tools %}{{ tools }}{% endif %}{% for message in messages %}{{ message.content }}{{ message.tool_calls }}"
        "{% endfor %}{% if enable_thinking %}<think>{% endif %}</think>"
    )
    with live_server(template=source) as live:
        template = live.http.get("/v1/models/toy").json()["template"]
    assert (template["tools"], template["calls"], template["developer"]) == (True, True, False)
    assert template["thinking"] == "qwen3" and template["thinking_choices"] == ["enable_thinking"]
    assert template["call_format"] is None and "--tool-call-parser" in caplog.text
    caplog.clear()
    for text, parser, expected in (
        ("{{ tools }}<tool_call>{{ messages }}", "auto", "hermes"),
        (source, "mistral", "mistral"),
        (source, "none", "none"),
    ):
        with live_server(template=text, tool_call_parser=parser) as live:
            assert live.http.get("/v1/models/toy").json()["template"]["call_format"] == expected
    assert not caplog.text
    with live_server(template=None) as live:
        assert live.http.get("/v1/models/toy").json()["template"] is None


def test_unknown_models_get_404(live: Live) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        assert live.refusal(path, {**body, "model": "other"}, 404) == ("model", "model_not_found")
        assert live.post(path, {**body, "model": "toy"}).status_code == 200


def test_openapi_document_has_streams_bodies_and_errors(live: Live) -> None:
    schema = live.http.get("/openapi.json").json()
    for path, body in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
        post = schema["paths"][path]["post"]
        assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert {"400", "404", "413", "429", "503", "504"} <= set(post["responses"])
        reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.endswith(f"/{body}")
    names = set(schema["components"]["schemas"])
    for reference in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(schema)):
        assert reference in names
    properties = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "rope_scaling" in properties and "prompt" in properties


@pytest.mark.parametrize("text", ["hello world", "é日 x 😀", "", "a\n\n b"])
def test_tokenize_and_back(live: Live, text: str) -> None:
    answer = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    ids = live.tokenizer.encode(text)
    assert answer["tokens"] == ids and answer["count"] == len(ids) and answer["max_model_len"] == 256
    assert len(answer["token_strs"]) == len(answer["offsets"]) == len(ids)
    assert answer["token_strs"][0] == "<|bos|>" and answer["offsets"][0] == [0, 0]
    for token, (start, end) in zip(answer["token_strs"][1:], answer["offsets"][1:], strict=True):
        assert token.startswith("bytes:") or text[start:end] == token
    back = live.post("/detokenize", {"tokens": ids, "skip_special_tokens": True}).json()
    assert back["prompt"] == text
    assert back["offsets"][0] == [0, 0]
    assert back["offsets"][-1][1] == len(text)
    whole = live.post("/detokenize", {"tokens": ids}).json()
    assert whole["prompt"] == "<|bos|>" + text
    for (start, end), token in zip(whole["offsets"], answer["token_strs"], strict=True):
        assert token.startswith("bytes:") or whole["prompt"][start:end] == token
    short = live.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_offsets": False}).json()
    assert short["tokens"] == ids[1:] and "offsets" not in short


def test_tokenize_a_chat(live: Live) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    ids = live.post("/tokenize", body).json()["tokens"]
    live.chat(**body, max_tokens=1)
    assert ids == live.engine.requests[-1].prompt_token_ids
    text = live.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == "<|bos|>[user]hi\n[assistant]"
    assert live.refuse("/tokenize", {})["message"] == "give either prompt or messages"
    live.refuse("/tokenize", {**body, "prompt": "a"})
    assert live.refuse("/tokenize", {"content": "a"})["message"].endswith("it is called prompt here")


@pytest.mark.slow
def test_the_server_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import windlass.server.application, sys; assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- web pages of other origins ---------------------------------------------------------------------------------------
SIMPLE_BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without keys that offers every endpoint."""
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
def test_cross_origin_simple_requests_are_refused(open_server: Live, headers: dict[str, str]) -> None:
    open_server.engine.reset()
    paths = [
        path for path, methods in open_server.http.get("/openapi.json").json()["paths"].items() if "post" in methods
    ]
    assert COMPLETIONS in paths and "/v1/load_lora_adapter" in paths and len(paths) > 15
    for path in paths:
        response = open_server.http.post(path, content=SIMPLE_BODY, headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert "content-type: application/json" in error["message"], path
    assert not open_server.engine.requests


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
def test_other_requests_of_pages_and_programs_are_answered(open_server: Live, headers: dict[str, str]) -> None:
    assert open_server.http.post(COMPLETIONS, content=SIMPLE_BODY, headers=headers).status_code == 200


def test_key_does_not_permit_simple_requests() -> None:
    """A proxy may have added the key."""
    with live_server(callers=(ApiKey.plain("secret"),)) as live:
        headers = {"origin": "http://page.example", "authorization": "Bearer secret"}
        assert live.http.post(COMPLETIONS, content=SIMPLE_BODY, headers=headers).status_code == 400
        headers["content-type"] = "application/json"
        assert live.http.post(COMPLETIONS, content=SIMPLE_BODY, headers=headers).status_code == 200


@pytest.mark.slow
def test_simple_request_of_a_browser_is_refused(open_server: Live) -> None:
    from helpers.browser import chromium

    open_server.engine.reset()
    send = """async ([url, body]) => { await fetch(url, {method: "POST", mode: "no-cors", body: new Blob([body])}); }"""
    with chromium() as browser, live_server() as other:
        page = browser.new_page()
        page.goto(f"{other.url}/health")
        page.evaluate(send, [f"{open_server.url}{COMPLETIONS}", SIMPLE_BODY.decode()])
        assert not open_server.engine.requests
