"""How rows and columns are shared out among ranks, and what a rank has of one weight. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

RowRange: TypeAlias = tuple[int, int]  # the first of them, and how many


def shard_range(size: int, rank: int, ranks: int, unit: int = 1) -> RowRange:
    """A rank's part of so many rows or columns, whole units but for the end. Nothing where there are fewer units than ranks."""
    units = size // unit
    first, end = units * rank // ranks * unit, units * (rank + 1) // ranks * unit
    return first, (size if rank == ranks - 1 else end) - first


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """What a rank has of a weight.

    rows: of the weight as the decoder has it, in this order; None: all. columns: None: all. first_only: zeros on all ranks
    but the first, as what is added to a sum is added once.
    """

    rows: tuple[RowRange, ...] | None = None
    columns: RowRange | None = None
    first_only: bool = False

    def count(self, first: int, rows: int) -> int:
        """How many it has of these rows of the weight."""
        return sum(end - begin for begin, end in self.within(first, rows))

    def within(self, first: int, rows: int) -> Iterable[tuple[int, int]]:
        """Those of these rows of the weight that it has: runs from one to before another, counted from `first`."""
        if self.rows is None:
            yield 0, rows
            return
        for start, count in self.rows:
            begin, end = max(start, first), min(start + count, first + rows)
            if begin < end:
                yield begin - first, end - first
