"""Connections for the measured requests: HTTP/1.1 by h11 on asyncio protocols, kept alive and used again.

Times are taken when bytes arrive: the callback that reads the socket hands them to the answer's reader, and no task wakes
up per chunk. They are of `time.perf_counter`, as the other clock of Windows ticks every 16 ms. httpx spends nearly three
times the processor time on a chunk (benchmarks/load_generator.py). Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
import time
from collections.abc import Mapping
from typing import Any

import h11
import httpx

from windlass.clients.loadtest.stream import AnswerReader

_MAX_HEAD_BYTES = 64 * 1024
_LOOK_UP_SECONDS = 10.0
MAX_IDLE_SECONDS = 1.0  # servers close idle connections after 2 seconds and more
# Some servers close the connection after each stream, a moment after its end and whatever their headers promise: llama.cpp's.
PROOF_SECONDS = 0.1


class TimedConnection(asyncio.Protocol):
    """One connection, which carries one exchange after the other."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self.idle_since: float | None = None  # None before its first answer

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, reader: AnswerReader, request: h11.Request, body: bytes) -> None:
        """Send a request; its answer goes to `reader`."""
        assert self._transport is not None
        if not self.open:
            reader.broken(time.perf_counter(), "the server closed the connection")
            return
        self._reader = reader
        parts = [self._http.send(request), self._http.send(h11.Data(data=body)), self._http.send(h11.EndOfMessage())]
        self._transport.writelines([part for part in parts if part])

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    # ---- called by asyncio -------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        when = time.perf_counter()
        try:
            self._http.receive_data(data)
            self._take_events(when)
        except h11.RemoteProtocolError as error:
            self._fail("malformed", f"the answer is no proper HTTP: {error}", when)

    def eof_received(self) -> bool:
        when = time.perf_counter()
        try:
            self._http.receive_data(b"")
            self._take_events(when)  # the end of a body without a length
        except h11.RemoteProtocolError:
            self._lost(when, "the connection was closed before the answer was complete")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.closed(self)
        self._lost(time.perf_counter(), f"the connection broke: {error or 'closed by the server'}")

    # ---- the parts ---------------------------------------------------------------------------------------------------
    def _take_events(self, when: float) -> None:
        while True:
            event = self._http.next_event()
            reader = self._reader
            if event is h11.NEED_DATA or event is h11.PAUSED or reader is None:
                return
            if isinstance(event, h11.Data):
                reader.data(bytes(event.data), when)
            elif isinstance(event, h11.Response):
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                reader.head(event.status_code, headers)
            elif isinstance(event, h11.EndOfMessage):
                self._reader = None
                reader.body_end(when)
                self._next_cycle()
                return
            elif isinstance(event, h11.ConnectionClosed):
                return

    def _next_cycle(self) -> None:
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE and self.open:
            self._http.start_next_cycle()
            self._pool.idle(self)
        else:
            self.abort()

    def _lost(self, when: float, what: str) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            if self.idle_since is not None and not reader.begun:
                self._pool.hung_up()
            reader.broken(when, what)

    def _fail(self, outcome: str, what: str, when: float) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.end(outcome, when, what)
        self.abort()


class Pool:
    """Connections to one server. `headers` go with every request; `tls` is for HTTPS."""

    def __init__(self, base_url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None = None) -> None:
        url = httpx.URL(base_url)
        self._host, self._path = url.host, url.raw_path.decode("ascii").rstrip("/")
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = tls
        self._address: str | None = None
        fields = {"host": url.netloc.decode("ascii"), "accept": "text/event-stream", "content-type": "application/json"}
        self._headers = list({**fields, **headers}.items())
        self._idle: list[TimedConnection] = []
        self._open: set[TimedConnection] = set()
        self._kept: bool | None = None  # whether the server keeps connections after an answer; None: not known yet

    async def take(self) -> TimedConnection:
        """An idle connection, else a new one. Raises OSError where none can be made.

        A request is never sent twice: a server that hangs up is a failure to be counted. So a connection that has been
        idle for long is not used, as the server may be about to close it, and none before one has stayed open for
        PROOF_SECONDS after its answer, as the server may close them all.
        """
        if self._kept is None:
            self._kept = any(c.open and _idle_seconds(c) >= PROOF_SECONDS for c in self._idle) or None
        while self._kept and self._idle:
            connection = self._idle.pop()
            if connection.open and _idle_seconds(connection) < MAX_IDLE_SECONDS:
                return connection
            connection.abort()
        return await self._connect()

    async def look_up(self) -> None:
        """Find the address of a server that is given by name, ahead of what is measured. Failures show later."""
        with contextlib.suppress(ValueError):
            self._address = str(ipaddress.ip_address(self._host))
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LOOK_UP_SECONDS):
                (await self._connect()).abort()

    def request(self, path: str, body: bytes) -> h11.Request:
        """The head of a request."""
        headers: list[Any] = [*self._headers, ("content-length", str(len(body)))]
        return h11.Request(method="POST", target=self._path + path, headers=headers)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    # ---- told by connections -----------------------------------------------------------------------------------------
    def opened(self, connection: TimedConnection) -> None:
        self._open.add(connection)

    def idle(self, connection: TimedConnection) -> None:
        connection.idle_since = time.perf_counter()
        if self._kept is False:
            connection.abort()
        else:
            self._idle.append(connection)

    def hung_up(self) -> None:
        """The server closed a connection between two requests: from now on each request gets a new one."""
        self._kept = False

    def closed(self, connection: TimedConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
            if _idle_seconds(connection) < MAX_IDLE_SECONDS:
                self.hung_up()

    async def _connect(self) -> TimedConnection:
        loop = asyncio.get_running_loop()
        # Names are looked up once: a look-up per connection would be measured as the server's latency.
        host = self._address or self._host
        name = self._host if self._tls is not None else None
        transport, connection = await loop.create_connection(
            lambda: TimedConnection(self), host, self._port, ssl=self._tls, server_hostname=name
        )
        self._address = transport.get_extra_info("peername")[0]
        return connection


def _idle_seconds(connection: TimedConnection) -> float:
    """How long ago its last answer ended; 0 before the first."""
    return 0.0 if connection.idle_since is None else time.perf_counter() - connection.idle_since
