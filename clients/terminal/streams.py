"""The three standard streams of a command, whatever it was started with."""

from __future__ import annotations

import errno
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


def nobody_reads(error: OSError) -> bool:
    """Whether an error tells of standard output that it is a closed pipe, or a terminal that is gone."""
    if isinstance(error, BrokenPipeError):
        return True
    if error.errno != errno.EIO or sys.stdout is None:
        return False
    try:
        os.get_terminal_size(sys.stdout.fileno())
    except OSError as refused:  # of a disk that cannot be read, say, it would be that there is no terminal
        return refused.errno == errno.EIO
    return False


def leave_output() -> None:
    """Nothing is left to be flushed at the end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def on_terminal() -> bool:
    """Whether standard error is a terminal. The host of a library may have none."""
    return sys.stderr is not None and sys.stderr.isatty()
