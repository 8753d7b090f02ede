"""Connection limits: settings, a registry that admits, evicts and times out connections, and responses sent without the app."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Protocol

from pydantic_core import to_json

from windlass.engine.errors import LoadError
from windlass.server.config.option import split
from windlass.server.config.server_options import ConnectionOptions
from windlass.server.errors import INVALID_REQUEST, ApiError, body_too_large, unavailable
from windlass.server.observability.logging import RateLimitedLogger

Network = IPv4Network | IPv6Network

ALL_NETWORKS: tuple[Network, ...] = (ip_network("0.0.0.0/0"), ip_network("::/0"))
_LOCALHOST: tuple[Network, ...] = (IPv4Network("127.0.0.1"),)
MAX_OPEN_FILES = 65536  # requested where the hard limit is higher or absent
RESERVED_DESCRIPTORS = 128  # for the engine's pipes, the listener, files and worker processes
PIECES_PER_TURN = 32  # of bodies in one turn of the event loop: about a millisecond, as long as any request takes

# A body with more than MANY_CHUNKS chunks is refused if they have fewer than TINY_CHUNK bytes on average. Clients that write
# JSON incrementally send chunks of a few bytes, but not thousands of them without a text in between.
MANY_CHUNKS, TINY_CHUNK = 4096, 64

# The same for the rest of a body whose request is answered. A client may read its response only after it has sent everything.
MAX_DISCARDED_CHUNKS = 64

RETRY_AFTER_SECONDS = 1

_logger = logging.getLogger("windlass.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Limits of connections; times are seconds.

    max_connections: in total. max_per_address: per client network (see `client_network`).
    trusted_proxies: networks whose X-Forwarded-For is used, and to which max_per_address does not apply.
    header_seconds: from the start of a connection, or the first byte of a further request, to the end of the request's
    headers. idle_seconds: between two requests. write_seconds: with unsent data of which the client acknowledges nothing.
    """

    max_connections: int = 8192
    max_per_address: int = 512
    trusted_proxies: tuple[Network, ...] = _LOCALHOST
    header_seconds: float = 10.0
    idle_seconds: float = 75.0
    write_seconds: float = 60.0

    @classmethod
    def from_options(cls, options: ConnectionOptions) -> ConnectionSettings:
        """Settings from options. Raises LoadError for a proxy that is not an address."""
        proxies = split(options.forwarded_allow_ips)
        return cls(
            max_connections=options.max_connections,
            max_per_address=options.max_connections_per_address,
            trusted_proxies=_networks(proxies) if proxies else _LOCALHOST,
            header_seconds=options.header_timeout,
            idle_seconds=options.keep_alive_timeout,
            write_seconds=options.write_timeout,
        )

    def capped_by_files(self, descriptors: int) -> ConnectionSettings:
        """The same settings with at most as many connections as a process with that many file descriptors can hold."""
        total = max(1, min(self.max_connections, descriptors - RESERVED_DESCRIPTORS))
        return replace(self, max_connections=total, max_per_address=min(self.max_per_address, total))

    def trusts(self, address: str) -> bool:
        """Whether an address belongs to `trusted_proxies`. "", a client of a Unix socket, does: file permissions restrict it."""
        if not address:
            return True
        parsed = ip_address(address.partition("%")[0])
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(parsed in network for network in self.trusted_proxies)


def client_network(address: str) -> str:
    """The unit by which connections are counted: an IPv4 address, or an IPv6 network of 64 bits, which has one owner."""
    if ":" not in address:
        return address
    parsed = ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or ip_network((parsed, 64), strict=False))


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, at most to MAX_OPEN_FILES. Returns the limit now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS refuses more than the kernel's own limit, regardless of the hard limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def _networks(given: list[str]) -> tuple[Network, ...]:
    if "*" in given:
        return ALL_NETWORKS
    networks = []
    for text in given:
        try:
            networks.append(ip_network(text))
        except ValueError:
            raise LoadError(
                f"`forwarded_allow_ips` {text} is not an address: write 10.0.0.7, a network such as 10.0.0.0/8, or *"
            ) from None
    return tuple(networks)


# ---- responses without the app ---------------------------------------------------------------------------------------
class PreparedResponse:
    """An error response that closes its connection, complete except for the request id."""

    def __init__(self, error: ApiError) -> None:
        body = to_json(error.body())
        headers: Mapping[str, object] = {
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
            **error.headers,
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._parts = "\r\n".join([*lines, "x-request-id: "]).encode(), b"\r\n\r\n" + body

    def render(self) -> bytes:
        """The bytes of the response, with a new request id."""
        return uuid.uuid4().hex.encode().join(self._parts)


SERVER_FULL = PreparedResponse(
    unavailable(
        "the server has reached its limit of connections", code="too_many_connections", retry_after=RETRY_AFTER_SECONDS
    )
)

ADDRESS_FULL = PreparedResponse(
    ApiError(
        429,
        "this address has reached its limit of connections: close some of them, or reuse them",
        code="too_many_connections",
        retry_after=RETRY_AFTER_SECONDS,
    )
)

HEADER_TIMEOUT = PreparedResponse(ApiError(408, "the headers did not arrive in time", code="header_timeout"))

MALFORMED_REQUEST = PreparedResponse(
    ApiError(400, "the received bytes are not an HTTP/1.1 request", code="malformed_request")
)

FOLDED_LINE = PreparedResponse(
    ApiError(400, "a header line begins with a space or tab: send each header on one line", code="malformed_request")
)

CONTENT_LENGTHS = PreparedResponse(
    ApiError(400, "there are several values of Content-Length: send one", code="malformed_request")
)

UNKNOWN_CODING = PreparedResponse(
    ApiError(
        501,
        "Transfer-Encoding must be chunked, and given once",
        type=INVALID_REQUEST,
        code="unsupported_transfer_encoding",
    )
)

TINY_CHUNKS = PreparedResponse(
    ApiError(
        400,
        f"the body has more than {MANY_CHUNKS} chunks of less than {TINY_CHUNK} bytes on average: send larger chunks",
        code="tiny_chunks",
    )
)


def oversized_chunk(max_body_bytes: int) -> PreparedResponse:
    """Refusal of a chunk whose size alone is above the limit of a body."""
    return PreparedResponse(body_too_large(max_body_bytes))


# ---- the registry ----------------------------------------------------------------------------------------------------
class Connection(Protocol):
    """A connection as the registry uses it."""

    @property
    def bytes_pending(self) -> int:
        """Bytes of responses that are not sent yet."""
        ...

    @property
    def bytes_acknowledged(self) -> int:
        """Bytes of responses that the client has acknowledged."""
        ...

    def close_timed_out(self) -> None:
        """Close it because its request, or its next one, did not arrive in time."""
        ...

    def abort(self) -> None:
        """Close it immediately; unsent data is lost."""
        ...


class ConnectionRegistry:
    """Connections of a server. Each one awaits the head of a request, is idle between two requests, or is busy with one.

    Both kinds of waiting connections are ordered by the time at which they began to wait, so overdue ones come first.
    """

    def __init__(self, settings: ConnectionSettings, *, clock: Callable[[], float] | None = None) -> None:
        self._settings = settings
        self._clock = clock = clock or time.monotonic
        self._clients: dict[Connection, str] = {}  # to the client network
        self._counts: Counter[str] = Counter()
        self._awaiting_head: dict[Connection, float] = {}  # since when
        self._idle: dict[Connection, float] = {}
        self._waiting_by_client: dict[str, dict[Connection, None]] = {}  # of both kinds
        self._sending: dict[Connection, tuple[int, float]] = {}  # bytes acknowledged, and since when
        self._full_log = RateLimitedLogger(_logger, logging.WARNING, clock=clock)
        self._address_log = RateLimitedLogger(_logger, logging.WARNING, clock=clock)
        self._eviction_log = RateLimitedLogger(_logger, logging.WARNING, clock=clock)
        self._stall_log = RateLimitedLogger(_logger, logging.INFO, clock=clock)

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._clients

    @property
    def sweep_seconds(self) -> float:
        """Interval at which `sweep` should be called."""
        shortest = min(self._settings.header_seconds, self._settings.idle_seconds, self._settings.write_seconds)
        return min(1.0, shortest / 4)

    def refuse(self, address: str) -> PreparedResponse | None:
        """The response that refuses another connection of this address; None if it may be added (see `add`).

        If the server is full, a waiting connection is closed for the new one, so half-open connections cannot lock out other
        clients: the oldest waiting one of the same client network, so that a flood closes only its own connections; else the
        one that has awaited a request head for longest; else the one that has been idle for longest.
        """
        limits, client = self._settings, client_network(address)
        if self._counts[client] >= limits.max_per_address and not limits.trusts(address):
            self._address_log.log(
                f"a connection was refused: {address} already has {limits.max_per_address} connections "
                "(--max-connections-per-address raises the limit)"
            )
            return ADDRESS_FULL
        if len(self._clients) < limits.max_connections:
            return None
        for waiting in (self._waiting_by_client.get(client, {}), self._awaiting_head, self._idle):
            for evicted in waiting:
                if evicted.bytes_pending:  # the end of its response is not sent yet
                    continue
                self._eviction_log.log(
                    f"all {limits.max_connections} connections are in use: one without a request was closed for a new one "
                    "(--max-connections raises the limit)"
                )
                self.remove(evicted)
                evicted.abort()
                return None
        self._full_log.log(
            f"a connection was refused: all {limits.max_connections} connections are busy (--max-connections raises the limit)"
        )
        return SERVER_FULL

    def add(self, connection: Connection, address: str) -> None:
        """Count a connection, which then awaits the head of its first request."""
        self._clients[connection] = client_network(address)
        self._counts[self._clients[connection]] += 1
        self.mark_awaiting_head(connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection; unknown ones are ignored."""
        if connection not in self._clients:
            return
        self.mark_busy(connection)
        self._sending.pop(connection, None)
        client = self._clients.pop(connection)
        self._counts[client] -= 1
        if self._counts[client] == 0:
            del self._counts[client]

    def mark_awaiting_head(self, connection: Connection) -> None:
        """A request may arrive, or its head has begun to. Repeated calls have no effect."""
        self._wait(connection, self._awaiting_head)

    def mark_idle(self, connection: Connection) -> None:
        """The last response is complete. Repeated calls have no effect."""
        self._wait(connection, self._idle)

    def mark_busy(self, connection: Connection) -> None:
        """The head of a request is complete; its body and response have limits of their own."""
        for waiting in (self._awaiting_head, self._idle):
            waiting.pop(connection, None)
        client = self._clients.get(connection, "")
        own = self._waiting_by_client.get(client, {})
        own.pop(connection, None)
        if not own:
            self._waiting_by_client.pop(client, None)

    def mark_sending(self, connection: Connection) -> None:
        """Some data is not sent yet."""
        if connection in self._clients and connection not in self._sending:
            self._sending[connection] = (connection.bytes_acknowledged, self._clock())

    def sweep(self) -> None:
        """Close all overdue connections."""
        now = self._clock()
        for waiting, seconds in (
            (self._awaiting_head, self._settings.header_seconds),
            (self._idle, self._settings.idle_seconds),
        ):
            overdue = []
            for connection, since in waiting.items():
                if now - since < seconds:
                    break
                overdue.append(connection)
            for connection in overdue:
                connection.close_timed_out()
        for connection, (acknowledged, since) in list(self._sending.items()):
            if not connection.bytes_pending:
                del self._sending[connection]
            elif connection.bytes_acknowledged != acknowledged:
                self._sending[connection] = (connection.bytes_acknowledged, now)
            elif now - since >= self._settings.write_seconds:
                self._stall_log.log(
                    f"a client at {self._clients[connection]} was disconnected: it read nothing of its answer for "
                    f"{self._settings.write_seconds:g} s (WINDLASS_WRITE_TIMEOUT)"
                )
                connection.abort()

    def abort_all(self) -> None:
        """Close every connection immediately."""
        for connection in list(self._clients):
            connection.abort()

    def _wait(self, connection: Connection, waiting: dict[Connection, float]) -> None:
        if connection not in self._clients or connection in waiting:
            return
        self.mark_busy(connection)
        waiting[connection] = self._clock()
        self._waiting_by_client.setdefault(self._clients[connection], {})[connection] = None
