"""Writes whole answers in slices, each once the client has taken enough of those before it. Knows ASGI messages only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SLICE = 128 * 1024  # bytes handed to the server at once: it copies them, and the event loop waits meanwhile


async def send_whole(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], pieces: Sequence[bytes | bytearray]
) -> None:
    """Send a response whose body is known. headers: all but content-length."""
    length = (b"content-length", str(sum(map(len, pieces))).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    last = b""
    for part in _slices(pieces):
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
        last = part
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _slices(pieces: Sequence[bytes | bytearray]) -> Iterator[bytes]:
    """The same bytes in pieces of SLICE, the last one shorter."""
    held: list[bytes | bytearray] = []
    size = 0
    for piece in pieces:
        for start in range(0, len(piece), SLICE):
            part = piece[start : start + SLICE]
            held.append(part)
            size += len(part)
            if size >= SLICE:
                yield b"".join(held)
                held, size = [], 0
    if held:
        yield b"".join(held)


class LargeJson(Response):
    """A JSON answer that may be large, written as the client takes it."""

    def __init__(self, body: bytes) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [(b"content-type", b"application/json")]
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, self.status_code, self.raw_headers, [self._body])
