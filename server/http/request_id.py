"""The outermost middleware: a request id on every response, and a response to every failure."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.server.errors import error_response, internal_error, is_messages_api

CALLER_NAME = "windlass.caller_name"  # in a scope: its name, where it has one

CALLER = "windlass.caller"  # in a scope: a digest of the key that it was sent with, where keys are asked for

_HEADER = b"x-request-id"

_VALID = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")

_logger = logging.getLogger("windlass.server")

_current: ContextVar[Scope | None] = ContextVar("windlass-request", default=None)


class RequestIdMiddleware:
    """Puts the caller's x-request-id, or one of its own, on the response; `set_request_id` may change it until then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        valid = _VALID.fullmatch(given) is not None
        scope["windlass.request_id"] = given.decode() if valid else uuid.uuid4().hex
        _current.set(scope)  # for this task, which has this request only, and for those it starts
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                found = request_id(scope).encode()
                message["headers"] = [*message.get("headers", ()), (_HEADER, found)]
                if is_messages_api(scope):  # whose clients look for it under this name
                    message["headers"].append((b"request-id", found))
            await send(message)

        scope["windlass.send"] = send
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            _logger.exception("request %s failed", request_id(scope), exc_info=error)
            await error_response(internal_error(), scope)(scope, receive, send_with_id)


class RequestFields(logging.Filter):
    """Gives records of the log the id and the caller's name of the request that they are about, where they come from one."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (scope := _current.get()) is not None:
            record.request_id = getattr(record, "request_id", None) or request_id(scope)
            record.caller = scope.get(CALLER_NAME)
        return True


def request_id(scope: Scope) -> str:
    """The id of the request of this scope."""
    return str(scope["windlass.request_id"])


def direct_send(scope: Scope, send: Send) -> Send:
    """The server's own `send`, for the body of a response whose start went through `send`.

    Every layer between wraps `send` to see the start of the response; in a stream each of them would cost time at every token.
    """
    direct: Send = scope.get("windlass.send", send)
    return direct


def set_request_id(scope: Scope, value: str) -> None:
    """Use the id that a body asks for."""
    scope["windlass.request_id"] = value
