"""A `windlass serve` process for the duration of a block."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections import abc
from dataclasses import dataclass
from pathlib import Path

from harness.machine import descendants
from harness.worker import WorkerError

SERVE = "import sys; from windlass.server.cli.main import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Server:
    """url: its address. pid: of the API process. ready_seconds: from the command to a 200 from /ready."""

    url: str
    pid: int
    ready_seconds: float

    def processes(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]


@contextlib.contextmanager
def serving(
    model: Path, options: list[str], log: Path, environment: dict[str, str], limit: float = 600.0
) -> abc.Iterator[Server]:
    """A server that accepts requests. Raises WorkerError when it ends or is not ready within `limit` seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVE, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    started = time.perf_counter()
    with log.open("ab") as out:
        # A session of its own: ctrl-C reaches this script only, which then ends the server.
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        while _status(port, "/ready") != 200:
            if server.poll() is not None:
                raise WorkerError(f"windlass serve exited with {server.returncode}: see {log}")
            if time.perf_counter() - started > limit:
                raise WorkerError(f"windlass serve was not ready within {limit:.0f} s: see {log}")
            time.sleep(0.01)
        yield Server(f"http://127.0.0.1:{port}", server.pid, time.perf_counter() - started)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()
