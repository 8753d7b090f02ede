"""Chunked bodies over real sockets: a turn of the event loop reads only a few chunks, however small they are."""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Iterable, Iterator

import h11
import pytest
from helpers.live_server import Live, live_server
from helpers.raw_client import Connect, connector, read_answer, request, until_closed

from windlass.server.config.api_keys import ApiKey
from windlass.server.http.connection_limits import MANY_CHUNKS, MAX_DISCARDED_CHUNKS, PIECES_PER_TURN, TINY_CHUNK

TINY = b"1\r\nx\r\n"


@pytest.fixture
def connect() -> Iterator[Connect]:
    with connector() as connect:
        yield connect


class Turns:
    """Counts the pieces of bodies that a server reads in each turn of its event loop."""

    def __init__(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: Counter[int] = Counter()
        self._loop = live.loop
        self._turn = 0
        read = h11.Connection.next_event

        def counted(connection: h11.Connection) -> object:
            event = read(connection)
            self.pieces[self._turn] += isinstance(event, h11.Data)
            return event

        monkeypatch.setattr(h11.Connection, "next_event", counted)
        live.on_loop(self._count)

    def _count(self) -> None:
        self._turn += 1
        self._loop.call_soon(self._count)


def chunked(path: str, pieces: Iterable[bytes], *headers: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: x", "transfer-encoding: chunked", *headers, "", ""]
    return "\r\n".join(head).encode() + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it is closed before all has been sent
        connection.sendall(data)


def pieces_of(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def test_tiny_chunks_are_paced_and_refused(connect, monkeypatch, caplog):
    with live_server() as live:
        turns = Turns(live, monkeypatch)
        connection = connect(live.url)
        send(connection, chunked("/v1/completions", ()) + TINY * 40_000)
        answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 400 ") and b'"tiny_chunks"' in answer
        assert max(turns.pieces.values()) <= PIECES_PER_TURN
        assert turns.pieces.total() == MANY_CHUNKS + 1
        assert "tiny chunks was refused" in caplog.text and "Invalid HTTP" not in caplog.text


def test_little_of_an_unused_body_is_read_after_the_response(connect, monkeypatch):
    with live_server(callers=(ApiKey.plain("secret"),)) as live:
        turns = Turns(live, monkeypatch)
        connection = connect(live.url)
        connection.sendall(chunked("/v1/completions", ()))
        assert read_answer(connection).startswith(b"HTTP/1.1 401 ")
        send(connection, TINY * 40_000)
        assert until_closed(connection) == b""
        assert max(turns.pieces.values()) <= PIECES_PER_TURN
        assert turns.pieces.total() <= MAX_DISCARDED_CHUNKS + 1


def test_a_short_unused_rest_keeps_the_connection_open(connect):
    with live_server(callers=(ApiKey.plain("secret"),)) as live:
        connection = connect(live.url)
        connection.sendall(chunked("/v1/completions", ()))
        assert read_answer(connection).startswith(b"HTTP/1.1 401 ")
        connection.sendall(TINY * MAX_DISCARDED_CHUNKS + b"0\r\n\r\n" + request("/health"))
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_an_unused_body_in_ordinary_chunks_is_read_completely(connect):
    """Its client may read its response only then."""
    with live_server(callers=(ApiKey.plain("secret"),)) as live:
        connection = connect(live.url)
        body = chunked("/v1/completions", [b"x" * 4096] * 200, "authorization: Bearer wrong")
        connection.sendall(body + b"0\r\n\r\n" + request("/health"))
        assert read_answer(connection).startswith(b"HTTP/1.1 401 ")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("padding", "size"),
    [(0, 1), (MANY_CHUNKS * 5, 6), (MANY_CHUNKS * TINY_CHUNK * 2, TINY_CHUNK + 1), (2_000_000, 16_384)],
)
def test_chunked_bodies_are_complete_and_the_next_request_follows(connect, padding, size):
    with live_server() as live:
        connection = connect(live.url)
        body = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
        pieces = pieces_of(body[:-1] + b" " * padding + body[-1:], size)
        sent = chunked("/v1/completions", pieces) + b"0\r\n\r\n"
        for _ in range(2):
            connection.sendall(sent + request("/health"))
            answer = read_answer(connection)
            assert answer.startswith(b"HTTP/1.1 200 ") and b'"completion_tokens":4' in answer
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_a_pipelined_body_is_paced(connect, monkeypatch):
    """It waits in the parser while the first request is running."""
    with live_server() as live:
        turns = Turns(live, monkeypatch)
        connection = connect(live.url)
        body = [b'{"prompt":"hello","max_tokens":4', *[b" "] * 3000, b"}"]
        connection.sendall(request("/health") + chunked("/v1/completions", body) + b"0\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        assert max(turns.pieces.values()) <= PIECES_PER_TURN < turns.pieces.total() == len(body)
