"""A contestant in a worker process: requests and answers are lines of JSON.

Between the two the worker reports that only the timed part remains, and waits for permission to continue.
Both ends are here. Only the standard library is used, since workers run in the environments of the peers.
Other output of the worker goes to a log file.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections import abc
from pathlib import Path
from typing import Any, Protocol


class WorkerError(Exception):
    """The contestant cannot run or did not answer; the message gives the reason."""


class Handler(Protocol):
    """The far end: `info` once it has loaded, then one result per request. It calls `prepared` right before it times."""

    info: dict[str, Any]

    def measure(self, request: dict[str, Any], prepared: abc.Callable[[], None]) -> float: ...


def serve(make: abc.Callable[[], Handler]) -> None:
    """Run the far end on stdin and stdout until stdin ends. `make` loads the model."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of libraries must not mix with answers
    try:
        handler = make()
        print(json.dumps({"ready": True, "info": handler.info}), file=answers)
    except Exception as error:
        print(json.dumps({"ready": False, "reason": f"{type(error).__name__}: {error}"}), file=answers)
        return

    def prepared() -> None:
        print(json.dumps({"prepared": True}), file=answers)
        sys.stdin.readline()

    for line in sys.stdin:
        try:
            print(json.dumps({"value": handler.measure(json.loads(line), prepared)}), file=answers)
        except Exception as error:  # the near end decides what to do about it
            print(json.dumps({"reason": f"{type(error).__name__}: {error}"}), file=answers)


class Worker:
    """The near end. Raises WorkerError when the process cannot start, refuses or takes longer than its limit.

    A process that took longer is ended: what it answered late would be taken for the answer to what is asked next.
    """

    def __init__(
        self, command: list[str], *, log: Path, environment: dict[str, str] | None = None, load_seconds: float = 600.0
    ) -> None:
        self.log = log
        with log.open("ab") as errors:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, **(environment or {})},
                )
            except OSError as error:
                raise WorkerError(f"{command[0]} cannot be started: {error}") from None
        try:
            answer = self._read(load_seconds)
            if not answer.get("ready"):
                raise WorkerError(str(answer.get("reason", answer)))
        except WorkerError:
            self.close()
            raise
        self.info: dict[str, Any] = answer["info"]

    def measure(
        self, request: dict[str, Any], prepared: abc.Callable[[], None] = lambda: None, timeout: float = 3600.0
    ) -> float:
        """The result. `prepared` runs while the far end waits with all but the timed part done."""
        self._write(request)
        answer = self._read(timeout)
        if answer.get("prepared"):
            prepared()
            self._write({})
            answer = self._read(timeout)
        if "value" not in answer:
            raise WorkerError(str(answer.get("reason", answer)))
        return float(answer["value"])

    def close(self) -> None:
        """End the process, gently first."""
        if self.process.stdin:
            with contextlib.suppress(OSError):  # it may have ended with a request unread
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkerError(f"the process has ended: see {self.log}") from None

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                self.process.kill()
                self.process.wait()
                raise WorkerError(f"no answer within {seconds:.0f} s: see {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(f"the process ended without an answer: see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        return answer
