"""Pages for browsers: the start page, Swagger UI and Redoc."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import html
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from windlass.server.app.state import state_of

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}


@cache
def _read(folder: Path, name: str) -> tuple[bytes, bool, str]:
    """The bytes of a file, whether they are compressed, and their ETag."""
    packed = folder / f"{name}.gz"
    data = packed.read_bytes() if packed.exists() else (folder / name).read_bytes()
    return data, packed.exists(), hashlib.sha256(data).hexdigest()[:32]


async def send_file(request: Request, folder: Path, name: str, policy: str, vary: str = "accept-encoding") -> Response:
    """The file `name` of `folder`, or 304 if the browser has it. The caller has checked the name.

    policy: the Content-Security-Policy. vary: the request's headers on which the answer depends.
    """
    data, packed, tag = await asyncio.to_thread(_read, folder, name)
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "vary": vary,
    }
    if packed and "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
    elif packed:
        data, tag = await asyncio.to_thread(gzip.decompress, data), f"{tag}-plain"
    headers["etag"] = f'"{tag}"'
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, headers={**headers, "content-type": _TYPES[Path(name).suffix]})


_UI_FOLDER = Path(__file__).parent / "ui"

_UI_FILES = frozenset(
    path.relative_to(_UI_FOLDER).as_posix() for path in _UI_FOLDER.rglob("*") if path.suffix in (".js", ".mjs", ".css")
)

UI_PATHS = frozenset({"/", *(f"/ui/{path}" for path in _UI_FILES)})

_UI_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)

_LINKS = {
    "name": "windlass",
    "page": "/",
    "models": "/v1/models",
    "chat": "/v1/chat/completions",
    "description": "/openapi.json",
    "docs": "/docs",
    "health": "/health",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The start page for clients that accept HTML, else links."""
    if "text/html" in request.headers.get("accept", ""):
        return await send_file(request, _UI_FOLDER, "index.html", _UI_POLICY, "accept, accept-encoding")
    return JSONResponse(_LINKS, headers={"vary": "accept"})


@router.get("/ui/{name:path}")
async def ui_file(request: Request, name: str) -> Response:
    """Scripts and styles of the start page."""
    if name not in _UI_FILES:
        raise HTTPException(404)
    return await send_file(request, _UI_FOLDER, name, _UI_POLICY)


BASE_PATHS = frozenset({"/v1", "/v1/"})

_BASE_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Windlass API</title>
<h1>Windlass API</h1>
<p>This is the base URL for OpenAI clients: <code>OpenAI(base_url="{base}", api_key="none")</code></p>
<ul>{links}</ul>
</html>
"""

_PLAIN_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


async def base_page(request: Request) -> Response:
    """The base URL of the API, which is not an endpoint: links, as a page for clients that accept HTML."""
    links = dict(_LINKS)
    if not state_of(request).settings.ui:
        del links["page"]
    headers = {"vary": "accept", "cache-control": "no-cache"}
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({**links, "message": "This is the base URL of the API."}, headers=headers)
    texts = {"page": "Chat with the model", "docs": "Documentation of the API", "models": "Models"}
    up = "../" if request.scope["path"].endswith("/") else "./"  # relative, since a proxy may add a prefix
    items = "".join(
        f'<li><a href="{up}{links[name].removeprefix("/")}">{text}</a></li>'
        for name, text in texts.items()
        if name in links
    )
    page = _BASE_PAGE.format(base=html.escape(str(request.url.replace(query=""))), links=items)
    return HTMLResponse(page, headers={**headers, "content-security-policy": _PLAIN_POLICY})


_DOCS_FOLDER = Path(__file__).parent / "openapi_pages"
_PAGES = {"/docs": "docs.html", "/redoc": "redoc.html"}
_DOCS_FILES = ("page.css", "page.js", "swagger-ui.css", "swagger-ui-bundle.js", "redoc.standalone.js")
DOCS_PATHS = frozenset({*_PAGES, *(f"/docs/{file}" for file in _DOCS_FILES)})

# Both insert inline styles; Redoc searches in a worker created from a blob.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

openapi_router = APIRouter(include_in_schema=False)

for _path in sorted(BASE_PATHS):
    openapi_router.add_api_route(_path, base_page)


@openapi_router.get("/docs")
async def swagger_page(request: Request) -> Response:
    """Swagger UI."""
    return await send_file(request, _DOCS_FOLDER, _PAGES["/docs"], _DOCS_POLICY)


@openapi_router.get("/redoc")
async def redoc_page(request: Request) -> Response:
    """Redoc."""
    return await send_file(request, _DOCS_FOLDER, _PAGES["/redoc"], _DOCS_POLICY)


@openapi_router.get("/docs/{name}")
async def description_file(request: Request, name: str) -> Response:
    """Scripts and styles of both pages."""
    if name not in _DOCS_FILES:
        raise HTTPException(404)
    return await send_file(request, _DOCS_FOLDER, name, _DOCS_POLICY)
