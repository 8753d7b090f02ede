"""Ray cluster on one machine with free ports, and deployments by the command."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from helpers.crashes import CRASHES
from helpers.prometheus_text import total

BIN = Path(sys.executable).parent
TESTS = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class RayCluster:
    """address: of the cluster. url: of the deployment, without a slash at the end."""

    address: str
    folder: Path
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def windlass(self, *arguments: object, address: str | None = None) -> subprocess.CompletedProcess[str]:
        return self._run(str(BIN / "windlass"), "ray", *arguments, "--address", address or self.address)

    def _run(self, *command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=180, env=environment())

    def deploy(self, *arguments: object) -> None:
        done = self.windlass("deploy", "demo", "--port", self.port, *arguments)
        assert done.returncode == 0, (done.stdout, done.stderr, self.logs())

    def deploy_in_turns(self, *arguments: object) -> None:
        """Deploy with a router that sends requests to the replicas in turn."""
        command = [sys.executable, "-m", "helpers.ray_in_turns", "ray", "deploy", "demo", "--port", self.port]
        done = self._run(*command, *arguments, "--address", self.address)
        assert done.returncode == 0, (done.stdout, done.stderr, self.logs())

    def ingress(self) -> int:
        """Return the process id of the HTTP actor."""
        (found,) = self._processes(b"ray::ServeReplica:windlass:Ingress")
        return found

    def replicas(self) -> list[int]:
        """Return process ids of the engine actors, the oldest first."""
        return self._processes(b"ray::ServeReplica:windlass:Engine")

    def replica_count(self) -> dict[str, int]:
        found: dict[str, int] = httpx.get(f"{self.url}/health", timeout=20).json()["replicas"]
        return found

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return total(httpx.get(f"{self.url}/metrics", timeout=20).text, name)

    def wait_replicas(self, ready: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.replica_count() != {"total": ready, "ready": ready}:
            assert time.monotonic() < deadline, (self.replica_count(), self.logs())
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the ends of the replicas' logs."""
        files = sorted(self.folder.glob("session_latest/logs/serve/*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in files)

    def _processes(self, title: bytes) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(title):
                    mine = str(self.folder).encode() in (entry / "environ").read_bytes()
                    found += [int(entry.name)] if mine else []
        return sorted(found)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WINDLASS_", "RAY_"))}
    # Ray sets a niceness of 15 for its workers, and so for engines: on a busy machine they would get no processor time.
    own = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_worker_niceness": "0", "PYTHONPATH": str(TESTS), **CRASHES}
    return {**kept, **own, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


@contextlib.contextmanager
def ray_cluster(cpus: int = 4) -> Iterator[RayCluster]:
    """Start a cluster; its processes end with it, and no other cluster's."""
    port = free_port()
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--port={port}", f"--num-cpus={cpus}"]
    command += ["--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--ray-client-server-port={free_port()}"]
    with _started(lambda folder: [*command, f"--temp-dir={folder}"], b"Ray runtime started") as (folder, _):
        yield RayCluster(f"127.0.0.1:{port}", folder)


@contextlib.contextmanager
def ray_machines(cpus: list[int]) -> Iterator[tuple[RayCluster, list[int]]]:
    """Start a cluster of several raylets, as on several machines; yield it and their process ids. The first is the head."""
    command = [sys.executable, "-m", "helpers.raylets"]
    with _started(lambda folder: [*command, str(folder), *map(str, cpus)], b"raylets: ") as (folder, log):
        found = re.search(rb"raylets: (\S+) (.*)", log.read_bytes())
        assert found is not None
        yield RayCluster(found[1].decode(), folder), [int(pid) for pid in found[2].split()]


@contextlib.contextmanager
def _started(command: Callable[[Path], list[str]], sign: bytes) -> Iterator[tuple[Path, Path]]:
    """Start the head process; yield its folder, which every process of the cluster names, and its log once that has `sign`."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "start.log")
        with log.open("wb") as output:
            mark = {**environment(), "WINDLASS_TEST_CLUSTER": folder}
            head = subprocess.Popen(
                command(Path(folder)), stdout=output, stderr=subprocess.STDOUT, env=mark, start_new_session=True
            )
        try:
            deadline = time.monotonic() + 90
            while sign not in log.read_bytes():
                assert head.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield Path(folder), log
        finally:
            head.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(3)
            _end(folder)
            head.wait(10)


def _end(folder: str) -> None:
    """End the remaining processes of the cluster in this folder."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                told = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if folder.encode() in told:
                    os.kill(int(entry.name), signal.SIGKILL)
