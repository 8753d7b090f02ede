"""HTTP over a raw socket, for misbehaving clients."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import urlsplit


def connect(url: str, source: str = "127.0.0.1", *, receive_buffer: int | None = None) -> socket.socket:
    """Connect from a loopback address. A small receive buffer limits the unread bytes of a client."""
    parts = urlsplit(url)
    connection = socket.socket()
    connection.settimeout(10.0)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.bind((source, 0))
    connection.connect((parts.hostname, parts.port))
    return connection


def request(path: str, body: object = None, *headers: str) -> bytes:
    """Return the bytes of a GET, or of a POST with a body."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: localhost", *headers]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_answer(connection: socket.socket) -> bytes:
    """Read a response with a declared length from a connection that stays open."""
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
    """Read until the server closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


def is_open(connection: socket.socket) -> bool:
    """Return whether the server has neither sent anything nor closed."""
    poll = select.poll()  # select does not support descriptors above 1,023
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)


class Connect(Protocol):
    """Opens a connection, which `connector` closes at its end."""

    def __call__(self, url: str, source: str = "127.0.0.1", *, receive_buffer: int | None = None) -> socket.socket: ...


@contextlib.contextmanager
def connector() -> Iterator[Connect]:
    with contextlib.ExitStack() as connections:
        yield lambda *given, **named: connections.enter_context(connect(*given, **named))


def answers_health(url: str, source: str) -> bool:
    """Return whether /health returns 200 on a new connection from this address."""
    with connect(url, source) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request("/health", None, "connection: close"))
        return until_closed(connection).startswith(b"HTTP/1.1 200 ")


@contextlib.contextmanager
def crowd(url: str, count: int, source: str) -> Iterator[list[socket.socket]]:
    """Open connections from one address that never complete a request; every second one sends half of one."""
    connections: list[socket.socket] = []
    try:
        for number in range(count):
            connections.append(connect(url, source))
            if number % 2:
                with contextlib.suppress(ConnectionError):  # already refused
                    connections[-1].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-padding: ")
        yield connections
    finally:
        for connection in connections:
            connection.close()
