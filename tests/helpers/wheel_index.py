"""Wheels that contain a file, and a package index that serves one slowly, for tests of pulling a model without a network."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

from windlass.server.startup.model_catalog import KnownFile, KnownModel

MEMBER = "toy_model/toy.gguf"
CONTENT = bytes(range(256)) * 4096  # 1 MiB


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER, package: str = "toy_model") -> Path:
    """Return the wheel of a package's version 1.0, with one file."""
    wheel = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def toy_model(wheel: Path, content: bytes = CONTENT) -> KnownModel:
    """Return the model `toy`, which is this wheel's file."""
    return _model((("toy-model==1.0", MEMBER),), len(content), content)


def parted_model(folder: Path, content: bytes = CONTENT, part_size: int = 400_000) -> KnownModel:
    """Return the model `toy` whose file is in several wheels, which are written to `folder`."""
    parts = []
    for start in range(0, len(content), part_size):
        package = f"toy_part{len(parts) + 1}"
        member = f"{package}/data/part.bin"
        make_wheel(folder, content[start : start + part_size], member, package)
        parts.append((f"{package.replace('_', '-')}==1.0", member))
    return _model(tuple(parts), part_size, content)


def hub_model(hub: str, parts: tuple[tuple[str, str], ...] = (), content: bytes = CONTENT) -> KnownModel:
    """Return the model `toy`, a file of the hub. parts: its second source."""
    return _model(parts, len(content), content, hub)


def _model(parts: tuple[tuple[str, str], ...], part_size: int, content: bytes, hub: str | None = None) -> KnownModel:
    sha256 = hashlib.sha256(content).hexdigest()
    file = KnownFile(
        name="toy.gguf", hub=hub, parts=parts, part_size=part_size if parts else 0, size=len(content), sha256=sha256
    )
    return KnownModel(name="toy", about="a toy", licence="MIT", memory=1 << 20, file=file)


class SlowIndex:
    """Index with one wheel. It sends the first half, and the second after `release` is set.

    downloads: number of requests for the wheel. halfway: set when the first half was sent.
    """

    def __init__(self, wheel: Path) -> None:
        self.downloads = 0
        self.halfway, self.release = threading.Event(), threading.Event()
        index, data = self, wheel.read_bytes()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
                whole = data if self.path.endswith(".whl") else page
                self.send_response(200)
                self.send_header("content-type", "text/html" if whole is page else "application/octet-stream")
                self.send_header("content-length", str(len(whole)))
                self.end_headers()
                if whole is data:
                    index.downloads += 1
                    half = len(data) // 2
                    self.wfile.write(data[:half])
                    self.wfile.flush()
                    index.halfway.set()
                    index.release.wait(60)
                    whole = data[half:]
                with contextlib.suppress(OSError):  # the client was ended
                    self.wfile.write(whole)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/simple"

    def __enter__(self) -> SlowIndex:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
