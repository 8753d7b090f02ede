"""uvicorn's server with bounds on connections and on the time to stop."""

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

from windlass.server.config.settings import ConnectionSettings
from windlass.server.http.connections import ConnectionRegistry, refusal_response
from windlass.server.http.listener import use_small_buffers
from windlass.server.http.logs import RateLimitedLogger
from windlass.server.http.uvicorn_protocol import HttpProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp


ACCEPTS_PER_TURN = 32  # of the event loop: requests in progress wait no longer than these take

TLS_SHUTDOWN_SECONDS = 1.0

ACCEPT_RETRY_SECONDS = 0.25  # after an error; the listener stays readable, and trying at once would take the whole core

_logger = logging.getLogger("windlass.server")


class Acceptor:
    """Serves `listener` from `start` to `close`, which closes it.

    make_protocol: makes the protocol of a connection that was let in. tls: None for plain connections. A handshake is part of
    the time that a connection has for the head of its first request, and its connection counts like any other.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: ConnectionRegistry,
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
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_shutdown_timeout": TLS_SHUTDOWN_SECONDS}
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._error_log = RateLimitedLogger(_logger, logging.ERROR)

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
                self._error_log.log(f"no connection can be accepted: {error.strerror or error}")
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self.start)
                return
            self._admit(connection, address[0] if address else "")  # who comes to a Unix socket has none

    def _admit(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        refusal = self._connections.refuse(address)
        if refusal is not None:
            with connection, contextlib.suppress(OSError):
                if not self._tls:  # else nobody could read it
                    connection.send(refusal_response(refusal))
            return
        protocol = self._make_protocol()
        if self._tls:
            protocol.handshake_socket = connection
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


_CLOSE = (b"connection", b"close")

TASK_SECONDS = 1  # for requests to notice that their connection is gone


class HttpServer(uvicorn.Server):
    """Serves `app` on `listener`, which it closes, from `serve` to `stop`. It handles no signals.

    max_header_bytes: where the app bounds headers itself, a little more than that. tls: None for plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        settings: ConnectionSettings,
        *,
        max_header_bytes: int,
        access_log: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=HttpProtocol,  # over h11: httptools would put no bound on headers
            ws="none",
            log_config=None,
            access_log=access_log,
            server_header=False,
            forwarded_allow_ips=[str(network) for network in settings.trusted_proxies],
            timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]  # fractions serve as well
            timeout_graceful_shutdown=TASK_SECONDS,
            h11_max_incomplete_event_size=max_header_bytes,
        )
        super().__init__(config)
        self.registry = ConnectionRegistry(settings)
        self._warned = RateLimitedLogger(_logger, logging.WARNING)
        self._listener = listener
        self._tls = tls
        self._acceptor: Acceptor | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    def retire(self) -> None:
        """Accept nothing more, and answer on: each answer from now on says that its connection ends with it.

        A client that would reuse the connection of an answer before still can, once.
        """
        if self._acceptor is not None:
            self._acceptor.close()
        self.config.encoded_headers.append(_CLOSE)  # what uvicorn takes once a second
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]

    async def stop(self, seconds: float) -> None:
        """Accept nothing more, give requests in progress up to so many seconds, then cut every connection."""
        if self._acceptor is not None:
            self._acceptor.close()
        for protocol in list(self.server_state.connections):
            protocol.shutdown()  # at once without a request, else after its answer
        deadline = time.monotonic() + seconds
        while len(self.registry) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.registry.abort_all()
        self.should_exit = True

    # ---- what uvicorn calls ------------------------------------------------------------------------------------------
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

    # ---- the parts ---------------------------------------------------------------------------------------------------
    def _make_protocol(self) -> HttpProtocol:
        arguments: dict[str, Any] = {
            "config": self.config,
            "server_state": self.server_state,
            "app_state": self.lifespan.state,
        }
        return HttpProtocol(**arguments, registry=self.registry, warned=self._warned)

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(self.registry.sweep_seconds, self._sweep)
        self.registry.sweep()
