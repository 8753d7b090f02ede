"""Limits on size and shape, each at its edge, over real sockets, and large responses. The server must keep running."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.eventually import in_time
from helpers.live_server import Live, live_server
from helpers.probing import watched
from helpers.real_server import RealServer, serve

PATH = "/v1/completions"
MIB = 2**20


@pytest.fixture
def live(live: Live) -> Iterator[Live]:
    yield live
    assert live.complete("still here", max_tokens=1)["choices"][0]["text"] == "b"


def padded(size: int) -> bytes:
    """A valid body of exactly this many bytes."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    return body + b" " * (size - len(body))


def test_body_of_32_mib(live: Live) -> None:
    assert live.http.post(PATH, content=padded(32 * MIB)).status_code == 200
    assert live.refuse(PATH, padded(32 * MIB + 1), 413)["code"] == "request_too_large"


def test_body_without_declared_length(live: Live) -> None:
    def pieces(size: int) -> Iterator[bytes]:
        body = padded(size)
        for start in range(0, size, MIB):
            yield body[start : start + MIB]

    assert live.http.post(PATH, content=pieces(MIB)).status_code == 200
    response = live.http.post(PATH, content=pieces(33 * MIB))
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


def test_huge_declared_length_is_refused_before_the_body(live: Live) -> None:
    with socket.create_connection(httpx_address(live), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def httpx_address(live: Live) -> tuple[str, int]:
    url = httpx.URL(live.url)
    assert url.port is not None
    return url.host, url.port


def test_bodies_of_all_requests_together() -> None:
    size = 300_000
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with live_server(max_total_body_bytes=2 * size) as live:
        with socket.create_connection(httpx_address(live), timeout=5) as half_sent:
            half_sent.sendall(head % size + padded(size)[:-1])
            deadline = time.monotonic() + 10
            while (refused := live.http.post(PATH, content=padded(size))).status_code == 200:
                assert time.monotonic() < deadline  # the first one has not been read yet
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (429, "too_many_bytes")
            assert error["message"].startswith("the bodies of your requests in progress may have 300000 bytes")
            assert refused.headers["retry-after"] == "1"
            assert live.http.post(PATH, content=padded(60_000)).status_code == 200  # small ones are still accepted
            half_sent.sendall(b" ")
            assert half_sent.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert live.http.post(PATH, content=padded(size)).status_code == 200


def test_headers_of_64_kib(live: Live) -> None:
    assert live.http.get("/health", headers={"x-pad": "p" * (63 * 1024)}).status_code == 200
    for headers in ({"x-pad": "p" * (64 * 1024)}, {f"x-{i}": "p" * 1000 for i in range(66)}):
        response = live.http.get("/v1/models", headers=headers)
        assert response.status_code == 431 and response.json()["error"]["code"] == "request_too_large"


def test_stalled_body_times_out() -> None:
    with live_server(body_stall_seconds=0.2) as live, socket.create_connection(httpx_address(live), 5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({"prompt": ["a"] * 1024}, 1024),
        ({"n": 64}, 64),
        ({"best_of": 64}, 1),
        ({"stop": ["x" * 256] * 64}, 1),
        ({"logit_bias": {str(i): 100 for i in range(423)}}, 1),
        ({"logprobs": 20, "prompt_logprobs": 20}, 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_largest_values_are_accepted(live: Live, fields: dict[str, Any], choices: int) -> None:
    assert len(live.complete(**{"prompt": "a", "max_tokens": 1, **fields})["choices"]) == choices


def test_prompt_that_fills_the_context(live: Live) -> None:
    live.complete([5] * 255, max_tokens=1)
    live.complete([5] * 256, max_tokens=0, echo=True, logprobs=0)
    for count in (256, 257, 100_000):
        error = live.refuse(PATH, {"prompt": [5] * count, "max_tokens": 1})
        assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        assert " 256 " in error["message"] and f" {count} tokens" in error["message"]
    error = live.refuse(PATH, {"prompt": ["a", "z" * 300]})
    counted = len(live.tokenizer.encode("z" * 300))
    assert error["code"] == "context_length_exceeded" and f" {counted} tokens" in error["message"]


def test_too_long_text_is_refused_before_tokenization(live: Live) -> None:
    def seconds() -> float:
        begin = time.monotonic()
        error = live.refuse(PATH, {"prompt": "z " * (8 * MIB)})
        took = time.monotonic() - begin
        assert error["code"] == "context_length_exceeded" and "at least" in error["message"]
        return took

    in_time(seconds, 3)  # tokenizing 16 MiB takes more than ten seconds


def test_tokenize_has_its_own_limit() -> None:
    with live_server(max_tokenize_chars=100) as live:
        assert live.post("/tokenize", {"prompt": "a" * 100}).status_code == 200
        assert live.refuse("/tokenize", {"prompt": "a" * 101})["param"] == "prompt"
        assert live.refuse("/tokenize", {"messages": [{"role": "user", "content": "a" * 101}]})["param"] == "messages"


BAD_JSON: list[Any] = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"5",
    b"{",
    b'{"prompt": "a"',
    b'{"prompt": "a"} x',
    b"{'prompt': 'a'}",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": ' + b"9" * 400 + b"}",
    b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    b'{"prompt": "a", "metadata": {"x": NaN}}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800"}',
    b'{"\\ud800": 1}',
    b'{"prompt": "a\\u0000b"}',
    b'{"prompt": ["a", "\\u0000"]}',
    b'{"prompt": "a", "stop": "\\u0000"}',
    b'{"prompt": "a\x00b"}',
    b'{"prompt": "a"}\x00',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}',
    '{"prompt": "a"}'.encode("utf-16"),
    b"[" * 1_000_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"prompt": "a", "rope_scaling": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b'{"prompt": "a", "metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    json.dumps({f"field{i}": i for i in range(50_000)}).encode(),
    json.dumps({"prompt": "a", "stop": [5] * 500_000}).encode(),
    json.dumps({"prompt": "a", "stop_token_ids": ["x"] * 500_000}).encode(),
    json.dumps({"prompt": "a", "stream_options": {f"f{i}": i for i in range(50_000)}}).encode(),
    b'{"prompt": "a", "metadata": {"a": [' + b"[]," * (10 * MIB) + b"1]}}",
    pytest.param(b'{"prompt": "a", "metadata": {' + b'"":1,' * (6 * MIB) + b'"": 1}}', marks=pytest.mark.slow),
    pytest.param(b'{"prompt": "a\\u0000", "metadata": {"a": [' + b"1," * (8 * MIB) + b"1]}}", marks=pytest.mark.slow),
    pytest.param(b'{"prompt": "a", "rope_scaling": {"factor": [' + b"1," * (8 * MIB) + b"1]}}", marks=pytest.mark.slow),
    pytest.param(b'{"prompt": [' + b"1," * (15 * MIB) + b"1]}", marks=pytest.mark.slow),
    pytest.param(b'{"prompt": "' + b'\\"' * (10 * MIB) + b"[" * MIB, marks=pytest.mark.slow),
]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("body", BAD_JSON, ids=lambda body: repr(body[:30]))
def test_json_that_is_not_a_valid_body(live: Live, body: bytes) -> None:
    begin = time.monotonic()
    live.refuse(PATH, body)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("count", [1000, pytest.param(40_000, marks=pytest.mark.slow)])
def test_brackets_in_a_long_text_do_not_count_as_structure(live: Live, count: int) -> None:
    text = '[{"a": "\\\\"}, {' * count
    live.complete(text, max_tokens=1, truncate_prompt_tokens=4)
    assert live.engine.requests[-1].prompt_token_ids == live.tokenizer.encode(text)[-4:]


def test_ten_thousand_messages(live: Live) -> None:
    for message in ({}, {"role": "user"}, {"role": "user", "content": "x"}, 5):
        error = live.refuse("/v1/chat/completions", {"messages": [message] * 20_000})
        assert error["param"].startswith("messages")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"content-type": "text/plain"}, "content-type"),
        ({"content-type": "application/x-www-form-urlencoded"}, "content-type"),
        ({"content-type": "multipart/form-data; boundary=x"}, "content-type"),
        ({"content-type": "application/json; charset=utf-16"}, "content-type"),
        ({"content-type": "application/json; x=y; charset=latin-1"}, "content-type"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "content-encoding"),
    ],
)
def test_other_content_types(live: Live, headers: dict[str, str], param: str) -> None:
    response = live.http.post(PATH, content=padded(100), headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "value",
    [
        *("Application/JSON", "application/problem+json", "application/json;", "application/json; x-charset=latin-1"),
        *(f"application/json; {rest}" for rest in ("charset=UTF-8", "charset=utf-8;", 'charset="utf-8" ; x=y')),
        "application/json; x=y; Charset=US-ASCII",
    ],
)
def test_other_json_content_types(live: Live, value: str) -> None:
    assert live.http.post(PATH, content=padded(100), headers={"content-type": value}).status_code == 200


def test_too_many_requests_at_once() -> None:
    with live_server(max_in_flight=2) as live:
        live.engine.held = True
        from concurrent.futures import ThreadPoolExecutor

        def send(_: int) -> Any:
            return live.post(PATH, {"prompt": "a", "max_tokens": 1})

        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(send, number) for number in range(6)]
            try:
                live.wait(lambda: sum(each.done() for each in asked) == 4)
            finally:
                live.engine.held = False
            answers = [each.result() for each in asked]
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200, 200, 429, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "too_many_requests"


# ---- large responses --------------------------------------------------------------------------------------------------
PROMPTS = [[300 + (7 * row + column) % 3000 for column in range(500)] for row in range(256)]


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with serve() as server:
        yield server


def post(server: RealServer, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=300)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_above_the_limit_is_refused_with_both_numbers(stream: bool) -> None:
    """The log-probabilities of prompts are collected for the first events of a stream, too."""
    with live_server(max_response_bytes=2000) as live:
        body = {
            "prompt": [ids[:40] for ids in PROMPTS[:4]],
            "max_tokens": 1,
            "echo": True,
            "logprobs": 20,
            "prompt_logprobs": 20,
        }
        error = live.refuse("/v1/completions", body | {"stream": stream})
        assert error["code"] == "response_too_large"
        size, most = map(int, re.findall(r"\d{4,}", error["message"]))
        assert most == 2000 < size


def test_the_limit_is_the_operators() -> None:
    with live_server(max_response_bytes=2000) as live:
        live.complete(max_tokens=200)
        body = {"prompt": "x", "max_tokens": 200, "logprobs": 1}
        assert live.refuse("/v1/completions", body)["code"] == "response_too_large"
        assert live.stream("/v1/completions", body)[-1] == "[DONE]"
        assert "limit of 2000" in live.refuse("/tokenize", {"prompt": "hello " * 200})["message"]
        assert "limit of 2000" in live.refuse("/detokenize", {"tokens": [65] * 1000})["message"]


def attack(server: RealServer, rows: int, stream: bool) -> tuple[Any, int]:
    body = {"prompt": PROMPTS[:rows], "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
    raw = json.dumps(body).encode()
    with watched(server.url) as found:
        response = httpx.post(server.url + "/v1/completions", content=raw, timeout=300)
        size = len(response.content)
    assert response.status_code == 200
    return found, size


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_large_answer_delays_no_other_request(real: RealServer, stream: bool) -> None:
    def longest() -> float:
        """Longest gap in seconds, or twice the duration of /health, which has half the time."""
        found, size = attack(real, 32, stream)
        assert size > 8 * MIB
        assert not found.bad
        return max(found.worst_gap, 2 * found.worst_health)

    in_time(longest, 2.0)


@pytest.mark.soak
@pytest.mark.parametrize("stream", [False, True])
def test_largest_answer_delays_no_other_request(stream: bool) -> None:
    with serve() as server:
        found, size = attack(server, 180, stream)
        print(size, found.gaps[:3], found.health[:3])
        assert size > 45 * MIB
        assert not found.bad
        assert found.worst_health <= 0.25
        # The engine's own steps are part of a gap: log-probabilities of 2,048 tokens with 20 alternatives.
        assert found.worst_gap <= 0.75
