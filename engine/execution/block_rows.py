"""The block tables of running sequences as rows of one array, kept from step to step.

Responsible for turning the plan's block tables, which are Python lists that grow with the context, into an array at a
cost per step that does not: a row is written in full when its sequence is first seen, or when its plan says that the
table is another one, and after that only where the chunk's own blocks lie. It knows nothing of why tables change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windlass.engine.scheduling.plan import ScheduledSequence

_FIRST_COLUMNS = 64


@dataclass(slots=True)
class _Row:
    """index: where it stands in the array. version: of the table it was copied from. dropped: leading -1 per KV group."""

    index: int
    version: int
    dropped: list[int] = field(default_factory=list)


class BlockRows:
    """num_groups: KV groups. num_rows: rows held at first; there are always as many as a batch has sequences."""

    def __init__(self, num_groups: int, block_size: int, num_rows: int = 16) -> None:
        self._block_size = block_size
        self._tables = np.full((num_groups, num_rows, _FIRST_COLUMNS), -1, dtype=np.int32)  # [K, R, blocks]
        self._rows: OrderedDict[int, _Row] = OrderedDict()  # by sequence, least recently scheduled first
        self._free = list(range(num_rows - 1, -1, -1))

    def tables(self, sequences: list[ScheduledSequence], max_blocks: int) -> NDArray[np.int32]:
        """[K, B, max_blocks], -1 where a window group dropped a block; a view of what the next call may change.

        Entries past a sequence's last block are undefined.
        """
        self._reserve(len(sequences), max_blocks)
        for sequence in sequences:  # first, so that a newcomer takes no row from one of the same batch
            if sequence.seq_id in self._rows:
                self._rows.move_to_end(sequence.seq_id)
        indices = [self._sync(sequence) for sequence in sequences]
        count = len(indices)
        if indices == list(range(indices[0], indices[0] + count)):
            return self._tables[:, indices[0] : indices[0] + count, :max_blocks]
        return self._tables[:, indices, :max_blocks]

    def _sync(self, sequence: ScheduledSequence) -> int:
        """Bring the row of one sequence up to date and return its index."""
        row = self._rows.get(sequence.seq_id)
        first = sequence.start // self._block_size  # nothing before the chunk's first block changes but by a version
        if row is None:
            if not self._free:
                _, oldest = self._rows.popitem(last=False)
                self._free.append(oldest.index)
            row = self._rows[sequence.seq_id] = _Row(self._free.pop(), -1)
        if row.version != sequence.table_version:
            row.version, row.dropped, first = sequence.table_version, [0] * len(sequence.block_tables), 0
        last = (sequence.start + sequence.num_tokens - 1) // self._block_size
        for group, table in enumerate(sequence.block_tables):
            target = self._tables[group, row.index]
            if last == first:
                target[first] = table[first]
            else:
                target[first : last + 1] = table[first : last + 1]
            while row.dropped[group] < first and table[row.dropped[group]] < 0:
                target[row.dropped[group]] = -1
                row.dropped[group] += 1
        return row.index

    def _reserve(self, rows: int, columns: int) -> None:
        """Grow by doubling, so that growing costs little per token."""
        groups, have_rows, have_columns = self._tables.shape
        if rows <= have_rows and columns <= have_columns:
            return
        shape = (groups, max(have_rows, rows, 2 * have_rows * (rows > have_rows)), have_columns)
        if columns > have_columns:
            shape = (*shape[:2], max(columns, 2 * have_columns))
        grown = np.full(shape, -1, dtype=np.int32)
        grown[:, :have_rows, :have_columns] = self._tables
        self._tables = grown
        self._free = [*range(shape[1] - 1, have_rows - 1, -1), *self._free]
