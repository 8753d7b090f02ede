"""Measured requests: connections, streamed responses, and the record of each request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

import h11
import httpx

from windlass.clients.loadtest.results import RequestRecord
from windlass.clients.loadtest.workload import PreparedRequest
from windlass.clients.sse import SSEDecoder

_MAX_ERROR_BYTES = 64 * 1024

_MAX_MESSAGE = 300

# The finish reasons of servers that gave a request up themselves.
_ABORT_REASONS = frozenset({"abort", "aborted", "error", "cancelled"})

_NON_STREAM_TYPES = frozenset({"application/json", "text/html"})

_TEXT_FIELDS = ("text", "content")

_REASONING_FIELDS = ("reasoning_content", "reasoning")


class TimedResponse:
    """One answer. `finished` is called once, when it is clear how it ended.

    disconnect_after: go away after so many chunks with tokens. keep: whether to keep the text.
    """

    def __init__(
        self, finished: Callable[[], None], *, disconnect_after: int | None = None, keep: bool = False
    ) -> None:
        self._finished = finished
        self._leave_after = disconnect_after
        self._keep = keep
        self._decoder = SSEDecoder()
        self._status: int | None = None
        self._body = bytearray()  # of an answer that is no stream
        self._streams = False
        self.chunks: list[float] = []
        self.ended: float | None = None
        self.outcome: str | None = None
        self.message: str | None = None
        self.finish_reason: str | None = None
        self.request_id: str | None = None
        self.usage: Mapping[str, Any] = {}
        self.reused_tokens: int | None = None  # None: the server tells nothing of passages
        self.text: list[str] = []
        self.token_ids: list[int] | None = None
        self.sent: float | None = None

    # ---- told by the connection --------------------------------------------------------------------------------------
    @property
    def has_started(self) -> bool:
        """Whether the server has said anything."""
        return self._status is not None

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Status line and headers have come."""
        self._status = status
        self.request_id = headers.get("x-request-id")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        self._streams = status == 200 and kind not in _NON_STREAM_TYPES  # some servers mislabel their streams

    def data(self, data: bytes, when: float) -> None:
        """Bytes of the body that arrived at `when`."""
        if self.outcome is not None:
            return
        if not self._streams:
            self._body += data[: _MAX_ERROR_BYTES - len(self._body)]
            return
        try:
            events = self._decoder.feed(data)
        except ValueError as error:
            self.end("malformed", when, str(error))
            return
        for event in events:
            self._event(event.data, event.event, when)
            if self.outcome is not None:
                return

    def on_body_end(self, when: float) -> None:
        """The body is complete."""
        if self.outcome is not None:
            return
        if self._streams:
            self.end("truncated", when, f"the stream ended without {self._missing_parts()}")
        elif self._status == 200:
            self.end("malformed", when, f"the answer is no event stream: {_shorten(_decode(self._body))}")
        else:
            self.end(f"http_{self._status}", when, _error_text(_decode(self._body)))

    def on_connection_lost(self, when: float, what: str) -> None:
        """The connection broke."""
        if self.has_started:
            self.end("truncated", when, f"{what}, after {len(self.chunks)} chunks and without {self._missing_parts()}")
        else:
            self.end("connection", when, what)

    def end(self, outcome: str, when: float, message: str | None = None) -> None:
        """Note how it ended; only the first call counts."""
        if self.outcome is None:
            self.outcome, self.ended = outcome, when
            self.message = None if message is None else _shorten(message)
            self._finished()

    # ---- the parts ---------------------------------------------------------------------------------------------------
    def _missing_parts(self) -> str:
        return "[DONE]" if self.finish_reason is not None else "a finish reason and [DONE]"

    def _event(self, data: str, kind: str, when: float) -> None:
        if data == "[DONE]":
            self._done(when)
            return
        try:
            payload = json.loads(data)
        except (ValueError, RecursionError):
            self.end("malformed", when, f"an event is no JSON: {data}")
            return
        if kind == "error" or (isinstance(payload, dict) and payload.get("error")):
            self.end("error_event", when, _error_text(data))
            return
        try:
            self._chunk(payload, when)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            self.end("malformed", when, f"an event is no chunk of an answer: {data}")

    def _chunk(self, payload: Mapping[str, Any], when: float) -> None:
        if usage := payload.get("usage"):
            self.usage = {**usage}
        if rotary := payload.get("rotary"):
            self.reused_tokens = token_count((rotary.get("context") or {}).get("reused_tokens"), 0)
        for choice in payload.get("choices") or ():
            part = choice.get("delta") or choice
            ids = choice.get("token_ids")
            text = _first_text(part, _TEXT_FIELDS)
            reasoning = "" if text else _first_text(part, _REASONING_FIELDS)
            reason = choice.get("finish_reason")
            # Without a chunk that could be read, the first token counts as arriving at the end.
            if text or reasoning or ids or part.get("tool_calls") or (reason is not None and not self.chunks):
                self.chunks.append(when)
            if ids is not None:
                self.token_ids = (self.token_ids or []) + ids
            if self._keep and text:  # thoughts are no part of the answer, which the next turn of a chat sends back
                self.text.append(text)
            if reason is not None:
                self.finish_reason = reason
                if reason in _ABORT_REASONS:
                    self.end("aborted", when, f"the server ended it with finish_reason {reason!r}")
                    return
        if self._leave_after is not None and len(self.chunks) >= self._leave_after:
            self.end("disconnected", when, f"the client left after {len(self.chunks)} chunks, as planned")

    def _done(self, when: float) -> None:
        if self.finish_reason is None:
            self.end("truncated", when, "[DONE] came without a finish reason")
        else:
            self.end("completed", when)


def _first_text(part: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The text under the first of these names that has any. Raises TypeError for what is no text."""
    for name in names:
        if text := part.get(name):
            if not isinstance(text, str):
                raise TypeError
            return text
    return ""


def token_count(value: Any, default: int) -> int:
    """A number of tokens that a server told, and `default` for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _decode(body: bytes | bytearray) -> str:
    return body.decode("utf-8", "replace")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 1] + "…"


def _error_text(body: str) -> str:
    """The message of an OpenAI error object, else the body as it is."""
    try:
        data = json.loads(body)
        error = data.get("error", data)
        found = error.get("message") if isinstance(error, dict) else error
        return str(found) if found else body
    except (ValueError, AttributeError, RecursionError):
        return body


_MAX_HEAD_BYTES = 64 * 1024

_RESOLVE_SECONDS = 10.0

MAX_IDLE_SECONDS = 1.0  # servers close idle connections after 2 seconds and more

# Some servers close the connection after each stream, a moment after its end and whatever their headers promise: llama.cpp's.
KEEP_ALIVE_PROOF_SECONDS = 0.1


class TimedConnection(asyncio.Protocol):
    """One connection, which carries one exchange after the other."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._reader: TimedResponse | None = None
        self.idle_since: float | None = None  # None before its first answer

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, reader: TimedResponse, request: h11.Request, body: bytes) -> None:
        """Send a request; its answer goes to `reader`."""
        assert self._transport is not None
        if not self.open:
            reader.on_connection_lost(time.perf_counter(), "the server closed the connection")
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
                reader.on_body_end(when)
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
            if self.idle_since is not None and not reader.has_started:
                self._pool.disable_keep_alive()
            reader.on_connection_lost(when, what)

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
        self._keep_alive: bool | None = (
            None  # whether the server keeps connections after an answer; None: not known yet
        )

    async def acquire(self) -> TimedConnection:
        """An idle connection, else a new one. Raises OSError where none can be made.

        A request is never sent twice: a server that hangs up is a failure to be counted. So a connection that has been
        idle for long is not used, as the server may be about to close it, and none before one has stayed open for
        KEEP_ALIVE_PROOF_SECONDS after its answer, as the server may close them all.
        """
        if self._keep_alive is None:
            self._keep_alive = any(c.open and _idle_seconds(c) >= KEEP_ALIVE_PROOF_SECONDS for c in self._idle) or None
        while self._keep_alive and self._idle:
            connection = self._idle.pop()
            if connection.open and _idle_seconds(connection) < MAX_IDLE_SECONDS:
                return connection
            connection.abort()
        return await self._connect()

    async def resolve_address(self) -> None:
        """Find the address of a server that is given by name, ahead of what is measured. Failures show later."""
        with contextlib.suppress(ValueError):
            self._address = str(ipaddress.ip_address(self._host))
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_RESOLVE_SECONDS):
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
        if self._keep_alive is False:
            connection.abort()
        else:
            self._idle.append(connection)

    def disable_keep_alive(self) -> None:
        """The server closed a connection between two requests: from now on each request gets a new one."""
        self._keep_alive = False

    def closed(self, connection: TimedConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
            if _idle_seconds(connection) < MAX_IDLE_SECONDS:
                self.disable_keep_alive()

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


# After these the rest of the answer is not waited for; after others the connection ends by itself, or is used again.
_ABORT_OUTCOMES = frozenset({"timeout", "disconnected", "interrupted", "aborted", "malformed"})

# Of this process, and of its machine: what the generator lacks is no failure of the server.
_FILE_LIMIT_ERRNOS = (errno.EMFILE, errno.ENFILE)


class RequestSender:
    """Requests over a pool. timeout_s: for each of them, from its sending. keep: whether to keep texts and token ids."""

    def __init__(self, pool: Pool, timeout_s: float, *, keep: bool = False) -> None:
        self._pool, self._timeout_s, self._keep = pool, timeout_s, keep
        self._active: set[TimedResponse] = set()
        self._ended_chunks = 0

    @property
    def chunks(self) -> int:
        """Chunks with tokens received until now."""
        return self._ended_chunks + sum(len(reader.chunks) for reader in self._active)

    async def send_request(
        self,
        request: PreparedRequest,
        done: Callable[[RequestRecord], None],
        *,
        index: int = 0,
        intended: float = 0.0,
        start: float = 0.0,
    ) -> RequestRecord:
        """Send `request`; `done` gets its record whatever happens, cancellation included.

        intended: seconds since `start`, by `time.perf_counter`. Never raises but for cancellation.
        """
        sent = time.perf_counter()
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def mark_finished() -> None:
            if not finished.done():
                finished.set_result(None)

        reader = TimedResponse(mark_finished, disconnect_after=request.disconnect_after, keep=self._keep)
        self._active.add(reader)
        connection: TimedConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                connection = await self._pool.acquire()
                connection.send(reader, self._pool.request(request.path, request.body), request.body)
                await finished
        except OSError as error:  # TimeoutError is one: the system's own is a connection that cannot be made
            if clock.expired():
                reader.end("timeout", time.perf_counter(), f"no complete answer within {self._timeout_s:g} s")
            elif error.errno in _FILE_LIMIT_ERRNOS:
                reader.end(
                    "unsent", time.perf_counter(), f"the load generator has no file left for a connection: {error}"
                )
            else:
                reader.end("connection", time.perf_counter(), f"cannot connect: {error}")
        except asyncio.CancelledError:
            reader.end("interrupted", time.perf_counter(), "the run was stopped")
            raise
        finally:
            record = self._close(reader, connection, request, index, intended, sent, start)
            done(record)
        return record

    def _close(
        self,
        reader: TimedResponse,
        connection: TimedConnection | None,
        request: PreparedRequest,
        index: int,
        intended: float,
        sent: float,
        start: float,
    ) -> RequestRecord:
        self._active.discard(reader)
        self._ended_chunks += len(reader.chunks)
        outcome = reader.outcome or "interrupted"
        if connection is not None and outcome in _ABORT_OUTCOMES:
            connection.abort()
        usage = reader.usage
        return RequestRecord(
            index=index,
            intended=intended,
            sent=sent - start,
            chunks=tuple(when - start for when in reader.chunks),
            ended=None if reader.ended is None else reader.ended - start,
            input_tokens=token_count(usage.get("prompt_tokens"), request.input_tokens),
            output_tokens=token_count(usage.get("completion_tokens"), len(reader.chunks)),
            cached_tokens=_cached(usage.get("prompt_tokens_details")),
            reused_tokens=reader.reused_tokens,
            outcome=outcome,
            message=reader.message,
            label=request.label,
            request_id=reader.request_id,
            asked_tokens=request.output_tokens,
            finish_reason=reader.finish_reason,
            text="".join(reader.text) if self._keep else None,
            token_ids=tuple(reader.token_ids) if self._keep and reader.token_ids is not None else None,
        )


def _cached(details: Any) -> int | None:
    cached = token_count(details.get("cached_tokens"), -1) if isinstance(details, dict) else -1
    return None if cached < 0 else cached
