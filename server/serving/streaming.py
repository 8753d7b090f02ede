"""Streaming to a client: delayed headers, server-sent events, keep-alives, disconnects and deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from windlass.server.app.middleware import direct_send
from windlass.server.app.state import ServerState, T
from windlass.server.errors import ApiError, bad_request, error_body, internal_error, to_api_error
from windlass.server.observability.logging import request_id

SEND_SLICE_BYTES = 128 * 1024  # bytes sent at once: the server copies them on the event loop
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
ERROR_EVENT_TIMEOUT = 5.0  # for a client that stopped reading to receive its error event

_logger = logging.getLogger("windlass.server")
_JSON_HEADERS = [(b"content-type", b"application/json")]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers events
]


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """Stream events of one API: those of an error, the last one, and keep-alives, which are rendered when they are sent."""

    render_error: Callable[[ApiError], bytes] = lambda error: b"data: " + to_json(error.body()) + b"\n\n"
    done: bytes = DONE
    keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE


OPENAI_STREAM = StreamFormat()


class Exchange(Response):
    """Runs `work(exchange)`, which responds with `send_json`, or with `send_events` and `finish`.

    Headers are sent with the first event or keep-alive comment, so an earlier failure of a stream has its own status code. When
    the client disconnects the work is cancelled, which closes the engine's stream and so aborts the request.

    deadline: monotonic seconds. The engine ends the request then; if it does not, this class does.
    """

    def __init__(
        self,
        state: ServerState,
        work: Callable[[Exchange], Awaitable[None]],
        *,
        deadline: float | None = None,
        stream_format: StreamFormat = OPENAI_STREAM,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = []
        self._state = state
        self._work = work
        self._deadline = deadline
        self._format = stream_format
        self._scope: Scope
        self._send: Send  # through all middleware
        self._send_direct: Send  # bypasses middleware, for the bodies of streams
        self._id = ""  # request id, for the log and the client
        self._task: asyncio.Task[Any] | None = None
        self._closed = False  # the work has ended: no more interruptions
        self._disconnected = False
        self._stop_error: ApiError | None = None
        self._streaming = False
        self._idle = True  # nothing was sent since the last tick of the keep-alive timer
        self._sending = False
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        self._keep_alive_task: asyncio.Task[None] | None = None

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return str(self._scope["path"])

    @property
    def span(self) -> Any:
        """The tracing span of the exchange, if there is one."""
        return self._scope.get("windlass.span")

    @property
    def interruption_code(self) -> str:
        """Error code of an interruption of the work; empty without one."""
        if self._disconnected:
            return "client_disconnected"
        return "" if self._stop_error is None else self._stop_error.code or str(self._stop_error.status)

    # ---- for the work ------------------------------------------------------------------------------------------------
    def begin_stream(self) -> None:
        """Begin a stream: from now on keep-alive comments are sent while there are no events."""
        if self._state.settings.stream_comment_seconds > 0:
            self._schedule_keep_alive()

    async def send_json(self, pieces: Sequence[bytes]) -> None:
        """Send the response: JSON text in pieces."""
        await self._send_body(200, pieces, {})

    async def send_events(self, events: bytes) -> None:
        """Send encoded events, one or several."""
        self._idle = False
        self._sending = True
        await self._finish_keep_alive()
        if not self._streaming:
            await self._start_stream()
        for start in range(0, len(events), SEND_SLICE_BYTES):  # several only for log-probabilities of a long prompt
            part = events[start : start + SEND_SLICE_BYTES]
            await self._send_direct({"type": "http.response.body", "body": part, "more_body": True})
        self._sending = False

    async def finish(self, events: bytes = b"") -> None:
        """Send the last events and the end of a stream."""
        self._stop_keep_alive()
        await self._finish_keep_alive()
        if not self._streaming:
            await self._start_stream()
        await self._send_direct({"type": "http.response.body", "body": events + self._format.done, "more_body": False})

    # ---- for the server ----------------------------------------------------------------------------------------------
    def stop(self, error: ApiError) -> None:
        """End the exchange with this error; no effect once it is ending."""
        self._interrupt(error, disconnected=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._scope = scope
        self._send = send
        self._send_direct = direct_send(scope, send)
        self._id = request_id(scope)
        # In a task of its own, awaiting a token does not resume through the framework's twenty frames.
        self._task = loop.create_task(self._run())
        watcher = loop.create_task(wait_for_disconnect(receive))
        watcher.add_done_callback(self._on_disconnect)
        timer = None
        if self._deadline is not None:
            error = ApiError(504, "the request's deadline passed before it finished", code="deadline_exceeded")
            timer = loop.call_at(self._deadline + self._state.settings.deadline_slack, self.stop, error)
        self._state.register(self)
        try:
            await self._task
        finally:
            self._closed = True
            self._task.cancel()  # no effect unless the server is shutting down
            self._state.unregister(self)
            self._stop_keep_alive()
            if self._keep_alive_task is not None:
                self._keep_alive_task.cancel()  # only now: the end relies on headers that it may be sending
            watcher.cancel()
            if timer is not None:
                timer.cancel()

    async def _run(self) -> None:
        try:
            try:
                await self._work(self)
            except asyncio.CancelledError:
                if self._stop_error is None and not self._disconnected:
                    raise  # the server is shutting down
                assert self._task is not None
                self._task.uncancel()  # the code below may await
                if self._disconnected:
                    # Logged for questions of the client, which does not know how its request ended.
                    _logger.info("request %s: the client disconnected before its answer was complete", self._id)
                    self._state.metrics.count_error("client_disconnected")
                    return
                assert self._stop_error is not None
                raise self._stop_error from None
        except Exception as error:
            self._closed = True
            known = to_api_error(error, retry_after=self._state.settings.retry_after_seconds)
            if known is None:
                _logger.exception("request %s failed", self._id, exc_info=error)
                known = internal_error()
            elif known.status >= 500:
                _logger.info("request %s: answered %d: %s", self._id, known.status, known.message)
            self._state.metrics.count_error(known.code or str(known.status))
            await self._send_error(known)

    # ---- the parts ---------------------------------------------------------------------------------------------------
    def _interrupt(self, reason: ApiError | None, *, disconnected: bool) -> None:
        if self._closed or self._task is None:
            return
        self._closed = True  # a second interruption could cancel the error event of the first
        self._stop_error, self._disconnected = reason, disconnected
        self._task.cancel()

    def _on_disconnect(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and watcher.exception() is None:
            self._interrupt(None, disconnected=True)

    async def _send_error(self, error: ApiError) -> None:
        self._stop_keep_alive()
        try:
            async with asyncio.timeout(ERROR_EVENT_TIMEOUT):
                if self._streaming:
                    await self.finish(self._format.render_error(error))
                else:
                    await self._send_body(error.status, [to_json(error_body(error, self._scope))], error.headers)
        except TimeoutError:
            _logger.info(
                "request %s: the client does not read its stream, which ends without the error event", self._id
            )

    async def _send_body(self, status: int, pieces: Sequence[bytes], headers: dict[str, str]) -> None:
        self._stop_keep_alive()
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send_response(self._send, status, [*_JSON_HEADERS, *encoded], pieces)

    async def _start_stream(self) -> None:
        self._streaming = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})

    def _schedule_keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        self._keep_alive_timer = loop.call_later(self._state.settings.stream_comment_seconds, self._tick)

    def _tick(self) -> None:
        # Unlike a timeout on each token, a timer costs nothing per token.
        if self._closed:
            return
        if self._idle and not self._sending and (self._keep_alive_task is None or self._keep_alive_task.done()):
            self._keep_alive_task = asyncio.get_running_loop().create_task(self._send_keep_alive())
        self._idle = True
        self._schedule_keep_alive()

    async def _send_keep_alive(self) -> None:
        # The response may end before this task runs, and while the headers wait for the client.
        if self._closed or self._keep_alive_timer is None:
            return
        if not self._streaming:
            await self._start_stream()
            if self._keep_alive_timer is None or self._sending:
                return
        await self._send_direct({"type": "http.response.body", "body": self._format.keep_alive(), "more_body": True})

    async def _finish_keep_alive(self) -> None:
        """Wait until a keep-alive that is being sent to a slow client is complete: its events precede those that follow."""
        if self._keep_alive_task is not None and not self._keep_alive_task.done():
            await asyncio.wait({self._keep_alive_task})

    def _stop_keep_alive(self) -> None:
        if self._keep_alive_timer is not None:
            self._keep_alive_timer.cancel()
            self._keep_alive_timer = None


async def send_response(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], pieces: Sequence[bytes | bytearray]
) -> None:
    """Send a complete response. headers: without content-length."""
    length = (b"content-length", str(sum(map(len, pieces))).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    last = b""
    for part in _slices(pieces):
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
        last = part
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _slices(pieces: Sequence[bytes | bytearray]) -> Iterator[bytes]:
    """The same bytes in pieces of about SEND_SLICE_BYTES."""
    held: list[bytes | bytearray] = []
    size = 0
    for piece in pieces:
        for start in range(0, len(piece), SEND_SLICE_BYTES):
            part = piece[start : start + SEND_SLICE_BYTES]
            held.append(part)
            size += len(part)
            if size >= SEND_SLICE_BYTES:
                yield b"".join(held)
                held, size = [], 0
    if held:
        yield b"".join(held)


class LargeJsonResponse(Response):
    """A JSON response that may be large, sent as fast as the client reads it."""

    def __init__(self, body: bytes) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [(b"content-type", b"application/json")]
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_response(send, self.status_code, self.raw_headers, [self._body])


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects, discarding what it sends."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client disconnects. Read the request's body before."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise bad_request("the client disconnected", code="client_disconnected")  # for the log
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
