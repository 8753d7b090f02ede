"""The whole behaviour of the client without any input or output: requests, retries, errors, answers, streams.

`Core` builds calls and runs them as generators that ask for steps (`Send`, `Read`, `Close`, `Sleep`); the two clients
only carry the steps out, one synchronously and one asynchronously. So no rule is written twice.
"""

from __future__ import annotations

import email.utils
import json
import os
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from windlass.clients._parse import parse
from windlass.clients._stream import ChunkReader
from windlass.clients.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    ResponseError,
    status_error_class,
)
from windlass.clients.types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Detokenization,
    Health,
    Model,
    RetryPolicy,
    RotaryInspection,
    RotarySettings,
    Tokenization,
)

T = TypeVar("T")

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
# A long answer that is not streamed comes all at once; streams hear from the server every few seconds.
DEFAULT_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_RETRIED = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request, give its response with headers only."""

    request: httpx.Request


@dataclass(frozen=True, slots=True)
class Read:
    """Read the response's body to its end."""

    response: httpx.Response


@dataclass(frozen=True, slots=True)
class Close:
    """Close the response, read or not."""

    response: httpx.Response


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait."""

    seconds: float


Step = Send | Read | Close | Sleep
Steps = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request to make and how to understand its answer.

    answer: makes the result from the decoded JSON, or raises ValueError. accepted: error statuses that are answers too.
    timeout: None for the client's own.
    """

    method: str
    path: str
    body: dict[str, Any] | None = None
    answer: Callable[[Any, httpx.Response], T]
    accepted: frozenset[int] = frozenset()
    retried: bool = True
    timeout: float | httpx.Timeout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCall(Generic[T]):
    """A request that is answered by a stream of chunks of class `chunk`, which must finish `expected` choices."""

    path: str
    body: dict[str, Any]
    chunk: type[T]
    expected: int
    timeout: float | httpx.Timeout | None = None


class Core:
    """Settings, calls and the rules by which they run. Shared by both clients; holds no connection."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        timeout: float | httpx.Timeout | None,
        retry: RetryPolicy | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self.base_url = _base_url(base_url or os.environ.get("WINDLASS_BASE_URL") or DEFAULT_BASE_URL)
        key = api_key if api_key is not None else os.environ.get("WINDLASS_API_KEY")
        self.timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        self.retry = retry or RetryPolicy()
        self.headers = {"user-agent": "windlass-client", "accept": "application/json, text/event-stream"}
        if key:
            if not key.isascii() or not key.isprintable():
                raise ValueError("the API key holds characters that no HTTP header may carry: check WINDLASS_API_KEY")
            self.headers["authorization"] = f"Bearer {key}"
        self.headers.update(headers or {})
        self._random = random.Random()

    # ---- calls -------------------------------------------------------------------------------------------------------
    def completion(self, body: dict[str, Any], timeout: float | httpx.Timeout | None) -> Call[Completion]:
        return Call(method="POST", path="/v1/completions", body=body, answer=_dated(Completion), timeout=timeout)

    def completion_stream(
        self, body: dict[str, Any], timeout: float | httpx.Timeout | None
    ) -> StreamCall[CompletionChunk]:
        prompts = body.get("prompt")
        count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        return StreamCall(
            path="/v1/completions",
            body={**body, "stream": True},
            chunk=CompletionChunk,
            expected=count * _samples(body),
            timeout=timeout,
        )

    def chat(self, body: dict[str, Any], timeout: float | httpx.Timeout | None) -> Call[ChatCompletion]:
        return Call(
            method="POST", path="/v1/chat/completions", body=body, answer=_dated(ChatCompletion), timeout=timeout
        )

    def chat_stream(
        self, body: dict[str, Any], timeout: float | httpx.Timeout | None
    ) -> StreamCall[ChatCompletionChunk]:
        return StreamCall(
            path="/v1/chat/completions",
            body={**body, "stream": True},
            chunk=ChatCompletionChunk,
            expected=_samples(body),
            timeout=timeout,
        )

    def tokenize(self, body: dict[str, Any]) -> Call[Tokenization]:
        return Call(method="POST", path="/tokenize", body=body, answer=_plain(Tokenization))

    def detokenize(self, body: dict[str, Any]) -> Call[Detokenization]:
        return Call(method="POST", path="/detokenize", body=body, answer=_plain(Detokenization))

    def models(self) -> Call[list[Model]]:
        def answer(data: Any, response: httpx.Response) -> list[Model]:
            if not isinstance(data, dict) or not isinstance(data.get("data"), list):
                raise ValueError("the list of models should be an object with a list `data`")
            return [parse(Model, entry) for entry in data["data"]]

        return Call(method="GET", path="/v1/models", answer=answer)

    def model(self, model_id: str) -> Call[Model]:
        return Call(method="GET", path=f"/v1/models/{quote(model_id, safe='/')}", answer=_plain(Model))

    def rotary(self) -> Call[RotarySettings]:
        return Call(method="GET", path="/v1/rotary", answer=_plain(RotarySettings))

    def inspect(
        self,
        rope_scaling: Mapping[str, Any] | str | None,
        length: int | None,
        rope_update: Mapping[str, Any] | str | None,
        model: str | None,
    ) -> Call[RotaryInspection]:
        fixed = {"rope_scaling": rope_scaling, "length": length, "rope_update": rope_update, "model": model}
        body = build_body(fixed, {}, None)
        return Call(method="POST", path="/v1/rotary/inspect", body=body, answer=_plain(RotaryInspection))

    def probe(self, path: str) -> Call[Health]:
        """/health or /ready: 503 is an answer, and asking again is the caller's business."""

        def answer(data: Any, response: httpx.Response) -> Health:
            status = data.get("status") if isinstance(data, dict) else None
            return Health(ok=response.status_code == 200, status=status if isinstance(status, str) else "")

        return Call(method="GET", path=path, answer=answer, accepted=frozenset({503}), retried=False)

    # ---- running them ------------------------------------------------------------------------------------------------
    def run(self, call: Call[T]) -> Steps[T]:
        """Send, with retries, and give the parsed answer; raises APIError of some kind."""
        response = yield from self._exchange(
            call.method, call.path, call.body, call.timeout, call.accepted, call.retried
        )
        yield from self._read(response)
        try:
            return call.answer(response.json(), response)
        except ValueError as error:  # of the JSON decoder, or of a field
            raise _not_understood(response, str(error)) from error

    def open(self, call: StreamCall[T]) -> Steps[tuple[httpx.Response, ChunkReader[T]]]:
        """Send, with retries, until a stream begins; from then on nothing is sent again."""
        response = yield from self._exchange("POST", call.path, call.body, call.timeout, frozenset(), True)
        kind = response.headers.get("content-type", "")
        if not kind.lower().startswith("text/event-stream"):
            yield Close(response)
            raise _not_understood(response, f"a stream was expected, not {kind or 'an answer without a type'}")
        return response, ChunkReader(call.chunk, call.expected, request_id_of(response))

    def _exchange(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout: float | httpx.Timeout | None,
        accepted: frozenset[int],
        retried: bool,
    ) -> Steps[httpx.Response]:
        request = self._request(method, path, body, timeout)
        attempt = 0
        while True:
            failure: APIError
            retry_after = None
            try:
                response: httpx.Response = yield Send(request)
            except httpx.HTTPError as error:
                failure = transport_error(error, str(request.url))
                failure.__cause__ = error
                again = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            else:
                if response.is_success or response.status_code in accepted:
                    return response
                yield from self._read(response)
                failure = _status_error(response)
                retry_after = failure.retry_after
                again = response.status_code in _RETRIED
            delay = self.retry.delay(attempt, retry_after, self._random.random()) if again and retried else None
            if delay is None:
                raise failure
            attempt += 1
            yield Sleep(delay)

    def _read(self, response: httpx.Response) -> Steps[None]:
        try:
            yield Read(response)
        except httpx.HTTPError as error:
            failure = transport_error(error, str(response.request.url))
            failure.status, failure.request_id = response.status_code, request_id_of(response)
            raise failure from error

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float | httpx.Timeout | None
    ) -> httpx.Request:
        headers = dict(self.headers)
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
        limits = httpx.Timeout(self.timeout if timeout is None else timeout)
        extensions = {"timeout": limits.as_dict()}
        return httpx.Request(method, self.base_url + path, headers=headers, content=content, extensions=extensions)


def build_body(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """One body from a method's own arguments, its options and `extra_body`; None means "not given"."""
    body = {name: _jsonable(value) for name, value in {**fixed, **options}.items() if value is not None}
    body.update(extra or {})
    return body


def _jsonable(value: Any) -> Any:
    """Sequences such as tuples, ranges and arrays as lists; everything else as it is."""
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return value.tolist()
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        return value
    return [_jsonable(item) for item in value]


def transport_error(error: httpx.HTTPError, url: str) -> APIError:
    """What a failure below HTTP means to the caller."""
    what = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return APITimeoutError(f"timed out talking to {url}: {what}")
    if isinstance(error, (httpx.ConnectError, httpx.UnsupportedProtocol)):
        return APIConnectionError(f"cannot reach {url}: {what}; is the server running, and is the base URL right?")
    if isinstance(error, httpx.DecodingError):
        return ResponseError(f"cannot decode the answer of {url}: {what}")
    return APIConnectionError(f"the connection to {url} broke: {what}")


def _base_url(text: str) -> str:
    url = text.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"cannot read the base URL {text!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"the base URL {text!r} should look like {DEFAULT_BASE_URL}")
    return url


def _samples(body: Mapping[str, Any]) -> int:
    n = body.get("n")
    return n if isinstance(n, int) else 1


def _plain(cls: type[T]) -> Callable[[Any, httpx.Response], T]:
    return lambda data, response: parse(cls, data)


def _dated(cls: type[T]) -> Callable[[Any, httpx.Response], T]:
    def answer(data: Any, response: httpx.Response) -> T:
        if isinstance(data, dict):
            data = {**data, "request_id": request_id_of(response)}
        return parse(cls, data)

    return answer


def request_id_of(response: httpx.Response) -> str | None:
    value: str | None = response.headers.get("x-request-id")
    return value


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds a Retry-After header asks for: a number or an HTTP date."""
    value = response.headers.get("retry-after", "").strip()
    if value.isascii() and value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time()) if value else None
    except (ValueError, TypeError, OverflowError):
        return None


def _status_error(response: httpx.Response) -> APIStatusError:
    status = response.status_code
    fields: dict[str, str | None] = {"message": None, "type": None, "param": None, "code": None}
    try:
        data = response.json()
    except ValueError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("error"), dict):
        fields = {name: _text(data["error"].get(name)) for name in fields}
    elif isinstance(data, dict):
        fields["message"] = _text(data.get("message") or data.get("detail") or data.get("error"))
    message = fields.pop("message")
    if message is None:  # not our server: a proxy, or something else altogether
        location = response.headers.get("location")
        what = f"redirects to {location}" if response.is_redirect and location else response.text.strip()[:200]
        message = f"HTTP {status} {response.reason_phrase} from {response.request.url}" + (f": {what}" if what else "")
    return status_error_class(status)(
        message, status=status, request_id=request_id_of(response), retry_after=_retry_after(response), **fields
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _not_understood(response: httpx.Response, what: str) -> ResponseError:
    return ResponseError(
        f"the answer of {response.request.url} is not understood: {what}",
        status=response.status_code,
        request_id=request_id_of(response),
    )
