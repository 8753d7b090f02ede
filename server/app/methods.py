"""HEAD wherever there is GET, which paths there are, and which methods one takes. Knows ASGI scopes and the routes only."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Answers HEAD as GET, without the body: status and headers are the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


def allowed_methods(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """The methods of a path as the header Allow lists them; empty where there is no such path."""
    found: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    if not found:
        return ""
    if "GET" in found:
        found.add("HEAD")
    return ", ".join(sorted({*found, "OPTIONS"}))


def known_paths(routes: Sequence[BaseRoute]) -> list[str]:
    """The paths that have a route, those with parts that vary aside."""
    paths = (str(getattr(route, "path", "")) for route in routes)
    return sorted({path for path in paths if path and "{" not in path})
