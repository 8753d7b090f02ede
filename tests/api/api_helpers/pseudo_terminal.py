"""A program in a terminal of its own: keys go in, what it shows comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from types import TracebackType

from helpers.eventually import exit_code

CTRL_C, CTRL_D, UP, ENTER = "\x03", "\x04", "\x1b[A", "\r"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


def paste(text: str) -> str:
    """What a terminal sends for a text from the clipboard, for a program that has enabled bracketed paste."""
    return f"\x1b[200~{text}\x1b[201~"


def _as_from_a_terminal() -> None:
    """In the program before it begins: the terminal is its own, and hanging up and ctrl-C reach it, even where the tests run
    under nohup or behind a shell's `&`, which leave these signals ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class PseudoTerminal:
    """Runs `python ARGUMENTS` with the terminal as its standard streams and as what sends it signals for keys."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None, columns: int = 200) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", **(environment or {})},
            start_new_session=True,
            preexec_fn=_as_from_a_terminal,
        )
        os.close(slave)
        self._bytes = b""
        self._seen = 0

    @property
    def shown(self) -> str:
        """All that was written so far, without what moves the cursor and sets colours."""
        return _ESCAPES.sub("", self._bytes.decode("utf-8", "replace"))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ask(self, line: str, pattern: str = r".* of context used.*\n") -> str:
        """Type a line once it is asked for; what is shown until the pattern, its echo left out."""
        self.wait_prompt()
        self.type(line + ENTER)
        self.wait("\n")  # its echo
        return self.wait(pattern)

    def wait_prompt(self) -> None:
        """Until a line is asked for: what is typed before would be shown twice, and ctrl-D before is lost."""
        self.wait(r"(^|\n)> ")

    def wait(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until something not waited for yet matches; what was shown from there to the end of the match."""
        end = time.monotonic() + seconds
        while True:
            text = self.shown[self._seen :]
            if found := re.search(pattern, text):
                self._seen += found.end()
                return text[: found.end()]
            assert time.monotonic() < end, f"nothing matches {pattern!r} in:\n{self.shown}"
            assert self._read(0.2), f"it ended with {exit_code(self.process)} before {pattern!r}:\n{self.shown}"

    def _read(self, seconds: float) -> bool:
        """False at the end."""
        if select.select([self._master], [], [], seconds)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other side is closed
                return False
            self._bytes += data
            return bool(data)
        return True

    def end(self, seconds: float = 30.0) -> int:
        """Read what is left; the exit code."""
        end = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < end, self.shown
        return exit_code(self.process)

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
