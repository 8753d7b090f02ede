"""API keys. Knows ASGI scopes only.

The path is the one the router matches, `scope["path"]`; nothing is rebuilt from a URL or a Host header.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.server.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})


class AuthMiddleware:
    """Asks for `Authorization: Bearer <key>` on every path but OPEN_PATHS."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self._app = app
        # Digests have one length, so comparing them tells nothing of a key's length either.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            if scope["path"] in OPEN_PATHS or self._allowed(scope):
                await self._app(scope, receive, send)
            else:
                error = ApiError(
                    401,
                    "a valid API key is needed: send the header Authorization: Bearer <key>",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error_response(error)(scope, receive, send)
        else:  # this server has no WebSockets
            await send({"type": "websocket.close", "code": 1008})

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
