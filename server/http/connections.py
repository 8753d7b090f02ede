"""Connection limits: which connections may come and stay, pacing of reads, and refusals without the app."""

from __future__ import annotations

import enum
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

import h11
from pydantic_core import to_json

from windlass.server.config.settings import ConnectionSettings, client_network
from windlass.server.errors import ApiError, unavailable
from windlass.server.http.logs import RateLimitedLogger

PIECES_PER_TURN = 32  # of bodies: a millisecond, as much as a request takes anyway

# A body of more chunks than these is refused where they have fewer bytes on average. Who writes JSON as it is made sends pieces
# of a few bytes, but not thousands of them without a text between.
MANY_CHUNKS, TINY_CHUNK = 4096, 64

# The same of the rest of a body whose request is answered. A client may see its answer only once it has sent all of it.
MAX_DISCARDED_CHUNKS = 64


class PacedConnection(h11.Connection):
    """A server's end. `begin_turn` lets it give events again after it said NEED_DATA because it `has_paused`.

    too_fine: its body was refused for its tiny chunks. unwanted: so is what comes of it after the answer.
    """

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self.too_fine = self.discards_body = False
        self._left = PIECES_PER_TURN
        self._begin_body()

    @property
    def has_paused(self) -> bool:
        """Whether there may be more events in what came, for a later turn."""
        return self._left == 0

    def begin_turn(self) -> None:
        self._left = PIECES_PER_TURN

    def next_event(self) -> Any:
        """As h11 has it. Raises RemoteProtocolError where the chunks are too fine."""
        if self._left == 0 or self.discards_body:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._count(event)
        elif isinstance(event, h11.EndOfMessage):
            self._begin_body()
        return event

    def _begin_body(self) -> None:
        self._chunks = self._bytes = self._discarded_chunks = self._discarded_bytes = 0

    def _count(self, piece: h11.Data) -> None:
        self._left -= 1
        self._chunks += piece.chunk_start
        self._bytes += len(piece.data)
        if self.our_state is h11.DONE:
            self._discarded_chunks += piece.chunk_start
            self._discarded_bytes += len(piece.data)
            many = piece.chunk_end and self._discarded_chunks > MAX_DISCARDED_CHUNKS
            self.discards_body = many and self._discarded_bytes < TINY_CHUNK * self._discarded_chunks
        if piece.chunk_end and self._chunks > MANY_CHUNKS and self._bytes < TINY_CHUNK * self._chunks:
            self.too_fine = True
            raise h11.RemoteProtocolError("a body of tiny chunks")


_logger = logging.getLogger("windlass.server")


class Refusal(enum.Enum):
    """Why a connection is not let in."""

    SERVER_FULL = enum.auto()
    ADDRESS_FULL = enum.auto()


class Connection(Protocol):
    """What is asked of a connection."""

    @property
    def bytes_pending(self) -> int:
        """Bytes of answers that wait to be taken by the client."""
        ...

    @property
    def bytes_acknowledged(self) -> int:
        """Bytes of answers taken so far."""
        ...

    def close_timed_out(self) -> None:
        """End it because its request, or its next one, did not come in time."""
        ...

    def abort(self) -> None:
        """End it at once; what is not sent is lost."""
        ...


class ConnectionRegistry:
    """Each connection owes the head of a request, is idle between two requests, or is busy with one.

    Both kinds of waiting are kept in the order in which they began, so what is overdue stands in front.
    """

    def __init__(self, settings: ConnectionSettings, *, clock: Callable[[], float] | None = None) -> None:
        self._settings = settings
        self._clock = clock = clock or time.monotonic
        self._clients: dict[Connection, str] = {}
        self._counts: Counter[str] = Counter()
        self._awaiting_head: dict[Connection, float] = {}  # since when
        self._idle: dict[Connection, float] = {}
        self._waiting_by_client: dict[str, dict[Connection, None]] = {}  # both kinds, by holder
        self._sending: dict[Connection, tuple[int, float]] = {}  # bytes taken, and when that was seen first
        self._refusal_logs = {reason: RateLimitedLogger(_logger, logging.WARNING, clock=clock) for reason in Refusal}
        self._eviction_log = RateLimitedLogger(_logger, logging.WARNING, clock=clock)
        self._stall_log = RateLimitedLogger(_logger, logging.INFO, clock=clock)

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._clients

    @property
    def sweep_seconds(self) -> float:
        """How often `sweep` should be called."""
        shortest = min(self._settings.header_seconds, self._settings.idle_seconds, self._settings.write_seconds)
        return min(1.0, shortest / 4)

    # ---- letting in --------------------------------------------------------------------------------------------------
    def refuse(self, address: str) -> Refusal | None:
        """Why nobody more may come from this address, None if a connection may: `add` it then.

        Where all places are taken, one that waits loses its place to the newcomer, so half-open connections never lock
        others out: the oldest of the newcomer's own address, so that a flood from one address closes only its own;
        else whoever has owed the head of a request for longest; else whoever has been idle for longest.
        """
        if self._counts[client_network(address)] >= self._settings.max_per_address and not self._settings.trusts(
            address
        ):
            self._refusal_logs[Refusal.ADDRESS_FULL].log(
                f"{address} holds {self._settings.max_per_address} connections, the most of one address "
                "(--max-connections-per-address): another was refused"
            )
            return Refusal.ADDRESS_FULL
        if len(self._clients) < self._settings.max_connections:
            return None
        for waiting in (self._waiting_by_client.get(client_network(address), {}), self._awaiting_head, self._idle):
            for evicted in waiting:
                if evicted.bytes_pending:  # the last of its answer is still on the way
                    continue
                self._eviction_log.log(
                    f"{self._settings.max_connections} connections are open (--max-connections): one that waited without "
                    "a request was closed for another"
                )
                self.remove(evicted)
                evicted.abort()
                return None
        self._refusal_logs[Refusal.SERVER_FULL].log(
            f"all of {self._settings.max_connections} connections are at work (--max-connections): another was refused"
        )
        return Refusal.SERVER_FULL

    def add(self, connection: Connection, address: str) -> None:
        """Count a connection from now on; it owes the head of its first request."""
        self._clients[connection] = client_network(address)
        self._counts[self._clients[connection]] += 1
        self.mark_awaiting_head(connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection; unknown ones are ignored."""
        if connection not in self._clients:
            return
        self.mark_busy(connection)
        self._sending.pop(connection, None)
        of = self._clients.pop(connection)
        self._counts[of] -= 1
        if self._counts[of] == 0:
            del self._counts[of]

    # ---- what each is doing ------------------------------------------------------------------------------------------
    def mark_awaiting_head(self, connection: Connection) -> None:
        """A request may begin, or has begun, to come; saying it again changes nothing."""
        self._wait(connection, self._awaiting_head)

    def mark_idle(self, connection: Connection) -> None:
        """It has had its answer; saying it again changes nothing."""
        self._wait(connection, self._idle)

    def mark_busy(self, connection: Connection) -> None:
        """The head of its request is there: what follows has bounds of its own."""
        for waiting in (self._awaiting_head, self._idle):
            waiting.pop(connection, None)
        of = self._clients.get(connection, "")
        own = self._waiting_by_client.get(of, {})
        own.pop(connection, None)
        if not own:
            self._waiting_by_client.pop(of, None)

    def _wait(self, connection: Connection, waiting: dict[Connection, float]) -> None:
        if connection not in self._clients or connection in waiting:
            return
        self.mark_busy(connection)
        waiting[connection] = self._clock()
        self._waiting_by_client.setdefault(self._clients[connection], {})[connection] = None

    def mark_sending(self, connection: Connection) -> None:
        """Something waits to be taken by the client."""
        if connection in self._clients and connection not in self._sending:
            self._sending[connection] = (connection.bytes_acknowledged, self._clock())

    # ---- ending ------------------------------------------------------------------------------------------------------
    def sweep(self) -> None:
        """Close whatever is overdue."""
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
        for connection, (taken, since) in list(self._sending.items()):
            if not connection.bytes_pending:
                del self._sending[connection]
            elif connection.bytes_acknowledged != taken:
                self._sending[connection] = (connection.bytes_acknowledged, now)
            elif now - since >= self._settings.write_seconds:
                self._stall_log.log(
                    f"a client of {self._clients[connection]} took no byte of its answer for "
                    f"{self._settings.write_seconds:g} s and was dropped"
                )
                connection.abort()

    def abort_all(self) -> None:
        """End every connection at once."""
        for connection in list(self._clients):
            connection.abort()


RETRY_AFTER_SECONDS = 1


def _prepared(error: ApiError) -> tuple[bytes, bytes]:
    """An answer without its id: what stands before it and behind it."""
    body = to_json(error.body())
    headers = {"content-type": "application/json", "content-length": len(body), "connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "x-request-id: "]).encode(), b"\r\n\r\n" + body


_REQUEST_TIMEOUT = _prepared(ApiError(408, "the request did not come in time: its headers", code="header_timeout"))

_MALFORMED = _prepared(ApiError(400, "what was sent is no HTTP/1.1 request", code="malformed_request"))

_TOO_FINE = _prepared(
    ApiError(
        400,
        f"the body came in more than {MANY_CHUNKS} chunks of less than {TINY_CHUNK} bytes on average: send it in larger pieces",
        code="tiny_chunks",
    )
)

_REFUSALS = {
    Refusal.SERVER_FULL: _prepared(
        unavailable(
            "the server holds as many connections as it can",
            code="too_many_connections",
            retry_after=RETRY_AFTER_SECONDS,
        )
    ),
    Refusal.ADDRESS_FULL: _prepared(
        ApiError(
            429,
            "your address holds as many connections as it may: close some, or use them again",
            type="rate_limit_error",
            code="too_many_connections",
            retry_after=RETRY_AFTER_SECONDS,
        )
    ),
}


def refusal_response(reason: Refusal) -> bytes:
    """To somebody who may not stay."""
    return _with_id(_REFUSALS[reason])


def timeout_response() -> bytes:
    """To somebody whose request has begun and did not come in time."""
    return _with_id(_REQUEST_TIMEOUT)


def malformed_response() -> bytes:
    """To somebody who does not speak HTTP, or breaks off doing so."""
    return _with_id(_MALFORMED)


def too_fine() -> bytes:
    """To somebody whose body takes more time to read than it is worth."""
    return _with_id(_TOO_FINE)


def _with_id(prepared: tuple[bytes, bytes]) -> bytes:
    return uuid.uuid4().hex.encode().join(prepared)
