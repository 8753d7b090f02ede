"""Access log lines without query strings. Knows how uvicorn writes such a line."""

from __future__ import annotations

import logging


class AccessLog:
    """Stands where uvicorn expects the logger of its access lines.

    No endpoint takes a query, so what stands there is a mistake, and often a key that belongs into a header: neither
    names nor values are written.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, line: str, client: str, method: str, path: str, version: str, status: int) -> None:
        """One answered request; `path` may have a query."""
        path, mark, _ = path.partition("?")
        self._logger.info(line, client, method, path + ("?..." if mark else ""), version, status)
