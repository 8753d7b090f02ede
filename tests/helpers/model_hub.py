"""A Hugging Face hub on this machine, for tests of downloads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

HUB_FILE = "owner/name/folder/toy.gguf"


class Hub:
    """A hub with these files, by repository and path.

    requests: path and Range of each. ends_after: bytes of a response after which the connection is closed, once.
    """

    def __init__(self, files: Mapping[str, bytes], ranges: bool = True) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self.ends_after: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range") if ranges else None
                hub.requests.append((self.path, self.headers.get("Range")))
                content = files.get(self.path.removeprefix("/").replace("/resolve/main/", "/", 1))
                if content is None:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                end, hub.ends_after = hub.ends_after, None
                self.wfile.write(content[start:] if end is None else content[start : start + end])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
