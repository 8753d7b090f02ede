"""Appends lines of JSON to a file from a thread of its own: bounded, and whatever the disk does, no request notices.

Knows nothing of what the lines say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from queue import Full, Queue
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic_core import to_json

from windlass.server.options.settings import RecordSettings

_logger = logging.getLogger("windlass.server")

MOST_WAITING = 1024  # lines for a slow disk; further ones are lost
LOSSES = ("disk", "full", "slow")
_END_SECONDS = 5.0  # for what waits when the server ends

Line = Callable[[], dict[str, Any]]


class WorkloadRecorder:
    """Its thread begins with the first line. `written` and `lost`, by one of LOSSES, count lines."""

    def __init__(self, settings: RecordSettings) -> None:
        self.settings = settings
        self.written = 0
        self.lost: Counter[str] = Counter()
        self._waiting: Queue[Line | None] = Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether `put` was called before."""
        return self._begun

    def put(self, line: Line) -> None:
        """Have a line written soon; never waits, never raises. line: makes the object, in the thread."""
        self._begun = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(line)
        except Full:
            self._lose("slow", "the disk is too slow for it: some requests are missing")

    def close(self) -> None:
        """Write what waits, for seconds at most. Safe to call twice."""
        if self._thread is not None and self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._write(to_json(line()) + b"\n")
            except OSError as error:
                self._lose("disk", f"{error.strerror or error}: some requests are missing")
            except Exception:
                _logger.exception("a request could not be recorded")
                self.lost["disk"] += 1

    def _write(self, data: bytes) -> None:
        """Append it whole or not at all. The file is opened for each line, so that it may be moved away or come back."""
        # Only the owner may read it: it may hold what people wrote.
        file = os.open(self.settings.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(file).st_size
            if size + len(data) > self.settings.max_bytes:
                self._lose(
                    "full", f"it has {self.settings.max_bytes:,} bytes (--record-limit): nothing more is recorded"
                )
                return
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(file, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size)  # no half lines
                raise
        finally:
            os.close(file)
        self.written += 1

    def _lose(self, how: str, why: str) -> None:
        self.lost[how] += 1
        if how not in self._told:
            self._told.add(how)
            _logger.warning("--record %s: %s", self.settings.path, why)


class RecordingCollector(Collector):
    """The counts of a recorder, for /metrics; zeros where there is none."""

    def __init__(self, recorder: WorkloadRecorder | None) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        recorder = self._recorder
        yield CounterMetricFamily(
            "windlass_recorded_requests",
            "Lines written by --record.",
            value=0 if recorder is None else recorder.written,
        )
        lost = CounterMetricFamily(
            "windlass_record_lost", "Requests that --record could not write, by reason.", labels=["reason"]
        )
        for reason in LOSSES:
            lost.add_metric([reason], 0 if recorder is None else recorder.lost[reason])
        yield lost
