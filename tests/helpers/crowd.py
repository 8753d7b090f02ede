"""Hostile clients in a separate process: `python -m helpers.crowd URL COUNT SOURCE [REQUEST]`.

It keeps COUNT connections from one address open. Without a request (in hexadecimal digits), they are alternately idle
and incomplete, and closed ones are replaced. With a request, each sends it once and reads nothing before the end.
Each round it prints how many connections it has opened; it ends when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from helpers.eventually import exit_code
from helpers.raw_client import connect, is_open

ROUND_SECONDS = 0.1
HALF = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-padding: "


class Crowd:
    """Running crowd. opened: number of connections so far.

    ask: request that each client sends without reading the answer. ends: after the end, counts of answers by status and
    "whole", `told` (an error in a stream) or "cut".
    """

    def __init__(self, url: str, count: int, source: str, ask: bytes = b"") -> None:
        self.opened = 0
        self.ends: dict[str, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.crowd", url, str(count), source, ask.hex()],
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
            if line.startswith("{"):
                self.ends = json.loads(line)
            else:
                self.opened = int(line)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._reader.join(60.0)
        self._process.stdout.close()
        assert exit_code(self._process) == 0


def main(url: str, count: int, source: str, ask: bytes) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[socket.socket] = []
    opened = 0
    while not select.select([sys.stdin], [], [], ROUND_SECONDS)[0]:
        while len(held) < count:
            held.append(connect(url, source, receive_buffer=4096 if ask else None))
            opened += 1
            if ask or opened % 2:
                with contextlib.suppress(ConnectionError):
                    held[-1].sendall(ask or HALF)
            if opened % 250 == 0:
                print(opened, flush=True)
        print(opened, flush=True)
        if not ask:
            for connection in held:
                if not is_open(connection):
                    connection.close()
            held = [connection for connection in held if connection.fileno() >= 0]
    if ask:
        print(json.dumps(Counter(map(_end, held))), flush=True)


def _end(connection: socket.socket) -> str:
    """Return the available part of an answer."""
    connection.settimeout(0.0)
    begin = end = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(65536):
            begin = begin or data[:12]
            end = (end + data)[-400:]
    how = "told" if b'"error"' in end else "whole" if end.endswith(b"0\r\n\r\n") else "cut"
    return f"{begin[9:].decode()} {how}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4]))
