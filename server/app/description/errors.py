"""What the description says of errors: a response for each status, in the shapes of both APIs, and the headers of answers."""

from __future__ import annotations

from typing import Any

# Any request may be answered with these: before it reaches a route, while it is read, or for a defect.
EVERYWHERE = (408, 413, 429, 431, 500, 503)
# By connections that no route sees, so that they have OpenAI's shape wherever they were meant for.
_OF_CONNECTIONS = (408, 429, 503)

_NAMES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    408: "RequestTimeout",
    413: "BodyTooLarge",
    429: "TooManyRequests",
    431: "HeadersTooLarge",
    500: "InternalError",
    503: "Unavailable",
    504: "DeadlineExceeded",
}
_MEANING = {
    400: "The request is at fault: `param` names the field and `code` says how (`invalid_json`, `missing_field`, "
    "`unknown_field`, `unsupported_field`, `invalid_value`, `context_length_exceeded`, …).",
    401: "A valid API key is needed (`invalid_api_key`).",
    403: "This server is not set up for it (`adapters_fixed`, `attention_off`), or the key may not (`not_an_administrator`).",
    404: "There is no such model (`model_not_found`), response (`response_not_found`, `previous_response_not_found`), "
    "item (`item_not_found`) or path (`not_found`).",
    408: "The body (`body_timeout`) or the headers (`header_timeout`) did not come in time.",
    413: "The body is too large (`request_too_large`).",
    429: "Too many requests: `queue_full`, `too_many_requests`, `too_many_connections`, `too_many_bytes`, `too_much_text` or "
    "`rate_limit_exceeded`.",
    431: "The headers are too large (`request_too_large`).",
    500: "The server failed (`internal`): its log has details under the request's id.",
    503: "The server cannot take the request now: `engine_unavailable`, `draining`, `too_many_connections`, "
    "`text_unavailable` or `out_of_memory`.",
    504: "The request's deadline passed (`deadline_exceeded`).",
}
_TYPES = {429: "rate_limit_error"}
_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_EXAMPLES = {
    400: ("temperature should be greater than or equal to 0", "temperature", "invalid_value"),
    401: (
        "a valid API key is needed: send the header Authorization: Bearer <key>, or x-api-key: <key>",
        None,
        "invalid_api_key",
    ),
    403: ("this server loads no adapters while it runs: start it with --lora-folder DIR", None, "adapters_fixed"),
    404: ("the model 'other' does not exist here: this server serves 'demo'", "model", "model_not_found"),
    408: ("the body did not come in time", None, "body_timeout"),
    413: ("the body is larger than 33554432 bytes", None, "request_too_large"),
    429: ("4096 requests are in progress, the most this server takes", None, "too_many_requests"),
    431: ("the headers are larger than 65536 bytes", None, "request_too_large"),
    500: ("the server failed on this request; its log has details under this x-request-id", None, "internal"),
    503: ("the engine is starting", None, "engine_unavailable"),
    504: ("the request's deadline passed before it finished", None, "deadline_exceeded"),
}
HEADERS: dict[str, Any] = {
    "X-Request-Id": {
        "description": "The id that was sent with the request, else a new one; the server's log has it.",
        "schema": {"type": "string"},
    },
    "Request-Id": {"description": "The same under the name of Anthropic's API.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {"description": "How keys are sent.", "schema": {"type": "string", "const": "Bearer"}},
}


def name_of(status: int, *, messages: bool) -> str:
    """The name of a response among the components. messages: of Anthropic's API."""
    return ("Messages" if messages else "") + _NAMES.get(status, f"Status{status}")


def error_responses(*, keys: bool) -> dict[str, Any]:
    """The responses of all errors, by name. keys: whether this server asks for any."""
    statuses = [status for status in _NAMES if keys or status != 401]
    return {name_of(status, messages=both): _response(status, both) for both in (False, True) for status in statuses}


def _response(status: int, messages: bool) -> dict[str, Any]:
    message, param, code = _EXAMPLES[status]
    error = {"message": message, "type": _TYPES.get(status, _type(status)), "param": param, "code": code}
    example: dict[str, Any] = {"error": error}
    schema: dict[str, Any] = {"$ref": "#/components/schemas/ErrorAnswer"}
    headers = {"X-Request-Id": _header("X-Request-Id")}
    if messages:
        detail = {"type": _MESSAGES_TYPES[status], "message": message, "param": param, "code": code}
        example = {"type": "error", "error": detail, "request_id": "0b6f5d3c9e7a4d0f8f8c2b1a3d4e5f60"}
        ours = {"$ref": "#/components/schemas/MessageError"}
        schema = {"anyOf": [ours, schema]} if status in _OF_CONNECTIONS else ours
        headers["Request-Id"] = _header("Request-Id")
    if status in (429, 503):
        headers["Retry-After"] = _header("Retry-After")
    if status == 401:
        headers["WWW-Authenticate"] = _header("WWW-Authenticate")
    return {
        "description": _MEANING[status],
        "headers": headers,
        "content": {"application/json": {"schema": schema, "example": example}},
    }


def _type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def _header(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/headers/{name}"}
