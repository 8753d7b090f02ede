"""Either client behind the asynchronous interface, so that one test covers both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from helpers.scripted_http import ScriptedServer, scripted_server

from windlass.clients import AsyncClient, Client, Stream


def any_client(kind: str, *args: Any, **options: Any) -> Any:
    """The client of that kind, "sync" or "async", to be used with `async with` and awaited."""
    return Sync(*args, **options) if kind == "sync" else AsyncClient(*args, **options)


@asynccontextmanager
async def scripted_client(kind: str, *scripts: Any, **options: Any) -> AsyncIterator[tuple[ScriptedServer, Any]]:
    """A scripted server and a client of that kind for it."""
    with scripted_server(*scripts) as server:
        async with any_client(kind, server.url, **options) as client:
            yield server, client


class Sync:
    """The synchronous client, each call on a thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.client = Client(*args, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        async def call(*args: Any, **options: Any) -> Any:
            result = await asyncio.to_thread(method, *args, **options)
            return SyncStream(result) if isinstance(result, Stream) else result

        return call

    async def __aenter__(self) -> Sync:
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.client.close()


class SyncStream:
    """Its stream; properties are the stream's own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    async def __aenter__(self) -> SyncStream:
        assert self.stream.__enter__() is self.stream
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self.stream.__exit__, *error)

    def __aiter__(self) -> SyncStream:
        assert iter(self.stream) is self.stream
        return self

    async def __anext__(self) -> Any:
        end = object()
        item = await asyncio.to_thread(next, self.stream, end)
        if item is end:
            raise StopAsyncIteration
        return item

    async def until_done(self) -> SyncStream:
        assert await asyncio.to_thread(self.stream.until_done) is self.stream
        return self

    async def get_final(self) -> Any:
        return await asyncio.to_thread(self.stream.get_final)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.stream.close)
