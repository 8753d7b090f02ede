"""The person's side of a chat: reads lines, writes text, and says what ctrl-C means at the moment. Knows no server."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from typing import Literal

from windlass.clients.terminal.lines import say

_BLOCK = '"""'
# What could move the cursor, change colours or type into the terminal. New lines and tabs are text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ChatConsole:
    """interactive: a person types, rather than a file or another program. Make it in the main thread."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._screen = sys.stdout.isatty()
        self._interrupt: Literal["raise", "once", "ignore"] = "ignore"
        for stream in (sys.stdin, sys.stdout):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # arrow keys, and what was typed before

                # Pasted lines then come as one message, which ends with the Enter that a person types.
                readline.parse_and_bind("set enable-bracketed-paste on")
        signal.signal(signal.SIGINT, self._on_interrupt)

    def read(self) -> str:
        """The next message, without blanks around it; may be empty. Raises EOFError at the end, KeyboardInterrupt on ctrl-C."""
        line = self._line("> ")
        if not line.lstrip().startswith(_BLOCK):
            return line.strip()
        text = line.lstrip().removeprefix(_BLOCK)
        while not text.rstrip().endswith(_BLOCK):
            try:
                text += "\n" + self._line("... ")
            except EOFError:
                if self.interactive:
                    raise  # ctrl-D leaves
                return text.strip()  # the end of a file ends its last message too
        return text.rstrip().removesuffix(_BLOCK).strip()

    def _line(self, prompt: str) -> str:
        if not self.interactive:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.removesuffix("\n")
        if not self._screen:  # `input` would write the prompt among the answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        with self._on_ctrl_c("raise"):
            return input(prompt)

    def write(self, text: str) -> None:
        """A piece of an answer, at once. A terminal gets no control characters: a model may write any."""
        sys.stdout.write(_CONTROLS.sub("", text) if self._screen else text)
        sys.stdout.flush()

    def think(self, text: str) -> None:
        """A piece of what the model thinks before it answers, at once; like notes no part of the answer."""
        text = _CONTROLS.sub("", text)
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text)
        sys.stderr.flush()

    def note(self, *lines: str) -> None:
        """Lines that are no part of an answer; they go to standard error, as errors do."""
        for line in lines:
            line = _CONTROLS.sub("", line)
            say(f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() else line)

    def greet(self, *lines: str) -> None:
        """Lines for a person only."""
        if self.interactive:
            self.note(*lines)

    @contextlib.contextmanager
    def leavable(self) -> Iterator[None]:
        """While nothing is there to stop but the chat: ctrl-C raises KeyboardInterrupt."""
        with self._on_ctrl_c("raise"):
            yield

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """While an answer comes: the first ctrl-C raises KeyboardInterrupt, further ones do nothing."""
        with self._on_ctrl_c("once"):
            yield

    @contextlib.contextmanager
    def _on_ctrl_c(self, what: Literal["raise", "once"]) -> Iterator[None]:
        self._interrupt = what
        try:
            yield
        finally:
            self._interrupt = "ignore"  # between two of these it is never clear what ctrl-C was meant for

    def _on_interrupt(self, signum: int, frame: object) -> None:
        if self._interrupt == "ignore":
            return
        if self._interrupt == "once":
            self._interrupt = "ignore"
        raise KeyboardInterrupt
