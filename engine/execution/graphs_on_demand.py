"""Which further decode steps are captured: those that come again and again, when they have.

They are of rows with slot ranges, and of rows with adapters. Every number of rows could come with every number of ranges. So both
are rounded up to powers of two, a step is captured once it was asked for a few times, and there is a bound on how many are.
Responsible for that choice; it knows no device.
"""

from __future__ import annotations

import logging
from collections import Counter, abc
from typing import Generic, NamedTuple, TypeVar

from windlass.kernels import is_out_of_memory

_logger = logging.getLogger("windlass.engine")

T = TypeVar("T")
MAX_RANGED_GRAPHS = 16  # captured with ranges, each some megabytes
MAX_RANGE_CELLS = 1024  # rows times ranges; each may be a version of a query, in every layer
_CAPTURE_AFTER_MISSES = 2  # in vain, before a step is captured: a step may ask twice
_MAX_PADDING_FACTOR = (
    4  # times the rows, or the ranges, that a step may be made to have where it cannot be captured itself
)


class GraphKey(NamedTuple):
    """ranges: of each row at most, 0 where none has any. adapted: whether rows may have adapters."""

    rows: int
    ranges: int = 0
    adapted: bool = False

    def covers(self, other: GraphKey) -> bool:
        """Whether what is captured of this kind stands for steps of the other. Ranges are told of all rows or of none."""
        alike = (self.ranges > 0) == (other.ranges > 0)
        return alike and self.rows >= other.rows and self.ranges >= other.ranges and self.adapted >= other.adapted

    def __str__(self) -> str:
        ranges = f" in {self.ranges} ranges" if self.ranges else ""
        return f"a decode step of {self.rows} rows{ranges}{' with adapters' if self.adapted else ''}"


class LazyGraphs(Generic[T]):
    """capture: a step of this kind; raises RuntimeError where that cannot be done.

    obstacle: why no more of them are captured; None while they are.
    """

    def __init__(self, capture: abc.Callable[[GraphKey], T]) -> None:
        self._capture = capture
        self._captured: dict[GraphKey, T] = {}
        self._misses: Counter[GraphKey] = Counter()
        self.obstacle: str | None = None

    @property
    def captured(self) -> list[GraphKey]:
        return list(self._captured)

    def find(self, kind: GraphKey, *, ahead: bool) -> tuple[GraphKey, T] | None:
        """What stands for such a step, of as many rows as decode steps are captured for, in any number of ranges; None: nothing.

        ahead: the device has been asked for the step before it already. So nothing is captured now, and whatever stood for that
        one does for this, which has no more of anything.
        """
        wanted = kind._replace(ranges=max(2, 1 << (kind.ranges - 1).bit_length()) if kind.ranges else 0)
        if wanted not in self._captured and not ahead and self._is_due(wanted):
            self.capture(wanted)
        candidates = [one for one in self._captured if one.covers(wanted)]
        if not ahead:
            upper_bound = GraphKey(_MAX_PADDING_FACTOR * wanted.rows, _MAX_PADDING_FACTOR * wanted.ranges, adapted=True)
            candidates = [one for one in candidates if upper_bound.covers(one)]
        if not candidates:
            return None
        found = min(candidates)
        return found, self._captured[found]

    def capture(self, kind: GraphKey) -> None:
        """Capture a step, unless something is in its way, which is the `obstacle` then."""
        if kind.adapted and kind.ranges:
            # Ranges may vanish in steps that are planned ahead, where something has to stand for the rest.
            self.capture(kind._replace(ranges=0))
        if kind in self._captured or self.obstacle is not None:
            return
        try:
            self._captured[kind] = self._capture(kind)
        except RuntimeError as error:
            what = "no memory is left for it" if is_out_of_memory(error) else str(error).splitlines()[0]
            self.obstacle = f"{kind} was not captured: {what}"
            _logger.warning("%s; no more with ranges or adapters are", self.obstacle)

    def _is_due(self, wanted: GraphKey) -> bool:
        if self.obstacle is not None or wanted.rows * wanted.ranges > MAX_RANGE_CELLS:
            return False
        if wanted.ranges and sum(kind.ranges > 0 for kind in self._captured) >= MAX_RANGED_GRAPHS:
            return False
        self._misses[wanted] += 1
        return self._misses[wanted] > _CAPTURE_AFTER_MISSES
