"""What the system says of a process: whether it does anything at all, and how much processor time it has used.

Reads what Linux says of a process; elsewhere, and of a process that is gone, it knows nothing. Knows no engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ASLEEP = "STt"  # proc(5): sleeping, stopped by a signal, stopped by a debugger
_STOPPED = "T"


class ProcessActivity:
    """pid: of the process, all threads of which count. All attributes are as of the last `refresh`.

    lifeless: whether it was asleep or stopped and had used no processor time since the `refresh` before, nor, while it slept, had
    processes of its own, as compilers are that it waits for.
    stopped: whether a signal has stopped it, after which it does nothing until another has it go on.
    used_seconds: processor time since it began, None where the system does not tell. memory: bytes resident when that was
    told last.
    """

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        self._children_used: float | None = None  # by its children, as of the last look while it slept
        self.inactive = self.stopped = False
        self.used_seconds: float | None = None
        self.memory: int | None = None
        self.refresh()  # of one that dies at once something is known

    def refresh(self) -> None:
        """Ask the system."""
        before, children_before = self.used_seconds, self._children_used
        self._children_used = None
        try:
            # Behind the name, which may hold anything: state is the first field, user and system time the 12th and 13th,
            # resident pages the 22nd.
            fields = _stat(self._process)
            self.used_seconds = _seconds(fields, 11, 12)
            self.memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") or self.memory
            self.stopped = fields[0] in _STOPPED
            self.inactive = self.used_seconds == before and fields[0] in _ASLEEP
            if self.inactive and not self.stopped:
                # Those that have ended stand in the 14th and 15th field once it has waited for them.
                self._children_used = _seconds(fields, 13, 14) + sum(map(_used, self._children()))
                self.inactive = self._children_used == children_before
        except (OSError, ValueError, IndexError):
            self.inactive, self.stopped, self.used_seconds = False, False, None

    def _children(self) -> Iterator[Path]:
        """The processes that its threads have started; none where the system does not tell."""
        for thread in (self._process / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                yield from (Path("/proc") / pid for pid in thread.read_text().split())


def _stat(process: Path) -> list[str]:
    """What the system says of it behind its name. Raises OSError where it is gone."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _seconds(fields: list[str], *places: int) -> float:
    return sum(int(fields[place]) for place in places) / os.sysconf("SC_CLK_TCK")


def _used(process: Path) -> float:
    """Processor time in seconds; 0 of one that is gone."""
    try:
        return _seconds(_stat(process), 11, 12)
    except (OSError, ValueError, IndexError):
        return 0.0
