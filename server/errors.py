"""Errors of the API: their JSON forms, and the status and code of engine errors."""

from __future__ import annotations

import math
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Scope

from windlass.engine.errors import (
    DeadlineError,
    DeviceMemoryError,
    EngineDeadError,
    NotFiniteError,
    QueueFullError,
    RequestError,
    SlowConsumerError,
)
from windlass.server.config.option_names import with_option_names

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

# Codes of errors without a code of their own, by status.
_DEFAULT_CODES = {400: "invalid_value", 404: "not_found", 405: "method_not_allowed"}
_SHORTEN_ADVICE = "shorten the prompt or set truncate_prompt_tokens"
MESSAGES_PATH = "/v1/messages"

# Anthropic's error types, by status.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error with its HTTP status and the fields of OpenAI's error object. retry_after: in seconds.

    details, anthropic_message: for Anthropic's clients, which distinguish errors by them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
        anthropic_message: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _DEFAULT_CODES.get(status, "internal")
        self.type = type or ("rate_limit_error" if status == 429 else INVALID_REQUEST if status < 500 else SERVER_ERROR)
        self.headers = dict(headers or {})
        self.details = details
        self.anthropic_message = anthropic_message
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    def body(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(
    message: str, param: str | None = None, code: str | None = None, details: dict[str, Any] | None = None
) -> ApiError:
    """Error 400, with the field at fault."""
    return ApiError(400, message, param=param, code=code, details=details)


def context_length_exceeded(max_model_len: int, prompt_tokens: int, *, param: str, at_least: bool = False) -> ApiError:
    """Error 400 for a prompt that does not fit.

    at_least: the prompt was refused by its length in characters, so its token count is a lower bound.
    """
    return ApiError(
        400,
        f"this model's context holds {max_model_len} tokens, prompt and answer together, but the prompt has "
        f"{'at least ' if at_least else ''}{prompt_tokens} tokens: {_SHORTEN_ADVICE}",
        param=param,
        code="context_length_exceeded",
        # Claude Code shortens a conversation after these words alone.
        anthropic_message=f"prompt is too long: {prompt_tokens} tokens > {max_model_len} maximum",
    )


def after_dropping_turns(error: ApiError) -> ApiError:
    """The error for a chat whose older turns were already dropped, with other advice."""
    advice = "without its older turns: shorten the system message, the tools or the last turn"
    error.message = error.message.replace(_SHORTEN_ADVICE, advice)
    return error


def answer_exceeds_context(max_model_len: int, prompt_tokens: int, max_tokens: int) -> ApiError:
    """Error 400 for an answer that the context would cut, if the request does not permit it."""
    return bad_request(
        f"this model's context holds {max_model_len} tokens, prompt and answer together, but the prompt has {prompt_tokens} "
        f"tokens and max_tokens is {max_tokens}: set max_tokens to at most {max_model_len - prompt_tokens}, "
        "shorten the prompt or set context_overflow to 'stop'",
        "max_tokens",
        "context_length_exceeded",
    )


def response_too_large(size: int, limit: int) -> ApiError:
    """Error 400 for a response of too many bytes. size: those counted until it was refused."""
    return bad_request(
        f"the response has at least {size} bytes, more than the limit of {limit}: ask for fewer tokens, prompts, choices or "
        "log-probabilities, or stream it",
        code="response_too_large",
    )


def body_too_large(limit: int) -> ApiError:
    """Error 413 for a body of more than `limit` bytes. It closes the connection, as the rest of the body is not read."""
    message = f"the body is larger than {limit} bytes"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


def unavailable(message: str, *, code: str, retry_after: int) -> ApiError:
    """Error 503: the server cannot accept work now, but will later."""
    return ApiError(503, message, code=code, retry_after=retry_after)


def to_api_error(error: BaseException, *, retry_after: int = 1) -> ApiError | None:
    """The API's form of an engine error; None for unexpected exceptions."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(
            404 if error.code == "model_not_found" else 400, error.message, param=error.param, code=error.code
        )
    if isinstance(error, QueueFullError):
        wait = max(1, math.ceil(error.retry_after))
        return ApiError(429, str(error), code="queue_full", retry_after=wait)
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error) or "the request's deadline passed", code="deadline_exceeded")
    if isinstance(error, SlowConsumerError):
        return ApiError(408, str(error), code="slow_reader")
    if isinstance(error, NotFiniteError):
        return ApiError(500, str(error), code="not_finite")
    if isinstance(error, DeviceMemoryError):
        return unavailable(str(error), code="out_of_memory", retry_after=retry_after)
    if isinstance(error, EngineDeadError):
        return unavailable(
            with_option_names(str(error)) or "the engine is not running",
            code="engine_unavailable",
            retry_after=retry_after,
        )
    return None


def internal_error() -> ApiError:
    """Error 500 for a defect. Details are only in the log, with the request id."""
    return ApiError(
        500, "the server failed on this request; its log has details under this x-request-id", code="internal"
    )


def is_messages_api(scope: Scope) -> bool:
    """Whether the path belongs to Anthropic's API."""
    path = scope["path"]
    return bool(path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/"))


def error_body(error: ApiError, scope: Scope) -> dict[str, Any]:
    """The error in the form of the API that `scope` addresses. Anthropic's form also has `param` and `code`."""
    if not is_messages_api(scope):
        return error.body()
    kind = _MESSAGES_TYPES.get(error.status, INVALID_REQUEST if error.status < 500 else "api_error")
    message = error.anthropic_message or error.message
    detail: dict[str, Any] = {"type": kind, "message": message, "param": error.param, "code": error.code}
    if error.details is not None:
        detail["details"] = error.details
    return {"type": "error", "error": detail, "request_id": scope.get("windlass.request_id")}


def error_response(error: ApiError, scope: Scope) -> Response:
    """JSON response of an error, in the form of the API that `scope` addresses."""
    return Response(
        to_json(error_body(error, scope)),
        status_code=error.status,
        media_type="application/json",
        headers=error.headers,
    )
