"""Progress of a sweep on standard error: a bar with the remaining time, and one line per finished pass.

Without a terminal only the lines are written.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from windlass.clients.terminal import print_status

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class SweepProgress:
    """Progress in tokens computed by the model: a context manager that removes the bar at its end."""

    def __init__(self, terminal: bool | None = None) -> None:
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._total = self._done = self._passes = self._finished = 0
        self._began = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def expect(self, tokens: int, passes: int = 1) -> None:
        """Add expected work; negative values remove work that is known already."""
        self._total += tokens
        self._passes += passes
        self._update()

    def begin(self, label: str) -> None:
        """Report that a pass starts."""
        if not self._terminal:
            return
        if self._progress is None:
            self._began = time.monotonic()
            self._start()
        self._update(description=label)

    def computed(self, tokens: int) -> None:
        """Report computed tokens."""
        self._done += tokens
        self._update()

    def finished(self, line: str) -> None:
        """Report that a pass has finished. line: its result."""
        self._finished += 1
        line = f"{line}; {self._finished} of {self._passes} passes{self._remaining()}"
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print_status(line)

    def _remaining(self) -> str:
        left = self._total - self._done
        if left <= 0 or self._done <= 0:
            return ""
        seconds = (time.monotonic() - self._began) * left / self._done
        return f", about {duration(seconds)} to go"

    def _update(self, **more: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=self._total, completed=self._done, **more)  # type: ignore[arg-type]

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("to go"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=self._total)
        self._progress.start()


def duration(seconds: float) -> str:
    """45 -> "45 s", 600 -> "10 min", 9000 -> "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
