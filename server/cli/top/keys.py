"""Single keys from a terminal, without Enter. Knows no program."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Iterator

# What an arrow or a function key sends: it begins as the Escape key does and is not meant as one.
_SEQUENCE = re.compile(r"\x1b(?:O.|\[[0-?]*[ -/]*[@-~])")


class Keys:
    """Keys typed on the standard input while `typed_keys` lasts."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def wait(self, wanted: str, seconds: float) -> bool:
        """Whether one of these characters was typed within so many seconds. Others are dropped."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._on:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0]:
                typed = os.read(sys.stdin.fileno(), 64)
                if not typed:  # the terminal is gone
                    return True
                if any(character in wanted for character in _SEQUENCE.sub("", typed.decode("utf-8", "replace"))):
                    return True
        return False


@contextlib.contextmanager
def typed_keys() -> Iterator[Keys]:
    """Takes keys as they are typed, unechoed, and leaves the terminal as it was. Where there is none, nothing is ever typed."""
    try:
        import termios
        import tty
    except ImportError:  # not on Windows
        yield Keys(False)
        return
    if not sys.stdin.isatty():
        yield Keys(False)
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield Keys(True)
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(number, termios.TCSADRAIN, before)
