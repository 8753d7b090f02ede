"""`/docs` and `/redoc`: pages that show the description, with Swagger UI and Redoc from files of this package.

They hold nothing of this server, so they need no key; the description does, and they ask for it. Nothing is fetched from
another host: the policy that they are sent with forbids it.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_ASSETS = Path(__file__).parent / "assets"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_PAGES = {"/docs": "docs.html", "/redoc": "redoc.html"}
_FILES = ("page.css", "page.js", "swagger-ui.css", "swagger-ui-bundle.js", "redoc.standalone.js")
PAGE_PATHS = frozenset({*_PAGES, *(f"/docs/{name}" for name in _FILES)})

# Both write styles into their pages; Redoc searches in a worker that it makes of its own text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}

router = APIRouter(include_in_schema=False)


@cache
def _read(name: str) -> tuple[bytes, bool, str]:
    """The bytes of a file, whether they are compressed, and a tag of them."""
    packed = _ASSETS / f"{name}.gz"
    data = packed.read_bytes() if packed.exists() else (_ASSETS / name).read_bytes()
    return data, packed.exists(), hashlib.sha256(data).hexdigest()[:32]


async def _file(request: Request, name: str) -> Response:
    data, packed, tag = await asyncio.to_thread(_read, name)
    headers = dict(_HEADERS)
    if packed and "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
    elif packed:
        data, tag = await asyncio.to_thread(gzip.decompress, data), f"{tag}-plain"
    headers["etag"] = f'"{tag}"'
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, headers={**headers, "content-type": _TYPES[Path(name).suffix]})


@router.get("/docs")
async def swagger_page(request: Request) -> Response:
    """Swagger UI, from which requests can be tried out."""
    return await _file(request, _PAGES["/docs"])


@router.get("/redoc")
async def redoc_page(request: Request) -> Response:
    """Redoc, to read."""
    return await _file(request, _PAGES["/redoc"])


@router.get("/docs/{name}")
async def page_file(request: Request, name: str) -> Response:
    """What the two are made of."""
    if name not in _FILES:
        raise HTTPException(404)
    return await _file(request, name)
