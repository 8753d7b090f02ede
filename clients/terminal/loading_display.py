"""Progress of a loading model, on standard error."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from windlass.clients.terminal.lines import say
from windlass.clients.terminal.streams import on_terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


# Private: set by a Windlass command that starts a server, so that the command can display the progress. Each update is then a
# line of this name followed by [stage, done, total] as JSON.
PROGRESS_VARIABLE = "_WINDLASS_PROGRESS"


class LoadingDisplay:
    """A progress bar on a terminal; elsewhere one line per loading stage.

    The instance is the callback `(stage, done, total)`. `stop` removes the bar and may be called twice. first: a line to print
    before the first update.
    """

    def __init__(self, terminal: bool | None = None, first: str | None = None) -> None:
        self._terminal = on_terminal() if terminal is None else terminal
        self._first = first
        self._stage: str | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.begin()
        if PROGRESS_VARIABLE in os.environ:
            say(PROGRESS_VARIABLE + json.dumps([stage, done, total]))
        elif not self._terminal:
            if stage != self._stage:
                say(f"{stage} ...")
        else:
            progress = self._progress or self._start()
            if stage != self._stage:
                if self._task is not None:
                    progress.remove_task(self._task)
                self._task = progress.add_task(stage, total=total)
            if self._task is not None:
                progress.update(self._task, completed=done, total=total)
        self._stage = stage

    def begin(self) -> None:
        """Print the first line, unless it has been printed."""
        if self._first is not None:
            say(self._first)
            self._first = None

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._progress.start()
        return self._progress

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
