"""API keys. Knows ASGI scopes only.

The path is the one the router matches, `scope["path"]`; nothing is rebuilt from a URL or a Host header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.server.errors import ApiError, error_response
from windlass.server.exchange.callers import Callers
from windlass.server.exchange.request_id import CALLER, CALLER_NAME

OPEN_PATHS = frozenset({"/health", "/ready"})


class AuthMiddleware:
    """Asks for `Authorization: Bearer <key>`, or `x-api-key: <key>`, on every path but those that are open."""

    def __init__(self, app: ASGIApp, *, callers: Callers, open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open = open_paths
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            caller = self._caller(scope)
            if caller is not None or scope["path"] in self._open:
                scope[CALLER] = caller
                scope[CALLER_NAME] = self._callers.of(caller).name if caller is not None else ""
                await self._app(scope, receive, send)
            else:
                error = ApiError(
                    401,
                    "a valid API key is needed: send the header Authorization: Bearer <key>, or x-api-key: <key>",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error_response(error, scope)(scope, receive, send)
        else:  # this server has no WebSockets
            await send({"type": "websocket.close", "code": 1008})

    def _caller(self, scope: Scope) -> str | None:
        """The digest of the key that the request is sent with, in hexadecimal; None where it has no valid one."""
        found = None
        for key in _keys(scope):
            # Digests have one length, so comparing them tells nothing of a key's length either.
            digest = hashlib.sha256(key).hexdigest()
            if self._callers.find(digest) is not None:
                found = found or digest
        return found


def _keys(scope: Scope) -> list[bytes]:
    """The keys that a request brings, at most one in each header."""
    keys = []
    for header, prefix in ((b"authorization", b"bearer"), (b"x-api-key", b"")):
        given = [value for name, value in scope["headers"] if name == header]
        if len(given) == 1:
            scheme, _, key = given[0].partition(b" ") if prefix else (b"", b"", given[0])
            if scheme.lower() == prefix:
                keys.append(key.strip())
    return keys
