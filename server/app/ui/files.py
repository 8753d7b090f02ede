"""Sends files of this package to browsers, under a policy that lets a page load nothing from another host.

Knows no routes. A file `name.gz` stands for `name` and is sent as it lies to whoever takes gzip.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}


@cache
def _read(folder: Path, name: str) -> tuple[bytes, bool, str]:
    """The bytes of a file, whether they are compressed, and a tag of them."""
    packed = folder / f"{name}.gz"
    data = packed.read_bytes() if packed.exists() else (folder / name).read_bytes()
    return data, packed.exists(), hashlib.sha256(data).hexdigest()[:32]


async def send_file(request: Request, folder: Path, name: str, policy: str, vary: str = "accept-encoding") -> Response:
    """The file `name` of `folder`, or 304 where the browser has it. The caller has checked the name.

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
