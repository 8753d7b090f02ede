"""Input batch: the tokens, sampling settings and block tables of the running sequences.

A plan carries only what changed, so the cost of a step does not depend on the length of the contexts.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windlass.engine.cache.cache_operations import TableChanges
from windlass.engine.cache.sequence_cache import SlotLayout
from windlass.engine.interface.request import PoolingRule
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.scheduling.scheduler_output import NewSequence, SchedulerOutput, Snapshot

_FIRST_COLUMNS = 64


def table_width(blocks: int) -> int:
    """The number of columns to allocate for a block table that holds `blocks` and grows: a power of two."""
    return max(_FIRST_COLUMNS, 1 << (blocks - 1).bit_length())


class MissedPlanError(RuntimeError):
    """The plan does not follow the last one that was applied. A `Snapshot` of the scheduler repairs this."""


@dataclass(slots=True)
class RunnerSequence:
    """A running sequence.

    slot: its sampling state, which shares `token_ids`, the tokens known so far. row: its row in the array of tables.
    layout: the positions of its slots. window, sinks, adapter: see `NewSequence`. num_blocks, num_dropped: for each table, its
    length and the number of leading entries that are -1. The tables are those of every KV group, then those of the second key
    copies, which are empty for most requests.
    """

    slot: SampleSlot
    token_ids: list[int]
    row: int
    rotary_id: int
    layout: SlotLayout
    window: int | None
    sinks: int
    adapter: int | None
    num_blocks: list[int]
    num_dropped: list[int]


class InputBatch:
    """num_groups: KV groups. num_rows: initial number of rows, which grows with the number of sequences. has_states: whether a
    group of recurrent states follows the KV groups."""

    def __init__(self, num_groups: int, num_rows: int = 16, *, has_states: bool = False) -> None:
        self._num_groups = num_groups
        # [2K, R, blocks]: the tables of every group, then those of every group's second key copies.
        self._tables = np.full((2 * (num_groups + has_states), num_rows, _FIRST_COLUMNS), -1, dtype=np.int32)
        self._split_tables()
        self._free = list(range(num_rows - 1, -1, -1))
        self.by_id: dict[int, RunnerSequence] = {}  # changed only here
        self.pooled: dict[int, PoolingRule] = {}  # the sequences that are pooled
        self.step = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> abc.Iterator[int]:
        """Iterate over the sequence ids."""
        return iter(self.by_id)

    def apply(self, plan: SchedulerOutput) -> None:
        """Apply the changes of a plan. Raises MissedPlanError, with nothing changed, unless it is the next one."""
        if plan.step != self.step + 1:
            raise MissedPlanError(
                f"plan {plan.step} follows plan {self.step}: the plans between them are missing; "
                "restore a snapshot of the scheduler"
            )
        self.step = plan.step
        for seq_id in plan.removed:
            self._remove(seq_id)
        for new in plan.new:
            self._add(new)
        for fork in plan.forks:
            parent = self.by_id[fork.parent]
            token_ids = list(parent.token_ids)
            child = replace(parent.slot, seq_id=fork.seq_id, index=fork.index, token_ids=token_ids)
            self.by_id[fork.seq_id] = self._make_sequence(child, token_ids, -1, parent)
        for item in plan.sequences:
            live = self.by_id[item.seq_id]
            if item.token_ids:
                live.token_ids[item.num_known_tokens - len(item.token_ids) :] = item.token_ids
            if len(live.token_ids) != item.num_known_tokens:
                raise MissedPlanError(
                    f"sequence {item.seq_id} has {len(live.token_ids)} tokens here, "
                    f"{item.num_known_tokens} in the scheduler: restore a snapshot of the scheduler"
                )
            if item.rotary_id is not None:
                live.rotary_id = item.rotary_id
            if item.layout is not None:
                live.layout = item.layout
            if item.tables.groups:
                self._update_tables(live, item.tables)

    def restore(self, snapshot: Snapshot) -> None:
        """Replace all sequences with those of a snapshot."""
        for seq_id in list(self.by_id):
            self._remove(seq_id)
        self.step = snapshot.step
        for new in snapshot.sequences:
            self._add(new)

    def table(self, seq_id: int, group: int) -> NDArray[np.int32]:
        """The block table of one KV group, int32 [blocks], as a view; -1 where a window dropped the block."""
        live = self.by_id[seq_id]
        return self._tables[group, live.row, : live.num_blocks[group]]

    def all_tables(self, columns: int) -> NDArray[np.int32]:
        """The tables of all rows, int32 [K, R, at least `columns`].

        The next plan may change or replace the array. Entries past a sequence's last block are undefined.
        """
        self._reserve(0, columns)
        return self._tables_by_group

    def state_blocks(self, rows: abc.Sequence[int]) -> NDArray[np.int64]:
        """The state block of each of these rows, int64 [B]. Raises IndexError if a row has none."""
        found = self._states[0, list(rows)].astype(np.int64)
        if found.size and found.min() < 0:
            raise IndexError("a scheduled sequence has no state to change")
        return found

    def draft_state_blocks(self, live: RunnerSequence) -> NDArray[np.int32]:
        """State blocks, int32, as a view: for the states after the last known token and after each proposed one but the last."""
        return self._tables[self._num_groups, live.row, 1 : live.num_blocks[self._num_groups]]

    def tables(self, rows: list[int], max_blocks: int) -> NDArray[np.int32]:
        """The tables of these rows, int32 [K, B, max_blocks]; for consecutive rows a view, which the next plan may change.

        Entries past a sequence's last block are undefined.
        """
        self._reserve(0, max_blocks)
        first, count = rows[0], len(rows)
        if rows == list(range(first, first + count)):
            return self._tables_by_group[:, first : first + count, :max_blocks]
        return self._tables_by_group[:, rows, :max_blocks]

    def tables_with_second_keys(self, sequences: abc.Sequence[tuple[int, int]], max_blocks: int) -> NDArray[np.int32]:
        """Tables, int32 [K, B, max_blocks], of sequences given as (row, number of leading blocks of second key copies).

        Entries past a sequence's last block are -1.
        """
        groups, _, width = self._tables_by_group.shape
        tables = np.full((groups, len(sequences), max_blocks), -1, dtype=np.int32)
        for b, (row, second_blocks) in enumerate(sequences):
            second, own = min(second_blocks, width), min(max_blocks - second_blocks, width)
            tables[:, b, :second] = self._second_tables[:, row, :second]
            tables[:, b, second_blocks : second_blocks + own] = self._tables_by_group[:, row, :own]
        return tables

    def _add(self, new: NewSequence) -> None:
        if new.seq_id in self.by_id:
            raise MissedPlanError(
                f"sequence {new.seq_id} is new but already known: restore a snapshot of the scheduler"
            )
        token_ids = list(new.token_ids)
        slot = SampleSlot(new.seq_id, new.index, new.sampling, new.seed, new.num_prompt_tokens, token_ids, new.stop_ids)
        live = self.by_id[new.seq_id] = self._make_sequence(slot, token_ids, new.rotary_id, new)
        if new.pooling is not None:
            self.pooled[new.seq_id] = new.pooling
        self._update_tables(live, new.tables)

    def _make_sequence(
        self, slot: SampleSlot, token_ids: list[int], rotary_id: int, source: NewSequence | RunnerSequence
    ) -> RunnerSequence:
        """A sequence with empty tables in a free row, with the layout, window and adapter of `source`."""
        if not self._free:
            self._reserve(self._tables.shape[1] + 1, 0)
        row, num_tables = self._free.pop(), len(self._tables)
        rule = source.layout, source.window, source.sinks, source.adapter
        return RunnerSequence(slot, token_ids, row, rotary_id, *rule, [0] * num_tables, [0] * num_tables)

    def _remove(self, seq_id: int) -> None:
        self.pooled.pop(seq_id, None)
        live = self.by_id.pop(seq_id, None)  # unknown if it ended after a snapshot was taken
        if live is not None:
            self._free.append(live.row)

    def _update_tables(self, live: RunnerSequence, changes: TableChanges) -> None:
        for group, change in enumerate(changes.groups):
            end = change.length + len(change.appended)
            self._reserve(0, end)
            table, dropped, length = self._tables[group, live.row], live.num_dropped[group], live.num_blocks[group]
            for first, count in change.removed:
                table[first : length - count] = table[first + count : length].copy()
                length -= count
                dropped -= max(0, min(dropped, first + count) - first)
            for index, block in change.replaced:
                table[index] = block
            table[change.length : end] = change.appended
            if dropped < change.num_dropped:
                table[dropped : change.num_dropped] = -1
            live.num_blocks[group], live.num_dropped[group] = end, change.num_dropped

    def _split_tables(self) -> None:
        """Make views of the tables: [K, R, blocks] of keys and of second key copies, and the state blocks."""
        own, second_blocks = np.split(self._tables, 2)
        self._tables_by_group, self._second_tables = own[: self._num_groups], second_blocks[: self._num_groups]
        self._states = own[self._num_groups :, :, 0]  # [1, R], or [0, R] without states

    def _reserve(self, rows: int, columns: int) -> None:
        """Grow to at least this size by doubling, so that the cost per token stays small."""
        groups, have_rows, have_columns = self._tables.shape
        if rows <= have_rows and columns <= have_columns:
            return
        grown_rows = max(rows, 2 * have_rows) if rows > have_rows else have_rows
        grown_columns = max(columns, 2 * have_columns) if columns > have_columns else have_columns
        grown = np.full((groups, grown_rows, grown_columns), -1, dtype=np.int32)
        grown[:, :have_rows, :have_columns] = self._tables
        self._tables = grown
        self._split_tables()
        self._free = [*range(grown_rows - 1, have_rows - 1, -1), *self._free]
