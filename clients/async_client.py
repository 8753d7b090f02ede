"""The asynchronous client: one method per endpoint. `tools/generate_sync_client.py` makes client.py from this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, Unpack, overload
from urllib.parse import quote, urlencode

import httpx

from windlass.clients import _calls as calls
from windlass.clients import types
from windlass.clients._accumulate import InfillAccumulator, MessageAccumulator, ResponseAccumulator
from windlass.clients._calls import Call, StreamCall
from windlass.clients._parse import AnswerType
from windlass.clients._transport import CallFlow, run_async
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
from windlass.clients.response_types import Message, MessageEvent, Response, ResponseEvent, ResponseItems
from windlass.clients.rope import RopeScaling
from windlass.clients.streams import AsyncStream

T = TypeVar("T")
A = TypeVar("A")


class AsyncClient:
    """Asynchronous client for asyncio and trio. Use it as a context manager, or close it.

    base_url: of the server, with or without /v1 (default: WINDLASS_BASE_URL, else http://127.0.0.1:8000).
    api_key: default WINDLASS_API_KEY. timeout: seconds to wait for a connection, for a write and for the next bytes (default 600;
    5 for a connection). retry: when to repeat a request. headers: sent with every request. max_connections: open at the same
    time; further requests wait for one within the timeout. max_keepalive_connections: idle ones that stay open (default: all),
    for keepalive_expiry seconds (keep it below the server's own: 75 for Windlass, often 5). transport: an httpx transport, for
    tests and unusual networks. Raises ValueError for a malformed URL or key.

    Every method that sends a body accepts the fields of that body by their API names, and the fields of `CallOptions`. Except
    where a method documents another error, it raises a subclass of APIError.
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

    def __repr__(self) -> str:
        url = httpx.URL(self.base_url).copy_with(userinfo=b"")  # which may be a password
        return f"{type(self).__name__}(base_url={str(url)!r})"

    @property
    def base_url(self) -> str:
        """The server's URL, without /v1."""
        return self._flow.base_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; running streams end."""
        await self._http.aclose()

    @overload
    async def completions(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> types.Completion: ...

    @overload
    async def completions(
        self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> AsyncStream[types.CompletionChunk, types.Completion]: ...

    async def completions(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[CompletionOptions]
    ) -> types.Completion | AsyncStream[types.CompletionChunk, types.Completion]:
        """Continue a prompt: a string, token ids, or a list of either. Use a stream as a context manager."""
        fields = {"prompt": prompt}
        if stream:
            return await self._open_stream(calls.completion_stream(fields, options))
        return await self._run(calls.post("/v1/completions", types.Completion, fields, options))

    @overload
    async def chat(
        self,
        messages: Messages,
        *,
        answer_type: AnswerType | None = None,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> types.ChatCompletion: ...

    @overload
    async def chat(
        self,
        messages: Messages,
        *,
        answer_type: AnswerType | None = None,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> AsyncStream[types.ChatCompletionChunk, types.ChatCompletion]: ...

    async def chat(
        self,
        messages: Messages,
        *,
        answer_type: AnswerType | None = None,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> types.ChatCompletion | AsyncStream[types.ChatCompletionChunk, types.ChatCompletion]:
        """Answer a conversation, `[{"role": …, "content": …}, …]`, which may contain messages of earlier responses.

        answer_type: a JSON Schema, a pydantic model or a dataclass that the text must match; `parsed` returns its value.
        """
        fields = {"messages": messages}
        if stream:
            return await self._open_stream(calls.chat_stream(fields, options, answer_type))
        return await self._run(calls.chat(fields, options, answer_type))

    @overload
    async def responses(
        self, input: ResponseInput, *, stream: Literal[False] = False, **options: Unpack[ResponseOptions]
    ) -> Response: ...

    @overload
    async def responses(
        self, input: ResponseInput, *, stream: Literal[True], **options: Unpack[ResponseOptions]
    ) -> AsyncStream[ResponseEvent, Response]: ...

    async def responses(
        self, input: ResponseInput, *, stream: bool = False, **options: Unpack[ResponseOptions]
    ) -> Response | AsyncStream[ResponseEvent, Response]:
        """Answer an input: a string, or items, which may be those of earlier responses."""
        path, fields = "/v1/responses", {"input": input}
        if stream:
            return await self._open_stream(calls.stream(path, ResponseEvent, ResponseAccumulator, fields, options))
        return await self._run(calls.post(path, Response, fields, options))

    async def count_input(self, input: ResponseInput | None = None, **options: Unpack[ResponseOptions]) -> int:
        """Number of tokens of an input and of all that precedes it. The input is optional after `previous_response_id`."""
        read = calls.read_field("input_tokens", int)
        return await self._run(calls.post("/v1/responses/input_tokens", read, {"input": input}, options))

    async def response(self, response_id: str) -> Response:
        """A stored response; raises NotFoundError."""
        return await self._run(calls.get(calls.response_path(response_id), Response))

    async def delete_response(self, response_id: str) -> bool:
        """Delete a stored response; raises NotFoundError."""
        return await self._run(calls.delete(calls.response_path(response_id), calls.read_field("deleted", bool)))

    async def response_items(
        self, response_id: str, *, order: str | None = None, limit: int | None = None, after: str | None = None
    ) -> ResponseItems:
        """A page of the input items of a stored response, the latest first unless `order` is "asc"."""
        fields = {"order": order, "limit": limit, "after": after}
        query = urlencode({name: value for name, value in fields.items() if value is not None})
        path = f"{calls.response_path(response_id)}/input_items"
        return await self._run(calls.get(f"{path}?{query}" if query else path, ResponseItems))

    @overload
    async def messages(
        self,
        messages: MessageTurns,
        max_tokens: int,
        *,
        stream: Literal[False] = False,
        **options: Unpack[MessageOptions],
    ) -> Message: ...

    @overload
    async def messages(
        self, messages: MessageTurns, max_tokens: int, *, stream: Literal[True], **options: Unpack[MessageOptions]
    ) -> AsyncStream[MessageEvent, Message]: ...

    async def messages(
        self, messages: MessageTurns, max_tokens: int, *, stream: bool = False, **options: Unpack[MessageOptions]
    ) -> Message | AsyncStream[MessageEvent, Message]:
        """Answer a conversation in the form of Anthropic's API."""
        path, fields = "/v1/messages", {"messages": messages, "max_tokens": max_tokens}
        if stream:
            return await self._open_stream(calls.stream(path, MessageEvent, MessageAccumulator, fields, options))
        return await self._run(calls.post(path, Message, fields, options))

    async def count_tokens(self, messages: MessageTurns, **options: Unpack[CountOptions]) -> int:
        """Number of tokens of a conversation in the form of Anthropic's API."""
        read = calls.read_field("input_tokens", int)
        return await self._run(calls.post("/v1/messages/count_tokens", read, {"messages": messages}, options))

    async def models(self) -> list[types.Model]:
        """The served models."""
        return await self._run(calls.get("/v1/models", calls.read_models))

    async def model(self, model_id: str) -> types.Model:
        """One model; raises NotFoundError."""
        return await self._run(calls.get(f"/v1/models/{quote(model_id, safe='/')}", types.Model))

    async def load_adapter(self, name: str, path: str) -> str:
        """Load a LoRA adapter from the server's folder: "loaded". Raises BadRequestError if it is not a valid adapter."""
        return await self._change_adapter("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> str:
        """Unload an adapter: "unloaded", or "draining" if requests still use it after a while."""
        return await self._change_adapter("/v1/unload_lora_adapter", {"lora_name": name})

    async def _change_adapter(self, path: str, fields: Mapping[str, Any]) -> str:
        return await self._run(calls.post(path, calls.read_field("status", str), fields, retryable=False))

    async def rotary(self) -> types.RotarySettings:
        """The model's own scaling, the server's default and profiles, and what requests may set."""
        return await self._run(calls.get("/v1/rotary", types.RotarySettings))

    async def profiles(self) -> dict[str, RopeScaling]:
        """The server's profiles, which `rope_scaling` accepts by name."""
        return await self._run(calls.get("/v1/rotary", calls.read_profiles))

    async def inspect(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        length: int | None = None,
        rope_update: str | Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> types.RotaryInspection:
        """Frequencies and factors of a request of `length` tokens (default: the server's context length)."""
        fields = {"rope_scaling": rope_scaling, "length": length, "rope_update": rope_update, "model": model}
        return await self._run(calls.post("/v1/rotary/inspect", types.RotaryInspection, fields))

    async def health(self) -> types.Health:
        """Whether server and engine are alive. Never retried; raises APIConnectionError without a server."""
        return await self._run(calls.probe("/health"))

    async def ready(self) -> types.Health:
        """Whether the server accepts requests. Never retried."""
        return await self._run(calls.probe("/ready"))

    async def version(self) -> str:
        """The server's version."""
        return await self._run(calls.get("/version", calls.read_field("version", str)))

    async def metrics(self) -> types.Metrics:
        """The server's counters, gauges and histograms."""
        return await self._run(calls.get("/metrics", calls.read_metrics))

    async def openapi(self) -> dict[str, Any]:
        """The OpenAPI document of the server."""
        return await self._run(calls.get("/openapi.json", calls.read_object))

    async def tokenize(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Unpack[TokenizeOptions]
    ) -> types.Tokenization:
        """Token ids of a text, or of a conversation rendered by the chat template."""
        fields = {"prompt": prompt, "messages": messages}
        return await self._run(calls.post("/tokenize", types.Tokenization, fields, options))

    async def detokenize(self, tokens: Sequence[int], **options: Unpack[DetokenizeOptions]) -> types.Detokenization:
        """Text of token ids."""
        return await self._run(calls.post("/detokenize", types.Detokenization, {"tokens": tokens}, options))

    async def apply_template(self, messages: Messages, **options: Unpack[TemplateOptions]) -> str:
        """A conversation rendered by the chat template: the prompt of a chat with these messages."""
        read = calls.read_field("prompt", str)
        return await self._run(calls.post("/apply_template", read, {"messages": messages}, options))

    async def embeddings(self, input: Prompt, **options: Unpack[EmbeddingOptions]) -> types.Embeddings:
        """A vector for each text: a string, token ids, or a list of either."""
        fields = {"input": input, "encoding_format": "base64"}
        return await self._run(calls.post("/v1/embeddings", calls.read_embeddings, fields, options))

    async def pooling(self, input: Prompt, **options: Unpack[PoolingOptions]) -> types.PooledStates:
        """Hidden states of texts: one row each, or with `pooling` "all" one per token; or their classes, by `task`."""
        fields = {"input": input, "encoding_format": "base64"}
        return await self._run(calls.post("/pooling", calls.read_pooled_states, fields, options))

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **options: Unpack[ScoreOptions]
    ) -> types.PairScores:
        """Scores of pairs of texts: one with one, two lists of equal length, or one with each of a list."""
        fields = {"text_1": text_1, "text_2": text_2}
        return await self._run(calls.post("/v1/score", types.PairScores, fields, options))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, str]],
        top_n: int | None = None,
        **options: Unpack[RerankOptions],
    ) -> types.Ranking:
        """Documents ordered by their relevance to a query; the best `top_n` of them."""
        fields = {"query": query, "documents": documents, "top_n": top_n}
        return await self._run(calls.post("/v1/rerank", types.Ranking, fields, options))

    async def classify(self, input: Prompt, **options: Unpack[ClassifyOptions]) -> types.Classification:
        """Classes of texts; raises BadRequestError if the model is not a classifier."""
        return await self._run(calls.post("/classify", types.Classification, {"input": input}, options))

    @overload
    async def infill(
        self, input_prefix: str, input_suffix: str, *, stream: Literal[False] = False, **options: Unpack[InfillOptions]
    ) -> types.Infill: ...

    @overload
    async def infill(
        self, input_prefix: str, input_suffix: str, *, stream: Literal[True], **options: Unpack[InfillOptions]
    ) -> AsyncStream[types.Infill, types.Infill]: ...

    async def infill(
        self, input_prefix: str, input_suffix: str, *, stream: bool = False, **options: Unpack[InfillOptions]
    ) -> types.Infill | AsyncStream[types.Infill, types.Infill]:
        """Text between a prefix and a suffix, by a model trained for it. What exceeds the context is cut.

        The `suffix` of `completions` fills gaps too, without cutting, and with several choices.
        """
        path, fields = "/infill", {"input_prefix": input_prefix, "input_suffix": input_suffix}
        if stream:
            return await self._open_stream(calls.stream(path, types.Infill, InfillAccumulator, fields, options))
        return await self._run(calls.post(path, types.Infill, fields, options))

    async def curves(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        positions: Sequence[int] = (),
        distances: Sequence[int] = (),
        length: int | None = None,
        group: str | None = None,
    ) -> types.RotaryCurves:
        """Cosines and sines at `positions`, and curves over `distances`, under a scaling."""
        fields = {
            "rope_scaling": rope_scaling,
            "positions": positions,
            "distances": distances,
            "length": length,
            "group": group,
        }
        return await self._run(calls.post("/v1/rotary/curves", types.RotaryCurves, fields))

    async def cache(self) -> types.CachePages:
        """The blocks of the cache and the sequences that hold them."""
        return await self._run(calls.get("/v1/cache", types.CachePages))

    async def attention(
        self, prompt: str, layer: int = 0, head: int = 0, *, rope_scaling: Mapping[str, Any] | str | None = None
    ) -> types.AttentionMap:
        """Attention of one head over a short text. Raises AuthenticationError if the server does not allow it."""
        fields = {"prompt": prompt, "layer": layer, "head": head, "rope_scaling": rope_scaling}
        return await self._run(calls.post("/v1/attention", types.AttentionMap, fields))

    async def _run(self, call: Call[T]) -> T:
        return await run_async(self._http, self._flow.run(call))

    async def _open_stream(self, call: StreamCall[T, A]) -> AsyncStream[T, A]:
        return AsyncStream(*await run_async(self._http, self._flow.open(call)))
