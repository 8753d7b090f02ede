"""Where the processes that a host starts print."""

from __future__ import annotations

import os
import subprocess
import sys


def child_output() -> int:
    """For both their outputs: the host's standard error, so that nothing mixes with what a command writes to its standard output;
    nowhere where the host has none, as number 2 may then be any file or socket of its own.
    """
    if sys.stderr is None:
        return subprocess.DEVNULL
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
