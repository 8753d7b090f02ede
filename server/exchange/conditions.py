"""What has lately gone wrong with a server that goes on all the same, for `/health`. Knows codes and times alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

ConditionCode = Literal["engine_restarted", "event_loop_stalled", "text_process_lost"]
LASTS = 60.0  # seconds for which a condition is told


class Conditions:
    """clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: dict[ConditionCode, float] = {}
        self._counts: dict[ConditionCode, int] = {}

    def note(self, code: ConditionCode) -> None:
        """It has just happened."""
        self._noted[code] = self._clock()

    def follow(self, code: ConditionCode, count: int) -> None:
        """How often it has happened since the start; noted when that is more than before."""
        if count > self._counts.get(code, 0):
            self.note(code)
        self._counts[code] = count

    def current(self) -> list[ConditionCode]:
        """Those of the last minute, in the order of their names."""
        since = self._clock() - LASTS
        return sorted(code for code, at in self._noted.items() if at > since)
