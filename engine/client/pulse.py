"""What the system says of a process: whether it does anything at all, and how much processor time it has used.

Reads what Linux says of a process; elsewhere, and of a process that is gone, it knows nothing. Knows no engine.
"""

from __future__ import annotations

import os
from pathlib import Path

_ASLEEP = "STt"  # proc(5): sleeping, stopped by a signal, stopped by a debugger
_STOPPED = "T"


class Pulse:
    """pid: of the process, all threads of which count. All attributes are as of the last `feel`.

    lifeless: whether it was asleep or stopped and had used no processor time since the `feel` before.
    stopped: whether a signal has stopped it, after which it does nothing until another has it go on.
    used_seconds: processor time since it began, None where the system does not tell. memory: bytes resident when that was
    told last.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self.lifeless = self.stopped = False
        self.used_seconds: float | None = None
        self.memory: int | None = None
        self.feel()  # of one that dies at once something is known

    def feel(self) -> None:
        """Ask the system."""
        before = self.used_seconds
        try:
            # Behind the name, which may hold anything: state is the first field, user and system time the 12th and 13th,
            # resident pages the 22nd.
            fields = self._stat.read_text().rpartition(")")[2].split()
            self.used_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            self.memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") or self.memory
            self.lifeless = self.used_seconds == before and fields[0] in _ASLEEP
            self.stopped = fields[0] in _STOPPED
        except (OSError, ValueError, IndexError):
            self.lifeless, self.stopped, self.used_seconds = False, False, None
