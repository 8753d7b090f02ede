"""The synchronous client: one method per endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import httpx

from windlass.clients import _calls as calls
from windlass.clients._calls import Call, StreamCall
from windlass.clients._parse import AnswerType
from windlass.clients._transport import CallFlow, run
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
from windlass.clients.streams import Stream
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


class Client:
    """A synchronous client; use it from any number of threads, and close it or use it in a `with` block.

    base_url: of the server, with or without /v1 (default: WINDLASS_BASE_URL, else http://127.0.0.1:8000).
    api_key: default WINDLASS_API_KEY. timeout: seconds to wait for a connection, for a write and for the next bytes (default
    600, connecting 5). retry: when to send again. headers: sent with every request. max_connections: open at once; further
    requests wait for one, as long as the timeout. max_keepalive_connections: of these kept while idle (default: all), for
    keepalive_expiry seconds (keep it below the server's own: 75 here, 5 elsewhere). transport: an httpx transport, for tests and
    for unusual networks. Raises ValueError for a malformed URL or key."""

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._flow = CallFlow(base_url, api_key, timeout, retry, headers)
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_keepalive_connections,
            keepalive_expiry=keepalive_expiry,
        )
        self._http = httpx.Client(transport=transport, limits=limits)

    @property
    def base_url(self) -> str:
        """The server's URL, without /v1."""
        return self._flow.base_url

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
    ) -> Stream[CompletionChunk, Completion]: ...

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
    ) -> Completion | Stream[CompletionChunk, Completion]:
        """Continue a prompt: a string, token ids, or a list of either.

        deadline: seconds after which the server gives up (the API's `timeout` field). timeout: of this request's
        transfers. options: body fields by their API names. extra_body: fields this client does not know.
        """
        body = calls.build_body({"prompt": prompt, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return self._open_stream(calls.completion_stream(body, timeout))
        return self._run(calls.completion(body, timeout))

    @overload
    def chat(
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
    def chat(
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
    ) -> Stream[ChatCompletionChunk, ChatCompletion]: ...

    def chat(
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
    ) -> ChatCompletion | Stream[ChatCompletionChunk, ChatCompletion]:
        """Answer a conversation, `[{"role": …, "content": …}, …]`; a message of an earlier answer may stand in it.

        answer_type: what the answer shall be: a JSON Schema, a pydantic model or a dataclass. Its text then holds it, and
        `parsed` has it. The other arguments are those of `completions`.
        """
        body = calls.build_body({"messages": messages, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return self._open_stream(calls.chat_stream(body, timeout, answer_type))
        return self._run(calls.chat(body, timeout, answer_type))

    @overload
    def responses(
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
    def responses(
        self,
        input: ResponseInput,
        *,
        model: str | None = None,
        stream: Literal[True],
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ResponseOptions],
    ) -> Stream[ResponseEvent, Response]: ...

    def responses(
        self,
        input: ResponseInput,
        *,
        model: str | None = None,
        stream: bool = False,
        deadline: float | None = None,
        timeout: Timeout = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ResponseOptions],
    ) -> Response | Stream[ResponseEvent, Response]:
        """Answer an input: a string, or items. See `completions` for the other arguments."""
        body = calls.build_body({"input": input, "model": model, "timeout": deadline}, options, extra_body)
        if stream:
            return self._open_stream(calls.response_stream(body, timeout))
        return self._run(calls.response(body, timeout))

    def count_input(
        self,
        input: ResponseInput | None = None,
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[ResponseOptions],
    ) -> int:
        """What an input comes to in tokens, with all that stands before it. It may be left out behind `previous_response_id`."""
        return self._run(calls.count_input(calls.build_body({"input": input, "model": model}, options, extra_body)))

    def response(self, response_id: str) -> Response:
        """A response that the server keeps; raises NotFoundError."""
        return self._run(calls.get_response(response_id))

    def delete_response(self, response_id: str) -> bool:
        """Have the server forget a response; raises NotFoundError."""
        return self._run(calls.delete_response(response_id))

    def response_items(
        self, response_id: str, *, order: str | None = None, limit: int | None = None, after: str | None = None
    ) -> ResponseItems:
        """What a response that is kept answered: a page of it, the latest items first unless `order` is "asc"."""
        return self._run(calls.response_items(response_id, order, limit, after))

    @overload
    def messages(
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
    def messages(
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
    ) -> Stream[MessageEvent, Message]: ...

    def messages(
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
    ) -> Message | Stream[MessageEvent, Message]:
        """Answer a conversation in Anthropic's form. See `completions` for the other arguments."""
        body = calls.build_body(
            {"messages": messages, "max_tokens": max_tokens, "model": model, "timeout": deadline}, options, extra_body
        )
        if stream:
            return self._open_stream(calls.message_stream(body, timeout))
        return self._run(calls.message(body, timeout))

    def count_tokens(
        self,
        messages: MessageTurns,
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[CountOptions],
    ) -> int:
        """What a conversation in Anthropic's form comes to in tokens."""
        fixed = {"messages": messages, "model": model}
        return self._run(calls.count_tokens(calls.build_body(fixed, options, extra_body)))

    def models(self) -> list[Model]:
        """The models served."""
        return self._run(calls.models())

    def model(self, model_id: str) -> Model:
        """One model; raises NotFoundError."""
        return self._run(calls.model(model_id))

    def load_adapter(self, name: str, path: str) -> str:
        """Have the server load a LoRA adapter out of its folder; "loaded". Raises BadRequestError for what makes none."""
        return self._run(calls.load_adapter(name, path))

    def unload_adapter(self, name: str) -> str:
        """Have the server drop an adapter: "unloaded", or "draining" where requests still run with it after a while."""
        return self._run(calls.unload_adapter(name))

    def rotary(self) -> RotarySettings:
        """The model's rotation, the server's default and profiles, and what requests may set."""
        return self._run(calls.rotary())

    def profiles(self) -> dict[str, RopeScaling]:
        """The scalings that `rope_scaling` may name on this server, by name."""
        return self._run(calls.profiles())

    def inspect(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        length: int | None = None,
        rope_update: str | Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> RotaryInspection:
        """The frequencies and factors a request of `length` tokens (default: the server's context) would run under."""
        return self._run(calls.inspect(rope_scaling, length, rope_update, model))

    def health(self) -> Health:
        """Whether server and engine are alive. Never retried; raises APIConnectionError when nothing answers."""
        return self._run(calls.probe("/health"))

    def ready(self) -> Health:
        """Whether the server takes work."""
        return self._run(calls.probe("/ready"))

    def version(self) -> str:
        """The server's version."""
        return self._run(calls.version())

    def metrics(self) -> Metrics:
        """The server's counters, gauges and histograms, as Prometheus would scrape them."""
        return self._run(calls.metrics())

    def openapi(self) -> dict[str, Any]:
        """The machine-readable description of the API."""
        return self._run(calls.openapi())

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> Tokenization:
        """Token ids of a text, or of a conversation as the chat template renders it. options: by their API names."""
        fixed = {"prompt": prompt, "messages": messages, "model": model}
        return self._run(calls.tokenize(calls.build_body(fixed, options, extra_body)))

    def detokenize(
        self,
        tokens: Sequence[int],
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[DetokenizeOptions],
    ) -> Detokenization:
        """Text of token ids."""
        return self._run(calls.detokenize(calls.build_body({"tokens": tokens, "model": model}, options, extra_body)))

    def apply_template(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> str:
        """A conversation as the chat template writes it: the text that a chat of these messages continues."""
        fixed = {"messages": messages, "model": model}
        return self._run(calls.apply_template(calls.build_body(fixed, options, extra_body)))

    def embeddings(
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
        return self._run(calls.embeddings(fixed, options, extra_body, timeout))

    def pooling(
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
        return self._run(calls.pooling(fixed, options, extra_body, timeout))

    def score(
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
        return self._run(calls.score(fixed, options, extra_body, timeout))

    def rerank(
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
        return self._run(calls.rerank(fixed, options, extra_body, timeout))

    def classify(
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
        return self._run(calls.classify(fixed, options, extra_body, timeout))

    @overload
    def infill(
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
    def infill(
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
    ) -> Stream[Infill, Infill]: ...

    def infill(
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
    ) -> Infill | Stream[Infill, Infill]:
        """What stands between two texts, of a model that was taught to fill gaps. Its context cuts what is too long.

        options: body fields by their API names, which are llama.cpp's: `n_predict`, `input_extra`, `n_indent` and others. See
        `completions` for the other arguments; its `suffix` fills gaps too, cuts nothing and gives several answers.
        """
        fixed = {"input_prefix": input_prefix, "input_suffix": input_suffix, "model": model, "timeout": deadline}
        body = calls.build_body(fixed, options, extra_body)
        if stream:
            return self._open_stream(calls.infill_stream(body, timeout))
        return self._run(calls.infill(body, timeout))

    def curves(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        positions: Sequence[int] = (),
        distances: Sequence[int] = (),
        length: int | None = None,
        group: str | None = None,
    ) -> RotaryCurves:
        """Cosines and sines at `positions` and curves by distance, under a scaling."""
        fixed = {"rope_scaling": rope_scaling, "positions": list(positions), "distances": list(distances)}
        return self._run(calls.curves({**fixed, "length": length, "group": group}))

    def cache(self) -> CachePages:
        """The pages of the cache and who holds them."""
        return self._run(calls.cache())

    def attention(
        self, prompt: str, layer: int = 0, head: int = 0, *, rope_scaling: Mapping[str, Any] | str | None = None
    ) -> AttentionMap:
        """What a head attends to in a short text. Raises AuthenticationError where the server does not show it."""
        fixed = {"prompt": prompt, "layer": layer, "head": head, "rope_scaling": rope_scaling}
        return self._run(calls.attention(fixed))

    def _run(self, call: Call[T]) -> T:
        return run(self._http, self._flow.run(call))

    def _open_stream(self, call: StreamCall[T, A]) -> Stream[T, A]:
        return Stream(*run(self._http, self._flow.open(call)))
