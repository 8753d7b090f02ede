"""A real `windlass serve` process on a free loopback port, for end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from helpers.device import SERVERS


@dataclass
class RealServer:
    """url ends without a slash; process is the API process, parent of the engine and of the fork server for text."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0.0 if it is not there."""
        text = httpx.get(f"{self.url}/metrics", timeout=120).text
        found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        engines = [int(c) for c in children if b"windlass.engine" in Path(f"/proc/{c}/cmdline").read_bytes()]
        assert len(engines) == 1
        return engines[0]

    def wait_ready(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout} s:\n{self.log.read_text()}")


@contextlib.contextmanager
def serve(*arguments: str, model: Path | str = "demo") -> Iterator[RealServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("windlass")), "serve", str(model)]
    command += ["--port", str(port), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            environment = {**SERVERS, **os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                server = RealServer(f"http://127.0.0.1:{port}", process, log)
                server.wait_ready()
                yield server
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    try:
                        process.wait(20)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
