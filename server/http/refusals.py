"""Whole answers as bytes, for connections that no app ever sees. Each is the API's error object, has an id, and closes."""

from __future__ import annotations

import uuid
from http import HTTPStatus

from pydantic_core import to_json

from windlass.server.errors import ApiError, unavailable
from windlass.server.http.connections import Refusal
from windlass.server.http.paced import MANY_CHUNKS, TINY_CHUNK

RETRY_AFTER_SECONDS = 1


def _prepared(error: ApiError) -> tuple[bytes, bytes]:
    """An answer without its id: what stands before it and behind it."""
    body = to_json(error.body())
    headers = {"content-type": "application/json", "content-length": len(body), "connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "x-request-id: "]).encode(), b"\r\n\r\n" + body


_REQUEST_TIMEOUT = _prepared(ApiError(408, "the request did not come in time: its headers", code="header_timeout"))
_MALFORMED = _prepared(ApiError(400, "what was sent is no HTTP/1.1 request", code="malformed_request"))
_TOO_FINE = _prepared(
    ApiError(
        400,
        f"the body came in more than {MANY_CHUNKS} chunks of less than {TINY_CHUNK} bytes on average: send it in larger pieces",
        code="tiny_chunks",
    )
)
_REFUSALS = {
    Refusal.SERVER_FULL: _prepared(
        unavailable(
            "the server holds as many connections as it can",
            code="too_many_connections",
            retry_after=RETRY_AFTER_SECONDS,
        )
    ),
    Refusal.ADDRESS_FULL: _prepared(
        ApiError(
            429,
            "your address holds as many connections as it may: close some, or use them again",
            type="rate_limit_error",
            code="too_many_connections",
            retry_after=RETRY_AFTER_SECONDS,
        )
    ),
}


def refused(reason: Refusal) -> bytes:
    """To somebody who may not stay."""
    return _with_id(_REFUSALS[reason])


def late() -> bytes:
    """To somebody whose request has begun and did not come in time."""
    return _with_id(_REQUEST_TIMEOUT)


def malformed() -> bytes:
    """To somebody who does not speak HTTP, or breaks off doing so."""
    return _with_id(_MALFORMED)


def too_fine() -> bytes:
    """To somebody whose body takes more time to read than it is worth."""
    return _with_id(_TOO_FINE)


def _with_id(prepared: tuple[bytes, bytes]) -> bytes:
    return uuid.uuid4().hex.encode().join(prepared)
