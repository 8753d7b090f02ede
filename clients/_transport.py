"""Execution of calls with httpx: requests, retries, errors, and the start of streams."""

from __future__ import annotations

import json
import os
import random
import re
import time
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from windlass.clients._calls import Call, StreamCall
from windlass.clients.errors import (
    REQUEST_ID_HEADER,
    APIError,
    get_request_id,
    interrupted_response_error,
    invalid_response_error,
    status_error,
    transport_error,
)
from windlass.clients.options import RetryPolicy, Timeout
from windlass.clients.streams import ChunkReader

T = TypeVar("T")
A = TypeVar("A")

DEFAULT_BASE_URL = "http://127.0.0.1:8000"

# A long response that is not streamed arrives all at once. A stream has an event every few seconds.
DEFAULT_TIMEOUT = httpx.Timeout(600.0, connect=5.0)

_RETRY_STATUSES = frozenset({429, 503})
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")  # the server's own rule


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send the request and return its response without the body."""

    request: httpx.Request


@dataclass(frozen=True, slots=True)
class ReadBody:
    """Read the response's body to its end."""

    response: httpx.Response


@dataclass(frozen=True, slots=True)
class CloseResponse:
    """Close the response, whether or not it was read."""

    response: httpx.Response


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


Step = SendRequest | ReadBody | CloseResponse | Sleep
Steps = Generator[Step, Any, T]


class CallFlow:
    """Settings of a client, and the steps of its calls. Both clients use it; it does no I/O."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        timeout: Timeout,
        retry: RetryPolicy | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self.base_url = _base_url(base_url or os.environ.get("WINDLASS_BASE_URL") or DEFAULT_BASE_URL)
        # Never OPENAI_API_KEY, which is a secret of another server.
        key = api_key if api_key is not None else os.environ.get("WINDLASS_API_KEY")
        self.timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        self.retry = retry or RetryPolicy()
        self.headers = httpx.Headers({"user-agent": "windlass-client", "accept": "application/json, text/event-stream"})
        if key:
            if not key.isascii() or not key.isprintable():
                raise ValueError("the API key has characters that no HTTP header may carry: check WINDLASS_API_KEY")
            self.headers["authorization"] = f"Bearer {key}"
        self.headers.update(headers or {})
        self._random = random.Random()

    def run(self, call: Call[T]) -> Steps[T]:
        """Send the request, with retries, and return the parsed response; raises APIError."""
        request = self._build_request(call.method, call.path, call.body, call.timeout)
        response = yield from self._send_with_retries(request, call.accepted_statuses, call.retryable)
        yield from self._read_body(response)
        try:
            return call.read_response(response)
        except (ValueError, RecursionError) as error:  # of the JSON decoder, or of a field
            raise invalid_response_error(response, str(error)) from error

    def open(self, call: StreamCall[T, A]) -> Steps[tuple[httpx.Response, ChunkReader[T, A]]]:
        """Send the request, with retries, until a stream begins. After that nothing is repeated."""
        request = self._build_request("POST", call.path, call.body, call.timeout)
        response = yield from self._send_with_retries(request, frozenset(), True)
        kind = response.headers.get("content-type", "")
        if not kind.lower().startswith("text/event-stream"):
            yield CloseResponse(response)
            raise invalid_response_error(response, f"a stream was expected, not {kind or 'a response without a type'}")
        return response, ChunkReader(call.chunk, call.accumulator(), call.expected_choices, get_request_id(response))

    def _send_with_retries(
        self, request: httpx.Request, accepted_statuses: frozenset[int], retryable: bool
    ) -> Steps[httpx.Response]:
        attempt = 0
        while True:
            failure: APIError
            try:
                response: httpx.Response = yield SendRequest(request)
            except httpx.HTTPError as error:
                failure = transport_error(error, request)
                failure.__cause__ = error
                can_retry = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            else:
                if response.is_success or response.status_code in accepted_statuses:
                    return response
                yield from self._read_body(response)
                failure = status_error(response)
                can_retry = response.status_code in _RETRY_STATUSES
            delay = None
            if can_retry and retryable:
                delay = self.retry.delay(attempt, failure.retry_after, self._random.random())
            if delay is None:
                raise failure
            attempt += 1
            yield Sleep(delay)

    def _read_body(self, response: httpx.Response) -> Steps[None]:
        try:
            yield ReadBody(response)
        except httpx.HTTPError as error:
            raise interrupted_response_error(error, response) from error

    def _build_request(self, method: str, path: str, body: dict[str, Any] | None, timeout: Timeout) -> httpx.Request:
        headers = self.headers.copy()
        wanted = None if body is None else body.get("request_id")
        if isinstance(wanted, str) and _VALID_REQUEST_ID.fullmatch(wanted):
            headers[REQUEST_ID_HEADER] = wanted
        elif REQUEST_ID_HEADER not in headers:
            # Known before the response, so that a timeout can be found in the server's log.
            headers[REQUEST_ID_HEADER] = uuid.uuid4().hex
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
        limits = httpx.Timeout(self.timeout if timeout is None else timeout)
        extensions = {"timeout": limits.as_dict()}
        return httpx.Request(method, self.base_url + path, headers=headers, content=content, extensions=extensions)


def _base_url(text: str) -> str:
    url = text.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"cannot read the base URL {text!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"the base URL {text!r} must be an HTTP URL such as {DEFAULT_BASE_URL}")
    return url


def run(http: httpx.Client, steps: Steps[T]) -> T:
    """Perform the steps in order. An error of httpx is raised in the generator, which handles it."""
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
        case SendRequest(request):
            return http.send(request, stream=True, follow_redirects=False)
        case ReadBody(response):
            try:
                return response.read()
            finally:
                response.close()
        case CloseResponse(response):
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
        case SendRequest(request):
            return await http.send(request, stream=True, follow_redirects=False)
        case ReadBody(response):
            try:
                return await response.aread()
            finally:
                await response.aclose()
        case CloseResponse(response):
            return await response.aclose()
        case Sleep(seconds):
            import anyio  # httpx brings it

            return await anyio.sleep(seconds)
