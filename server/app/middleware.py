"""ASGI middleware: request ids, limits of headers and bodies, HEAD and allowed methods, root path, and hosts and origins.

The headers Host and Origin are checked against DNS rebinding and pages of other origins.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.server.app.auth import CALLER
from windlass.server.config.settings import Binding, ServerSettings
from windlass.server.errors import ApiError, body_too_large, error_response, internal_error, is_messages_api
from windlass.server.observability.logging import current_request, request_id, response_headers

_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[\w.-]{1,254}))(?::(?P<port>[0-9]*))?", re.ASCII)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MAX_SHOWN = 200  # characters of a header in a message


def binding_of(listener: socket.socket) -> Binding:
    """The kind of address at which a socket listens. A Unix socket, which browsers reach only by a proxy, counts as a network."""
    return "loopback" if is_loopback_host(listener.getsockname()[0]) else "network"


def is_loopback_host(name: str) -> bool:
    """Whether a host name in lower case or an address always means the machine itself."""
    address = _address(name)
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _split(authority: str) -> tuple[str, str]:
    """Host name in lower case and port of an authority such as `localhost:8000`; "" for each that is absent or malformed."""
    match = _AUTHORITY.fullmatch(authority.lower())
    if match is None:
        return "", ""
    name = (match["ipv6"] or match["name"]).removesuffix(".")
    address = _address(name)
    return name if address is None else str(address), match["port"] or ""


class HostMiddleware:
    """Refuses requests for unknown hosts (421) and of pages of other origins (403); see `ServerSettings`.

    In DNS rebinding a page's own name is resolved to the address of this server, so that the browser takes its requests for
    those of one origin. Such requests have the page's name as their host. No page can do that with an IP address as its host.
    """

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._find_error(dict(scope["headers"])) if scope["type"] == "http" else None
        app = self._app if error is None else error_response(error, scope)
        await app(scope, receive, send)

    def _find_error(self, headers: dict[bytes, bytes]) -> ApiError | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self._settings.checks_hosts and b"host" in headers and not self._knows(_split(host)[0]):
            # RFC 9110, 15.5.20: the request was not meant for this server.
            return ApiError(
                421,
                f"this server does not answer to the host {host[:_MAX_SHOWN]!r}: if clients reach it by this name, start it with "
                f"--allowed-hosts {_split(host)[0] or 'NAME'}",
                param="host",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if self._settings.checks_origins and b"origin" in headers and not self._allows_origin(origin, host, headers):
            return ApiError(
                403,
                f"pages of the origin {origin[:_MAX_SHOWN]!r} may not use this server, whose host is {host[:_MAX_SHOWN]!r}: to "
                "permit them start it with --cors-origin and this origin; if this is its own address, at a proxy that changes "
                "the host, with --allowed-hosts and this name",
                param="origin",
                code="origin_not_allowed",
            )
        return None

    def _knows(self, name: str) -> bool:
        if is_loopback_host(name) or self._is_listed(name):
            return True
        return self._settings.binding != "loopback" and _address(name) is not None  # such as the probes of Kubernetes

    def _is_listed(self, name: str) -> bool:
        return any(
            entry in ("*", name) or (entry.startswith("*.") and name.endswith(entry[1:]))
            for entry in self._settings.allowed_hosts
        )

    def _allows_origin(self, origin: str, host: str, headers: dict[bytes, bytes]) -> bool:
        if "*" in self._settings.cors_origins or origin in self._settings.cors_origins:
            return True
        if headers.get(b"sec-fetch-site") == b"same-origin":  # no page can set it: a proxy has changed the host
            return True
        scheme, _, authority = origin.partition("://")
        (name, port), (own, own_port) = _split(authority), _split(host)
        default = _DEFAULT_PORTS.get(scheme, "")
        return bool(name) and ((name, port or default) == (own, own_port or default) or self._is_listed(name))


UNCOUNTED_BYTES = 64 * 1024  # of each body; the number of such requests is limited instead

# A client in the middle of an upload may never see a response that is sent before the upload ends: up to this many times
# the limit is read and discarded first.
DRAIN_FACTOR = 2

DRAIN_SECONDS = 10.0
_REQUEST_ID_HEADER = b"x-request-id"
_VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")

_logger = logging.getLogger("windlass.server")


class RequestIdMiddleware:
    """Outermost middleware: a request id and `response_headers` on every response, and a response to every failure.

    The id is the client's x-request-id or a new one; `set_request_id` may change it until the response starts.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _REQUEST_ID_HEADER), b"")
        valid = _VALID_REQUEST_ID.fullmatch(given) is not None
        scope["windlass.request_id"] = given.decode() if valid else uuid.uuid4().hex
        current_request.set(scope)  # for this task, which has this request only, and for the tasks it starts
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                found = request_id(scope).encode()
                further = [(name.encode(), value.encode()) for name, value in response_headers(scope).items()]
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID_HEADER, found), *further]
                if is_messages_api(scope):  # its clients read the header under this name
                    message["headers"].append((b"request-id", found))
            await send(message)

        scope["windlass.send"] = send
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            _logger.exception("request %s failed", request_id(scope), exc_info=error)
            await error_response(internal_error(), scope)(scope, receive, send_with_id)


def direct_send(scope: Scope, send: Send) -> Send:
    """The server's own `send`, for the body of a response whose start went through `send`.

    Each middleware wraps `send` to see the start of the response; in a stream every wrapper would cost time at each token.
    """
    direct: Send = scope.get("windlass.send", send)
    return direct


class BodyReservation:
    """The part of a `BodyBudget` that one request's body uses. Set `caller` before the first `add`."""

    def __init__(self, used: Counter[str], max_bytes: int) -> None:
        self._used, self._max_bytes = used, max_bytes
        self.caller = ""
        self.received = self.counted = 0

    def add(self, num_bytes: int) -> None:
        """Count received bytes. Raises ApiError 429 if the budget does not have them now."""
        self.received += num_bytes
        more = max(0, self.received - UNCOUNTED_BYTES) - self.counted
        if more <= 0:
            return
        for whose, used, limit in (
            ("all requests in progress", self._used.total(), self._max_bytes),
            ("your requests in progress", self._used[self.caller], self._max_bytes // 2),
        ):
            if used + more > limit:
                raise ApiError(
                    429,
                    f"the bodies of {whose} may have {limit} bytes together: wait until others are answered, or send less "
                    "at once",
                    code="too_many_bytes",
                    retry_after=1,
                    headers={"connection": "close"},  # the rest of the body is not read
                )
        self._used[self.caller] += more
        self.counted += more


class BodyBudget:
    """Bytes of the bodies of all requests in progress. One caller may use half of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used: Counter[str] = Counter()  # bytes by caller

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are counted now."""
        return self._used.total()

    @contextmanager
    def reserve(self) -> Iterator[BodyReservation]:
        """A body that is counted until the block ends, since its texts are held as long as the request."""
        body = BodyReservation(self._used, self._max_bytes)
        try:
            yield body
        finally:
            self._used[body.caller] -= body.counted
            if self._used[body.caller] == 0:
                del self._used[body.caller]


class _BodyTooLargeError(Exception):
    pass


class LimitsMiddleware:
    """Refuses headers (431) and bodies (413) over their limits. A declared length is refused before a byte is read.

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
        # Name, value, ": " and the line end; path and query are in the first line.
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if size > self._max_headers:
            message = f"the headers are larger than {self._max_headers} bytes"
            error = ApiError(431, message, code="request_too_large", headers={"connection": "close"})
            await error_response(error, scope)(scope, receive, send)
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

        async def receive_counted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                # Known only now: AuthMiddleware has checked the request's key.
                body.caller = body.caller or scope.get(CALLER) or (scope["client"] or ("",))[0]
                body.add(len(message.get("body", b"")))
                if body.received > self._max_body:
                    raise _BodyTooLargeError
            return message

        async def send_observed(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            with self._budget.reserve() as body:
                await self._app(scope, receive_counted, send_observed)
        except _BodyTooLargeError:
            if started:
                raise
            await self._drain(receive, self._max_body * (DRAIN_FACTOR - 1))
            await self._refuse_body(scope, receive, send)

    async def _refuse_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(body_too_large(self._max_body), scope)(scope, receive, send)

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
    """Handles HEAD as GET without the body: status and headers are the same."""

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
    """The methods of a path in the form of the header Allow; empty for an unknown path."""
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
    """The paths that have a route, except those with parameters."""
    paths = (str(getattr(route, "path", "")) for route in routes)
    return sorted({path for path in paths if path and "{" not in path})


class RootPathMiddleware:
    """Changes `/llm/v1/models` to `/v1/models`; paths without the prefix, removed by a proxy, are unchanged.

    It comes before everything that inspects paths, so that keys are required by the path that is routed.
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
