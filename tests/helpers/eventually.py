"""Waiting for conditions, and inspection of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LISTENING, ESTABLISHED = "0A", "01"


def calm_time() -> float:
    """A clock in seconds that stops while a thread of this machine waits for a core.

    At least a tenth of the real time counts, so that something that never happens is noticed on a busy machine, too.
    """
    found = re.search(rb"some .*total=(\d+)", _read(Path("/proc/pressure/cpu")))  # pressure stall information of Linux
    waited = int(found[1]) / 1e6 if found else 0.0
    return time.monotonic() - 0.9 * waited


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Return once the condition holds; fail after `seconds` of calm time."""
    deadline = calm_time() + seconds
    while not condition():
        assert calm_time() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.02)


async def eventually_async(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """As `eventually`, and other tasks run meanwhile."""
    deadline = calm_time() + seconds
    while not condition():
        assert calm_time() < deadline, f"did not happen within {seconds} s"
        await asyncio.sleep(0.01)


def exit_code(process: subprocess.Popen[Any], seconds: float = 20.0) -> int:
    """Wait for the end of a process and return its exit code; fail after `seconds` of calm time."""
    eventually(lambda: process.poll() is not None, seconds)
    return process.wait()


def in_time(once: Callable[[], float], seconds: float, tries: int = 3) -> None:
    """Fail unless one of a few tries is fast enough. once: performs a try and returns its duration.

    Several tries, because a busy machine may delay anything.
    """
    took: list[float] = []
    while not took or took[-1] >= seconds:
        assert len(took) < tries, f"{took} s, and {seconds} s are promised"
        took.append(once())


def alive(pid: int) -> bool:
    """Return whether a process is running and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int, within: bytes = b"") -> list[int]:
    """Return the children of a process whose command contains these bytes."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(thread).split()):
            command = _read(Path(f"/proc/{child}/cmdline"))
            if command and within in command:  # a process without a command has ended
                found.append(child)
    return found


def ports(pid: int, state: str) -> list[int]:
    """Return the local ports of a process's TCP sockets in this state."""
    mine = set()
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            mine.add(str(entry.readlink()))
    rows = [line.split() for line in _read(Path(f"/proc/{pid}/net/tcp")).decode().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == state and f"socket:[{row[9]}]" in mine]


def open_files(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def seconds_of_texts(pid: int) -> float:
    """Return the processor time of a server's text workers."""
    forks = children(pid, b"workers.fork_server")
    return sum(cpu_seconds(each) for fork in forks for each in children(fork))


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100 if fields else 0.0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
