"""`windlass serve` process on a free loopback port, for end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from helpers.device import SERVERS
from helpers.eventually import children
from helpers.prometheus_text import total


@dataclass
class RealServer:
    """url: without a slash at the end, known once the server listens.

    process: API process, parent of the engine and of the fork server. timeout: of requests, in seconds.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    timeout: float = 120.0

    def get(self, path: str) -> Any:
        """Return the JSON body of a GET."""
        return httpx.get(self.url + path, timeout=self.timeout).json()

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=self.timeout)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the body of a response, which must have status 200."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def refuse(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the error of a response, which must have status 400."""
        response = self.post(path, body)
        assert response.status_code == 400, response.text
        found: dict[str, Any] = response.json()["error"]
        return found

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Return a completion, greedy by default."""
        return self.ask("/v1/completions", prompt=prompt, **{"temperature": 0, **fields})

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream."""
        lines = self.post(path, {**body, "stream": True}).text.splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return total(httpx.get(f"{self.url}/metrics", timeout=120).text, name)

    def engine_pids(self) -> list[int]:
        return children(self.process.pid, b"windlass.engine")

    def engine_pid(self) -> int:
        (engine,) = self.engine_pids()
        return engine

    def wait_ready(self, timeout: float = 180.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")
            if not self.url and (found := re.search(r"listening on (http\S+?)/v1", self.log.read_text())):
                self.url = found[1]
            with contextlib.suppress(httpx.TransportError):
                if self.url and httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout} s:\n{self.log.read_text()}")


@contextlib.contextmanager
def serve(*arguments: str, model: Path | str = "demo", **variables: str) -> Iterator[RealServer]:
    command = [str(Path(sys.executable).with_name("windlass")), "serve", str(model), "--port", "0", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            environment = {**SERVERS, **os.environ, "OMP_NUM_THREADS": "1", **variables}
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                server = RealServer("", process, log)
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
