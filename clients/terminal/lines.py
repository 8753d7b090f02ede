"""Lines for the person at the terminal. They go to standard error, so that results alone are on standard output."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """One line on standard error. Where it cannot be written, on a full disk or into a closed pipe, work goes on without it."""
    if sys.stderr is None:  # print would take standard output
        return
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
