"""Streams: the parser of their bytes, and iterators over their chunks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, Generic, Self, TypeVar

import httpx

from windlass.clients._accumulate import StreamAccumulator
from windlass.clients._parse import parse
from windlass.clients.errors import ResponseError, StreamError, interrupted_response_error
from windlass.clients.sse import SSEDecoder
from windlass.clients.types import Rotary, ToolCall, Usage

T = TypeVar("T")
A = TypeVar("A")

# Limits of draining a response: beyond them a new connection is cheaper.
_DRAIN_BYTES = 64 * 1024
_DRAIN_SECONDS = 1.0


def drain_response(response: httpx.Response, pieces: Iterator[bytes]) -> None:
    """Read the rest of a response, if it is short and arrives soon, so that its connection can be reused.

    pieces: the iterator that has read the response so far. Never raises; the caller closes the response.
    """
    if not _is_reusable(response):
        return
    # httpcore takes its timeout when the body begins, so another thread must interrupt a long wait.
    timer = threading.Timer(_DRAIN_SECONDS, interrupt_reader, (response,))
    timer.daemon = True
    timer.start()
    try:
        with contextlib.suppress(httpx.HTTPError, httpx.StreamClosed):
            size = 0
            for data in pieces:
                size += len(data)
                if size > _DRAIN_BYTES:
                    break
    finally:
        timer.cancel()


async def drain_response_async(response: httpx.Response, pieces: AsyncIterator[bytes]) -> None:
    """`drain_response` for an asynchronous client."""
    if not _is_reusable(response):
        return
    import anyio  # httpx brings it

    with anyio.move_on_after(_DRAIN_SECONDS), contextlib.suppress(httpx.HTTPError, httpx.StreamClosed):
        size = 0
        async for data in pieces:
            size += len(data)
            if size > _DRAIN_BYTES:
                break


def interrupt_reader(response: httpx.Response) -> None:
    """Shut down the connection of a thread that waits for its next bytes; closing the socket would not wake the thread."""
    network = response.extensions.get("network_stream")
    shared = response.http_version == "HTTP/2"  # with the streams of other requests
    found = None if network is None or shared or response.is_closed else network.get_extra_info("socket")
    if isinstance(found, socket.socket):
        with contextlib.suppress(OSError):  # it is closed already
            # Not SSLSocket.shutdown, which discards the keys that the reader still uses.
            socket.socket.shutdown(found, socket.SHUT_RDWR)


def _is_reusable(response: httpx.Response) -> bool:
    """Whether the connection can be used for another request after this response."""
    kept = response.headers.get("connection", "").lower() != "close"
    return kept and response.http_version == "HTTP/1.1" and "network_stream" in response.extensions


class ChunkReader(Generic[T, A]):
    """Parser of a stream's bytes, without I/O: `feed` returns chunks until `done`, and `end` must be called after the last byte.

    A stream is complete if `expected_choices` choices, and every choice that has started, have a finish_reason, followed by
    [DONE] or the last event of this kind of stream. Anything else raises StreamError, so that incomplete text is never taken for
    a complete answer. accumulator: the response so far.
    """

    def __init__(
        self, chunk: type[T], accumulator: StreamAccumulator[T, A], expected_choices: int, request_id: str | None
    ) -> None:
        self.done = False
        self.accumulator = accumulator
        self.request_id = request_id
        self._chunk = chunk
        self._expected = expected_choices
        self._sse = SSEDecoder()

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the chunks completed by these bytes one by one, so that chunks before an error event arrive before it raises."""
        try:
            events = self._sse.feed(data)
        except ValueError as error:
            raise self._stream_error(str(error)) from error
        for event in events:
            last = event.data.strip() == "[DONE]"
            if not last:
                yield self._read_chunk(event.data)
            if last or self.accumulator.ended:
                self._check_complete()
                self.done = True
                return

    def end(self) -> None:
        """Raise StreamError unless the stream's last event has arrived."""
        if not self.done:
            raise self._stream_error(
                f"the stream ended without {self.accumulator.final_event}: the answer is incomplete"
            )

    def check_done(self) -> None:
        """Raise StreamError unless the stream is complete."""
        if not self.done:
            raise self._stream_error("the stream was closed or failed before its end: the answer is incomplete")

    def result(self) -> A:
        """The whole response; raises StreamError unless the stream is complete."""
        self.check_done()
        return self.accumulator.result(self.request_id)

    def _read_chunk(self, text: str) -> T:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._response_error(f"an event is not JSON ({error})") from error
        failure = _find_error(data)
        if failure is not None:
            raise self._server_error(failure)
        try:
            chunk = parse(self._chunk, data)
        except ValueError as error:
            raise self._response_error(str(error)) from error
        self.accumulator.add(chunk)
        return chunk

    def _check_complete(self) -> None:
        finished = len(self.accumulator.finish_reasons)
        missing = max(self.accumulator.num_started, self._expected) - finished
        if missing > 0:
            raise self._stream_error(
                f"the stream ended without a finish_reason for {missing} of its choices: the answer is incomplete"
            )

    def _server_error(self, error: Any) -> StreamError:
        fields = error if isinstance(error, dict) else {"message": error}
        message = str(fields.get("message") or "the server reported an error in the stream")
        failure = StreamError(message, status=200, request_id=self.request_id)
        for name in ("type", "param", "code"):
            if fields.get(name) is not None:
                setattr(failure, name, str(fields[name]))
        return failure

    def _stream_error(self, message: str) -> StreamError:
        return StreamError(message, status=200, request_id=self.request_id)

    def _response_error(self, what: str) -> ResponseError:
        return ResponseError(f"the stream is not understood: {what}", status=200, request_id=self.request_id)


def _find_error(data: Any) -> Any:
    """The error in an event, None without one."""
    if not isinstance(data, dict):
        return None
    if data.get("error") is not None:
        return data["error"]
    if data.get("type") == "error":
        return data
    if data.get("type") == "response.failed":
        response = data.get("response")
        return (response.get("error") if isinstance(response, dict) else None) or {}
    return None


class _StreamProperties(Generic[T, A]):
    """Common properties of both streams, which describe the generation so far."""

    _reader: ChunkReader[T, A]
    _exited = False  # whether its `with` block has ended

    def _check_finished(self) -> None:
        """Raise StreamError if there are no more chunks although the generation has not ended."""
        if not self._exited:
            self._reader.check_done()

    @property
    def request_id(self) -> str | None:
        """The `x-request-id` of the response."""
        return self._reader.request_id

    @property
    def text(self) -> str:
        """Text of the first choice so far."""
        return self._reader.accumulator.text

    @property
    def reasoning(self) -> str:
        """Reasoning of the first choice of a chat so far."""
        return self._reader.accumulator.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the first choice of a chat so far; the arguments of the last one may be incomplete."""
        return self._reader.accumulator.tool_calls

    @property
    def parsed(self) -> Any:
        """The first choice of a chat as the requested `answer_type`, None until it has ended. See `ChatMessage.parsed`."""
        return self._reader.accumulator.parsed

    @property
    def finish_reasons(self) -> dict[int, str]:
        """Finish reasons of the choices that have ended, by index."""
        return self._reader.accumulator.finish_reasons

    @property
    def usage(self) -> Usage | None:
        """Token counts; None until the server has sent them, by default at the end."""
        return self._reader.accumulator.usage

    @property
    def rotary(self) -> Rotary | None:
        """Rotary scaling of the first choice; None until that choice has ended."""
        return self._reader.accumulator.rotary


class Stream(_StreamProperties[T, A]):
    """Chunks of a running generation as they arrive. Iterate it once, preferably as a context manager.

    The end of the `with` block, `close`, an error and the end of the stream close the HTTP response, and the server stops
    generating when its client has disconnected. Raises StreamError if the stream is incomplete, APIConnectionError if the
    connection breaks. After that, and after `close`, further iteration raises StreamError.
    """

    def __init__(self, response: httpx.Response, reader: ChunkReader[T, A]) -> None:
        self._response = response
        self._reader = reader
        self._chunks = _chunks(response, reader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        for chunk in self._chunks:
            return chunk
        self._check_finished()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._exited = True
        self.close()

    def until_done(self) -> Self:
        """Read the rest of the stream and return it."""
        for _ in self:
            pass
        return self

    def get_final(self) -> A:
        """Read the rest and return the whole response, as the same call without `stream` would.

        Raises StreamError if the stream was closed or failed before its end.
        """
        return self.until_done()._reader.result()

    def close(self) -> None:
        """End the stream. Safe to call twice, and from any thread: a thread that waits for a chunk gets APIConnectionError."""
        try:
            self._chunks.close()
        except ValueError:  # another thread runs the generator
            interrupt_reader(self._response)
        finally:
            self._response.close()  # the generator does not, if it never started


class AsyncStream(_StreamProperties[T, A]):
    """`Stream` for `async for` and `async with`."""

    def __init__(self, response: httpx.Response, reader: ChunkReader[T, A]) -> None:
        self._response = response
        self._reader = reader
        self._chunks = _chunks_async(response, reader)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        async for chunk in self._chunks:
            return chunk
        self._check_finished()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._exited = True
        await self.aclose()

    async def until_done(self) -> Self:
        """See `Stream.until_done`."""
        async for _ in self:
            pass
        return self

    async def get_final(self) -> A:
        """See `Stream.get_final`."""
        return (await self.until_done())._reader.result()

    async def aclose(self) -> None:
        """End the stream. Safe to call twice, and from any task: a task that waits for a chunk gets APIConnectionError."""
        try:
            with contextlib.suppress(RuntimeError):  # another task runs the generator: closing the response wakes it
                await self._chunks.aclose()
        finally:
            await self._response.aclose()  # the generator does not, if it never started


# Not methods: a generator with a reference to its stream would keep an abandoned stream, and its connection, open until the
# garbage collector runs.
def _chunks(response: httpx.Response, reader: ChunkReader[T, A]) -> Generator[T, None, None]:
    try:
        pieces = response.iter_bytes()
        for data in pieces:
            yield from reader.feed(data)
            if reader.done:
                drain_response(response, pieces)
                return
        reader.end()
    except (httpx.HTTPError, httpx.StreamClosed) as error:  # the latter if another thread has closed it
        raise interrupted_response_error(error, response) from error
    finally:
        response.close()


async def _chunks_async(response: httpx.Response, reader: ChunkReader[T, A]) -> AsyncGenerator[T, None]:
    try:
        pieces = response.aiter_bytes()
        async for data in pieces:
            for chunk in reader.feed(data):
                yield chunk
            if reader.done:
                await drain_response_async(response, pieces)
                return
        reader.end()
    except (httpx.HTTPError, httpx.StreamClosed) as error:  # the latter if another task has closed it
        raise interrupted_response_error(error, response) from error
    finally:
        await response.aclose()
