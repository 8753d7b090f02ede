"""Takes the path that a proxy has put this server under off the paths of requests. Knows ASGI scopes only."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """`/llm/v1/models` becomes `/v1/models`; paths that a proxy has cut already stay as they are.

    It stands before everything that looks at paths, so that keys are asked for by the path that is routed.
    """

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root = root_path
        self._raw = root_path.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._root + "/"):
            scope = {**scope, "path": scope["path"][len(self._root) :]}
            raw = scope.get("raw_path") or b""
            if raw.startswith(self._raw + b"/"):
                scope["raw_path"] = raw[len(self._raw) :]
        await self._app(scope, receive, send)
