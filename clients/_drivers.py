"""Carries out the steps `Core` asks for, with httpx, and iterates streams: the only module of the client that waits."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx

from windlass.clients._core import Close, Read, Send, Sleep, Step, Steps, request_id_of, transport_error
from windlass.clients._stream import ChunkReader
from windlass.clients.errors import APIError
from windlass.clients.types import Rotary

T = TypeVar("T")


def run(http: httpx.Client, steps: Steps[T]) -> T:
    """Carry the steps out one after the other; a failure of httpx is told to the generator, which decides."""
    result: Any = None
    error: httpx.HTTPError | None = None
    while True:
        try:
            step = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as stop:
            value: T = stop.value
            return value
        result = error = None
        try:
            result = _perform(http, step)
        except httpx.HTTPError as failed:
            error = failed


def _perform(http: httpx.Client, step: Step) -> Any:
    match step:
        case Send(request):
            return http.send(request, stream=True, follow_redirects=False)
        case Read(response):
            try:
                return response.read()
            finally:
                response.close()
        case Close(response):
            return response.close()
        case Sleep(seconds):
            return time.sleep(seconds)


async def run_async(http: httpx.AsyncClient, steps: Steps[T]) -> T:
    """`run` for an asynchronous client."""
    result: Any = None
    error: httpx.HTTPError | None = None
    while True:
        try:
            step = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as stop:
            value: T = stop.value
            return value
        result = error = None
        try:
            result = await _perform_async(http, step)
        except httpx.HTTPError as failed:
            error = failed


async def _perform_async(http: httpx.AsyncClient, step: Step) -> Any:
    match step:
        case Send(request):
            return await http.send(request, stream=True, follow_redirects=False)
        case Read(response):
            try:
                return await response.aread()
            finally:
                await response.aclose()
        case Close(response):
            return await response.aclose()
        case Sleep(seconds):
            import anyio  # httpx brings it

            return await anyio.sleep(seconds)


def _broken(error: httpx.HTTPError, response: httpx.Response) -> APIError:
    failure = transport_error(error, str(response.request.url))
    failure.status, failure.request_id = response.status_code, request_id_of(response)
    return failure


# Not methods: a generator that held its stream would keep a forgotten one, and its connection, alive until the garbage
# collector comes by.
def _chunks(response: httpx.Response, reader: ChunkReader[T]) -> Generator[T, None, None]:
    try:
        for data in response.iter_bytes():
            yield from reader.feed(data)
            if reader.done:
                return
        reader.end()
    except httpx.HTTPError as error:
        raise _broken(error, response) from error
    finally:
        response.close()


async def _chunks_async(response: httpx.Response, reader: ChunkReader[T]) -> AsyncGenerator[T, None]:
    try:
        async for data in response.aiter_bytes():
            for chunk in reader.feed(data):
                yield chunk
            if reader.done:
                return
        reader.end()
    except httpx.HTTPError as error:
        raise _broken(error, response) from error
    finally:
        await response.aclose()


class Stream(Generic[T]):
    """Chunks of a running generation, as they come. Iterate it once, best inside `with`.

    Leaving the `with` block, `close`, an error and the end all close the HTTP response, and a server stops generating
    when its client is gone. Raises StreamError when the stream does not end well, APIConnectionError when it breaks.
    """

    def __init__(self, response: httpx.Response, reader: ChunkReader[T]) -> None:
        self._response = response
        self._reader = reader
        self._chunks = _chunks(response, reader)

    @property
    def request_id(self) -> str | None:
        """The `x-request-id` of the answer."""
        return request_id_of(self._response)

    @property
    def rotary(self) -> Rotary | None:
        """The rotary scaling the first choice ran under; None until that choice has ended."""
        return self._reader.rotary

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the stream now. Safe to call twice."""
        self._chunks.close()
        self._response.close()  # a generator that never started has no `finally`


class AsyncStream(Generic[T]):
    """`Stream` for `async for` and `async with`."""

    def __init__(self, response: httpx.Response, reader: ChunkReader[T]) -> None:
        self._response = response
        self._reader = reader
        self._chunks = _chunks_async(response, reader)

    @property
    def request_id(self) -> str | None:
        """The `x-request-id` of the answer."""
        return request_id_of(self._response)

    @property
    def rotary(self) -> Rotary | None:
        """The rotary scaling the first choice ran under; None until that choice has ended."""
        return self._reader.rotary

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream now. Safe to call twice."""
        try:
            await self._chunks.aclose()
        finally:
            await self._response.aclose()  # a generator that never started has no `finally`
