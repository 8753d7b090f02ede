"""HTTP by hand over a socket, for clients that do not behave."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import time
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import urlsplit


def connect(url: str, source: str = "127.0.0.1", *, receive_buffer: int | None = None) -> socket.socket:
    """A connection from a loopback address of choice; a small receive buffer makes a client that takes little unread."""
    parts = urlsplit(url)
    connection = socket.socket()
    connection.settimeout(10.0)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.bind((source, 0))
    connection.connect((parts.hostname, parts.port))
    return connection


def request(path: str, body: object = None, *headers: str) -> bytes:
    """The bytes of a GET, or of a POST where there is a body."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: x", *headers]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_answer(connection: socket.socket) -> bytes:
    """One whole answer of a connection that stays open; it must declare its length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _byte(connection)
    (length,) = re.findall(rb"(?i)\r\ncontent-length: (\d+)\r\n", received)
    for _ in range(int(length)):
        received += _byte(connection)
    return received


def _byte(connection: socket.socket) -> bytes:
    data = connection.recv(1)
    assert data, "the connection was closed amid an answer"
    return data


def until_closed(connection: socket.socket) -> bytes:
    """Everything the server sends until it closes; a connection that was reset counts as closed."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


def is_open(connection: socket.socket) -> bool:
    """Whether the server has neither sent anything nor closed."""
    poll = select.poll()  # select knows no descriptors above 1,023
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)


class Connect(Protocol):
    """What `connector` yields: `connect`, whose connections are closed at the end."""

    def __call__(self, url: str, source: str = "127.0.0.1", *, receive_buffer: int | None = None) -> socket.socket: ...


@contextlib.contextmanager
def connector() -> Iterator[Connect]:
    with contextlib.ExitStack() as connections:
        yield lambda *given, **named: connections.enter_context(connect(*given, **named))


def answers_health(url: str, source: str) -> bool:
    """Whether /health is answered with 200 on a new connection from this address."""
    with connect(url, source) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request("/health", None, "connection: close"))
        return until_closed(connection).startswith(b"HTTP/1.1 200 ")


@contextlib.contextmanager
def crowd(url: str, count: int, source: str) -> Iterator[list[socket.socket]]:
    """So many connections from one address that never complete a request: every second one sends half of one."""
    connections: list[socket.socket] = []
    try:
        for number in range(count):
            connections.append(connect(url, source))
            if number % 2:
                with contextlib.suppress(ConnectionError):  # turned away already
                    connections[-1].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-padding: ")
        yield connections
    finally:
        for connection in connections:
            connection.close()


def wait_for(condition, seconds: float = 30.0) -> None:
    """Wait until a condition holds; fails the test otherwise."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)
