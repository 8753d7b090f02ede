"""Which decode steps of rows with slot ranges are captured: those that come again and again, when they have.

Every number of rows could come with every number of ranges. So both are rounded up to powers of two, a step is captured once it
was asked for a few times, and there is a bound on how many are. Responsible for that choice; it knows no device.
"""

from __future__ import annotations

import logging
from collections import Counter, abc
from typing import Generic, NamedTuple, TypeVar

from windlass.kernels import is_out_of_memory

_logger = logging.getLogger("windlass.engine")

T = TypeVar("T")
MOST_RANGED = 16  # captured, each some megabytes
MOST_CELLS = 1024  # rows times ranges; each may be a version of a query, in every layer
_MEETINGS = 2  # in vain, before a step is captured: a step may ask twice
_WIDER = 4  # times the rows, or the ranges, that a step may be made to have where it cannot be captured itself


class RangedKey(NamedTuple):
    rows: int
    ranges: int

    def holds(self, other: RangedKey) -> bool:
        return self.rows >= other.rows and self.ranges >= other.ranges


class RangedGraphs(Generic[T]):
    """capture: of a step of so many rows and ranges; raises RuntimeError where that cannot be done.

    obstacle: why no more of them are captured; None while they are.
    """

    def __init__(self, capture: abc.Callable[[RangedKey], T]) -> None:
        self._capture = capture
        self._captured: dict[RangedKey, T] = {}
        self._met: Counter[RangedKey] = Counter()
        self.obstacle: str | None = None

    @property
    def captured(self) -> list[RangedKey]:
        return list(self._captured)

    def find(self, rows: int, ranges: int, *, ahead: bool) -> tuple[RangedKey, T] | None:
        """What stands for a step of so many rows, as decode steps are captured for, in so many ranges at most; None: nothing.

        ahead: the device has been asked for the step before it already. So nothing is captured now, and whatever stood for that
        one does for this, which has no more of either.
        """
        wanted = RangedKey(rows, max(2, 1 << (ranges - 1).bit_length()))
        if wanted not in self._captured and not ahead and self._is_due(wanted):
            self.capture(wanted)
        wider = [key for key in self._captured if key.holds(wanted)]
        if not ahead:
            most = RangedKey(_WIDER * wanted.rows, _WIDER * wanted.ranges)
            wider = [key for key in wider if most.holds(key)]
        if not wider:
            return None
        key = min(wider)
        return key, self._captured[key]

    def capture(self, key: RangedKey) -> None:
        """Capture a step, unless something is in its way, which is the `obstacle` then."""
        try:
            self._captured[key] = self._capture(key)
        except RuntimeError as error:
            what = "no memory is left for it" if is_out_of_memory(error) else str(error).splitlines()[0]
            self.obstacle = f"a decode step of {key.rows} rows in {key.ranges} ranges was not captured: {what}"
            _logger.warning("%s; no more with ranges are", self.obstacle)

    def _is_due(self, wanted: RangedKey) -> bool:
        if self.obstacle is not None or len(self._captured) >= MOST_RANGED or wanted.rows * wanted.ranges > MOST_CELLS:
            return False
        self._met[wanted] += 1
        return self._met[wanted] > _MEETINGS
