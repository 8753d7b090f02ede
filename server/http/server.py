"""HTTP server: uvicorn's, with limited connections and a shutdown within a given time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

from windlass.server.http.connection_limits import ConnectionRegistry, ConnectionSettings
from windlass.server.http.http_protocol import HttpProtocol
from windlass.server.http.listener import use_small_tls_buffers
from windlass.server.observability.logging import RateLimitedLogger

if TYPE_CHECKING:
    from starlette.types import ASGIApp

ACCEPTS_PER_TURN = 32  # of the event loop: requests in progress wait no longer than these take
ACCEPT_RETRY_SECONDS = 0.25  # after an error; the listener stays readable, so an immediate retry would occupy a core
TLS_SHUTDOWN_SECONDS = 1.0  # to wait for the other end when a connection is closed
TASK_SECONDS = 1  # for requests to notice that their connection was closed

_logger = logging.getLogger("windlass.server")


class Acceptor:
    """Accepts connections of `listener` from `start` to `close`, which closes it.

    make_protocol: creates the protocol of an accepted connection. tls: None for plain connections. A TLS handshake is part of
    the time for the head of the first request, and its connection is counted like any other.
    """

    def __init__(
        self,
        listener: socket.socket,
        registry: ConnectionRegistry,
        make_protocol: Callable[[], HttpProtocol],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._registry = registry
        self._make_protocol = make_protocol
        if tls is not None:
            use_small_tls_buffers()
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_shutdown_timeout": TLS_SHUTDOWN_SECONDS}
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._error_log = RateLimitedLogger(_logger, logging.ERROR)

    def start(self) -> None:
        """Begin to accept; no effect once closed."""
        self._retry = None
        if self._listener.fileno() >= 0:
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting. Safe to call twice."""
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
                return  # no client is waiting
            except OSError as error:
                self._error_log.log(
                    f"new connections cannot be accepted: {error.strerror or error}; "
                    f"the next attempt is in {ACCEPT_RETRY_SECONDS:g} s"
                )
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self.start)
                return
            self._admit(connection, address[0] if address else "")  # clients of a Unix socket have no address

    def _admit(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        refusal = self._registry.refuse(address)
        if refusal is not None:
            with connection, contextlib.suppress(OSError):
                if not self._tls:  # a plain response would be unreadable
                    connection.send(refusal.render())
            return
        protocol = self._make_protocol()
        if self._tls:
            protocol.handshake_socket = connection
        self._registry.add(protocol, address)
        task = self._loop.create_task(self._connect(connection, protocol))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _connect(self, connection: socket.socket, protocol: HttpProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._tls)
        except OSError:  # it is already closed, or sent something other than TLS
            self._registry.remove(protocol)
            connection.close()


class HttpServer(uvicorn.Server):
    """Serves `app` on `listener`, which it closes, from `serve` to `stop`. It handles no signals.

    max_header_bytes: slightly more than the limit of the app, which refuses larger headers with a response.
    max_body_bytes: the limit of the app; larger chunks are refused before they arrive.
    tls: None for plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        settings: ConnectionSettings,
        *,
        max_header_bytes: int,
        max_body_bytes: int,
        access_log: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=HttpProtocol,  # over h11: httptools does not limit headers
            ws="none",
            log_config=None,
            access_log=access_log,
            server_header=False,
            forwarded_allow_ips=[str(network) for network in settings.trusted_proxies],
            timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]  # fractions work as well
            timeout_graceful_shutdown=TASK_SECONDS,
            h11_max_incomplete_event_size=max_header_bytes,
        )
        super().__init__(config)
        self.registry = ConnectionRegistry(settings)
        self._warning_log = RateLimitedLogger(_logger, logging.WARNING)
        self._listener = listener
        self._max_body_bytes = max_body_bytes
        self._tls = tls
        self._acceptor: Acceptor | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    def retire(self) -> None:
        """Stop accepting but continue to respond; each response from now on announces that its connection closes.

        A client that reuses the connection of an earlier response still can, once.
        """
        if self._acceptor is not None:
            self._acceptor.close()
        self.config.encoded_headers.append(CLOSE_HEADER)  # uvicorn copies these once a second
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE_HEADER]

    async def stop(self, seconds: float) -> None:
        """Stop accepting, wait up to `seconds` for requests in progress, then abort every connection."""
        if self._acceptor is not None:
            self._acceptor.close()
        for protocol in list(self.server_state.connections):
            protocol.shutdown()  # immediately if it has no request, else after its response
        deadline = time.monotonic() + seconds
        while len(self.registry) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.registry.abort_all()
        self.should_exit = True

    # ---- called by uvicorn -------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handlers close the listener at the first signal, and raise the signal again at the end.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._acceptor = Acceptor(self._listener, self.registry, self._make_protocol, tls=self._tls)
        self._acceptor.start()
        self._sweep()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets=[])
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _make_protocol(self) -> HttpProtocol:
        arguments: dict[str, Any] = {
            "config": self.config,
            "server_state": self.server_state,
            "app_state": self.lifespan.state,
        }
        return HttpProtocol(
            **arguments, registry=self.registry, warning_log=self._warning_log, max_body_bytes=self._max_body_bytes
        )

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(self.registry.sweep_seconds, self._sweep)
        self.registry.sweep()
