"""The asynchronous client: one method per endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import httpx

from windlass.clients import _calls as calls
from windlass.clients._calls import Call, StreamCall
from windlass.clients._parse import AnswerType
from windlass.clients._transport import CallFlow, run_async
from windlass.clients.message_types import Message, MessageEvent
from windlass.clients.metrics import Metrics
from windlass.clients.options import (
    ChatOptions,
    ClassifyOptions,
    CompletionOptions,
    CountOptions,
    DetokenizeOptions,
    EmbeddingOptions,
    InfillOptions,
    MessageOptions,
    Messages,
    MessageTurns,
    PoolingOptions,
    Prompt,
    RerankOptions,
    ResponseInput,
    ResponseOptions,
    RetryPolicy,
    ScoreOptions,
    TemplateOptions,
    Timeout,
    TokenizeOptions,
)
from windlass.clients.response_types import Response, ResponseEvent, ResponseItems
from windlass.clients.rope import RopeScaling
from windlass.clients.streams import AsyncStream
from windlass.clients.types import (
    AttentionMap,
    CachePages,
    ChatCompletion,
    ChatCompletionChunk,
    Classification,
    Completion,
    CompletionChunk,
    Detokenization,
    Embeddings,
    Health,
    Infill,
    Model,
    PairScores,
    PooledStates,
    Ranking,
    RotaryCurves,
    RotaryInspection,
    RotarySettings,
    Tokenization,
)

T = TypeVar("T")


A = TypeVar("A")


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
        max_keepalive_connections: int | None = None,
        keepalive_expiry: float = 4.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._flow = CallFlow(base_url, api_key, timeout, retry, headers)
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_keepalive_connections,
            keepalive_expiry=keepalive_expiry,
        )
        self._http = httpx.AsyncClient(transport=transport, limits=limits)

    @property
    def base_url(self) -> str:
        """The server's URL, without /v1."""
        return self._flow.base_url

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
            return await self._open_stream(calls.completion_stream(body, timeout))
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
            return await self._open_stream(calls.chat_stream(body, timeout, answer_type))
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
            return await self._open_stream(calls.response_stream(body, timeout))
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
        return await self._run(calls.get_response(response_id))

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
            return await self._open_stream(calls.message_stream(body, timeout))
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

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> Tokenization:
        """See `Client.tokenize`."""
        fixed = {"prompt": prompt, "messages": messages, "model": model}
        return await self._run(calls.tokenize(calls.build_body(fixed, options, extra_body)))

    async def detokenize(
        self,
        tokens: Sequence[int],
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[DetokenizeOptions],
    ) -> Detokenization:
        """See `Client.detokenize`."""
        return await self._run(
            calls.detokenize(calls.build_body({"tokens": tokens, "model": model}, options, extra_body))
        )

    async def apply_template(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> str:
        """See `Client.apply_template`."""
        fixed = {"messages": messages, "model": model}
        return await self._run(calls.apply_template(calls.build_body(fixed, options, extra_body)))

    async def embeddings(
        self,
        input: Prompt,
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> Embeddings:
        """A vector for each text: a string, token ids, or a list of either. See `completions` for the other arguments."""
        fixed = {"input": input, "model": model, "timeout": deadline}
        return await self._run(calls.embeddings(fixed, options, extra_body, timeout))

    async def pooling(
        self,
        input: Prompt,
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> PooledStates:
        """The hidden states of texts: one row each, or with `pooling` "all" one for each token; or their classes, by `task`."""
        fixed = {"input": input, "model": model, "timeout": deadline}
        return await self._run(calls.pooling(fixed, options, extra_body, timeout))

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ScoreOptions],
    ) -> PairScores:
        """How well texts go together: one with one, as many with as many, or one with each of several."""
        fixed = {"text_1": text_1, "text_2": text_2, "model": model, "timeout": deadline}
        return await self._run(calls.score(fixed, options, extra_body, timeout))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, str]],
        top_n: int | None = None,
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Documents in the order in which they answer a query; the best `top_n` of them."""
        fixed = {"query": query, "documents": documents, "top_n": top_n, "model": model, "timeout": deadline}
        return await self._run(calls.rerank(fixed, options, extra_body, timeout))

    async def classify(
        self,
        input: Prompt,
        *,
        model: str | None = None,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Classification:
        """The classes of texts, by a model that classifies; raises BadRequestError where it does not."""
        fixed = {"input": input, "model": model, "timeout": deadline}
        return await self._run(calls.classify(fixed, options, extra_body, timeout))

    @overload
    async def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[InfillOptions],
    ) -> Infill: ...

    @overload
    async def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[InfillOptions],
    ) -> AsyncStream[Infill, Infill]: ...

    async def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[InfillOptions],
    ) -> Infill | AsyncStream[Infill, Infill]:
        """See `Client.infill`. A stream begins with `async with await client.infill(…, stream=True)`."""
        fixed = {"input_prefix": input_prefix, "input_suffix": input_suffix, "model": model, "timeout": deadline}
        body = calls.build_body(fixed, options, extra_body)
        if stream:
            return await self._open_stream(calls.infill_stream(body, timeout))
        return await self._run(calls.infill(body, timeout))

    async def curves(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        positions: Sequence[int] = (),
        distances: Sequence[int] = (),
        length: int | None = None,
        group: str | None = None,
    ) -> RotaryCurves:
        """See `Client.curves`."""
        fixed = {"rope_scaling": rope_scaling, "positions": list(positions), "distances": list(distances)}
        return await self._run(calls.curves({**fixed, "length": length, "group": group}))

    async def cache(self) -> CachePages:
        """See `Client.cache`."""
        return await self._run(calls.cache())

    async def attention(
        self, prompt: str, layer: int = 0, head: int = 0, *, rope_scaling: Mapping[str, Any] | str | None = None
    ) -> AttentionMap:
        """See `Client.attention`."""
        fixed = {"prompt": prompt, "layer": layer, "head": head, "rope_scaling": rope_scaling}
        return await self._run(calls.attention(fixed))

    async def _run(self, call: Call[T]) -> T:
        return await run_async(self._http, self._flow.run(call))

    async def _open_stream(self, call: StreamCall[T, A]) -> AsyncStream[T, A]:
        return AsyncStream(*await run_async(self._http, self._flow.open(call)))
