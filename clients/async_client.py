"""The asynchronous client. Each method builds a call and has it carried out; no rule lives here."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import httpx

from windlass.clients import _calls as calls
from windlass.clients._answer_type import AnswerType
from windlass.clients._calls import Call, StreamCall
from windlass.clients._drivers import run_async
from windlass.clients._rules import CallRules
from windlass.clients.async_infill import AsyncInfillMethods
from windlass.clients.async_looking import AsyncLookingMethods
from windlass.clients.async_retrieval import AsyncRetrievalMethods
from windlass.clients.async_tokens import AsyncTokenMethods
from windlass.clients.message_types import Message, MessageEvent
from windlass.clients.metrics import Metrics
from windlass.clients.options import (
    ChatOptions,
    CompletionOptions,
    CountOptions,
    MessageOptions,
    Messages,
    MessageTurns,
    Prompt,
    ResponseInput,
    ResponseOptions,
    RetryPolicy,
    Timeout,
)
from windlass.clients.response_types import Response, ResponseEvent, ResponseItems
from windlass.clients.rope import RopeScaling
from windlass.clients.rotary_types import RotaryInspection, RotarySettings
from windlass.clients.streams import AsyncStream
from windlass.clients.types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Health,
    Model,
)

T = TypeVar("T")
A = TypeVar("A")


class AsyncClient(AsyncInfillMethods, AsyncLookingMethods, AsyncRetrievalMethods, AsyncTokenMethods):
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
        max_keepalive_connections: int | None = None,
        keepalive_expiry: float = 4.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._rules = CallRules(base_url, api_key, timeout, retry, headers)
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_keepalive_connections,
            keepalive_expiry=keepalive_expiry,
        )
        self._http = httpx.AsyncClient(transport=transport, limits=limits)

    @property
    def base_url(self) -> str:
        """The server's URL, without /v1."""
        return self._rules.base_url

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
    ) -> AsyncStream[CompletionChunk, Completion]: ...

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
    ) -> Completion | AsyncStream[CompletionChunk, Completion]:
        """See `Client.completions`. A stream begins with `async with await client.completions(…, stream=True)`."""
        body = calls.build_body({"prompt": prompt, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return await self._open(calls.completion_stream(body, timeout))
        return await self._run(calls.completion(body, timeout))

    @overload
    async def chat(
        self,
        messages: Messages,
        *,
        answer_type: AnswerType | None = None,
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
        answer_type: AnswerType | None = None,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream[ChatCompletionChunk, ChatCompletion]: ...

    async def chat(
        self,
        messages: Messages,
        *,
        answer_type: AnswerType | None = None,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk, ChatCompletion]:
        """See `Client.chat`."""
        body = calls.build_body({"messages": messages, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return await self._open(calls.chat_stream(body, timeout, answer_type))
        return await self._run(calls.chat(body, timeout, answer_type))

    @overload
    async def responses(
        self,
        input: ResponseInput,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ResponseOptions],
    ) -> Response: ...

    @overload
    async def responses(
        self,
        input: ResponseInput,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ResponseOptions],
    ) -> AsyncStream[ResponseEvent, Response]: ...

    async def responses(
        self,
        input: ResponseInput,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ResponseOptions],
    ) -> Response | AsyncStream[ResponseEvent, Response]:
        """See `Client.responses`."""
        body = calls.build_body({"input": input, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return await self._open(calls.response_stream(body, timeout))
        return await self._run(calls.response(body, timeout))

    async def count_input(
        self,
        input: ResponseInput | None = None,
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ResponseOptions],
    ) -> int:
        """See `Client.count_input`."""
        return await self._run(
            calls.count_input(calls.build_body({"input": input, "model": model}, options, extra_body))
        )

    async def response(self, response_id: str) -> Response:
        """See `Client.response`."""
        return await self._run(calls.kept_response(response_id))

    async def delete_response(self, response_id: str) -> bool:
        """See `Client.delete_response`."""
        return await self._run(calls.delete_response(response_id))

    async def response_items(
        self, response_id: str, *, order: str | None = None, limit: int | None = None, after: str | None = None
    ) -> ResponseItems:
        """See `Client.response_items`."""
        return await self._run(calls.response_items(response_id, order, limit, after))

    @overload
    async def messages(
        self,
        messages: MessageTurns,
        max_tokens: int,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[MessageOptions],
    ) -> Message: ...

    @overload
    async def messages(
        self,
        messages: MessageTurns,
        max_tokens: int,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[MessageOptions],
    ) -> AsyncStream[MessageEvent, Message]: ...

    async def messages(
        self,
        messages: MessageTurns,
        max_tokens: int,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[MessageOptions],
    ) -> Message | AsyncStream[MessageEvent, Message]:
        """See `Client.messages`."""
        body = calls.build_body(
            {"messages": messages, "max_tokens": max_tokens, "model": model, "timeout": deadline}, options, extra_body
        )
        if stream:
            return await self._open(calls.message_stream(body, timeout))
        return await self._run(calls.message(body, timeout))

    async def count_tokens(
        self,
        messages: MessageTurns,
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[CountOptions],
    ) -> int:
        """See `Client.count_tokens`."""
        fixed = {"messages": messages, "model": model}
        return await self._run(calls.count_tokens(calls.build_body(fixed, options, extra_body)))

    async def models(self) -> list[Model]:
        """See `Client.models`."""
        return await self._run(calls.models())

    async def model(self, model_id: str) -> Model:
        """See `Client.model`."""
        return await self._run(calls.model(model_id))

    async def load_adapter(self, name: str, path: str) -> str:
        """See `Client.load_adapter`."""
        return await self._run(calls.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> str:
        """See `Client.unload_adapter`."""
        return await self._run(calls.unload_adapter(name))

    async def rotary(self) -> RotarySettings:
        """See `Client.rotary`."""
        return await self._run(calls.rotary())

    async def profiles(self) -> dict[str, RopeScaling]:
        """See `Client.profiles`."""
        return await self._run(calls.profiles())

    async def inspect(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        length: int | None = None,
        rope_update: str | Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> RotaryInspection:
        """See `Client.inspect`."""
        return await self._run(calls.inspect(rope_scaling, length, rope_update, model))

    async def health(self) -> Health:
        """See `Client.health`."""
        return await self._run(calls.probe("/health"))

    async def ready(self) -> Health:
        """See `Client.ready`."""
        return await self._run(calls.probe("/ready"))

    async def version(self) -> str:
        """See `Client.version`."""
        return await self._run(calls.version())

    async def metrics(self) -> Metrics:
        """See `Client.metrics`."""
        return await self._run(calls.metrics())

    async def openapi(self) -> dict[str, Any]:
        """See `Client.openapi`."""
        return await self._run(calls.openapi())

    async def _run(self, call: Call[T]) -> T:
        return await run_async(self._http, self._rules.run(call))

    async def _open(self, call: StreamCall[T, A]) -> AsyncStream[T, A]:
        return AsyncStream(*await run_async(self._http, self._rules.open(call)))
