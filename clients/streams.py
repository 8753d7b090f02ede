"""Streams: iterators over the chunks of a running generation."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx

from windlass.clients._stream import ChunkReader
from windlass.clients.errors import interrupted_response_error
from windlass.clients.types import Rotary, ToolCall, Usage

# More is not waited for: a connection is soon made anew.
_DRAIN_BYTES = 64 * 1024

_DRAIN_SECONDS = 1.0


def drain_response(response: httpx.Response, pieces: Iterator[bytes]) -> None:
    """Read what is left of a response, if that is little and comes soon, so that its connection can be used again.

    pieces: the iterator that read the response so far. Never raises; the caller closes the response.
    """
    if not _is_reusable(response):
        return
    # httpcore has read its timeout when the body began, so another thread has to end a wait that lasts.
    watch = threading.Timer(_DRAIN_SECONDS, interrupt_reader, (response,))
    watch.daemon = True
    watch.start()
    try:
        with contextlib.suppress(httpx.HTTPError, httpx.StreamClosed):
            size = 0
            for data in pieces:
                size += len(data)
                if size > _DRAIN_BYTES:
                    break
    finally:
        watch.cancel()


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
    """End the connection under a thread that waits for its next bytes: one whose socket is only closed waits on."""
    network = response.extensions.get("network_stream")
    shared = response.http_version == "HTTP/2"  # with the streams of other requests
    found = None if network is None or shared or response.is_closed else network.get_extra_info("socket")
    if isinstance(found, socket.socket):
        with contextlib.suppress(OSError):  # it is gone already
            socket.socket.shutdown(found, socket.SHUT_RDWR)  # that of TLS forgets its keys, which the reader still uses


def _is_reusable(response: httpx.Response) -> bool:
    """Whether there is a connection that takes another request once this response was read."""
    kept = response.headers.get("connection", "").lower() != "close"
    return kept and response.http_version == "HTTP/1.1" and "network_stream" in response.extensions


T = TypeVar("T")

A = TypeVar("A")


class _StreamProperties(Generic[T, A]):
    """What both streams say of the generation while it runs."""

    _reader: ChunkReader[T, A]
    _exited = False  # its `with` block is over

    def _check_finished(self) -> None:
        """Raise StreamError where no chunk comes any more though the generation has not ended."""
        if not self._exited:
            self._reader.check_done()

    @property
    def request_id(self) -> str | None:
        """The `x-request-id` of the answer."""
        return self._reader.request_id

    @property
    def text(self) -> str:
        """Text of the first choice, as far as it was read."""
        return self._reader.accumulator.text

    @property
    def reasoning(self) -> str:
        """What the first choice of a chat thought, as far as it was read."""
        return self._reader.accumulator.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the first choice of a chat, as far as they were read: the last one may lack arguments."""
        return self._reader.accumulator.tool_calls

    @property
    def parsed(self) -> Any:
        """The first choice of a chat as the `answer_type` that was asked for; None until it has ended.

        See `ChatMessage.parsed`, also for what it raises.
        """
        return self._reader.accumulator.parsed

    @property
    def finish_reasons(self) -> dict[int, str]:
        """Why each choice ended, by its index; only of choices that have."""
        return self._reader.accumulator.finish_reasons

    @property
    def usage(self) -> Usage | None:
        """Token counts; None until the server has told them, which by default it does at the end."""
        return self._reader.accumulator.usage

    @property
    def rotary(self) -> Rotary | None:
        """The rotary scaling the first choice ran under; None until that choice has ended."""
        return self._reader.accumulator.rotary


class Stream(_StreamProperties[T, A]):
    """Chunks of a running generation, as they come. Iterate it once, best inside `with`.

    Leaving the `with` block, `close`, an error and the end all close the HTTP response, and a server stops generating
    when its client is gone. Raises StreamError when the stream does not end well, APIConnectionError when it breaks. One
    that was cut off, by an error that was caught or by `close`, raises StreamError again when it is asked for more.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exited = True
        self.close()

    def until_done(self) -> Self:
        """Read what is left; then everything about the stream is known."""
        for _ in self:
            pass
        return self

    def get_final(self) -> A:
        """Read what is left and give the whole answer, as if it had not been streamed.

        Raises StreamError where the stream was closed, or has failed, before its end.
        """
        return self.until_done()._reader.result()

    def close(self) -> None:
        """End the stream now. Safe to call twice, and from any thread: one that waits for a chunk gets its error then."""
        try:
            self._chunks.close()
        except ValueError:  # another thread is in the generator
            interrupt_reader(self._response)
        finally:
            self._response.close()  # a generator that never started has no `finally`


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        """End the stream now. Safe to call twice, and from any task: one that waits for a chunk gets its error then."""
        try:
            with contextlib.suppress(RuntimeError):  # another task is in the generator: the response wakes it
                await self._chunks.aclose()
        finally:
            await self._response.aclose()  # a generator that never started has no `finally`


# Not methods: a generator that held its stream would keep a forgotten one, and its connection, alive until the garbage
# collector comes by.
def _chunks(response: httpx.Response, reader: ChunkReader[T, A]) -> Generator[T, None, None]:
    try:
        pieces = response.iter_bytes()
        for data in pieces:
            yield from reader.feed(data)
            if reader.done:
                drain_response(response, pieces)
                return
        reader.end()
    except (httpx.HTTPError, httpx.StreamClosed) as error:  # the latter where another thread was quicker
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
    except (httpx.HTTPError, httpx.StreamClosed) as error:  # the latter where another task was quicker
        raise interrupted_response_error(error, response) from error
    finally:
        await response.aclose()
