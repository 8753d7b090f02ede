"""What of a stream follows its last event: read to its end, the connection serves another request; closed, it is lost.

Knows httpx's responses; knows nothing of events.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import httpx

# More is not waited for: a connection is soon made anew.
_REST_BYTES = 64 * 1024
_REST_SECONDS = 1.0


def read_rest(response: httpx.Response, pieces: Iterator[bytes]) -> None:
    """Read what is left of a response, if that is little and comes soon, so that its connection can be used again.

    pieces: the iterator that read the response so far. Never raises; the caller closes the response.
    """
    if not _serves_more(response):
        return
    # httpcore has read its timeout when the body began, so another thread has to end a wait that lasts.
    watch = threading.Timer(_REST_SECONDS, wake_reader, (response,))
    watch.daemon = True
    watch.start()
    try:
        with contextlib.suppress(httpx.HTTPError, httpx.StreamClosed):
            size = 0
            for data in pieces:
                size += len(data)
                if size > _REST_BYTES:
                    break
    finally:
        watch.cancel()


async def read_rest_async(response: httpx.Response, pieces: AsyncIterator[bytes]) -> None:
    """`read_rest` for an asynchronous client."""
    if not _serves_more(response):
        return
    import anyio  # httpx brings it

    with anyio.move_on_after(_REST_SECONDS), contextlib.suppress(httpx.HTTPError, httpx.StreamClosed):
        size = 0
        async for data in pieces:
            size += len(data)
            if size > _REST_BYTES:
                break


def wake_reader(response: httpx.Response) -> None:
    """End the connection under a thread that waits for its next bytes: one whose socket is only closed waits on."""
    network = response.extensions.get("network_stream")
    shared = response.http_version == "HTTP/2"  # with the streams of other requests
    found = None if network is None or shared or response.is_closed else network.get_extra_info("socket")
    if isinstance(found, socket.socket):
        with contextlib.suppress(OSError):  # it is gone already
            socket.socket.shutdown(found, socket.SHUT_RDWR)  # that of TLS forgets its keys, which the reader still uses


def _serves_more(response: httpx.Response) -> bool:
    """Whether there is a connection that takes another request once this response was read."""
    kept = response.headers.get("connection", "").lower() != "close"
    return kept and response.http_version == "HTTP/1.1" and "network_stream" in response.extensions
