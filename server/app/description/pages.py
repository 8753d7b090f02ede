"""`/docs` and `/redoc`: pages that show the description, with Swagger UI and Redoc from files of this package.

They hold nothing of this server, so they need no key; the description does, and they ask for it. Nothing is fetched from
another host: the policy that they are sent with forbids it.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.app.ui.files import send_file

_ASSETS = Path(__file__).parent / "assets"
_PAGES = {"/docs": "docs.html", "/redoc": "redoc.html"}
_FILES = ("page.css", "page.js", "swagger-ui.css", "swagger-ui-bundle.js", "redoc.standalone.js")
PAGE_PATHS = frozenset({*_PAGES, *(f"/docs/{name}" for name in _FILES)})

# Both write styles into their pages; Redoc searches in a worker that it makes of its own text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def swagger_page(request: Request) -> Response:
    """Swagger UI, from which requests can be tried out."""
    return await send_file(request, _ASSETS, _PAGES["/docs"], _POLICY)


@router.get("/redoc")
async def redoc_page(request: Request) -> Response:
    """Redoc, to read."""
    return await send_file(request, _ASSETS, _PAGES["/redoc"], _POLICY)


@router.get("/docs/{name}")
async def page_file(request: Request, name: str) -> Response:
    """What the two are made of."""
    if name not in _FILES:
        raise HTTPException(404)
    return await send_file(request, _ASSETS, name, _POLICY)
