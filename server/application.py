"""The FastAPI application: state, middleware, routes, error handlers and the OpenAPI document."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from windlass._version import __version__
from windlass.engine.client.engine_client import EngineClient
from windlass.engine.errors import EngineError, nearest
from windlass.server.api import (
    chat,
    completions,
    infill,
    introspection,
    messages,
    models,
    pooling,
    responses,
    rotary,
    tokenize,
)
from windlass.server.app import web_pages
from windlass.server.app.auth import PUBLIC_PATHS, AuthMiddleware
from windlass.server.app.middleware import (
    HeadMiddleware,
    HostMiddleware,
    LimitsMiddleware,
    RequestIdMiddleware,
    RootPathMiddleware,
    allowed_methods,
    known_paths,
)
from windlass.server.app.state import TEMPLATE_CHANGES_HEADER, ServerState
from windlass.server.app.web_pages import BASE_PATHS, DOCS_PATHS, UI_PATHS
from windlass.server.config.settings import ServerSettings
from windlass.server.errors import ApiError, error_response, internal_error, to_api_error
from windlass.server.openapi import openapi_document
from windlass.server.schemas.base import IGNORED_HEADER
from windlass.server.text.tokenizer import Tokenizer

_PATH_SIMILARITY = (
    0.75  # share of characters that agree: "completion" is near "completions", "ping" is not near "pooling"
)

_ROUTERS = (
    completions.router,
    infill.router,
    chat.router,
    responses.router,
    messages.router,
    pooling.embeddings_router,
    pooling.ranking_router,
    pooling.classes_router,
    tokenize.router,
    models.router,
    models.adapters_router,
    rotary.router,
    introspection.inside_router,
    introspection.health_router,
)


def create_app(engine: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """Create the application, whose state is `app.state.windlass`.

    The engine may still be loading: generation is answered with 503 until it is ready. The caller closes the engine.
    """
    state = ServerState(engine, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.text.spawn()
        try:
            yield
        finally:
            state.close()

    app = FastAPI(
        title="Windlass",
        version=__version__,
        openapi_url=None,  # FastAPI's own route would build the document on the event loop
        generate_unique_id_function=lambda route: route.name,
        docs_url=None,  # FastAPI's own pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the caller's Host header
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        lifespan=lifespan,
    )
    app.state.windlass = state
    for router in _ROUTERS:
        app.include_router(router)
    app.include_router(web_pages.openapi_router)
    if settings.ui:
        app.include_router(web_pages.router)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(EngineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    build_lock = threading.Lock()
    app.openapi = lambda: _cached_openapi(app, settings, build_lock)  # type: ignore[method-assign]
    app.state.openapi_json = functools.cache(lambda: to_json(app.openapi()))
    app.add_route("/openapi.json", _send_openapi, include_in_schema=False)

    # The last one added is the outermost.
    app.add_middleware(HeadMiddleware)
    if settings.requires_key:
        public_paths = PUBLIC_PATHS | BASE_PATHS | DOCS_PATHS | (UI_PATHS if settings.ui else frozenset())
        app.add_middleware(AuthMiddleware, callers=state.callers, public_paths=public_paths)
    app.add_middleware(
        LimitsMiddleware,
        max_body_bytes=settings.max_body_bytes,
        max_total_body_bytes=settings.max_total_body_bytes,
        max_header_bytes=settings.max_header_bytes,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],  # clients send many headers (x-stainless-…); the operator restricts origins
            expose_headers=["x-request-id", "request-id", "retry-after", TEMPLATE_CHANGES_HEADER, IGNORED_HEADER],
            allow_credentials=False,
        )
    if settings.checks_hosts or settings.checks_origins:
        app.add_middleware(HostMiddleware, settings=settings)
    if state.tracing is not None:
        from windlass.server.observability.tracing import TracingMiddleware

        app.add_middleware(TracingMiddleware, tracing=state.tracing)
    app.add_middleware(RequestIdMiddleware)
    if settings.root_path:
        app.add_middleware(RootPathMiddleware, root_path=settings.root_path)
    return app


def _all_routes(app: FastAPI) -> list[BaseRoute]:
    """All routes. The application itself keeps those of routers in branches without methods."""
    return [
        *app.routes,
        *(route for router in (*_ROUTERS, web_pages.openapi_router, web_pages.router) for route in router.routes),
    ]


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error) or internal_error(), request.scope)


def _nearest_path(path: str, known: Sequence[str]) -> str | None:
    """The nearest path, compared without the common /v1: /v1/batches is not near /v1/cache."""
    if f"/v1{path}" in known:
        return f"/v1{path}"
    versioned = path.startswith("/v1/")
    ordered = sorted(known, key=lambda other: other.startswith("/v1/") == versioned)
    by_suffix = {_unversioned(other): other for other in ordered}
    near = nearest(_unversioned(path), by_suffix, _PATH_SIMILARITY)
    return None if near is None else by_suffix[near]


def _unversioned(path: str) -> str:
    return path.removeprefix("/v1").removeprefix("/")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the router: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.scope['path'][:200]}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        path = request.scope["path"][:200]
        suggestion = _nearest_path(path, [other for other in known_paths(_all_routes(request.app)) if other != path])
        hint = "" if suggestion is None else f" (did you mean {suggestion!r}?)"
        message = f"there is no endpoint {where}{hint}"
    elif error.status_code == 405:
        # The router lists the methods of only one route.
        headers = {"allow": allowed_methods(_all_routes(request.app), request.scope)}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        methods = headers["allow"].replace("OPTIONS, ", "").removesuffix(", OPTIONS")
        message = f"{where} is not supported: this endpoint accepts {methods}"
    else:
        message = str(error.detail)
    return error_response(ApiError(error.status_code, message, headers=headers), request.scope)


async def _send_openapi(request: Request) -> Response:
    """Send the document, which the first request builds, as most servers never need it, in a thread that delays no
    stream.
    """
    return Response(await asyncio.to_thread(request.app.state.openapi_json), media_type="application/json")


def _cached_openapi(app: FastAPI, settings: ServerSettings, build_lock: threading.Lock) -> dict[str, Any]:
    with build_lock:
        if app.openapi_schema is None:
            app.openapi_schema = openapi_document(app, _ROUTERS, settings)
        return app.openapi_schema
