"""Lines for the person at the terminal. They go to standard error, so that results alone are on standard output."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr, flush=True)
