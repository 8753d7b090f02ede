"""`windlass serve` process with the scripted core, for tests of signals, exit codes and sockets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from helpers.crashes import CRASHES
from helpers.eventually import children, exit_code

from windlass.server.startup.engines import CORE_VARIABLE

TESTS = Path(__file__).parents[1]


class Served:
    """Starts on a free port; `url` is known once it listens. Remaining processes are killed at the end of the block."""

    def __init__(self, model: Path, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*self.command(model), "--port", "0", *arguments],
            env={**self.environment(), **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @staticmethod
    def command(model: Path) -> list[str]:
        return [sys.executable, "-m", "windlass.server.cli.main", "serve", str(model)]

    @staticmethod
    def environment() -> dict[str, str]:
        """Start with the scripted core."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
        return {
            **inherited,
            **CRASHES,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
            CORE_VARIABLE: "helpers.scripted_core:ScriptedCore",
            "SCRIPT_STEP_SECONDS": "0.02",
        }

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def errors(self) -> str:
        return "\n".join(self.lines)

    def wait_line(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """Wait for a line on standard error that matches; return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            for line in self.lines:
                if match := re.search(pattern, line):
                    return match
            assert not ended, f"it ended with {self.process.returncode}:\n{self.errors}"
            time.sleep(0.02)
        raise AssertionError(f"no line matches {pattern!r}:\n{self.errors}")

    @property
    def url(self) -> str:
        return self.wait_line(r"listening on (http://\S+?)/v1")[1]

    def wait_ready(self) -> str:
        self.wait_line(r"^windlass \S+ serves")
        return self.url

    @property
    def engine_pid(self) -> int:
        """Return the process id of the engine, one of the children."""
        (engine,) = children(self.process.pid, b"windlass.engine")
        return engine

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 10.0) -> int:
        """Return its exit code. The timeout is shorter than the grace period, for which it must not wait."""
        code = exit_code(self.process, seconds)
        self._reader.join(30.0)
        return code

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5.0)
        for stream in (self.process.stderr, self.process.stdout):
            if stream is not None:
                stream.close()
