"""One connection: uvicorn's HTTP/1.1 protocol, which tells `ConnectionRegistry` what it is doing.

Knows uvicorn and asyncio's transports; who may wait for how long is decided by `ConnectionRegistry`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from windlass.server.http.connections import (
    ConnectionRegistry,
    PacedConnection,
    malformed_response,
    timeout_response,
    too_fine,
)
from windlass.server.http.logs import AccessLog, RateLimitedLogger, WarningsLog

# The system would take megabytes that a client never reads, and nobody would notice for minutes that it does not.
UNSENT_BYTES = 64 * 1024


class HttpProtocol(H11Protocol):
    """A `Connection` of `registry`, which it must have been added to. warned: what uvicorn warns of."""

    def __init__(self, *args: Any, registry: ConnectionRegistry, warned: RateLimitedLogger, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.config.h11_max_incomplete_event_size is not None
        self.conn: PacedConnection = PacedConnection(self.config.h11_max_incomplete_event_size)
        self._next_turn: asyncio.Handle | None = None
        self._registry = registry
        self.handshake_socket: socket.socket | None = None  # until there is a transport: what to cut
        # uvicorn calls nothing but what these two have.
        self.logger = cast(logging.Logger, WarningsLog(self.logger, warned, self._better_warning))
        self.access_logger = cast(logging.Logger, AccessLog(self.access_logger))

    # ---- what asyncio calls ------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn has it so
        self.handshake_socket = None
        sock = transport.get_extra_info("socket")
        # Not everywhere, and not on a connection that is gone already.
        with contextlib.suppress(AttributeError, OSError):
            # Else what follows a response's headers waits 40 ms for their acknowledgement. asyncio does it by itself only
            # where the listener was made for TCP by name.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        super().connection_made(_CountingTransport(transport, self))  # type: ignore[arg-type]
        if self not in self._registry:  # it lost its place before it had a transport to close
            self.abort()

    def data_received(self, data: bytes) -> None:
        self.conn.begin_turn()
        super().data_received(data)
        self._pace()
        self._update_registry()

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.remove(self)
        super().connection_lost(exc)

    # ---- what uvicorn calls ------------------------------------------------------------------------------------------
    def on_response_complete(self) -> None:
        self.conn.begin_turn()  # the next request may have come already
        super().on_response_complete()
        self._pace()
        self._update_registry()

    def send_400_response(self, msg: str) -> None:
        # What follows an answer, as the rest of a body does, cannot be answered again.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(too_fine() if self.conn.too_fine else malformed_response())
            self.conn.send_failed()  # nothing more is sent by whoever still works on the request
        self.transport.close()

    def _better_warning(self) -> str | None:
        return "A body in thousands of tiny chunks was refused." if self.conn.too_fine else None

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.warning("A client asked for an upgrade to another protocol; it was answered in HTTP/1.1.")

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # an answer that failed in its middle
            self.abort()

    # ---- what `ConnectionRegistry` asks -------------------------------------------------------------------------------------
    @property
    def bytes_pending(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    @property
    def bytes_acknowledged(self) -> int:
        return 0 if self.transport is None else cast(_CountingTransport, self.transport).acknowledged()

    def close_timed_out(self) -> None:
        """See `Connection`; a request that has begun to come gets a 408."""
        if self.transport is None:  # let in a moment ago, or its handshake takes too long
            self.abort()
            return
        if self.transport.is_closing():
            self.abort()
            return
        if self._has_begun():
            self.transport.write(timeout_response())
        self.transport.close()

    def abort(self) -> None:
        """See `Connection`."""
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake_socket is not None:
            with contextlib.suppress(OSError):
                self.handshake_socket.shutdown(socket.SHUT_RDWR)  # the handshake then fails

    def on_unsent(self) -> None:
        """The client has not taken all that was written."""
        self._registry.mark_sending(self)

    # ---- the parts ---------------------------------------------------------------------------------------------------
    def _pace(self) -> None:
        """Go on in the next turn of the event loop where this one has had its share; nothing more is read meanwhile."""
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
            # Also while the rest of a body comes that nobody wants: however it comes, it does not keep the place.
            self._registry.mark_idle(self)

    def _has_begun(self) -> bool:
        """Whether a request has begun to come whose head is not complete."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])


class _CountingTransport:
    """A transport that counts what is written, and says when the client does not take all of it at once.

    It reads while neither uvicorn has paused it nor `hold_reading` holds it.
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
        """Bytes that the client's system has confirmed, or, where this one does not tell, that this one has taken."""
        waiting = 0
        with contextlib.suppress(OSError):
            descriptor = self._transport.get_extra_info("socket").fileno()
            (waiting,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return self._written - self._transport.get_write_buffer_size() - waiting
