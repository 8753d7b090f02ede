"""Bounds on the size of headers and bodies, whatever the route. Knows ASGI messages only."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.server.app.body_budget import BodyBudget
from windlass.server.errors import ApiError, error_response
from windlass.server.exchange.request_id import CALLER

# A client that is mid-upload may never see an answer sent before it is done: up to this many bytes beyond the limit
# are read and thrown away first.
DRAIN_FACTOR = 2
DRAIN_SECONDS = 10.0


class _BodyTooLarge(Exception):
    pass


class LimitsMiddleware:
    """431 for headers and 413 for bodies over their limits. A declared length is refused before a byte is read.

    max_bodies_bytes: see `BodyBudget`.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, max_bodies_bytes: int, max_header_bytes: int) -> None:
        self._app = app
        self._budget = BodyBudget(max_bodies_bytes)
        self._max_body = max_body_bytes
        self._max_headers = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        # Name, value, ": " and the line's end; path and query stand in the first line.
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if size > self._max_headers:
            await self._refuse(431, f"the headers are larger than {self._max_headers} bytes", scope, receive, send)
            return
        declared = next((value for name, value in headers if name == b"content-length"), b"0")
        length = int(declared) if declared.isdigit() and len(declared) < 20 else self._max_body + 1
        if length > self._max_body:
            # A client that waits for "100 Continue" has sent nothing yet.
            waits = any(name == b"expect" for name, _ in headers)
            if not waits and length <= self._max_body * DRAIN_FACTOR:
                await self._drain(receive, length)
            await self._refuse_body(scope, receive, send)
            return

        started = False

        async def counted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                # Known only by now: the app has looked at the request's key.
                body.caller = body.caller or scope.get(CALLER) or (scope["client"] or ("",))[0]
                body.add(len(message.get("body", b"")))
                if body.received > self._max_body:
                    raise _BodyTooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            with self._budget.hold() as body:
                await self._app(scope, counted, watched)
        except _BodyTooLarge:
            if started:
                raise
            await self._drain(receive, self._max_body * (DRAIN_FACTOR - 1))
            await self._refuse_body(scope, receive, send)

    async def _refuse_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._refuse(413, f"the body is larger than {self._max_body} bytes", scope, receive, send)

    @staticmethod
    async def _refuse(status: int, message: str, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(status, message, code="request_too_large", headers={"connection": "close"})
        await error_response(error, scope)(scope, receive, send)

    @staticmethod
    async def _drain(receive: Receive, most: int) -> None:
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while most > 0:
                    message = await receive()
                    most -= len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
        except TimeoutError:
            return
