"""Errors the client raises, one class per thing a caller would do differently. Knows status codes; knows no transport."""

from __future__ import annotations


class APIError(Exception):
    """Base of every error of this client.

    message: in words. status: HTTP status, None where there was no answer. type, param, code: of the server's error
    object (`param` is the field at fault). request_id: the `x-request-id` under which the server's log knows the request.
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
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.request_id = request_id

    def __str__(self) -> str:
        known = (("status", self.status), ("code", self.code), ("param", self.param), ("request_id", self.request_id))
        details = ", ".join(f"{name}={value}" for name, value in known if value is not None)
        return f"{self.message} ({details})" if details else self.message


class APIConnectionError(APIError):
    """The server could not be reached, or the connection broke before the answer was complete."""


class APITimeoutError(APIConnectionError):
    """Nothing came within the timeout."""


class ResponseError(APIError):
    """The answer is not what a Windlass server sends: probably something else listens at the base URL."""


class StreamError(APIError):
    """A stream did not end well: an error event, or an end without finish_reason or [DONE]. What came before is partial."""


class APIStatusError(APIError):
    """The server answered with an error status. `retry_after`: seconds after which it asks to try again, if it does."""

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
        super().__init__(message, status=status, type=type, param=param, code=code, request_id=request_id)
        self.retry_after = retry_after


class BadRequestError(APIStatusError):
    """400 and the other 4xx: the request must change before it can succeed."""


class AuthenticationError(APIStatusError):
    """401 or 403: the API key is missing or wrong."""


class NotFoundError(APIStatusError):
    """404: no such model or path."""


class RateLimitError(APIStatusError):
    """429: the server's queue is full; try again later."""


class ServerError(APIStatusError):
    """5xx: the server failed, is starting or is shutting down."""


def status_error_class(status: int) -> type[APIStatusError]:
    """The class for an error status."""
    if status in (401, 403):
        return AuthenticationError
    if status == 404:
        return NotFoundError
    if status == 429:
        return RateLimitError
    return ServerError if status >= 500 else BadRequestError
