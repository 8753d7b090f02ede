"""Carries requests of the SDK to an app in this process: what HTTP does between two, without sockets.

Two httpx transports: one for code on the app's event loop, one for code on any other thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp, Message

from windlass.engine.errors import EngineDeadError

_logger = logging.getLogger("windlass.server")

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


class _AppAnswer(httpx.AsyncByteStream):
    """One request on its way through the app. Iterate for the bytes of its answer; closing it early aborts the request."""

    def __init__(self, app: ASGIApp, request: httpx.Request, body: bytes) -> None:
        self.head: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()  # None behind the last one
        self._complete = False
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._run(app, _scope(request)))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            if not self.head.done():
                self.head.set_exception(error)
            else:
                _logger.error("an answer ended with an error of the server", exc_info=error)
                self._error = error
        finally:
            self._parts.put_nowait(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.head.set_result(message)
            return
        if body := message.get("body"):
            self._parts.put_nowait(body)
        self._complete = not message.get("more_body", False)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises ReadError where the app ended before its answer did: over a socket, the connection would break."""
        while (part := await self._parts.get()) is not None:
            yield part
        if not self._complete:
            why = "" if self._error is None else f": {self._error}"
            raise httpx.ReadError(f"the server ended its answer early{why}") from self._error

    async def aclose(self) -> None:
        """As a client that goes away: the app ends what it does for it."""
        self._left.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class AppTransport(httpx.AsyncBaseTransport):
    """For code on the event loop on which the app runs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _AppAnswer(self._app, request, await request.aread())
        try:
            head = await exchange.head
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(head["status"], headers=head["headers"], stream=exchange)


class ThreadTransport(httpx.BaseTransport):
    """For code on other threads. run: has a coroutine carried out on the app's event loop and waits for it.

    Its EngineDeadError, after the end of the loop, is a broken connection to a client.
    """

    def __init__(self, transport: AppTransport, run: Run[Any]) -> None:
        self._transport = transport

        def carry_out(work: Coroutine[Any, Any, Any]) -> Any:
            try:
                return run(work)
            except EngineDeadError as error:
                raise httpx.ReadError(str(error)) from error

        self._run = carry_out

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        response: httpx.Response = self._run(self._transport.handle_async_request(request))
        assert isinstance(response.stream, _AppAnswer)
        stream = _ThreadStream(response.stream, self._run)
        return httpx.Response(response.status_code, headers=response.headers, stream=stream)


class _ThreadStream(httpx.SyncByteStream):
    def __init__(self, exchange: _AppAnswer, run: Run[Any]) -> None:
        self._exchange = exchange
        self._run = run

    def __iter__(self) -> Iterator[bytes]:
        parts = aiter(self._exchange)
        while (part := self._run(_next(parts))) is not None:
            yield part

    def close(self) -> None:
        with contextlib.suppress(httpx.ReadError):  # the end of the loop has ended the exchange
            self._run(self._exchange.aclose())


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": None,
        "root_path": "",
    }
