"""One call per endpoint: what is sent, and how the response is read. Does no input or output."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import httpx

from windlass.clients._accumulate import (
    ChatAccumulator,
    CompletionAccumulator,
    MessageAccumulator,
    ResponseAccumulator,
    Whole,
)
from windlass.clients._parse import AnswerType, parse, reader, response_format
from windlass.clients.errors import request_id_of
from windlass.clients.message_types import Message, MessageEvent
from windlass.clients.metrics import Metrics
from windlass.clients.options import Timeout
from windlass.clients.response_types import Response, ResponseEvent, ResponseItems
from windlass.clients.rope import RopeScaling
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
    InfillAccumulator,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request to make and how to understand its answer.

    answer: makes the result from the response, whole, or raises ValueError. accepted: error statuses that are answers
    too. timeout: None for the client's own.
    """

    method: str
    path: str
    body: dict[str, Any] | None = None
    answer: Callable[[httpx.Response], T]
    accepted: frozenset[int] = frozenset()
    retried: bool = True
    timeout: Timeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCall(Generic[T, A]):
    """A request that is answered by a stream of chunks of class `chunk`, which must finish `expected` choices.

    accumulator: makes what puts the whole answer together from them.
    """

    path: str
    body: dict[str, Any]
    chunk: type[T]
    accumulator: Callable[[], Whole[A]]
    expected: int
    timeout: Timeout = None


def completion(body: dict[str, Any], timeout: Timeout) -> Call[Completion]:
    return Call(method="POST", path="/v1/completions", body=body, answer=_generated(Completion), timeout=timeout)


def completion_stream(body: dict[str, Any], timeout: Timeout) -> StreamCall[CompletionChunk, Completion]:
    prompts = body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return StreamCall(
        path="/v1/completions",
        body=_streamed(body),
        chunk=CompletionChunk,
        accumulator=CompletionAccumulator,
        expected=count * _samples(body),
        timeout=timeout,
    )


def infill(body: dict[str, Any], timeout: Timeout) -> Call[Infill]:
    return Call(method="POST", path="/infill", body=body, answer=_generated(Infill), timeout=timeout)


def infill_stream(body: dict[str, Any], timeout: Timeout) -> StreamCall[Infill, Infill]:
    return StreamCall(
        path="/infill",
        body={**body, "stream": True},
        chunk=Infill,
        accumulator=InfillAccumulator,
        expected=1,
        timeout=timeout,
    )


def chat(body: dict[str, Any], timeout: Timeout, answer_type: AnswerType | None = None) -> Call[ChatCompletion]:
    """answer_type: what the answers shall be; the body then asks for it (see `asking_for`)."""
    read = None if answer_type is None else reader(answer_type)

    def answer(response: httpx.Response) -> ChatCompletion:
        whole = _generated(ChatCompletion)(response)
        if read is None:
            return whole
        choices = (replace(choice, message=replace(choice.message, _read=read)) for choice in whole.choices)
        return replace(whole, choices=tuple(choices))

    return Call(
        method="POST", path="/v1/chat/completions", body=asking_for(body, answer_type), answer=answer, timeout=timeout
    )


def chat_stream(
    body: dict[str, Any], timeout: Timeout, answer_type: AnswerType | None = None
) -> StreamCall[ChatCompletionChunk, ChatCompletion]:
    read = None if answer_type is None else reader(answer_type)
    return StreamCall(
        path="/v1/chat/completions",
        body=_streamed(asking_for(body, answer_type)),
        chunk=ChatCompletionChunk,
        accumulator=lambda: ChatAccumulator(read),
        expected=_samples(body),
        timeout=timeout,
    )


def asking_for(body: dict[str, Any], answer_type: AnswerType | None) -> dict[str, Any]:
    """The body with the `response_format` of an answer type. Raises TypeError for what is none, ValueError for both."""
    if answer_type is None:
        return body
    if "response_format" in body:
        raise ValueError("give answer_type or response_format, not both")
    return {**body, "response_format": response_format(answer_type)}


def response(body: dict[str, Any], timeout: Timeout) -> Call[Response]:
    return Call(method="POST", path="/v1/responses", body=body, answer=_generated(Response), timeout=timeout)


def response_stream(body: dict[str, Any], timeout: Timeout) -> StreamCall[ResponseEvent, Response]:
    return StreamCall(
        path="/v1/responses",
        body={**body, "stream": True},
        chunk=ResponseEvent,
        accumulator=ResponseAccumulator,
        expected=1,
        timeout=timeout,
    )


def kept_response(response_id: str) -> Call[Response]:
    return Call(method="GET", path=_kept(response_id), answer=_generated(Response))


def delete_response(response_id: str) -> Call[bool]:
    def answer(response: httpx.Response) -> bool:
        data = response.json()
        if not isinstance(data, dict) or not isinstance(data.get("deleted"), bool):
            raise ValueError("what became of the response should be an object with a boolean `deleted`")
        return bool(data["deleted"])

    return Call(method="DELETE", path=_kept(response_id), answer=answer, retried=False)


def response_items(response_id: str, order: str | None, limit: int | None, after: str | None) -> Call[ResponseItems]:
    query = {name: value for name, value in (("order", order), ("limit", limit), ("after", after)) if value is not None}
    path = f"{_kept(response_id)}/input_items" + (f"?{urlencode(query)}" if query else "")
    return Call(method="GET", path=path, answer=_parsed(ResponseItems))


def _kept(response_id: str) -> str:
    return f"/v1/responses/{quote(response_id, safe='')}"


def message(body: dict[str, Any], timeout: Timeout) -> Call[Message]:
    return Call(method="POST", path="/v1/messages", body=body, answer=_generated(Message), timeout=timeout)


def message_stream(body: dict[str, Any], timeout: Timeout) -> StreamCall[MessageEvent, Message]:
    return StreamCall(
        path="/v1/messages",
        body={**body, "stream": True},
        chunk=MessageEvent,
        accumulator=MessageAccumulator,
        expected=1,
        timeout=timeout,
    )


def count_tokens(body: dict[str, Any]) -> Call[int]:
    return _count("/v1/messages/count_tokens", body)


def count_input(body: dict[str, Any]) -> Call[int]:
    return _count("/v1/responses/input_tokens", body)


def _count(path: str, body: dict[str, Any]) -> Call[int]:
    def answer(response: httpx.Response) -> int:
        data = response.json()
        if not isinstance(data, dict) or type(data.get("input_tokens")) is not int:
            raise ValueError("the count should be an object with a number `input_tokens`")
        return int(data["input_tokens"])

    return Call(method="POST", path=path, body=body, answer=answer)


def tokenize(body: dict[str, Any]) -> Call[Tokenization]:
    return Call(method="POST", path="/tokenize", body=body, answer=_parsed(Tokenization))


def apply_template(body: dict[str, Any]) -> Call[str]:
    def answer(response: httpx.Response) -> str:
        data = response.json()
        if not isinstance(data, dict) or not isinstance(data.get("prompt"), str):
            raise ValueError("the answer should be an object with a text `prompt`")
        return str(data["prompt"])

    return Call(method="POST", path="/apply_template", body=body, answer=answer)


def detokenize(body: dict[str, Any]) -> Call[Detokenization]:
    return Call(method="POST", path="/detokenize", body=body, answer=_parsed(Detokenization))


def models() -> Call[list[Model]]:
    def answer(response: httpx.Response) -> list[Model]:
        data = response.json()
        if not isinstance(data, dict) or not isinstance(data.get("data"), list):
            raise ValueError("the list of models should be an object with a list `data`")
        return [parse(Model, entry) for entry in data["data"]]

    return Call(method="GET", path="/v1/models", answer=answer)


def model(model_id: str) -> Call[Model]:
    return Call(method="GET", path=f"/v1/models/{quote(model_id, safe='/')}", answer=_parsed(Model))


def load_adapter(name: str, path: str) -> Call[str]:
    body = {"lora_name": name, "lora_path": path}
    return Call(method="POST", path="/v1/load_lora_adapter", body=body, answer=_status, retried=False)


def unload_adapter(name: str) -> Call[str]:
    body = {"lora_name": name}
    return Call(method="POST", path="/v1/unload_lora_adapter", body=body, answer=_status, retried=False)


def _status(response: httpx.Response) -> str:
    data = response.json()
    if not isinstance(data, dict) or not isinstance(data.get("status"), str):
        raise ValueError("what became of the adapter should be an object with a string `status`")
    return str(data["status"])


def rotary() -> Call[RotarySettings]:
    return Call(method="GET", path="/v1/rotary", answer=_parsed(RotarySettings))


def profiles() -> Call[dict[str, RopeScaling]]:
    def answer(response: httpx.Response) -> dict[str, RopeScaling]:
        given = parse(RotarySettings, response.json()).profiles
        for name, scaling in given.items():
            if not isinstance(scaling, dict):
                raise ValueError(f"the profile {name!r} should be an object")
        # Not checked here: a newer server may know kinds that this client does not.
        return {name: RopeScaling(scaling) for name, scaling in given.items()}

    return Call(method="GET", path="/v1/rotary", answer=answer)


def inspect(
    rope_scaling: Mapping[str, Any] | str | None,
    length: int | None,
    rope_update: Mapping[str, Any] | str | None,
    model: str | None,
) -> Call[RotaryInspection]:
    fixed = {"rope_scaling": rope_scaling, "length": length, "rope_update": rope_update, "model": model}
    body = build_body(fixed, {}, None)
    return Call(method="POST", path="/v1/rotary/inspect", body=body, answer=_parsed(RotaryInspection))


def curves(fixed: Mapping[str, Any]) -> Call[RotaryCurves]:
    body = build_body(fixed, {}, None)
    return Call(method="POST", path="/v1/rotary/curves", body=body, answer=_parsed(RotaryCurves))


def cache() -> Call[CachePages]:
    return Call(method="GET", path="/v1/cache", answer=_parsed(CachePages))


def attention(fixed: Mapping[str, Any]) -> Call[AttentionMap]:
    return Call(method="POST", path="/v1/attention", body=build_body(fixed, {}, None), answer=_parsed(AttentionMap))


def probe(path: str) -> Call[Health]:
    """/health or /ready: 503 is an answer, and the caller decides whether to ask again."""

    def answer(response: httpx.Response) -> Health:
        data = response.json()
        found = data if isinstance(data, dict) else {}
        status, degraded = found.get("status"), found.get("degraded")
        return Health(
            ok=response.status_code == 200,
            status=status if isinstance(status, str) else "",
            degraded=tuple(map(str, degraded)) if isinstance(degraded, list) else (),
        )

    return Call(method="GET", path=path, answer=answer, accepted=frozenset({503}), retried=False)


def version() -> Call[str]:
    def answer(response: httpx.Response) -> str:
        data = response.json()
        if not isinstance(data, dict) or not isinstance(data.get("version"), str):
            raise ValueError("the version should be an object with a string `version`")
        return str(data["version"])

    return Call(method="GET", path="/version", answer=answer)


def metrics() -> Call[Metrics]:
    return Call(method="GET", path="/metrics", answer=lambda response: Metrics.parse(response.text))


def openapi() -> Call[dict[str, Any]]:
    def answer(response: httpx.Response) -> dict[str, Any]:
        data = response.json()
        if not isinstance(data, dict):
            raise ValueError("the description should be an object")
        return data

    return Call(method="GET", path="/openapi.json", answer=answer)


def build_body(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """One body from a method's own arguments, its options and `extra_body`; None means "not given"."""
    body = {name: _jsonable(value) for name, value in {**fixed, **options}.items() if value is not None}
    body.update(extra or {})
    return body


def _jsonable(value: Any) -> Any:
    """Sequences such as tuples, ranges and arrays as lists, messages as objects; everything else as it is."""
    if hasattr(value, "to_dict"):  # messages, items and blocks of answers
        return value.to_dict()
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return value.tolist()
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        return value
    return [_jsonable(item) for item in value]


def _streamed(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a stream, which tells its usage unless the caller says otherwise."""
    given = body.get("stream_options")
    options = {"include_usage": True, **given} if isinstance(given, Mapping) else {"include_usage": True}
    return {**body, "stream": True, "stream_options": options}


def _samples(body: Mapping[str, Any]) -> int:
    n = body.get("n")
    return n if isinstance(n, int) else 1


def _parsed(cls: type[T]) -> Callable[[httpx.Response], T]:
    return lambda response: parse(cls, response.json())


def _generated(cls: type[T]) -> Callable[[httpx.Response], T]:
    def answer(response: httpx.Response) -> T:
        data = response.json()
        if isinstance(data, dict):
            data = {**data, "request_id": request_id_of(response)}
        return parse(cls, data)

    return answer


def embeddings(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[Embeddings]:
    body = {"encoding_format": "base64", **build_body(fixed, options, extra)}

    def answer(response: httpx.Response) -> Embeddings:
        data = _object(response)
        for item in _items(data):
            if isinstance(item.get("embedding"), str):
                item["embedding"] = _floats(item["embedding"])
        return parse(Embeddings, data)

    return Call(method="POST", path="/v1/embeddings", body=body, answer=answer, timeout=timeout)


def pooling(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[PooledStates]:
    body = {"encoding_format": "base64", **build_body(fixed, options, extra)}

    def answer(response: httpx.Response) -> PooledStates:
        data = _object(response)
        for item in _items(data):
            item["rows"] = _rows(item.get("data"), item.get("shape"))
        return parse(PooledStates, data)

    return Call(method="POST", path="/pooling", body=body, answer=answer, timeout=timeout)


def score(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[PairScores]:
    return _plain(PairScores, "/v1/score", build_body(fixed, options, extra), timeout)


def rerank(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[Ranking]:
    return _plain(Ranking, "/v1/rerank", build_body(fixed, options, extra), timeout)


def classify(
    fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout
) -> Call[Classification]:
    return _plain(Classification, "/classify", build_body(fixed, options, extra), timeout)


def _plain(cls: type[T], path: str, body: dict[str, Any], timeout: Timeout) -> Call[T]:
    return Call(
        method="POST", path=path, body=body, answer=lambda response: parse(cls, _object(response)), timeout=timeout
    )


def _object(response: httpx.Response) -> dict[str, Any]:
    data = response.json()
    if not isinstance(data, dict):
        raise ValueError("the answer should be an object")
    return {**data, "request_id": request_id_of(response)}


def _items(data: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    items = data.get("data")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else ()


def _rows(values: Any, shape: Any) -> Any:
    """The rows of one text, whether they came as base64, as one row or as several."""
    if isinstance(values, str):
        if not isinstance(shape, list) or len(shape) != 2 or not isinstance(shape[1], int) or shape[1] < 1:
            raise ValueError("states in base64 should have a shape of rows and values")
        numbers, width = _floats(values), shape[1]
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]
    several = isinstance(values, list) and bool(values) and isinstance(values[0], list)
    return values if several else [values]


def _floats(packed: str) -> list[float]:
    """Little-endian float32."""
    numbers = array("f")
    numbers.frombytes(b64decode(packed, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
