"""Errors of the clients, and their construction from responses."""

from __future__ import annotations

import email.utils
import re
import time

import httpx


class APIError(Exception):
    """Base of the errors of this client.

    status: HTTP status, None without a response. type, param, code: of the server's error object; `param` is the invalid field.
    request_id: the `x-request-id` in the server's log. retry_after: seconds after which the server asks for another attempt.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        known = (("status", self.status), ("code", self.code), ("param", self.param), ("request_id", self.request_id))
        details = ", ".join(f"{name}={value}" for name, value in known if value is not None)
        return f"{self.message} ({details})" if details else self.message


class APIConnectionError(APIError):
    """The server could not be reached, or the connection broke before the response was complete."""


class APITimeoutError(APIConnectionError):
    """No data arrived within the timeout."""


class ResponseError(APIError):
    """The response is malformed: there is probably another server at the base URL."""


class StreamError(APIError):
    """An incomplete stream: it had an error event, or ended without a finish_reason or [DONE]."""


class APIStatusError(APIError):
    """The server answered with an error status."""


class BadRequestError(APIStatusError):
    """400 and the other 4xx: the request is invalid."""


class AuthenticationError(APIStatusError):
    """401 or 403: the API key is missing or wrong."""


class NotFoundError(APIStatusError):
    """404: no such model or path."""


class RateLimitError(APIStatusError):
    """429: the server's queue is full."""


class ServerError(APIStatusError):
    """5xx: the server failed, is starting or is shutting down."""


def status_error_class(status: int) -> type[APIStatusError]:
    """The error class of an HTTP status."""
    if status in (401, 403):
        return AuthenticationError
    if status == 404:
        return NotFoundError
    if status == 429:
        return RateLimitError
    return ServerError if status >= 500 else BadRequestError


REQUEST_ID_HEADER = "x-request-id"
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")


def get_request_id(response: httpx.Response) -> str | None:
    """The request id of the response, otherwise the one that was sent."""
    answered: str | None = response.headers.get(REQUEST_ID_HEADER)
    sent: str | None = response.request.headers.get(REQUEST_ID_HEADER)
    return answered or sent


def transport_error(error: httpx.HTTPError | httpx.StreamError, request: httpx.Request) -> APIError:
    """The error for a failure below HTTP, with the request id that was sent."""
    what = _ERRNO.sub("", " ".join(str(error).split())) or type(error).__name__
    sent, url = request.headers.get(REQUEST_ID_HEADER), request.url
    if isinstance(error, httpx.PoolTimeout):
        message = f"no free connection to {url} in time: raise max_connections or the timeout, or close streams"
        return APITimeoutError(message, request_id=sent)
    if isinstance(error, httpx.TimeoutException):
        return APITimeoutError(f"request to {url} timed out: {what}", request_id=sent)
    if isinstance(error, (httpx.ConnectError, httpx.UnsupportedProtocol)):
        message = f"cannot reach {url}: {what}; is the server running, and is the base URL right?"
        return APIConnectionError(message, request_id=sent)
    if isinstance(error, httpx.DecodingError):
        return ResponseError(f"cannot decode the response of {url}: {what}", request_id=sent)
    return APIConnectionError(f"the connection to {url} broke: {what}", request_id=sent)


def interrupted_response_error(error: httpx.HTTPError | httpx.StreamError, response: httpx.Response) -> APIError:
    """The error for a failure below HTTP after the response has begun."""
    failure = transport_error(error, response.request)
    failure.status, failure.request_id = response.status_code, get_request_id(response)
    return failure


def status_error(response: httpx.Response) -> APIStatusError:
    """The error for a response that was read, from this or any other server."""
    status = response.status_code
    fields: dict[str, str | None] = {"message": None, "type": None, "param": None, "code": None}
    try:
        data = response.json()
    except (ValueError, RecursionError):
        data = None
    if isinstance(data, dict) and isinstance(data.get("error"), dict):
        fields = {name: _optional_text(data["error"].get(name)) for name in fields}
    elif isinstance(data, dict):
        fields["message"] = _optional_text(data.get("message") or data.get("detail") or data.get("error"))
    message = fields.pop("message")
    if message is None:  # of a proxy or another server
        location = response.headers.get("location")
        what = f"redirects to {location}" if response.is_redirect and location else response.text.strip()[:200]
        message = f"HTTP {status} {response.reason_phrase} from {response.request.url}" + (f": {what}" if what else "")
    return status_error_class(status)(
        message, status=status, request_id=get_request_id(response), retry_after=_retry_after(response), **fields
    )


def invalid_response_error(response: httpx.Response, what: str) -> ResponseError:
    """The error for a malformed response."""
    return ResponseError(
        f"the response of {response.request.url} is not understood: {what}",
        status=response.status_code,
        request_id=get_request_id(response),
    )


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds until the time of a Retry-After header, which is a number or an HTTP date."""
    value = response.headers.get("retry-after", "").strip()
    if value.isascii() and value.replace(".", "", 1).isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time()) if value else None
    except (ValueError, TypeError, OverflowError):
        return None


def _optional_text(value: object) -> str | None:
    return None if value is None else str(value)
