"""Measured requests: connections, streamed responses, and the records of requests."""

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

MAX_IDLE_SECONDS = 1.0  # servers close idle connections after 2 seconds or later

# Some servers (llama.cpp) close the connection shortly after the end of each stream, although their headers keep it open.
KEEP_ALIVE_PROOF_SECONDS = 0.1

_MAX_HEAD_BYTES = 64 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_MAX_MESSAGE_CHARS = 300
_RESOLVE_SECONDS = 10.0

# Finish reasons with which servers abort a request.
_ABORT_REASONS = frozenset({"abort", "aborted", "error", "cancelled"})

# Outcomes after which the rest of the response is not read. Otherwise the connection ends, or is reused.
_ABORT_OUTCOMES = frozenset({"timeout", "disconnected", "interrupted", "aborted", "malformed"})

# Limits of this process and of its machine: without files the generator, not the server, has failed.
_FILE_LIMIT_ERRNOS = (errno.EMFILE, errno.ENFILE)

_NON_STREAM_TYPES = frozenset({"application/json", "text/html"})
_TEXT_FIELDS = ("text", "content")
_REASONING_FIELDS = ("reasoning_content", "reasoning")


class TimedResponse:
    """One response with the times of its chunks. `finished` is called once, when its outcome is known.

    disconnect_after: number of chunks with tokens after which the client disconnects. keep: record the text.
    """

    def __init__(
        self, finished: Callable[[], None], *, disconnect_after: int | None = None, keep: bool = False
    ) -> None:
        self._finished = finished
        self._leave_after = disconnect_after
        self._keep = keep
        self._decoder = SSEDecoder()
        self._status: int | None = None
        self._body = bytearray()  # unless it is a stream
        self._streams = False
        self.chunks: list[float] = []
        self.ended: float | None = None
        self.outcome: str | None = None
        self.message: str | None = None
        self.finish_reason: str | None = None
        self.request_id: str | None = None
        self.usage: Mapping[str, Any] = {}
        self.reused_tokens: int | None = None  # None: the server does not report reused passages
        self.text: list[str] = []
        self.token_ids: list[int] | None = None
        self.sent: float | None = None

    @property
    def has_started(self) -> bool:
        """Whether the status line has arrived."""
        return self._status is not None

    def on_headers(self, status: int, headers: Mapping[str, str]) -> None:
        """Receive the status and the headers."""
        self._status = status
        self.request_id = headers.get("x-request-id")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        self._streams = status == 200 and kind not in _NON_STREAM_TYPES  # some servers mislabel their streams

    def on_data(self, data: bytes, when: float) -> None:
        """Receive bytes of the body, which arrived at `when`."""
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
        """Receive the end of the body."""
        if self.outcome is not None:
            return
        if self._streams:
            self.end("truncated", when, f"the stream ended without {self._missing_parts()}")
        elif self._status == 200:
            self.end("malformed", when, f"the response is not an event stream: {_shorten(_decode(self._body))}")
        else:
            self.end(f"http_{self._status}", when, _error_text(_decode(self._body)))

    def on_connection_lost(self, when: float, what: str) -> None:
        """Handle a broken connection."""
        if self.has_started:
            self.end("truncated", when, f"{what}, after {len(self.chunks)} chunks and without {self._missing_parts()}")
        else:
            self.end("connection", when, what)

    def end(self, outcome: str, when: float, message: str | None = None) -> None:
        """Set the outcome. Only the first call counts."""
        if self.outcome is None:
            self.outcome, self.ended = outcome, when
            self.message = None if message is None else _shorten(message)
            self._finished()

    def _missing_parts(self) -> str:
        return "[DONE]" if self.finish_reason is not None else "a finish reason and [DONE]"

    def _event(self, data: str, kind: str, when: float) -> None:
        if data == "[DONE]":
            if self.finish_reason is None:
                self.end("truncated", when, "[DONE] came without a finish reason")
            else:
                self.end("completed", when)
            return
        try:
            payload = json.loads(data)
        except (ValueError, RecursionError):
            self.end("malformed", when, f"an event is not JSON: {data}")
            return
        if kind == "error" or (isinstance(payload, dict) and payload.get("error")):
            self.end("error_event", when, _error_text(data))
            return
        try:
            self._chunk(payload, when)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            self.end("malformed", when, f"an event is not a chunk of a response: {data}")

    def _chunk(self, payload: Mapping[str, Any], when: float) -> None:
        if usage := payload.get("usage"):
            self.usage = {**usage}
        if rotary := payload.get("rotary"):
            self.reused_tokens = _token_count((rotary.get("context") or {}).get("reused_tokens"), 0)
        for choice in payload.get("choices") or ():
            part = choice.get("delta") or choice
            ids = choice.get("token_ids")
            text = _first_text(part, _TEXT_FIELDS)
            reasoning = "" if text else _first_text(part, _REASONING_FIELDS)
            reason = choice.get("finish_reason")
            if reason is not None and not isinstance(reason, str):
                raise TypeError
            # Without any visible token, the first token counts as arriving at the end.
            if text or reasoning or ids or part.get("tool_calls") or (reason is not None and not self.chunks):
                self.chunks.append(when)
            if ids is not None:
                self.token_ids = (self.token_ids or []) + ids
            if self._keep and text:  # without reasoning, which the next turn of a chat must not send back
                self.text.append(text)
            if reason is not None:
                self.finish_reason = reason
                if reason in _ABORT_REASONS:
                    self.end("aborted", when, f"the server aborted it with finish_reason {reason!r}")
                    return
        if self._leave_after is not None and len(self.chunks) >= self._leave_after:
            self.end("disconnected", when, f"the client disconnected after {len(self.chunks)} chunks, as planned")


def _first_text(part: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first non-empty text under these names. Raises TypeError for another type."""
    for name in names:
        if text := part.get(name):
            if not isinstance(text, str):
                raise TypeError
            return text
    return ""


def _token_count(value: Any, default: int) -> int:
    """A number of tokens from a server, `default` for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _decode(body: bytes | bytearray) -> str:
    return body.decode("utf-8", "replace")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 1] + "…"


def _error_text(body: str) -> str:
    """The message of an OpenAI error object, otherwise the body."""
    try:
        data = json.loads(body)
        error = data.get("error", data)
        found = error.get("message") if isinstance(error, dict) else error
        return str(found) if found else body
    except (ValueError, AttributeError, RecursionError):
        return body


class TimedConnection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._response: TimedResponse | None = None
        self.idle_since: float | None = None  # None before its first response

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, response: TimedResponse, request: h11.Request, body: bytes) -> None:
        """Send a request whose response goes to `response`."""
        assert self._transport is not None
        if not self.open:
            response.on_connection_lost(time.perf_counter(), "the server closed the connection")
            return
        self._response = response
        parts = [self._http.send(request), self._http.send(h11.Data(data=body)), self._http.send(h11.EndOfMessage())]
        self._transport.writelines([part for part in parts if part])

    def abort(self) -> None:
        """Close immediately."""
        if self._transport is not None:
            self._transport.abort()

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
            self._fail("malformed", f"the response is not valid HTTP: {error}", when)

    def eof_received(self) -> bool:
        when = time.perf_counter()
        try:
            self._http.receive_data(b"")
            self._take_events(when)  # the end of a body without a length
        except h11.RemoteProtocolError:
            self._lost(when, "the connection was closed before the response was complete")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.closed(self)
        self._lost(time.perf_counter(), f"the connection broke: {error or 'closed by the server'}")

    def _take_events(self, when: float) -> None:
        while True:
            event = self._http.next_event()
            response = self._response
            if event is h11.NEED_DATA or event is h11.PAUSED or response is None:
                return
            if isinstance(event, h11.Data):
                response.on_data(bytes(event.data), when)
            elif isinstance(event, h11.Response):
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                response.on_headers(event.status_code, headers)
            elif isinstance(event, h11.EndOfMessage):
                self._response = None
                response.on_body_end(when)
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
        response, self._response = self._response, None
        if response is not None:
            if self.idle_since is not None and not response.has_started:
                self._pool.disable_keep_alive()
            response.on_connection_lost(when, what)

    def _fail(self, outcome: str, what: str, when: float) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.end(outcome, when, what)
        self.abort()


class Pool:
    """Connections to one server. headers: sent with every request. tls: for HTTPS."""

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
        self._keep_alive: bool | None = None  # whether the server keeps connections open; None: not known yet

    async def acquire(self) -> TimedConnection:
        """An idle connection, otherwise a new one. Raises OSError where none can be made.

        A request is never sent twice, since a closed connection counts as a failure of the server. A connection is
        therefore not reused after MAX_IDLE_SECONDS, when the server may be about to close it, nor before any has remained
        open for KEEP_ALIVE_PROOF_SECONDS after its response, as the server may close all of them.
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
        """Resolve the name of the server before requests are measured. Errors appear with the first request."""
        with contextlib.suppress(ValueError):
            self._address = str(ipaddress.ip_address(self._host))
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_RESOLVE_SECONDS):
                (await self._connect()).abort()

    def request(self, path: str, body: bytes) -> h11.Request:
        headers: list[Any] = [*self._headers, ("content-length", str(len(body)))]
        return h11.Request(method="POST", target=self._path + path, headers=headers)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def opened(self, connection: TimedConnection) -> None:
        self._open.add(connection)

    def idle(self, connection: TimedConnection) -> None:
        connection.idle_since = time.perf_counter()
        if self._keep_alive is False:
            connection.abort()
        else:
            self._idle.append(connection)

    def disable_keep_alive(self) -> None:
        """Use a new connection for each request, since the server closed one between two requests."""
        self._keep_alive = False

    def closed(self, connection: TimedConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
            if _idle_seconds(connection) < MAX_IDLE_SECONDS:
                self.disable_keep_alive()

    async def _connect(self) -> TimedConnection:
        loop = asyncio.get_running_loop()
        # The name is resolved once. Resolving it per connection would count as latency of the server.
        host = self._address or self._host
        name = self._host if self._tls is not None else None
        transport, connection = await loop.create_connection(
            lambda: TimedConnection(self), host, self._port, ssl=self._tls, server_hostname=name
        )
        self._address = transport.get_extra_info("peername")[0]
        return connection


def _idle_seconds(connection: TimedConnection) -> float:
    """Seconds since the end of its last response; 0 before the first."""
    return 0.0 if connection.idle_since is None else time.perf_counter() - connection.idle_since


class RequestSender:
    """Sends requests over a pool. timeout_s: per request, from its send. keep: record texts and token ids."""

    def __init__(self, pool: Pool, timeout_s: float, *, keep: bool = False) -> None:
        self._pool, self._timeout_s, self._keep = pool, timeout_s, keep
        self._active: set[TimedResponse] = set()
        self._ended_chunks = 0

    @property
    def chunks(self) -> int:
        """Number of chunks with tokens received so far."""
        return self._ended_chunks + sum(len(response.chunks) for response in self._active)

    async def send_request(
        self,
        request: PreparedRequest,
        done: Callable[[RequestRecord], None],
        *,
        index: int = 0,
        intended: float = 0.0,
        start: float = 0.0,
    ) -> RequestRecord:
        """Send `request` and return its record, which `done` receives in any case, also on cancellation.

        start: of the run, by `time.perf_counter`. intended: in seconds since then. Raises nothing but CancelledError.
        """
        sent = time.perf_counter()
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def mark_finished() -> None:
            if not finished.done():
                finished.set_result(None)

        response = TimedResponse(mark_finished, disconnect_after=request.disconnect_after, keep=self._keep)
        self._active.add(response)
        connection: TimedConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                connection = await self._pool.acquire()
                connection.send(response, self._pool.request(request.path, request.body), request.body)
                await finished
        except OSError as error:  # includes TimeoutError, which the system also raises for a connection
            now = time.perf_counter()
            if clock.expired():
                response.end("timeout", now, f"no complete response within {self._timeout_s:g} s")
            elif error.errno in _FILE_LIMIT_ERRNOS:
                response.end("unsent", now, f"the load generator has no file left for a connection: {error}")
            else:
                response.end("connection", now, f"cannot connect: {error}")
        except asyncio.CancelledError:
            response.end("interrupted", time.perf_counter(), "the run was stopped")
            raise
        finally:
            self._active.discard(response)
            self._ended_chunks += len(response.chunks)
            if connection is not None and (response.outcome or "interrupted") in _ABORT_OUTCOMES:
                connection.abort()
            usage = response.usage
            details = usage.get("prompt_tokens_details")
            cached = _token_count(details.get("cached_tokens"), -1) if isinstance(details, dict) else -1
            record = RequestRecord(
                index=index,
                intended=intended,
                sent=sent - start,
                chunks=tuple(when - start for when in response.chunks),
                ended=None if response.ended is None else response.ended - start,
                input_tokens=_token_count(usage.get("prompt_tokens"), request.input_tokens),
                output_tokens=_token_count(usage.get("completion_tokens"), len(response.chunks)),
                cached_tokens=None if cached < 0 else cached,
                reused_tokens=response.reused_tokens,
                outcome=response.outcome or "interrupted",
                message=response.message,
                label=request.label,
                request_id=response.request_id,
                asked_tokens=request.output_tokens,
                finish_reason=response.finish_reason,
                text="".join(response.text) if self._keep else None,
                token_ids=tuple(response.token_ids) if self._keep and response.token_ids is not None else None,
            )
            done(record)
        return record
