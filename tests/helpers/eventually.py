"""Waits for what happens elsewhere, and looks at processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def eventually(condition: Callable[[], Any], seconds: float) -> None:
    """Return once the condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process is at work; one that has ended and waits for its parent is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int, within: bytes = b"") -> list[int]:
    """The children of a process whose command holds these bytes; one that ends while they are read is left out."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(thread).split()):
            command = _read(Path(f"/proc/{child}/cmdline"))
            if command and within in command:  # without a command it has ended
                found.append(child)
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
