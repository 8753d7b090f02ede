"""Named keys and their limits over HTTP: 429s with Retry-After, priorities, shares, administration, metrics."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from helpers.eventually import eventually
from helpers.live_server import Live, live_server
from helpers.real_server import RealServer, serve
from prometheus_client.parser import text_string_to_metric_families

from windlass.server.config.api_keys import ApiKey

# They report a state that is known anyway, or send a file.
FREE = {
    "/",
    "/docs",
    "/docs/{name}",
    "/health",
    "/metrics",
    "/openapi.json",
    "/ready",
    "/redoc",
    "/ui/{name:path}",
    "/v1",
    "/v1/",
    "/v1/cache",
    "/v1/models",
    "/v1/models/{model:path}",
    "/version",
}


def named(name: str, **fields: object) -> ApiKey:
    return ApiKey(digest=ApiKey.plain(f"key of {name}").digest, name=name, **{"admin": False, **fields})  # type: ignore[arg-type]


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key of {name}"}


@pytest.fixture
def live() -> Iterator[Live]:
    callers = (
        named("root", admin=True),
        named("free"),
        named("slow", requests_per_minute=1),
        named("short", tokens_per_minute=10),
        named("single", concurrency=1),
        named("late", priority=3, share=0.25),
        named("slow root", requests_per_minute=1, admin=True),
    )
    with live_server(callers=callers, attention_maps=True) as live:
        yield live


def complete(live: Live, name: str, **fields: object) -> httpx.Response:
    return live.post("/v1/completions", {"prompt": "hello", "max_tokens": 3, **fields}, headers=of(name))


def test_key_is_required_and_identifies_the_caller(live: Live) -> None:
    assert live.http.get("/v1/models").status_code == 401
    assert live.http.get("/v1/models", headers=of("nobody")).status_code == 401
    assert complete(live, "free").status_code == complete(live, "late").status_code == 200
    first, second = live.engine.requests
    assert (first.priority, first.share, second.priority, second.share) == (0, 1.0, 3, 0.25)
    assert first.caller != second.caller and "key of" not in first.caller + second.caller


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_requests_per_minute(live: Live, path: str) -> None:
    body = {"prompt": "a", "max_tokens": 2} if path == "/v1/completions" else {"input": "a"}
    assert live.post(path, body, headers=of("slow")).status_code == 200
    refused = live.post(path, body, headers=of("slow"))
    assert refused.status_code == 429 and 55 <= int(refused.headers["retry-after"]) <= 60
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "1 requests a minute" in error["message"]
    assert live.post(path, body, headers=of("free")).status_code == 200


def test_every_route_counts_requests_unless_it_is_free(live: Live) -> None:
    """A new route counts them by default; one that is declared free has to be listed here."""
    found: dict[str, set[str]] = {}
    for route in iter_route_contexts(live.app.routes):
        assert route.path is not None and route.methods
        found.setdefault(route.path, set()).update(route.methods - {"HEAD"})
    assert set(found) >= FREE and all(found[path] == {"GET"} for path in FREE) and len(found) > 40
    assert live.http.post("/tokenize", json={"prompt": "a"}, headers=of("slow root")).status_code == 200
    limited = set()
    for template, methods in found.items():
        path = re.sub(r"\{.+?\}", "x", template)
        for method in methods:
            body = None if method == "GET" else {}
            for caller, status in (("slow root", 429), ("free", None)):
                response = live.http.request(method, path, json=body, headers=of(caller))
                refused = response.status_code == 429
                assert refused == (status == 429 and template not in FREE), (method, template, response.text)
                if refused:
                    assert response.json()["error"]["code"] == "rate_limit_exceeded" or "/messages" in path
                    limited.add(template)
        assert live.http.options(path, headers=of("slow root")).status_code == 204
        assert live.http.request("PUT", path, headers=of("slow root")).status_code == 405
    assert limited == set(found) - FREE
    assert live.state.callers.usage["slow root"].requests == 1


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", {"prompt": "hello"}),
        ("POST", "/detokenize", {"tokens": [65]}),
        ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
        ("POST", "/v1/responses/input_tokens", {"input": "hello"}),
        ("POST", "/v1/rotary/inspect", {}),
        ("POST", "/v1/completions", {"prompt": 3}),  # refused, but only after its body was read
    ],
)
def test_a_request_that_generates_nothing_counts(live: Live, method: str, path: str, body: object) -> None:
    statuses = [live.http.request(method, path, json=body, headers=of("slow")).status_code for _ in range(2)]
    assert statuses[0] in (200, 400) and statuses[1] == 429
    assert (live.state.callers.usage["slow"].requests, live.state.callers.usage["slow"].refused.total()) == (1, 1)


def test_concurrency_counts_requests_that_generate_nothing(live: Live) -> None:
    """A body that has not arrived is part of a request in progress."""
    begun, rest = threading.Event(), threading.Event()

    def body() -> Iterator[bytes]:
        yield b'{"prompt":'
        begun.set()
        assert rest.wait(30)
        yield b'"hello"}'

    answers: list[int] = []
    headers = {**of("single"), "content-type": "application/json"}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{live.url}/tokenize", content=body(), headers=headers).status_code)
    )
    thread.start()
    assert begun.wait(30)
    live.wait(lambda: bool(live.on_loop(lambda: dict(live.state.callers._in_flight))))
    refused = live.post("/detokenize", {"tokens": [65]}, headers=of("single"))
    assert refused.status_code == 429 and "in progress" in refused.json()["error"]["message"]
    rest.set()
    thread.join(30)
    assert answers == [200]
    assert live.post("/detokenize", {"tokens": [65]}, headers=of("single")).status_code == 200


def test_attention_counts_the_tokens_of_its_prompt(live: Live) -> None:
    body = {"tokens": [65] * 8, "layer": 0, "head": 0}
    answer = live.post("/v1/attention", body, headers=of("slow root"))
    assert answer.status_code == 200, answer.text
    assert live.state.callers.usage["slow root"].prompt_tokens == 8


def test_tokens_per_minute_count_prompts_and_answers(live: Live) -> None:
    assert complete(live, "short", prompt=[65] * 6, max_tokens=3).status_code == 200
    refused = complete(live, "short", prompt=[65] * 6, max_tokens=1)
    assert refused.status_code == 429  # 6 and 3 are gone
    assert 25 <= int(refused.headers["retry-after"]) <= 30
    assert len(live.engine.requests) == 1
    assert live.state.callers.usage["short"].generated_tokens == 3


def test_a_stream_is_refused_before_it_begins(live: Live) -> None:
    assert complete(live, "short", prompt=[65] * 10).status_code == 200
    refused = complete(live, "short", prompt=[65] * 10, stream=True)
    assert refused.status_code == 429 and refused.headers["content-type"] == "application/json"


@pytest.mark.slow
def test_concurrency_is_exact_and_ends_with_the_request(live: Live) -> None:
    live.engine.delay = 0.02
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(complete(live, "single", max_tokens=20).status_code))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert live.engine.most_running == 1 and statuses.count(200) >= 1 and set(statuses) <= {200, 429}
    assert complete(live, "single").status_code == 200


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/score", "/rerank"])
def test_a_request_without_an_answer_counts_once(live: Live, path: str) -> None:
    body = {
        "/score": {"text_1": "hello", "text_2": "there"},
        "/rerank": {"query": "hello", "documents": ["there", "here"]},
    }.get(path, {"input": ["hello", "there"]})
    for _ in range(2):
        answer = live.post(path, body, headers=of("single"))
        assert answer.status_code == 200, answer.text
    assert not live.state.callers.usage["single"].refused


GENERATING: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "hello"},
    "/score": {"text_1": "hello", "text_2": "there"},
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("path", GENERATING)
def test_cached_blocks_belong_to_the_key_on_every_endpoint(live: Live, path: str) -> None:
    def salts(name: str, **fields: object) -> set[str | None]:
        """The salts under which the engine stores the prefix and the passages of a request."""
        before = len(live.engine.requests)
        answer = live.post(path, {**GENERATING[path], **fields}, headers=of(name))
        assert answer.status_code == 200, answer.text
        found = live.engine.requests[before:]
        return {each.cache_salt for each in found} | {each.reuse.scope for each in found if each.reuse is not None}

    given = [
        salts(name, **fields) for name in ("free", "late") for fields in ({}, {"cache_salt": "s"}, {"cache_salt": "t"})
    ]
    assert all(len(each) == 1 for each in given) and len(set.union(*given)) == 6 and None not in set.union(*given)
    assert salts("free") == given[0]
    with live_server(callers=(named("free"), named("late")), shared_prefix_cache=True) as shared:
        for name in ("free", "late"):
            assert shared.post(path, GENERATING[path], headers=of(name)).status_code == 200
        first, *_, last = shared.engine.requests
        assert first.cache_salt is last.cache_salt is None
        if first.reuse is not None and last.reuse is not None:  # a passage reveals what preceded it
            assert first.reuse.scope != last.reuse.scope


def test_no_salt_names_the_blocks_of_a_key() -> None:
    salts = {}
    for keys, fields in ((True, {}), (False, {}), (False, {"cache_salt": "name:free"}), (True, {"cache_salt": "s"})):
        with live_server(callers=(named("free"),) if keys else ()) as live:
            assert complete(live, "free", **fields).status_code == 200
            salts[keys, str(fields)] = live.engine.requests[-1].cache_salt
    assert len(set(salts.values())) == 4 and salts[False, "{}"] is None


def test_disconnect_releases_concurrency(live: Live) -> None:
    live.engine.delay, live.engine.reply = 0.02, [65] * 500
    body = {"prompt": "hello", "max_tokens": 500, "stream": True}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, headers=of("single")) as response:
        lines = response.iter_lines()  # referenced, as httpx would close the stream with it
        next(lines)
        assert complete(live, "single").status_code == 429
    live.wait(lambda: live.engine.running == 0)
    assert len(live.engine.aborted) == 1  # it was ended before its own end
    live.wait(lambda: not live.state.callers._in_flight)
    assert complete(live, "single").status_code == 200
    assert live.state.callers.usage["single"].generated_tokens >= 4


def test_priority_above_that_of_the_key_is_refused(live: Live) -> None:
    refused = complete(live, "late", priority=2)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    assert complete(live, "late", priority=4).status_code == 200
    assert live.engine.requests[-1].priority == 4


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/metrics", None),
        ("GET", "/v1/cache", None),
        ("POST", "/v1/attention", {"prompt": "hello"}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}),
    ],
)
def test_server_wide_endpoints_require_an_administrator(live: Live, method: str, path: str, body: object) -> None:
    refused = live.http.request(method, path, json=body, headers=of("free"))
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "not_an_administrator"
    allowed = live.http.request(method, path, json=body, headers=of("root"))
    assert allowed.status_code != 401 and "not_an_administrator" not in allowed.text


def test_metrics_by_caller(live: Live) -> None:
    complete(live, "slow", prompt=[65] * 5, max_tokens=2)
    complete(live, "slow")
    text = live.http.get("/metrics", headers=of("root")).text
    assert "key of" not in text
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "caller" in sample.labels
    }
    assert found["windlass_caller_requests_total", "slow"] == 1
    assert found["windlass_caller_tokens_total", "prompt", "slow"] == 5
    assert found["windlass_caller_tokens_total", "generated", "slow"] == 2
    assert found["windlass_caller_refused_total", "requests_per_minute", "slow"] == 1
    assert found["windlass_caller_requests_total", "free"] == 0


# -- a real engine -------------------------------------------------------------------------------------------------------

SECRET = " ".join(f"river {number}" for number in range(12)) + " The PIN is 4711, which nobody else may know."


def cached_tokens(server: RealServer, key: str, prompt: str = SECRET) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def keys_in(file: Path, **keys: str) -> Path:
    file.write_text("".join(f'[{name}]\nkey = "{key}"\n' for name, key in keys.items()))
    return file


def test_cached_tokens_reveal_nothing_of_another_key(tmp_path: Path) -> None:
    with serve("--api-key-file", str(keys_in(tmp_path / "keys", alice="a", bob="b"))) as server:
        assert cached_tokens(server, "a") == 0
        again = cached_tokens(server, "a")
        assert again >= 32
        assert cached_tokens(server, "b") == 0
        assert cached_tokens(server, "b") == again


@pytest.mark.slow
def test_persisted_blocks_belong_to_the_key_after_a_reload_and_a_restart(tmp_path: Path) -> None:
    file, folder = tmp_path / "keys", tmp_path / "blocks"
    options = ("--api-key-file", str(keys_in(file, alice="a")), "--kv-persist", str(folder))

    def files() -> int:
        return len(list(folder.glob("*/*.safetensors")))

    with serve(*options) as server:
        assert cached_tokens(server, "a") == 0
        eventually(lambda: files() > 0, 60)
        keys_in(file, alice="a", bob="b")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "was read again: 2 keys" in server.log.read_text(), 60)
        assert cached_tokens(server, "b") == 0
        again = cached_tokens(server, "a")
        assert again >= 32 and cached_tokens(server, "b") == again
    assert files() >= 2 * (again // 16) and files() % 2 == 0
    keys_in(file, alice="new", carol="c")  # alice has another key
    with serve(*options) as server:
        assert cached_tokens(server, "c") == 0
        assert cached_tokens(server, "new") == again
