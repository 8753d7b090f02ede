"""The two clients. Each method builds a call in the shared core and has it carried out; no rule lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import httpx

from windlass.clients._core import Call, Core, StreamCall, build_body
from windlass.clients._drivers import AsyncStream, Stream, run, run_async
from windlass.clients.types import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatOptions,
    Completion,
    CompletionChunk,
    CompletionOptions,
    Detokenization,
    Health,
    Model,
    Prompt,
    RetryPolicy,
    RotaryInspection,
    RotarySettings,
    Tokenization,
)

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Timeout = float | httpx.Timeout | None


class Client:
    """A synchronous client; use it from any number of threads, and close it or use it in a `with` block.

    base_url: of the server, with or without /v1 (default: WINDLASS_BASE_URL, else http://127.0.0.1:8000).
    api_key: default WINDLASS_API_KEY. timeout: seconds to wait for a connection, for a write and for the next bytes
    (default 600, connecting 5). retry: when to send again. max_connections: open at once; further requests wait.
    transport: an httpx transport, for tests and for unusual networks. Raises ValueError for a malformed URL or key.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: Timeout = None,
        retry: RetryPolicy | None = None,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 100,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._core = Core(base_url, api_key, timeout, retry, headers)
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._http = httpx.Client(transport=transport, limits=limits)

    @property
    def base_url(self) -> str:
        """The server's URL, without /v1."""
        return self._core.base_url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; running streams end."""
        self._http.close()

    @overload
    def completions(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion: ...

    @overload
    def completions(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Stream[CompletionChunk]: ...

    def completions(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion | Stream[CompletionChunk]:
        """Continue a prompt: a string, token ids, or a list of either.

        deadline: seconds after which the server gives up (the API's `timeout` field). timeout: of this request's
        transfers. options: body fields by their API names. extra_body: fields this client does not know.
        """
        body = build_body({"prompt": prompt, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return self._open(self._core.completion_stream(body, timeout))
        return self._run(self._core.completion(body, timeout))

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream[ChatCompletionChunk]: ...

    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """Answer a conversation, `[{"role": …, "content": …}, …]`. The other arguments are those of `completions`."""
        body = build_body({"messages": messages, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return self._open(self._core.chat_stream(body, timeout))
        return self._run(self._core.chat(body, timeout))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Tokenization:
        """Token ids of a text, or of a conversation as the chat template renders it."""
        return self._run(
            self._core.tokenize(build_body({"prompt": prompt, "messages": messages, "model": model}, {}, extra_body))
        )

    def detokenize(
        self, tokens: Sequence[int], *, model: str | None = None, extra_body: Mapping[str, Any] | None = None
    ) -> Detokenization:
        """Text of token ids."""
        return self._run(self._core.detokenize(build_body({"tokens": tokens, "model": model}, {}, extra_body)))

    def models(self) -> list[Model]:
        """The models served."""
        return self._run(self._core.models())

    def model(self, model_id: str) -> Model:
        """One model; raises NotFoundError."""
        return self._run(self._core.model(model_id))

    def rotary(self) -> RotarySettings:
        """What the model rotates by, the server's default and profiles, and what requests may set."""
        return self._run(self._core.rotary())

    def inspect(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        length: int | None = None,
        rope_update: str | Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> RotaryInspection:
        """The frequencies and factors a request would run under, without generating anything.

        rope_scaling: an object, a profile's name, or None for the server's default. length: of the request in tokens,
        for the kinds that depend on it (default: the server's context).
        """
        return self._run(self._core.inspect(rope_scaling, length, rope_update, model))

    def health(self) -> Health:
        """Whether server and engine are alive. Never retried; raises APIConnectionError when nothing answers."""
        return self._run(self._core.probe("/health"))

    def ready(self) -> Health:
        """Whether the server takes work."""
        return self._run(self._core.probe("/ready"))

    def _run(self, call: Call[T]) -> T:
        return run(self._http, self._core.run(call))

    def _open(self, call: StreamCall[T]) -> Stream[T]:
        return Stream(*run(self._http, self._core.open(call)))


class AsyncClient:
    """`Client` for asyncio and trio: the same arguments, and methods to await."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: Timeout = None,
        retry: RetryPolicy | None = None,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 100,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._core = Core(base_url, api_key, timeout, retry, headers)
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._http = httpx.AsyncClient(transport=transport, limits=limits)

    @property
    def base_url(self) -> str:
        """The server's URL, without /v1."""
        return self._core.base_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; running streams end."""
        await self._http.aclose()

    @overload
    async def completions(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion: ...

    @overload
    async def completions(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[CompletionOptions],
    ) -> AsyncStream[CompletionChunk]: ...

    async def completions(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion | AsyncStream[CompletionChunk]:
        """See `Client.completions`. A stream begins with `async with await client.completions(…, stream=True)`."""
        body = build_body({"prompt": prompt, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return await self._open(self._core.completion_stream(body, timeout))
        return await self._run(self._core.completion(body, timeout))

    @overload
    async def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion: ...

    @overload
    async def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream[ChatCompletionChunk]: ...

    async def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]:
        """See `Client.chat`."""
        body = build_body({"messages": messages, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return await self._open(self._core.chat_stream(body, timeout))
        return await self._run(self._core.chat(body, timeout))

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Tokenization:
        """See `Client.tokenize`."""
        return await self._run(
            self._core.tokenize(build_body({"prompt": prompt, "messages": messages, "model": model}, {}, extra_body))
        )

    async def detokenize(
        self, tokens: Sequence[int], *, model: str | None = None, extra_body: Mapping[str, Any] | None = None
    ) -> Detokenization:
        """See `Client.detokenize`."""
        return await self._run(self._core.detokenize(build_body({"tokens": tokens, "model": model}, {}, extra_body)))

    async def models(self) -> list[Model]:
        """See `Client.models`."""
        return await self._run(self._core.models())

    async def model(self, model_id: str) -> Model:
        """See `Client.model`."""
        return await self._run(self._core.model(model_id))

    async def rotary(self) -> RotarySettings:
        """See `Client.rotary`."""
        return await self._run(self._core.rotary())

    async def inspect(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        length: int | None = None,
        rope_update: str | Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> RotaryInspection:
        """See `Client.inspect`."""
        return await self._run(self._core.inspect(rope_scaling, length, rope_update, model))

    async def health(self) -> Health:
        """See `Client.health`."""
        return await self._run(self._core.probe("/health"))

    async def ready(self) -> Health:
        """See `Client.ready`."""
        return await self._run(self._core.probe("/ready"))

    async def _run(self, call: Call[T]) -> T:
        return await run_async(self._http, self._core.run(call))

    async def _open(self, call: StreamCall[T]) -> AsyncStream[T]:
        return AsyncStream(*await run_async(self._http, self._core.open(call)))
