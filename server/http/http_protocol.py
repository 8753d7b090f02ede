"""HTTP/1.1 protocol of one connection: uvicorn's over h11, paced, and reporting its state to `ConnectionRegistry`.

It knows uvicorn and asyncio's transports; `connection_limits` decides which connection may wait for how long.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import re
import socket
import struct
import termios
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn, cast

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from windlass.server.http import connection_limits as limits
from windlass.server.http.connection_limits import ConnectionRegistry, PreparedResponse
from windlass.server.observability.logging import AccessLog, RateLimitedLogger

# The system would buffer megabytes that a client never reads, and hide for minutes that it does not read.
UNSENT_BYTES = 64 * 1024

# h11 joins folded lines and repeated lengths before it returns a request.
_END_OF_HEAD = re.compile(rb"\n\r?\n")

_FOLDED = re.compile(rb"\n[ \t]")
_CONTENT_LENGTH = re.compile(rb"\ncontent-length:([^\n]*)", re.IGNORECASE)
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)

# More digits than h11 reads as the size of a chunk.
_OVERLONG_SIZE = re.compile(rb"[0-9A-Fa-f]{21}")


class PacedConnection(h11.Connection):
    """The server's end of h11. It parses a share of the received bytes in each turn of the event loop.

    It is stricter than h11, since a proxy in front may read ambiguous requests differently: see `_check_request`.

    refusal: the response to what it refuses with RemoteProtocolError. discards_body: the rest of a body after its response is
    discarded, because of its tiny chunks.
    """

    def __init__(self, max_incomplete_event_size: int, max_body_bytes: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self.refusal = limits.MALFORMED_REQUEST
        self.discards_body = False
        self._max_body_bytes = max_body_bytes
        self._left = limits.PIECES_PER_TURN
        self._begin_body()

    @property
    def has_paused(self) -> bool:
        """Whether the received bytes may hold more events, for the next turn (see `begin_turn`)."""
        return self._left == 0

    def begin_turn(self) -> None:
        """Return events again after NEED_DATA because of `has_paused`."""
        self._left = limits.PIECES_PER_TURN

    def next_event(self) -> Any:
        """See h11. Raises RemoteProtocolError also for ambiguous requests, and for tiny and oversized chunks."""
        if self._left == 0 or self.discards_body:
            return h11.NEED_DATA
        received = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == HTTPStatus.NOT_IMPLEMENTED:
                self.refusal = limits.UNKNOWN_CODING
            raise
        if isinstance(event, h11.Request):
            return self._check_request(event, received)
        if isinstance(event, h11.Data):
            self._count(event)
        elif isinstance(event, h11.EndOfMessage):
            self._begin_body()
        if self.their_state is h11.SEND_BODY:
            self._check_chunk_size(waiting=event is h11.NEED_DATA)
        return event

    def _check_request(self, request: h11.Request, received: bytes) -> h11.Request:
        """Refuse a request whose end or fields another recipient may see elsewhere (RFC 9112, 5.2, 6.1 and 6.3).

        With both Transfer-Encoding and Content-Length the first applies, and the connection closes after the response. A target
        in absolute form, as proxies receive it, becomes one in origin form (3.2.2).
        """
        end = _END_OF_HEAD.search(received)
        assert end is not None
        lengths = _CONTENT_LENGTH.findall(received, 0, end.start())
        if _FOLDED.search(received, 0, end.start()):
            self._refuse(limits.FOLDED_LINE)
        if len(lengths) > 1 or any(b"," in value for value in lengths):
            self._refuse(limits.CONTENT_LENGTHS)
        request = self._in_origin_form(request)
        if not any(name == b"transfer-encoding" for name, _ in request.headers):
            return request
        if request.http_version < b"1.1":
            self._refuse(limits.MALFORMED_REQUEST)
        if not lengths:
            return request
        headers = [(name, value) for name, value in request.headers if name != b"content-length"]
        return h11.Request(
            method=request.method,
            target=request.target,
            headers=[*headers, CLOSE_HEADER],
            http_version=request.http_version,
        )

    def _in_origin_form(self, request: h11.Request) -> h11.Request:
        """The request with its target as a path. The host of the target replaces that of the header, which is ignored."""
        found = _ABSOLUTE_TARGET.fullmatch(request.target)
        if found is None:
            return request
        host, target = found.groups()
        if not host or b"@" in host:
            self._refuse(limits.MALFORMED_REQUEST)
        others = [(name, value) for name, value in request.headers if name != b"host"]
        return h11.Request(
            method=request.method,
            target=target if target.startswith(b"/") else b"/" + target,
            headers=[(b"host", host), *others],
            http_version=request.http_version,
        )

    def _check_chunk_size(self, *, waiting: bool) -> None:
        """Refuse a chunk above the limit of the body as soon as its size is known: its bytes may never arrive.

        waiting: whether h11 needs further bytes; only then may an overlong size be incomplete, and the buffer is copied.
        """
        # h11 has no other access to the size of a chunk.
        missing = getattr(self._reader, "_bytes_in_chunk", 0)
        if missing > self._max_body_bytes:
            self._refuse(limits.oversized_chunk(self._max_body_bytes))
        if waiting and not missing and _OVERLONG_SIZE.match(self.trailing_data[0]):
            self._refuse(limits.MALFORMED_REQUEST)

    def _refuse(self, refusal: PreparedResponse) -> NoReturn:
        self.refusal = refusal
        raise h11.RemoteProtocolError("refused by PacedConnection")

    def _begin_body(self) -> None:
        self._chunks = self._bytes = self._discarded_chunks = self._discarded_bytes = 0

    def _count(self, piece: h11.Data) -> None:
        self._left -= 1
        self._chunks += piece.chunk_start
        self._bytes += len(piece.data)
        if self.our_state is h11.DONE:
            self._discarded_chunks += piece.chunk_start
            self._discarded_bytes += len(piece.data)
            many = piece.chunk_end and self._discarded_chunks > limits.MAX_DISCARDED_CHUNKS
            self.discards_body = many and self._discarded_bytes < limits.TINY_CHUNK * self._discarded_chunks
        if piece.chunk_end and self._chunks > limits.MANY_CHUNKS and self._bytes < limits.TINY_CHUNK * self._chunks:
            self._refuse(limits.TINY_CHUNKS)


class HttpProtocol(H11Protocol):
    """A `Connection` that was added to `registry`. warning_log: shared by all connections, for uvicorn's warnings.

    max_body_bytes: larger chunks are refused before they arrive.
    """

    def __init__(
        self,
        *args: Any,
        registry: ConnectionRegistry,
        warning_log: RateLimitedLogger,
        max_body_bytes: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        assert self.config.h11_max_incomplete_event_size is not None
        self.conn: PacedConnection = PacedConnection(self.config.h11_max_incomplete_event_size, max_body_bytes)
        self._next_turn: asyncio.Handle | None = None
        self._registry = registry
        self.handshake_socket: socket.socket | None = None  # to abort a connection that has no transport yet
        # uvicorn calls only methods that these two have.
        self.logger = cast(logging.Logger, _WarningLog(self.logger, warning_log, self._replacement_warning))
        self.access_logger = cast(logging.Logger, AccessLog(self.access_logger))

    # ---- called by asyncio -------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn types it
        self.handshake_socket = None
        sock = transport.get_extra_info("socket")
        # Not available everywhere, nor for a connection that is already closed.
        with contextlib.suppress(AttributeError, OSError):
            # Otherwise the data after a response's headers waits 40 ms for an acknowledgement. asyncio sets it only for
            # listeners that were created for TCP by name.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        super().connection_made(_CountingTransport(transport, self))  # type: ignore[arg-type]
        if self not in self._registry:  # it was evicted before it had a transport to close
            self.abort()

    def data_received(self, data: bytes) -> None:
        self.conn.begin_turn()
        super().data_received(data)
        self._pace()
        self._update_registry()

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.remove(self)
        super().connection_lost(exc)

    # ---- called by uvicorn -------------------------------------------------------------------------------------------
    def on_response_complete(self) -> None:
        self.conn.begin_turn()  # the next request may have arrived already
        super().on_response_complete()
        self._pace()
        self._update_registry()

    def send_400_response(self, msg: str) -> None:
        # Data after a response, such as the rest of a body, cannot get another response.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(self.conn.refusal.render())
            self.conn.send_failed()  # the task of the request, if any, can send nothing more
        self.transport.close()

    def _replacement_warning(self) -> str | None:
        return "A body in thousands of tiny chunks was refused." if self.conn.refusal is limits.TINY_CHUNKS else None

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.warning(
            "a client asked for another protocol (upgrade), which is not supported; the response used HTTP/1.1"
        )

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # a response that failed partway
            self.abort()

    # ---- called by `ConnectionRegistry` ------------------------------------------------------------------------------
    @property
    def bytes_pending(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    @property
    def bytes_acknowledged(self) -> int:
        return 0 if self.transport is None else cast(_CountingTransport, self.transport).acknowledged()

    def close_timed_out(self) -> None:
        """See `Connection`; a request that has partly arrived gets a 408."""
        if (
            self.transport is None or self.transport.is_closing()
        ):  # without a transport: just accepted, or in its handshake
            self.abort()
            return
        if self._has_begun():
            self.transport.write(limits.HEADER_TIMEOUT.render())
        self.transport.close()

    def abort(self) -> None:
        """See `Connection`."""
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake_socket is not None:
            with contextlib.suppress(OSError):
                self.handshake_socket.shutdown(socket.SHUT_RDWR)  # the handshake then fails

    def on_unsent(self) -> None:
        """The client has not read everything that was written."""
        self._registry.mark_sending(self)

    def _pace(self) -> None:
        """Continue in the next turn of the event loop if this turn has had its share. Nothing more is read until then."""
        transport = cast(_CountingTransport, self.transport)
        if self.conn.discards_body:
            transport.close()
        transport.hold_reading(self.conn.has_paused)
        if self.conn.has_paused and self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._continue_reading)

    def _continue_reading(self) -> None:
        self._next_turn = None
        if self.transport.is_closing():
            return
        self.conn.begin_turn()
        self.handle_events()
        self._pace()
        self._update_registry()

    def _update_registry(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._registry.mark_busy(self)
        elif self.transport.is_closing():
            return
        elif self._has_begun():
            self._registry.mark_awaiting_head(self)
        elif self.cycle is not None:
            # Also while the unused rest of a body arrives, so that a body sent slowly does not keep the connection open.
            self._registry.mark_idle(self)

    def _has_begun(self) -> bool:
        """Whether a part of a request's head has arrived."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])


class _CountingTransport:
    """A transport that counts written bytes and reports data that the client has not read.

    It reads unless paused by uvicorn or by `hold_reading`.
    """

    def __init__(self, transport: asyncio.Transport, protocol: HttpProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._written = 0  # bytes
        self._paused = self._held = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)
        if self._transport.get_write_buffer_size():
            self._protocol.on_unsent()

    def pause_reading(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if not self._held:
            self._transport.resume_reading()

    def hold_reading(self, held: bool) -> None:
        if held == self._held:
            return
        self._held = held
        if held:
            self._transport.pause_reading()
        elif not self._paused:
            self._transport.resume_reading()

    def acknowledged(self) -> int:
        """Bytes that the client's system has acknowledged or, where that is unknown, that this system has accepted."""
        waiting = 0
        with contextlib.suppress(OSError):
            descriptor = self._transport.get_extra_info("socket").fileno()
            (waiting,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return self._written - self._transport.get_write_buffer_size() - waiting


class _WarningLog:
    """Replaces a connection's logger, whose warnings are about bytes that are not HTTP.

    replacement: returns the text to log instead of a warning, or None.
    """

    def __init__(
        self, logger: logging.Logger, warning_log: RateLimitedLogger, replacement: Callable[[], str | None]
    ) -> None:
        self._logger = logger
        self._warning_log = warning_log
        self._replacement = replacement

    @property
    def level(self) -> int:
        return self._logger.level

    def warning(self, message: str) -> None:
        """Logged at most once a minute for all connections together."""
        self._warning_log.log(self._replacement() or message)

    def error(self, message: str, *args: Any, **options: Any) -> None:
        """A failed request: always logged."""
        self._logger.error(message, *args, **options)

    def log(self, level: int, message: str, *args: Any) -> None:
        """Traces, if enabled."""
        self._logger.log(level, message, *args)
