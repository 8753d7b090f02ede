"""An app and its engine on an event loop thread inside this process, and the transport of the SDK to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp, Message

from windlass.clients.terminal import LoadingDisplay, stderr_is_terminal
from windlass.engine.errors import EngineDeadError
from windlass.engine.interface.model_info import ModelInfo
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.server_options import ServerOptions, check_log_level
from windlass.server.config.settings import ServerSettings
from windlass.server.serving.request_rotation import check_profiles
from windlass.server.startup.engines import Engines, SupervisedEngine
from windlass.server.startup.launch import make_app, prepare, read_template
from windlass.server.startup.model_defaults import check_context_defaults

T = TypeVar("T")

_LEAVE_SECONDS = 5.0

_CLOSED = "this model was closed: make another LLM"

_FORKED = (
    "this LLM is of the process that made it, and a fork has none of its threads: make one in the process that uses it"
)


class LoopThread:
    """`start` it; `end` it, then `close` it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="windlass", daemon=True)
        self._process = os.getpid()
        self._lock = threading.Lock()  # over the next two: what is accepted is begun before the loop stops
        self._ended = False
        self._pending: set[concurrent.futures.Future[Any]] = set()

    @property
    def forked(self) -> bool:
        """Whether this is a process that has the object alone."""
        return os.getpid() != self._process

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. An interrupt of the caller's thread cancels the work. Raises EngineDeadError behind the end."""
        if self.forked:  # before the lock: perhaps it was held when the process was forked
            work.close()
            raise EngineDeadError(_FORKED)
        with self._lock:
            if self._ended:
                work.close()
                raise EngineDeadError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._pending.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # by the end
            raise EngineDeadError(_CLOSED) from None
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._pending.discard(future)

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Carry out `last`, then accept nothing more, cancel what still runs and wait for the thread."""
        try:
            self.run(last)
        finally:
            with self._lock:
                self._ended = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            with self._lock:
                left = list(self._pending)
            for future in left:  # of work that would not be cancelled
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_exception(EngineDeadError(_CLOSED))

    def close(self) -> None:
        self._loop.close()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_LEAVE_SECONDS)
    for task in others:
        if task.done() and not task.cancelled():
            task.exception()  # it was seen: nothing is logged of it


_logger = logging.getLogger("windlass.server")

Run = Callable[[Coroutine[Any, Any, T]], T]


class _AppExchange(httpx.AsyncByteStream):
    """One request on its way through the app. Iterate for the bytes of its answer; closing it early aborts the request."""

    def __init__(self, app: ASGIApp, request: httpx.Request, body: bytes) -> None:
        self.response_start: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._body: bytes | None = body
        self._disconnected = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()  # None behind the last one
        self._complete = False
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._run(app, _scope(request)))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            if not self.response_start.done():
                self.response_start.set_exception(error)
            else:
                _logger.error("an answer ended with an error of the server", exc_info=error)
                self._error = error
        finally:
            self._parts.put_nowait(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.response_start.set_result(message)
            return
        if body := message.get("body"):
            self._parts.put_nowait(body)
        self._complete = not message.get("more_body", False)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises ReadError where the app ended before its answer did: over a socket, the connection would break."""
        while (part := await self._parts.get()) is not None:
            yield part
        if not self._complete:
            why = "" if self._error is None else f": {self._error}"
            raise httpx.ReadError(f"the server ended its answer early{why}") from self._error

    async def aclose(self) -> None:
        """As a client that goes away: the app ends what it does for it."""
        self._disconnected.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class AppTransport(httpx.AsyncBaseTransport):
    """For code on the event loop on which the app runs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _AppExchange(self._app, request, await request.aread())
        try:
            response_start = await exchange.response_start
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(response_start["status"], headers=response_start["headers"], stream=exchange)


class ThreadTransport(httpx.BaseTransport):
    """For code on other threads. run: has a coroutine carried out on the app's event loop and waits for it.

    Its EngineDeadError, after the end of the loop, is a broken connection to a client.
    """

    def __init__(self, transport: AppTransport, run: Run[Any]) -> None:
        self._transport = transport

        def run_or_fail(work: Coroutine[Any, Any, Any]) -> Any:
            try:
                return run(work)
            except EngineDeadError as error:
                raise httpx.ReadError(str(error)) from error

        self._run = run_or_fail

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        response: httpx.Response = self._run(self._transport.handle_async_request(request))
        assert isinstance(response.stream, _AppExchange)
        stream = _ThreadStream(response.stream, self._run)
        return httpx.Response(response.status_code, headers=response.headers, stream=stream)


class _ThreadStream(httpx.SyncByteStream):
    def __init__(self, exchange: _AppExchange, run: Run[Any]) -> None:
        self._exchange = exchange
        self._run = run

    def __iter__(self) -> Iterator[bytes]:
        parts = aiter(self._exchange)
        while (part := self._run(_next(parts))) is not None:
            yield part

    def close(self) -> None:
        with contextlib.suppress(httpx.ReadError):  # the end of the loop has ended the exchange
            self._run(self._exchange.aclose())


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": None,
        "root_path": "",
    }


class ModelHost:
    """Loads when it is made; raises LoadError or RequestError, one line. `close` it.

    info: the loaded model. transport: for clients on its event loop; other threads have `run`.
    """

    info: ModelInfo

    def __init__(self, model: str | None, engine: EngineOptions, server: ServerOptions, log_level: str) -> None:
        level = check_log_level(log_level)
        template = read_template(server)
        self._loop = LoopThread()
        with contextlib.ExitStack() as undo:
            undo.callback(self._loop.close)
            engines = undo.enter_context(contextlib.closing(Engines(engine, level)))
            path, engine, settings = prepare(model, engine, server)
            client = engines.client(engine, path)
            undo.callback(client.kill)
            client.spawn()  # it loads while the tokenizer is imported and read
            app = make_app(client, path, settings, template)
            state = undo.enter_context(contextlib.closing(app.state.windlass))
            self.transport = AppTransport(app)
            self._loop.start()
            undo.callback(_end, self._loop, client)
            state.text.spawn()
            self.info = self.run(_load(client, settings))
            state.text.wait_loaded()
            # The callbacks hold nothing of this object, so a program that forgets it ends the engine too.
            self._close = weakref.finalize(self, _close, undo.pop_all(), self._loop)

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, worked out on the event loop; see `LoopThread.run`."""
        return self._loop.run(work)

    def close(self) -> None:
        """End the engine and all that runs. Safe to call twice. In a fork it does nothing: the engine is another's."""
        self._close()


async def _load(client: SupervisedEngine, settings: ServerSettings) -> ModelInfo:
    display = LoadingDisplay()
    client.progress = display if stderr_is_terminal() else None
    client.start_nowait()
    try:
        info = await client.wait_ready()
    finally:
        display.stop()
    check_profiles(settings.rope_profiles, info.rotary_groups)
    check_context_defaults(settings, info)
    return info


def _close(undo: contextlib.ExitStack, loop: LoopThread) -> None:
    if loop.forked:  # also at the end of a process that was forked: whoever made the model ends it
        return
    if loop.is_current:  # garbage is collected on any thread, and this one cannot wait for itself
        threading.Thread(target=undo.close, name="windlass-end").start()
    else:
        undo.close()


def _end(loop: LoopThread, client: SupervisedEngine) -> None:
    """End the engine, then what still runs on the loop, then the loop."""
    loop.end(_shut_down(client))


async def _shut_down(client: SupervisedEngine) -> None:
    await client.close()  # requests in flight get their error
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(others, timeout=1.0) if others else None
