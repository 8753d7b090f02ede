"""Workload recording: a JSON lines file of limited size, written by its own thread."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from queue import Full, Queue
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic_core import to_json

from windlass.server.config.settings import RecordSettings

_logger = logging.getLogger("windlass.server")

MAX_QUEUED_LINES = 1024  # if the disk is slow; further lines are lost
LOSS_REASONS = ("disk", "full", "slow")
_CLOSE_SECONDS = 5.0  # for queued lines when the server ends

LineBuilder = Callable[[], dict[str, Any]]


class WorkloadRecorder:
    """Records requests. `written` and `lost`, by LOSS_REASONS, count lines without headers. The first line starts the thread."""

    def __init__(self, settings: RecordSettings) -> None:
        self.settings = settings
        self.written = 0
        self.lost: Counter[str] = Counter()
        self._queue: Queue[tuple[LineBuilder, LineBuilder] | None] = Queue(MAX_QUEUED_LINES)
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()
        self._has_header = False  # whether this process has written its header

    def put(self, line: LineBuilder, *, header: LineBuilder) -> None:
        """Queue a line; never waits, never raises. line: builds the object, in the thread.

        header: builds the object of the server, written before the first line of this process and of each file.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((line, header))
        except Full:
            self._count_lost("slow", "the disk is too slow: some requests are missing")

    def close(self) -> None:
        """Write queued lines, for at most a few seconds. Safe to call twice."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            line, header = given
            try:
                self._write(_as_line(line), header)
            except OSError as error:
                self._count_lost("disk", f"{error.strerror or error}: some requests were not recorded")
            except Exception:
                _logger.exception("a request could not be recorded")
                self.lost["disk"] += 1

    def _write(self, data: bytes, header: LineBuilder) -> None:
        """Append a line completely or not at all, after the header if that is missing.

        The file is opened for each line, so that it may be rotated.
        """
        # Only the owner may read it: it may contain prompts.
        file = os.open(self.settings.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            about = os.fstat(file)
            size = about.st_size
            if not self._has_header or (size == 0 and stat.S_ISREG(about.st_mode)):
                data = _as_line(header) + data
            if size + len(data) > self.settings.max_bytes:
                self._count_lost(
                    "full",
                    f"the limit of {self.settings.max_bytes:,} bytes is reached (WINDLASS_RECORD_LIMIT): recording stops",
                )
                return
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(file, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size)  # no partial lines
                raise
        finally:
            os.close(file)
        self._has_header = True
        self.written += 1

    def _count_lost(self, how: str, why: str) -> None:
        self.lost[how] += 1
        if how not in self._warned:
            self._warned.add(how)
            _logger.warning("--record %s: %s", self.settings.path, why)


def _as_line(line: LineBuilder) -> bytes:
    return to_json(line()) + b"\n"


class RecordingCollector(Collector):
    """Counts of a recorder for /metrics; zeros without one."""

    def __init__(self, recorder: WorkloadRecorder | None) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        recorder = self._recorder
        yield CounterMetricFamily(
            "windlass_recorded_requests",
            "Requests written by --record.",
            value=0 if recorder is None else recorder.written,
        )
        lost = CounterMetricFamily(
            "windlass_record_lost",
            "Requests that --record could not write, by reason: disk, full (WINDLASS_RECORD_LIMIT) or slow.",
            labels=["reason"],
        )
        for reason in LOSS_REASONS:
            lost.add_metric([reason], 0 if recorder is None else recorder.lost[reason])
        yield lost
