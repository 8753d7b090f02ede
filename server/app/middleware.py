"""ASGI middleware: limits of headers and bodies, HEAD and allowed methods, root path."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.server.errors import ApiError, error_response
from windlass.server.http.request_id import CALLER

UNCOUNTED_BYTES = 64 * 1024  # bytes of each body that are not counted: such requests are bounded by their number


class BodyReservation:
    """What one request's body has been given. Set `caller` before the first `add`."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.caller = ""
        self.received = self.counted = 0

    def add(self, num_bytes: int) -> None:
        """So many more have come; raises ApiError 429 where that is too much now."""
        self.received += num_bytes
        counted = max(0, self.received - UNCOUNTED_BYTES)
        if counted > self.counted:
            self._budget.take(self, counted - self.counted)


class BodyBudget:
    """most: bytes of all bodies together, of which one caller may have half."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reserved_bytes: Counter[str] = Counter()

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are counted now."""
        return self._reserved_bytes.total()

    @contextmanager
    def reserve(self) -> Iterator[BodyReservation]:
        """A body that counts until the block ends, since its texts are kept as long as the request."""
        body = BodyReservation(self)
        try:
            yield body
        finally:
            self._reserved_bytes[body.caller] -= body.counted
            if self._reserved_bytes[body.caller] == 0:
                del self._reserved_bytes[body.caller]

    def take(self, body: BodyReservation, num_bytes: int) -> None:
        """Count more bytes of a body; see `BodyReservation.add`."""
        of_caller = self._reserved_bytes[body.caller] + num_bytes
        if self.reserved_bytes + num_bytes > self._most:
            who, most = "all requests in progress", self._most
        elif of_caller > self._most // 2:
            who, most = "your requests in progress", self._most // 2
        else:
            self._reserved_bytes[body.caller] = of_caller
            body.counted += num_bytes
            return
        raise ApiError(
            429,
            f"the bodies of {who} may have {most} bytes together: wait until others are answered, or send less at once",
            type="rate_limit_error",
            code="too_many_bytes",
            retry_after=1,
            headers={"connection": "close"},  # the rest of the body is not read
        )


# A client that is mid-upload may never see an answer sent before it is done: up to this many bytes beyond the limit
# are read and thrown away first.
DRAIN_FACTOR = 2

DRAIN_SECONDS = 10.0


class _BodyTooLarge(Exception):
    pass


class LimitsMiddleware:
    """431 for headers and 413 for bodies over their limits. A declared length is refused before a byte is read.

    max_total_body_bytes: see `BodyBudget`.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, max_total_body_bytes: int, max_header_bytes: int) -> None:
        self._app = app
        self._budget = BodyBudget(max_total_body_bytes)
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
            with self._budget.reserve() as body:
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


class HeadMiddleware:
    """Answers HEAD as GET, without the body: status and headers are the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


def allowed_methods(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """The methods of a path as the header Allow lists them; empty where there is no such path."""
    found: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    if not found:
        return ""
    if "GET" in found:
        found.add("HEAD")
    return ", ".join(sorted({*found, "OPTIONS"}))


def known_paths(routes: Sequence[BaseRoute]) -> list[str]:
    """The paths that have a route, those with parts that vary aside."""
    paths = (str(getattr(route, "path", "")) for route in routes)
    return sorted({path for path in paths if path and "{" not in path})


class RootPathMiddleware:
    """`/llm/v1/models` becomes `/v1/models`; paths that a proxy has cut already stay as they are.

    It stands before everything that looks at paths, so that keys are asked for by the path that is routed.
    """

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root = root_path
        self._raw = root_path.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._root + "/"):
            scope = {**scope, "path": scope["path"][len(self._root) :]}
            raw = scope.get("raw_path") or b""
            if raw.startswith(self._raw + b"/"):
                scope["raw_path"] = raw[len(self._raw) :]
        await self._app(scope, receive, send)
