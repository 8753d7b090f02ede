"""Whether a process does anything: stopped and sleeping ones are told from those that compute or wait for a disk.

Reads what Linux says of a process; elsewhere, and of a process that is gone, it knows nothing. Knows no engine.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_ASLEEP = "STt"  # proc(5): sleeping, stopped by a signal, stopped by a debugger


class Pulse:
    """pid: of the process, all threads of which count."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._used: int | None = None

    def lifeless(self) -> bool:
        """Whether it is asleep or stopped now and has used no processor time since the last call."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Behind the name, which may hold anything: state is the first field, user and system time the 12th and 13th.
            fields = self._stat.read_text().rpartition(")")[2].split()
            used, before = int(fields[11]) + int(fields[12]), self._used
            self._used = used
            return used == before and fields[0] in _ASLEEP
        self._used = None
        return False
