"""Handover to another server: the retired one finishes its requests, and no client loses a request by a closed connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from windlass.server.http.connection_limits import ConnectionSettings
from windlass.server.http.server import HttpServer


def test_a_retired_server_announces_that_connections_close() -> None:
    async def main() -> None:
        half, retired = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            """Half an answer, and once the server has retired the rest."""
            if scope["type"] != "http":
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            half.set()
            await retired.wait()
            await send({"type": "http.response.body", "body": b"whole"})

        listener = socket.create_server(("127.0.0.1", 0))
        held = listener.dup()  # another server accepts later
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = HttpServer(app, listener, ConnectionSettings(), max_header_bytes=65536)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(limits=limits, timeout=10) as client:
            begun = asyncio.create_task(client.get(url))
            await asyncio.wait_for(half.wait(), 30)
            server.retire()
            retired.set()
            first = await begun
            again = await client.get(url)  # over the same connection: no other is accepted
            assert (first.text, again.text) == ("halfwhole", "halfwhole")
            assert "connection" not in first.headers and again.headers["connection"] == "close"
            await asyncio.sleep(1.2)  # uvicorn has renewed its headers
            assert len(server.registry) == 0
            with pytest.raises(httpx.ReadTimeout):
                await client.get(url, timeout=httpx.Timeout(10, read=0.3))  # it is in the listener's queue
        accepted, _ = held.accept()
        assert accepted.recv(4) == b"GET "
        accepted.close()
        held.close()
        await server.stop(1)
        await serving

    asyncio.run(main())
