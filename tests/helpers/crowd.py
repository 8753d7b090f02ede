"""A crowd of clients that never complete a request, as a process of its own: `python -m helpers.crowd URL COUNT SOURCE`.

It holds so many connections from one address, idle and half open by turns, and replaces those that are closed. Each
round it prints how many it has opened so far; it ends with its standard input.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

from helpers.raw_client import connect, is_open

ROUND_SECONDS = 0.1


class Crowd:
    """Runs the crowd; `opened` is how many connections it has made."""

    def __init__(self, url: str, count: int, source: str) -> None:
        self.opened = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.crowd", url, str(count), source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.opened = int(line)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._reader.join(30.0)
        self._process.stdout.close()
        assert self._process.wait(30.0) == 0


def main(url: str, count: int, source: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[socket.socket] = []
    opened = 0
    while not select.select([sys.stdin], [], [], ROUND_SECONDS)[0]:
        while len(held) < count:
            held.append(connect(url, source))
            opened += 1
            if opened % 2:
                with contextlib.suppress(ConnectionError):
                    held[-1].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-padding: ")
        print(opened, flush=True)
        for connection in held:
            if not is_open(connection):
                connection.close()
        held = [connection for connection in held if connection.fileno() >= 0]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
