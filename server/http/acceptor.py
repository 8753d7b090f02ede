"""Accepts connections from a listening socket, refuses those that may not stay, pauses while the system has no room.

Knows sockets and asyncio; `Connections` says who may stay, and the protocol what a connection does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from windlass.server.http.connections import Connections
from windlass.server.http.occasional import Occasional
from windlass.server.http.refusals import refused
from windlass.server.http.tls import use_small_buffers
from windlass.server.http.uvicorn_protocol import HttpProtocol

ACCEPTS_PER_TURN = 32  # of the event loop: requests in progress wait no longer than these take
TLS_GOODBYE_SECONDS = 1.0
PAUSE_SECONDS = 0.25  # after an error; the listener stays readable, and trying at once would take the whole core

_logger = logging.getLogger("windlass.server")


class Acceptor:
    """Serves `listener` from `start` to `close`, which closes it.

    make_protocol: makes the protocol of a connection that was let in. tls: None for plain connections. A handshake is part of
    the time that a connection has for the head of its first request, and its connection counts like any other.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], HttpProtocol],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        if tls is not None:
            use_small_buffers()
        # Who ends a connection waits for the other end's word only so long.
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_shutdown_timeout": TLS_GOODBYE_SECONDS}
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._said = Occasional(_logger, logging.ERROR)

    def start(self) -> None:
        """Accept from now on; without effect once closed."""
        self._retry = None
        if self._listener.fileno() >= 0:
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept nothing more. Safe to call twice."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # nobody is waiting
            except OSError as error:
                self._said.say(f"no connection can be accepted: {error.strerror or error}")
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(PAUSE_SECONDS, self.start)
                return
            self._let_in(connection, address[0] if address else "")  # who comes to a Unix socket has none

    def _let_in(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        refusal = self._connections.refuse(address)
        if refusal is not None:
            with connection, contextlib.suppress(OSError):
                if not self._tls:  # else nobody could read it
                    connection.send(refused(refusal))
            return
        protocol = self._make_protocol()
        if self._tls:
            protocol.shaking_hands = connection
        self._connections.add(protocol, address)
        task = self._loop.create_task(self._connect(connection, protocol))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _connect(self, connection: socket.socket, protocol: HttpProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._tls)
        except OSError:  # it is gone already, or what it said is no TLS
            self._connections.remove(protocol)
            connection.close()
