"""The three standard streams of a command, whatever it was started with."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Put /dev/null where the command was started with a stream closed, as by `2>&-`.

    Else the next file or socket would get its number, and be read or written by whoever means the stream.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null == number:
            os.set_inheritable(null, True)
        elif not _is_open(number):
            os.dup2(null, number)
        setattr(sys, name, os.fdopen(null, mode))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def on_terminal() -> bool:
    """Whether standard error is a terminal. The host of a library may have none."""
    return sys.stderr is not None and sys.stderr.isatty()
