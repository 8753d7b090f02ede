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
    StreamAccumulator,
)
from windlass.clients._parse import AnswerType, parse, reader, response_format
from windlass.clients.errors import get_request_id
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
    read_response: Callable[[httpx.Response], T]
    accepted_statuses: frozenset[int] = frozenset()
    retryable: bool = True
    timeout: Timeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCall(Generic[T, A]):
    """A request that is answered by a stream of chunks of class `chunk`, which must finish `expected_choices` choices.

    accumulator: makes what puts the whole answer together from them.
    """

    path: str
    body: dict[str, Any]
    chunk: type[T]
    accumulator: Callable[[], StreamAccumulator[A]]
    expected_choices: int
    timeout: Timeout = None


def completion(body: dict[str, Any], timeout: Timeout) -> Call[Completion]:
    return Call(
        method="POST",
        path="/v1/completions",
        body=body,
        read_response=_reader_with_request_id(Completion),
        timeout=timeout,
    )


def completion_stream(body: dict[str, Any], timeout: Timeout) -> StreamCall[CompletionChunk, Completion]:
    prompts = body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return StreamCall(
        path="/v1/completions",
        body=_stream_body(body),
        chunk=CompletionChunk,
        accumulator=CompletionAccumulator,
        expected_choices=count * _num_samples(body),
        timeout=timeout,
    )


def infill(body: dict[str, Any], timeout: Timeout) -> Call[Infill]:
    return Call(
        method="POST", path="/infill", body=body, read_response=_reader_with_request_id(Infill), timeout=timeout
    )


def infill_stream(body: dict[str, Any], timeout: Timeout) -> StreamCall[Infill, Infill]:
    return StreamCall(
        path="/infill",
        body={**body, "stream": True},
        chunk=Infill,
        accumulator=InfillAccumulator,
        expected_choices=1,
        timeout=timeout,
    )


def chat(body: dict[str, Any], timeout: Timeout, answer_type: AnswerType | None = None) -> Call[ChatCompletion]:
    """answer_type: what the answers shall be; the body then asks for it (see `with_response_format`)."""
    read = None if answer_type is None else reader(answer_type)

    def read_response(response: httpx.Response) -> ChatCompletion:
        parsed = _reader_with_request_id(ChatCompletion)(response)
        if read is None:
            return parsed
        choices = (replace(choice, message=replace(choice.message, _parse_content=read)) for choice in parsed.choices)
        return replace(parsed, choices=tuple(choices))

    return Call(
        method="POST",
        path="/v1/chat/completions",
        body=with_response_format(body, answer_type),
        read_response=read_response,
        timeout=timeout,
    )


def chat_stream(
    body: dict[str, Any], timeout: Timeout, answer_type: AnswerType | None = None
) -> StreamCall[ChatCompletionChunk, ChatCompletion]:
    read = None if answer_type is None else reader(answer_type)
    return StreamCall(
        path="/v1/chat/completions",
        body=_stream_body(with_response_format(body, answer_type)),
        chunk=ChatCompletionChunk,
        accumulator=lambda: ChatAccumulator(read),
        expected_choices=_num_samples(body),
        timeout=timeout,
    )


def with_response_format(body: dict[str, Any], answer_type: AnswerType | None) -> dict[str, Any]:
    """The body with the `response_format` of an answer type. Raises TypeError for what is none, ValueError for both."""
    if answer_type is None:
        return body
    if "response_format" in body:
        raise ValueError("give answer_type or response_format, not both")
    return {**body, "response_format": response_format(answer_type)}


def response(body: dict[str, Any], timeout: Timeout) -> Call[Response]:
    return Call(
        method="POST", path="/v1/responses", body=body, read_response=_reader_with_request_id(Response), timeout=timeout
    )


def response_stream(body: dict[str, Any], timeout: Timeout) -> StreamCall[ResponseEvent, Response]:
    return StreamCall(
        path="/v1/responses",
        body={**body, "stream": True},
        chunk=ResponseEvent,
        accumulator=ResponseAccumulator,
        expected_choices=1,
        timeout=timeout,
    )


def get_response(response_id: str) -> Call[Response]:
    return Call(method="GET", path=_response_path(response_id), read_response=_reader_with_request_id(Response))


def delete_response(response_id: str) -> Call[bool]:
    def read_response(response: httpx.Response) -> bool:
        data = response.json()
        if not isinstance(data, dict) or not isinstance(data.get("deleted"), bool):
            raise ValueError("what became of the response should be an object with a boolean `deleted`")
        return bool(data["deleted"])

    return Call(method="DELETE", path=_response_path(response_id), read_response=read_response, retryable=False)


def response_items(response_id: str, order: str | None, limit: int | None, after: str | None) -> Call[ResponseItems]:
    query = {name: value for name, value in (("order", order), ("limit", limit), ("after", after)) if value is not None}
    path = f"{_response_path(response_id)}/input_items" + (f"?{urlencode(query)}" if query else "")
    return Call(method="GET", path=path, read_response=_reader_of(ResponseItems))


def _response_path(response_id: str) -> str:
    return f"/v1/responses/{quote(response_id, safe='')}"


def message(body: dict[str, Any], timeout: Timeout) -> Call[Message]:
    return Call(
        method="POST", path="/v1/messages", body=body, read_response=_reader_with_request_id(Message), timeout=timeout
    )


def message_stream(body: dict[str, Any], timeout: Timeout) -> StreamCall[MessageEvent, Message]:
    return StreamCall(
        path="/v1/messages",
        body={**body, "stream": True},
        chunk=MessageEvent,
        accumulator=MessageAccumulator,
        expected_choices=1,
        timeout=timeout,
    )


def count_tokens(body: dict[str, Any]) -> Call[int]:
    return _token_count_call("/v1/messages/count_tokens", body)


def count_input(body: dict[str, Any]) -> Call[int]:
    return _token_count_call("/v1/responses/input_tokens", body)


def _token_count_call(path: str, body: dict[str, Any]) -> Call[int]:
    def read_response(response: httpx.Response) -> int:
        data = response.json()
        if not isinstance(data, dict) or type(data.get("input_tokens")) is not int:
            raise ValueError("the count should be an object with a number `input_tokens`")
        return int(data["input_tokens"])

    return Call(method="POST", path=path, body=body, read_response=read_response)


def tokenize(body: dict[str, Any]) -> Call[Tokenization]:
    return Call(method="POST", path="/tokenize", body=body, read_response=_reader_of(Tokenization))


def apply_template(body: dict[str, Any]) -> Call[str]:
    def read_response(response: httpx.Response) -> str:
        data = response.json()
        if not isinstance(data, dict) or not isinstance(data.get("prompt"), str):
            raise ValueError("the answer should be an object with a text `prompt`")
        return str(data["prompt"])

    return Call(method="POST", path="/apply_template", body=body, read_response=read_response)


def detokenize(body: dict[str, Any]) -> Call[Detokenization]:
    return Call(method="POST", path="/detokenize", body=body, read_response=_reader_of(Detokenization))


def models() -> Call[list[Model]]:
    def read_response(response: httpx.Response) -> list[Model]:
        data = response.json()
        if not isinstance(data, dict) or not isinstance(data.get("data"), list):
            raise ValueError("the list of models should be an object with a list `data`")
        return [parse(Model, entry) for entry in data["data"]]

    return Call(method="GET", path="/v1/models", read_response=read_response)


def model(model_id: str) -> Call[Model]:
    return Call(method="GET", path=f"/v1/models/{quote(model_id, safe='/')}", read_response=_reader_of(Model))


def load_adapter(name: str, path: str) -> Call[str]:
    body = {"lora_name": name, "lora_path": path}
    return Call(method="POST", path="/v1/load_lora_adapter", body=body, read_response=_read_status, retryable=False)


def unload_adapter(name: str) -> Call[str]:
    body = {"lora_name": name}
    return Call(method="POST", path="/v1/unload_lora_adapter", body=body, read_response=_read_status, retryable=False)


def _read_status(response: httpx.Response) -> str:
    data = response.json()
    if not isinstance(data, dict) or not isinstance(data.get("status"), str):
        raise ValueError("what became of the adapter should be an object with a string `status`")
    return str(data["status"])


def rotary() -> Call[RotarySettings]:
    return Call(method="GET", path="/v1/rotary", read_response=_reader_of(RotarySettings))


def profiles() -> Call[dict[str, RopeScaling]]:
    def read_response(response: httpx.Response) -> dict[str, RopeScaling]:
        given = parse(RotarySettings, response.json()).profiles
        for name, scaling in given.items():
            if not isinstance(scaling, dict):
                raise ValueError(f"the profile {name!r} should be an object")
        # Not checked here: a newer server may know kinds that this client does not.
        return {name: RopeScaling(scaling) for name, scaling in given.items()}

    return Call(method="GET", path="/v1/rotary", read_response=read_response)


def inspect(
    rope_scaling: Mapping[str, Any] | str | None,
    length: int | None,
    rope_update: Mapping[str, Any] | str | None,
    model: str | None,
) -> Call[RotaryInspection]:
    fixed = {"rope_scaling": rope_scaling, "length": length, "rope_update": rope_update, "model": model}
    body = build_body(fixed, {}, None)
    return Call(method="POST", path="/v1/rotary/inspect", body=body, read_response=_reader_of(RotaryInspection))


def curves(fixed: Mapping[str, Any]) -> Call[RotaryCurves]:
    body = build_body(fixed, {}, None)
    return Call(method="POST", path="/v1/rotary/curves", body=body, read_response=_reader_of(RotaryCurves))


def cache() -> Call[CachePages]:
    return Call(method="GET", path="/v1/cache", read_response=_reader_of(CachePages))


def attention(fixed: Mapping[str, Any]) -> Call[AttentionMap]:
    return Call(
        method="POST", path="/v1/attention", body=build_body(fixed, {}, None), read_response=_reader_of(AttentionMap)
    )


def probe(path: str) -> Call[Health]:
    """/health or /ready: 503 is an answer, and the caller decides whether to ask again."""

    def read_response(response: httpx.Response) -> Health:
        data = response.json()
        found = data if isinstance(data, dict) else {}
        status, degraded = found.get("status"), found.get("degraded")
        return Health(
            ok=response.status_code == 200,
            status=status if isinstance(status, str) else "",
            degraded=tuple(map(str, degraded)) if isinstance(degraded, list) else (),
        )

    return Call(
        method="GET", path=path, read_response=read_response, accepted_statuses=frozenset({503}), retryable=False
    )


def version() -> Call[str]:
    def read_response(response: httpx.Response) -> str:
        data = response.json()
        if not isinstance(data, dict) or not isinstance(data.get("version"), str):
            raise ValueError("the version should be an object with a string `version`")
        return str(data["version"])

    return Call(method="GET", path="/version", read_response=read_response)


def metrics() -> Call[Metrics]:
    return Call(method="GET", path="/metrics", read_response=lambda response: Metrics.parse(response.text))


def openapi() -> Call[dict[str, Any]]:
    def read_response(response: httpx.Response) -> dict[str, Any]:
        data = response.json()
        if not isinstance(data, dict):
            raise ValueError("the description should be an object")
        return data

    return Call(method="GET", path="/openapi.json", read_response=read_response)


def build_body(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """One body from a method's own arguments, its options and `extra_body`; None means "not given"."""
    body = {name: _to_json_value(value) for name, value in {**fixed, **options}.items() if value is not None}
    body.update(extra or {})
    return body


def _to_json_value(value: Any) -> Any:
    """Sequences such as tuples, ranges and arrays as lists, messages as objects; everything else as it is."""
    if hasattr(value, "to_dict"):  # messages, items and blocks of answers
        return value.to_dict()
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return value.tolist()
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        return value
    return [_to_json_value(item) for item in value]


def _stream_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a stream, which tells its usage unless the caller says otherwise."""
    given = body.get("stream_options")
    options = {"include_usage": True, **given} if isinstance(given, Mapping) else {"include_usage": True}
    return {**body, "stream": True, "stream_options": options}


def _num_samples(body: Mapping[str, Any]) -> int:
    n = body.get("n")
    return n if isinstance(n, int) else 1


def _reader_of(cls: type[T]) -> Callable[[httpx.Response], T]:
    return lambda response: parse(cls, response.json())


def _reader_with_request_id(cls: type[T]) -> Callable[[httpx.Response], T]:
    def read_response(response: httpx.Response) -> T:
        data = response.json()
        if isinstance(data, dict):
            data = {**data, "request_id": get_request_id(response)}
        return parse(cls, data)

    return read_response


def embeddings(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[Embeddings]:
    body = {"encoding_format": "base64", **build_body(fixed, options, extra)}

    def read_response(response: httpx.Response) -> Embeddings:
        data = _read_object(response)
        for item in _data_items(data):
            if isinstance(item.get("embedding"), str):
                item["embedding"] = _decode_floats(item["embedding"])
        return parse(Embeddings, data)

    return Call(method="POST", path="/v1/embeddings", body=body, read_response=read_response, timeout=timeout)


def pooling(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[PooledStates]:
    body = {"encoding_format": "base64", **build_body(fixed, options, extra)}

    def read_response(response: httpx.Response) -> PooledStates:
        data = _read_object(response)
        for item in _data_items(data):
            item["rows"] = _decode_rows(item.get("data"), item.get("shape"))
        return parse(PooledStates, data)

    return Call(method="POST", path="/pooling", body=body, read_response=read_response, timeout=timeout)


def score(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[PairScores]:
    return _pooling_call(PairScores, "/v1/score", build_body(fixed, options, extra), timeout)


def rerank(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[Ranking]:
    return _pooling_call(Ranking, "/v1/rerank", build_body(fixed, options, extra), timeout)


def classify(
    fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout
) -> Call[Classification]:
    return _pooling_call(Classification, "/classify", build_body(fixed, options, extra), timeout)


def _pooling_call(cls: type[T], path: str, body: dict[str, Any], timeout: Timeout) -> Call[T]:
    return Call(
        method="POST",
        path=path,
        body=body,
        read_response=lambda response: parse(cls, _read_object(response)),
        timeout=timeout,
    )


def _read_object(response: httpx.Response) -> dict[str, Any]:
    data = response.json()
    if not isinstance(data, dict):
        raise ValueError("the answer should be an object")
    return {**data, "request_id": get_request_id(response)}


def _data_items(data: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    items = data.get("data")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else ()


def _decode_rows(values: Any, shape: Any) -> Any:
    """The rows of one text, whether they came as base64, as one row or as several."""
    if isinstance(values, str):
        if not isinstance(shape, list) or len(shape) != 2 or not isinstance(shape[1], int) or shape[1] < 1:
            raise ValueError("states in base64 should have a shape of rows and values")
        numbers, width = _decode_floats(values), shape[1]
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]
    several = isinstance(values, list) and bool(values) and isinstance(values[0], list)
    return values if several else [values]


def _decode_floats(packed: str) -> list[float]:
    """Little-endian float32."""
    numbers = array("f")
    numbers.frombytes(b64decode(packed, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
