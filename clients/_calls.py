"""Requests of the endpoints and the parsing of their responses, without I/O."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from windlass.clients import types
from windlass.clients._accumulate import ChatAccumulator, CompletionAccumulator, StreamAccumulator
from windlass.clients._parse import AnswerType, answer_reader, parse, response_format, to_json_value
from windlass.clients.errors import get_request_id
from windlass.clients.options import Timeout
from windlass.clients.rope import RopeScaling

T = TypeVar("T")
A = TypeVar("A")

# The dataclass of a response, or a function that reads the response and raises ValueError if it is malformed.
Answer = type[T] | Callable[[httpx.Response], T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request and the reader of its response.

    read_response: raises ValueError for a malformed response. accepted_statuses: error statuses that are read like successes.
    timeout: None for the client's own.
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
    """A request whose response is a stream of chunks of class `chunk`.

    accumulator: makes the accumulator of the whole response. expected_choices: number of choices that must finish.
    """

    path: str
    body: dict[str, Any]
    chunk: type[T]
    accumulator: Callable[[], StreamAccumulator[T, A]]
    expected_choices: int = 1
    timeout: Timeout = None


def get(path: str, answer: Answer[T]) -> Call[T]:
    return Call(method="GET", path=path, read_response=_reader(answer))


def post(
    path: str,
    answer: Answer[T],
    fields: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    retryable: bool = True,
) -> Call[T]:
    """fields: of the body, by the method's own parameters. options: CallOptions, and further fields of the body."""
    body, timeout = build_body(fields, options)
    return Call(
        method="POST", path=path, body=body, read_response=_reader(answer), retryable=retryable, timeout=timeout
    )


def delete(path: str, answer: Answer[T]) -> Call[T]:
    return Call(method="DELETE", path=path, read_response=_reader(answer), retryable=False)


def probe(path: str) -> Call[types.Health]:
    """/health or /ready. Status 503 is read as well, and the caller decides whether to repeat the request."""
    return Call(
        method="GET", path=path, read_response=_read_health, accepted_statuses=frozenset({503}), retryable=False
    )


def stream(
    path: str,
    chunk: type[T],
    accumulator: Callable[[], StreamAccumulator[T, A]],
    fields: Mapping[str, Any],
    options: Mapping[str, Any],
) -> StreamCall[T, A]:
    body, timeout = build_body(fields, options)
    return StreamCall(path=path, body={**body, "stream": True}, chunk=chunk, accumulator=accumulator, timeout=timeout)


def completion_stream(
    fields: Mapping[str, Any], options: Mapping[str, Any]
) -> StreamCall[types.CompletionChunk, types.Completion]:
    call = stream("/v1/completions", types.CompletionChunk, CompletionAccumulator, fields, options)
    prompts = call.body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return _with_usage(call, count)


def chat(
    fields: Mapping[str, Any], options: Mapping[str, Any], answer_type: AnswerType | None
) -> Call[types.ChatCompletion]:
    """Raises TypeError for an unsupported answer type, ValueError if there is a `response_format` as well."""
    call = post("/v1/chat/completions", types.ChatCompletion, fields, options)
    if answer_type is None:
        return call
    parse_content = answer_reader(answer_type)

    def read_response(response: httpx.Response) -> types.ChatCompletion:
        chat = call.read_response(response)
        choices = [
            replace(choice, message=replace(choice.message, _parse_content=parse_content)) for choice in chat.choices
        ]
        return replace(chat, choices=tuple(choices))

    return replace(call, body=_with_response_format(call.body or {}, answer_type), read_response=read_response)


def chat_stream(
    fields: Mapping[str, Any], options: Mapping[str, Any], answer_type: AnswerType | None
) -> StreamCall[types.ChatCompletionChunk, types.ChatCompletion]:
    """Raises the same errors as `chat`."""
    parse_content = None if answer_type is None else answer_reader(answer_type)
    call = stream(
        "/v1/chat/completions", types.ChatCompletionChunk, lambda: ChatAccumulator(parse_content), fields, options
    )
    if answer_type is not None:
        call = replace(call, body=_with_response_format(call.body, answer_type))
    return _with_usage(call, 1)


def response_path(response_id: str) -> str:
    return f"/v1/responses/{quote(response_id, safe='')}"


def build_body(fields: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], Timeout]:
    """The body of a request and the timeout of its transfers. Fields and options that are None are left out."""
    rest = dict(options or {})
    timeout, extra_body, deadline = (rest.pop(name, None) for name in ("timeout", "extra_body", "deadline"))
    body: dict[str, Any] = {}
    for given in (fields, rest, {"timeout": deadline}):
        body |= {name: to_json_value(value) for name, value in given.items() if value is not None}
    return {**body, **(extra_body or {})}, timeout


def _with_response_format(body: dict[str, Any], answer_type: AnswerType) -> dict[str, Any]:
    if "response_format" in body:
        raise ValueError("give answer_type or response_format, not both")
    return {**body, "response_format": response_format(answer_type)}


def _with_usage(call: StreamCall[T, A], num_prompts: int) -> StreamCall[T, A]:
    """The call with `include_usage`, unless the caller set it, and with the number of its choices."""
    given, samples = call.body.get("stream_options"), call.body.get("n")
    options = {"include_usage": True, **(given if isinstance(given, Mapping) else {})}
    expected = num_prompts * (samples if isinstance(samples, int) else 1)
    return replace(call, body={**call.body, "stream_options": options}, expected_choices=expected)


def _reader(answer: Answer[T]) -> Callable[[httpx.Response], T]:
    if not isinstance(answer, type):
        return answer
    return lambda response: _parse_with_id(answer, response.json(), response)


def _parse_with_id(cls: type[T], data: Any, response: httpx.Response) -> T:
    if isinstance(data, dict):
        data = {**data, "request_id": get_request_id(response)}
    return parse(cls, data)


def read_field(name: str, kind: type[T]) -> Callable[[httpx.Response], T]:
    """A reader of responses of which only one field matters."""

    def read_response(response: httpx.Response) -> T:
        data = response.json()
        value = data.get(name) if isinstance(data, dict) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"it should be an object with {name!r} of type {kind.__name__}")
        return value

    return read_response


def read_models(response: httpx.Response) -> list[types.Model]:
    return [parse(types.Model, entry) for entry in read_field("data", list)(response)]


def read_profiles(response: httpx.Response) -> dict[str, RopeScaling]:
    profiles = parse(types.RotarySettings, response.json()).profiles
    for name, scaling in profiles.items():
        if not isinstance(scaling, dict):
            raise ValueError(f"the profile {name!r} should be an object")
    return {name: RopeScaling(scaling) for name, scaling in profiles.items()}


def read_metrics(response: httpx.Response) -> types.Metrics:
    return types.Metrics.parse(response.text)


def read_object(response: httpx.Response) -> dict[str, Any]:
    data = response.json()
    if not isinstance(data, dict):
        raise ValueError("it should be an object")
    return data


def _read_health(response: httpx.Response) -> types.Health:
    data = response.json()
    found = data if isinstance(data, dict) else {}
    status, degraded = found.get("status"), found.get("degraded")
    return types.Health(
        ok=response.status_code == 200,
        status=status if isinstance(status, str) else "",
        degraded=tuple(map(str, degraded)) if isinstance(degraded, list) else (),
    )


def read_embeddings(response: httpx.Response) -> types.Embeddings:
    """Embeddings as numbers or as base64 of little-endian float32."""
    data = read_object(response)
    for item in _data_items(data):
        if isinstance(item.get("embedding"), str):
            item["embedding"] = _decode_floats(item["embedding"])
    return _parse_with_id(types.Embeddings, data, response)


def read_pooled_states(response: httpx.Response) -> types.PooledStates:
    """States as one row or several, as numbers or as base64 of little-endian float32."""
    data = read_object(response)
    for item in _data_items(data):
        item["rows"] = _decode_rows(item.get("data"), item.get("shape"))
    return _parse_with_id(types.PooledStates, data, response)


def _data_items(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = data.get("data")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _decode_rows(values: Any, shape: Any) -> Any:
    if isinstance(values, str):
        if not isinstance(shape, list) or len(shape) != 2 or not isinstance(shape[1], int) or shape[1] < 1:
            raise ValueError("states in base64 should have a shape of rows and values")
        numbers, width = _decode_floats(values), shape[1]
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]
    several = isinstance(values, list) and bool(values) and isinstance(values[0], list)
    return values if several else [values]


def _decode_floats(packed: str) -> list[float]:
    numbers = array("f")
    numbers.frombytes(b64decode(packed, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
