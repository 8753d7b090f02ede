"""`/`: the page for browsers, and for everybody else a JSON object that says where things are.

Neither holds anything of this server, so they need no key; the page asks for it when the API does.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from windlass.server.app.ui.files import send_file

_STATIC = Path(__file__).parent / "static"
_FILES = frozenset(
    path.relative_to(_STATIC).as_posix() for path in _STATIC.rglob("*") if path.suffix in (".js", ".mjs", ".css")
)
UI_PATHS = frozenset({"/", *(f"/ui/{name}" for name in _FILES)})

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_LINKS = {
    "name": "windlass",
    "models": "/v1/models",
    "chat": "/v1/chat/completions",
    "description": "/openapi.json",
    "docs": "/docs",
    "health": "/health",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page, for whoever takes HTML."""
    if "text/html" in request.headers.get("accept", ""):
        return await send_file(request, _STATIC, "index.html", _POLICY, "accept, accept-encoding")
    return JSONResponse(_LINKS, headers={"vary": "accept"})


@router.get("/ui/{name:path}")
async def page_file(request: Request, name: str) -> Response:
    """What the page is made of."""
    if name not in _FILES:
        raise HTTPException(404)
    return await send_file(request, _STATIC, name, _POLICY)
