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

from windlass.engine.cache.runs import OPEN_END, UNBOUNDED, SlotLayout
from windlass.engine.execution.ranges import last_unclamped_position, reaches_of, spans_of
from windlass.engine.execution.sequences import RunnerSequence

# Of each range of a row: where it ends, the version of the query that meets it (0: as it is, -1: none), what distances in it are
# more than slots. Of the row, in all of its ranges: tokens missing before it. Of the row's version n, in range n - 1: by how many
# positions it is turned, and the last position that is turned by no less. Behind these, for each kind of window, the reach.
ENDS, COPIES, GAPS, NUM_MISSING, ROTATIONS, LAST_UNCLAMPED, REACHES = range(7)


class RowRanges:
    """numbers: of each of B rows [REACHES + W, ranges] int64; ranges differ."""

    def __init__(self, numbers: abc.Sequence[NDArray[np.int64]]) -> None:
        self._numbers = numbers
        self.most = max(one.shape[1] for one in numbers)

    def padded(self, rows: int, ranges: int) -> NDArray[np.int64]:
        """[REACHES + W, rows, ranges], at least as many as there are; in those that are more nothing is seen."""
        found = _empty_ranges(len(self._numbers[0]), rows, ranges)
        for row, one in enumerate(self._numbers):
            found[:, row, : one.shape[1]] = one
        return found


class RangeTables:
    """Makes them, and keeps those of the rows that it was asked for last.

    windows: the kinds that layers have, None for none. anchored: see `query_ranges`.
    """

    def __init__(self, windows: abc.Sequence[int | None], *, absolute_scores: bool) -> None:
        self._windows, self._absolute_scores = windows, absolute_scores
        self._cached: dict[int, tuple[SlotLayout, NDArray[np.int64]]] = {}

    def of(self, rows: abc.Sequence[RunnerSequence]) -> RowRanges:
        """Those of single tokens of these sequences."""
        known, found = self._cached, []
        self._cached = {}
        for live in rows:
            seq_id = live.slot.seq_id
            earlier = known.get(seq_id) or self._cached.get(seq_id)
            if earlier is None or earlier[0] is not live.layout:
                earlier = live.layout, self._build_table(live)
            self._cached[seq_id] = earlier
            found.append(earlier[1])
        return RowRanges(found)

    def _build_table(self, live: RunnerSequence) -> NDArray[np.int64]:
        spans, layout = spans_of(live, self._windows), live.layout
        anchor_shift = layout.num_gap_closed if self._absolute_scores else 0
        copies = {(0, UNBOUNDED): 0}  # by how they are turned
        copy_and_gap: list[tuple[int, int]] = []  # version and gap of each span
        for span in spans:
            rotation = anchor_shift - span.shift, last_unclamped_position(span, live)
            version = -1 if span.empty else copies.setdefault(rotation, len(copies))
            copy_and_gap.append((version, spans[-1].offset - span.offset))
        found = _empty_ranges(REACHES + len(self._windows), 1, max(len(spans), len(copies)))[:, 0]
        found[NUM_MISSING] = layout.num_gap_closed
        for rotation, version in copies.items():
            if version:
                found[[ROTATIONS, LAST_UNCLAMPED], version - 1] = rotation
        for r, (span, (version, gap)) in enumerate(zip(spans, copy_and_gap, strict=True)):
            found[[ENDS, COPIES], r] = span.end_slot, version
            if not span.empty:
                found[GAPS, r] = gap
                found[REACHES:, r] = reaches_of(span, gap, live, self._windows)
        return found


def _empty_ranges(fields: int, rows: int, ranges: int) -> NDArray[np.int64]:
    """Ranges in which nothing is seen."""
    found = np.zeros((fields, rows, ranges), dtype=np.int64)
    found[ENDS], found[COPIES], found[LAST_UNCLAMPED] = OPEN_END, -1, UNBOUNDED
    return found
