"""The slot ranges of rows that are single tokens, as plain numbers that stay true while a device goes on by itself.

What `query_ranges` says of one step's queries is said here without their positions, which the device knows: a version is turned
by a number, and from some position on by as much less as the query has moved on. So the numbers change only with the layout of
a sequence, once in a block of tokens. Responsible for the numbers alone, in the words of `ranges`, where there is an example. Its
query has version 1 in the first span, turned by -48, and 0 in the second; with sinks, version 1 is turned by 0 up to position 22.

Both say by the same rules who meets what: `tests/engine/execution/test_row_ranges.py` holds them to each other.
"""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from windlass.engine.cache.runs import NO_BOUND, OPEN_END, SlotLayout
from windlass.engine.execution.ranges import last_turned, reaches_of, spans_of
from windlass.engine.execution.sequences import LiveSequence

# Of each range of a row: where it ends, the version of the query that meets it (0: as it is, -1: none), what distances in it are
# more than slots. Of the row, in all of its ranges: tokens missing before it. Of the row's version n, in range n - 1: by how many
# positions it is turned, and the last position that is turned by no less. Behind these, for each kind of window, the reach.
ENDS, VERSIONS, GAPS, CLOSED, TURNS, LAST_TURNED, REACHES = range(7)


class RowRanges:
    """numbers: of each of B rows [REACHES + W, ranges] int64; ranges differ."""

    def __init__(self, numbers: abc.Sequence[NDArray[np.int64]]) -> None:
        self._numbers = numbers
        self.most = max(one.shape[1] for one in numbers)

    def padded(self, rows: int, ranges: int) -> NDArray[np.int64]:
        """[REACHES + W, rows, ranges], at least as many as there are; in those that are more nothing is seen."""
        found = _nothing(len(self._numbers[0]), rows, ranges)
        for row, one in enumerate(self._numbers):
            found[:, row, : one.shape[1]] = one
        return found


class RangeNumbers:
    """Makes them, and keeps those of the rows that it was asked for last.

    windows: the kinds that layers have, None for none. anchored: see `query_ranges`.
    """

    def __init__(self, windows: abc.Sequence[int | None], *, anchored: bool) -> None:
        self._windows, self._anchored = windows, anchored
        self._known: dict[int, tuple[SlotLayout, NDArray[np.int64]]] = {}

    def of(self, rows: abc.Sequence[LiveSequence]) -> RowRanges:
        """Those of single tokens of these sequences."""
        known, found = self._known, []
        self._known = {}
        for live in rows:
            seq_id = live.slot.seq_id
            earlier = known.get(seq_id) or self._known.get(seq_id)
            if earlier is None or earlier[0] is not live.layout:
                earlier = live.layout, self._numbers_of(live)
            self._known[seq_id] = earlier
            found.append(earlier[1])
        return RowRanges(found)

    def _numbers_of(self, live: LiveSequence) -> NDArray[np.int64]:
        spans, layout = spans_of(live, self._windows), live.layout
        back = layout.num_closed if self._anchored else 0
        versions = {(0, NO_BOUND): 0}  # by how they are turned
        told: list[tuple[int, int]] = []  # version and gap of each span
        for span in spans:
            turn = back - span.shift, last_turned(span, live)
            version = -1 if span.empty else versions.setdefault(turn, len(versions))
            told.append((version, spans[-1].offset - span.offset))
        found = _nothing(REACHES + len(self._windows), 1, max(len(spans), len(versions)))[:, 0]
        found[CLOSED] = layout.num_closed
        for turn, version in versions.items():
            if version:
                found[[TURNS, LAST_TURNED], version - 1] = turn
        for r, (span, (version, gap)) in enumerate(zip(spans, told, strict=True)):
            found[[ENDS, VERSIONS], r] = span.end_slot, version
            if not span.empty:
                found[GAPS, r] = gap
                found[REACHES:, r] = reaches_of(span, gap, live, self._windows)
        return found


def _nothing(fields: int, rows: int, ranges: int) -> NDArray[np.int64]:
    """Ranges in which nothing is seen."""
    found = np.zeros((fields, rows, ranges), dtype=np.int64)
    found[ENDS], found[VERSIONS], found[LAST_TURNED] = OPEN_END, -1, NO_BOUND
    return found
