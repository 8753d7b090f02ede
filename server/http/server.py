"""uvicorn's server over a listener that is already open, with bounds on its connections and on the time it takes to stop.

Knows uvicorn; of the app it runs it knows nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from windlass.server.http.acceptor import Acceptor
from windlass.server.http.connections import Connections
from windlass.server.http.occasional import Occasional
from windlass.server.http.uvicorn_protocol import HttpProtocol
from windlass.server.options.connection_settings import ConnectionSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_logger = logging.getLogger("windlass.server")

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
        self.registry = Connections(settings)
        self._warned = Occasional(_logger, logging.WARNING)
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
