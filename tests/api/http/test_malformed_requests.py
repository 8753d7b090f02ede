"""Malformed and ambiguous requests over a real socket: the status, and whether the connection closes."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
from helpers.live_server import Live, live_server
from helpers.raw_client import Connect, connector, read_answer, request, until_closed

BODY = b'{"prompt":"hello"}'
LENGTH = b"Content-Length: %d" % len(BODY)
CODING = b"Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(max_body_bytes=LIMIT) as live:
        yield live


@pytest.fixture
def connect() -> Iterator[Connect]:
    with connector() as connect:
        yield connect


def head(*headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST /tokenize HTTP/" + version, b"Host: localhost", *headers]
    return b"\r\n".join([*lines, b"", b""])


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def send_all(connection: socket.socket, data: bytes) -> bytes:
    """Send a request, then a second one, and read until the server closes."""
    connection.sendall(data + request("/health"))
    return until_closed(connection)


REFUSED = {
    "a folded line": (400, head(b"X-A: b", b" c", LENGTH) + BODY),
    "a line folded with a tab": (400, head(b"X-A: b", b"\tc", LENGTH) + BODY),
    "a folded length": (400, head(b"Content-Length:", b" %d" % len(BODY)) + BODY),
    "a folded first line": (400, head(version=b"1.1\r\n X-A: b")),
    "a line of spaces": (400, head(b"X-A: b", b"  ", LENGTH) + BODY),
    "a folded line after a bare line feed": (400, head(b"X-A: b\n c", LENGTH) + BODY),
    "a list of equal lengths": (400, head(LENGTH + b", %d" % len(BODY)) + BODY),
    "a list of lengths": (400, head(LENGTH + b", 1") + BODY),
    "a list with an empty length": (400, head(LENGTH + b",") + BODY),
    "equal lengths": (400, head(LENGTH, LENGTH.lower()) + BODY),
    "different lengths": (400, head(LENGTH, b"Content-Length: 1") + BODY),
    "a signed length": (400, head(b"Content-Length: +%d" % len(BODY)) + BODY),
    "a negative length": (400, head(b"Content-Length: -1") + BODY),
    "a hexadecimal length": (400, head(b"Content-Length: 0x12") + BODY),
    "a length with a space": (400, head(b"Content-Length: 1 8") + BODY),
    "an empty length": (400, head(b"Content-Length:") + BODY),
    "a length of 21 digits": (400, head(b"Content-Length: " + b"9" * 21)),
    "a space before the colon": (400, head(b"Content-Length : 18") + BODY),
    "a bare carriage return": (400, head(b"X-A: b\rContent-Length: 18") + BODY),
    "a null character": (400, head(b"X-A: b\0c")),
    "no host": (400, b"GET /health HTTP/1.1\r\n\r\n"),
    "two hosts": (400, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"),
    "a target without a host": (400, b"GET http:///health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "a target with a user": (400, b"GET http://a@localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "another coding": (501, head(b"Transfer-Encoding: gzip, chunked") + CHUNKS),
    "the identity coding": (501, head(b"Transfer-Encoding: identity", LENGTH) + BODY),
    "a coding twice in a list": (501, head(CODING + b", chunked") + CHUNKS),
    "a coding twice": (501, head(CODING, CODING) + CHUNKS),
    "a coding of HTTP/1.0": (400, head(CODING, version=b"1.0") + CHUNKS),
    "a chunk above the limit": (413, head(CODING) + b"%x\r\n" % (LIMIT + 1)),
    "a later chunk above the limit": (413, head(CODING) + b"1\r\n{\r\n" + b"%x\r\n" % (LIMIT + 1)),
    "a chunk of 20 digits": (413, head(CODING) + b"F" * 20 + b"\r\n"),
    "a chunk of 21 digits": (400, head(CODING) + b"F" * 21 + b"\r\n"),
    "a size without an end": (400, head(CODING) + b"F" * 40),
    "a later size without an end": (400, head(CODING) + b"1\r\n{\r\n" + b"0" * 40),
    "a size with a prefix": (400, head(CODING) + b"0x12\r\n" + CHUNKS),
    "a signed size": (400, head(CODING) + b"+12\r\n" + CHUNKS),
    "a negative size": (400, head(CODING) + b"-1\r\n"),
    "an empty size": (400, head(CODING) + b"\r\n" + CHUNKS),
    "a chunk longer than its size": (400, head(CODING) + b"1\r\nabc\r\n0\r\n\r\n"),
}


@pytest.mark.parametrize(("status", "data"), REFUSED.values(), ids=REFUSED)
def test_refused_at_once_and_closed(live: Live, connect: Connect, status: int, data: bytes) -> None:
    """The bytes after a head, a chunk size or a part of it never arrive: only the rest of the request could end a wait."""
    connection = connect(live.url)
    connection.sendall(data)
    received = until_closed(connection)
    assert statuses(received) == [status]
    head, _, body = received.partition(b"\r\n\r\n")
    code = {400: "malformed_request", 413: "request_too_large", 501: "unsupported_transfer_encoding"}[status]
    assert b"\r\nconnection: close\r\n" in head and b"\r\nx-request-id: " in head
    assert json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize("name", ["a folded line", "a list of equal lengths", "equal lengths", "a coding twice"])
def test_a_request_after_a_refused_one_is_not_answered(live: Live, connect: Connect, name: str) -> None:
    status, data = REFUSED[name]
    assert statuses(send_all(connect(live.url), data)) == [status]


@pytest.mark.parametrize(
    "headers",
    [
        (LENGTH, CODING),
        (CODING, LENGTH),
        (CODING, b"Content-Length: 1"),
        (CODING, b"Content-Length: %d" % (LIMIT * 10)),
        (CODING, b"Connection: keep-alive", b"Content-Length: 0"),
    ],
)
def test_a_length_with_a_coding_is_ignored_and_the_connection_closes(live: Live, connect: Connect, headers) -> None:
    received = send_all(connect(live.url), head(*headers) + CHUNKS)
    assert statuses(received) == [200] and b"\r\nconnection: close\r\n" in received.lower()
    assert json.loads(received.partition(b"\r\n\r\n")[2])["count"] > 1


def test_a_refused_request_with_a_coding_and_a_length_closes_the_connection() -> None:
    with live_server(api_keys=("secret",)) as live, connector() as connect:
        assert statuses(send_all(connect(live.url), head(CODING, LENGTH) + CHUNKS)) == [401]


@pytest.mark.parametrize(
    "data",
    [
        head(LENGTH) + BODY,
        head(CODING) + CHUNKS,
        head(b"X-A: b\tc  d", b"X-B: content-length: 1, 2", LENGTH) + BODY,
        head(CODING) + b"0" * 18 + CHUNKS,
        head(CODING) + CHUNKS.replace(b"\r\n", b";name=value\r\n", 1),
    ],
)
def test_unambiguous_requests_keep_the_connection_open(live: Live, connect: Connect, data: bytes) -> None:
    connection = connect(live.url)
    for _ in range(2):
        connection.sendall(data)
        assert statuses(read_answer(connection)) == [200]


def test_lines_of_a_body_are_no_headers(live: Live, connect: Connect) -> None:
    """The body arrives with its head."""
    body = b'{"prompt":\n "content-length: 1, 2"\n}'
    connection = connect(live.url)
    connection.sendall(head(b"Content-Length: %d" % len(body)) + body)
    assert statuses(read_answer(connection)) == [200]


def test_a_chunk_of_the_limit_is_read(live: Live, connect: Connect) -> None:
    body = BODY + b" " * (LIMIT - len(BODY))
    connection = connect(live.url)
    connection.sendall(head(CODING) + b"%x\r\n%s\r\n0\r\n\r\n" % (LIMIT, body))
    assert statuses(read_answer(connection)) == [200]


def test_an_oversized_chunk_after_the_response_closes_the_connection() -> None:
    with live_server(api_keys=("secret",)) as live, connector() as connect:
        connection = connect(live.url)
        connection.sendall(head(CODING))
        assert statuses(read_answer(connection)) == [401]
        connection.sendall(b"F" * 16 + b"\r\n")
        assert until_closed(connection) == b""


@pytest.mark.parametrize("scheme", [b"http", b"HTTP", b"https"])
def test_targets_in_absolute_form(live: Live, connect: Connect, scheme: bytes) -> None:
    """As a proxy gets them; the path may be empty."""
    connection = connect(live.url)
    for data, status in (
        (head(LENGTH).replace(b" /tokenize ", b" %s://localhost:80/tokenize " % scheme) + BODY, 200),
        (b"GET %s://localhost/health?a=http://b HTTP/1.1\r\nHost: localhost\r\n\r\n" % scheme, 200),
        (b"POST %s://localhost HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n" % scheme, 405),
        (b"POST %s://localhost?a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n" % scheme, 405),
        (b"GET /http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    ):
        connection.sendall(data)
        assert statuses(read_answer(connection)) == [status], data


def test_the_host_of_a_target_is_checked(connect: Connect) -> None:
    """It replaces the header (RFC 9112, 3.2.2)."""
    with live_server(binding="loopback") as live:
        for target, header, status in (
            (b"http://localhost", b"evil.example", 200),
            (b"http://evil.example", b"localhost", 421),
        ):
            connection = connect(live.url)
            connection.sendall(b"GET %s/health HTTP/1.1\r\nHost: %s\r\n\r\n" % (target, header))
            assert statuses(read_answer(connection)) == [status]
