"""Whole answers as bytes, for connections that no app ever sees. Each is the API's error object and closes."""

from __future__ import annotations

from http import HTTPStatus

from pydantic_core import to_json

from windlass.server.errors import ApiError, unavailable
from windlass.server.http.connections import Refusal

RETRY_AFTER_SECONDS = 1


def _answer(error: ApiError) -> bytes:
    body = to_json(error.body())
    headers = {"content-type": "application/json", "content-length": len(body), "connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


REQUEST_TIMEOUT = _answer(ApiError(408, "the request did not come in time: its headers", code="header_timeout"))

REFUSALS = {
    Refusal.SERVER_FULL: _answer(
        unavailable(
            "the server holds as many connections as it can",
            code="too_many_connections",
            retry_after=RETRY_AFTER_SECONDS,
        )
    ),
    Refusal.ADDRESS_FULL: _answer(
        ApiError(
            429,
            "your address holds as many connections as it may: close some, or use them again",
            type="rate_limit_error",
            code="too_many_connections",
            retry_after=RETRY_AFTER_SECONDS,
        )
    ),
}
