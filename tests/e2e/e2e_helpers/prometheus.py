"""Debian's Prometheus as a child process with a temporary database, its tool, and the queries of the Grafana dashboard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
from helpers.eventually import LISTENING, ports

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "windlass.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (Debian: apt-get install prometheus)",
)


def as_grafana_asks(expression: str) -> str:
    """Set the variable of Grafana's own in a query."""
    return expression.replace("$__rate_interval", "1m")


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *map(str, arguments)], input=text, cwd=ROOT, capture_output=True, text=True, check=False
    )


def write_config(folder: Path, key_file: Path, *targets: str) -> Path:
    """Write the configuration with other targets and another path of the key, and copy the alerts."""
    text = CONFIG.read_text(encoding="utf-8")
    for old, new in (('["windlass:8000"]', str(list(targets))), ("/server-key", str(key_file))):
        assert text.count(old) == 1, f"{old} is not in {CONFIG.name} once"
        text = text.replace(old, new)
    shutil.copy(ALERTS, folder)
    path = folder / CONFIG.name
    path.write_text(text, encoding="utf-8")
    return path


class Prometheus:
    """A running Prometheus, ended with the block. Its HTTP API answers after `wait_ready`."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GOMAXPROCS": "1"},
            )
        self._http = httpx.Client(timeout=30, trust_env=False)

    def wait_ready(self) -> None:
        self.eventually(lambda: ports(self._process.pid, LISTENING), "Prometheus listens")
        self._http.base_url = httpx.URL(f"http://127.0.0.1:{ports(self._process.pid, LISTENING)[0]}")
        self.eventually(lambda: self._http.get("/-/ready").status_code == 200, "Prometheus gets ready")

    def api(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer; fail with the message of an error."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    def query(self, expression: str) -> list[float]:
        """Return the values of an instant vector."""
        data = self.api("query", query=expression)
        assert data["resultType"] == "vector"
        return [float(sample["value"][1]) for sample in data["result"]]

    def targets(self) -> dict[str, dict[str, Any]]:
        """Return active targets by address."""
        return {target["labels"]["instance"]: target for target in self.api("targets")["activeTargets"]}

    def eventually(
        self, condition: Callable[[], Any], what: str, *, seconds: float = 90.0, otherwise: Callable[[], Any] = str
    ) -> None:
        """Wait for a condition. `otherwise` adds details to the failure."""
        deadline = time.monotonic() + seconds
        while True:
            assert self._process.poll() is None, self._log.read_text()
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}; {otherwise()}"
            time.sleep(0.1)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
