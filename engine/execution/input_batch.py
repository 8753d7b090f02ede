"""Input batch: the running sequences as the model runner knows them.

Tokens, sampling settings, and block tables as rows of one array. A plan carries only what changed, so the cost of a step does not depend on the length of the contexts. `MissedPlanError` is raised when a plan is not the next one; a `Snapshot` of the scheduler repairs it.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.engine.cache.cache_operations import TableChanges
from windlass.engine.cache.sequence_cache import SlotLayout
from windlass.engine.interface.request import PoolingRule
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.scheduling.scheduler_output import NewSequence, SchedulerOutput, Snapshot

_FIRST_COLUMNS = 64


def table_width(blocks: int) -> int:
    """Columns of tables that hold so many blocks, where memory is kept for tables as they grow."""
    return max(_FIRST_COLUMNS, 1 << (blocks - 1).bit_length())


class MissedPlanError(RuntimeError):
    """A plan is not the one after the last that was followed. A `Snapshot` of the scheduler's heals it."""


@dataclass(slots=True)
class RunnerSequence:
    """slot: its settings, and `token_ids`, the tokens known so far. row: of its tables in the array.

    layout: which slots hold which positions. window, sinks, adapter: see `NewSequence`.
    num_blocks, num_dropped: length of the table of each KV group, and how many leading entries of it are -1; behind those the
    same of its far keys, which other requests have none of.
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
    """num_groups: KV groups. num_rows: rows held at first; there are always as many as sequences. has_states: behind the KV
    groups there is one of states."""

    def __init__(self, num_groups: int, num_rows: int = 16, *, has_states: bool = False) -> None:
        self._num_groups = num_groups
        # [2K, R, blocks]: of every group, and behind those of every group for far keys.
        self._tables = np.full((2 * (num_groups + has_states), num_rows, _FIRST_COLUMNS), -1, dtype=np.int32)
        self._split_tables()
        self._free = list(range(num_rows - 1, -1, -1))
        self.by_id: dict[int, RunnerSequence] = {}  # read by many, changed here alone
        self.pooled: dict[int, PoolingRule] = {}  # those of them that are pooled
        self.step = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> abc.Iterator[int]:
        """Their ids."""
        return iter(self.by_id)

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in what a plan says. Raises MissedPlanError, with nothing changed, unless it is the next one."""
        if plan.step != self.step + 1:
            raise MissedPlanError(
                f"plan {plan.step} came after plan {self.step}: what was said between them is missing, "
                "a snapshot of the scheduler brings it"
            )
        self.step = plan.step
        for seq_id in plan.removed:
            self._remove(seq_id)
        for new in plan.new:
            self._add(new)
        for fork in plan.forks:
            parent = self.by_id[fork.parent]
            token_ids = list(parent.token_ids)
            slot, num_tables = parent.slot, len(self._tables)
            child = SampleSlot(
                fork.seq_id, fork.index, slot.sampling, slot.seed, slot.num_prompt_tokens, token_ids, slot.stop_ids
            )
            row, rule = self._take_row(), (parent.layout, parent.window, parent.sinks, parent.adapter)
            self.by_id[fork.seq_id] = RunnerSequence(
                child, token_ids, row, -1, *rule, [0] * num_tables, [0] * num_tables
            )
        for item in plan.sequences:
            live = self.by_id[item.seq_id]
            if item.token_ids:
                live.token_ids[item.num_known_tokens - len(item.token_ids) :] = item.token_ids
            if len(live.token_ids) != item.num_known_tokens:
                raise MissedPlanError(
                    f"sequence {item.seq_id} has {len(live.token_ids)} tokens here, "
                    f"{item.num_known_tokens} at the scheduler: a snapshot of the scheduler heals it"
                )
            if item.rotary_id is not None:
                live.rotary_id = item.rotary_id
            if item.layout is not None:
                live.layout = item.layout
            if item.tables.groups:
                self._update_tables(live, item.tables)

    def restore(self, snapshot: Snapshot) -> None:
        """Forget everything and start from a snapshot."""
        for seq_id in list(self.by_id):
            self._remove(seq_id)
        self.step = snapshot.step
        for new in snapshot.sequences:
            self._add(new)

    def table(self, seq_id: int, group: int) -> NDArray[np.int32]:
        """The physical block of each logical block of one KV group, -1 where a window dropped it; a view."""
        live = self.by_id[seq_id]
        return self._tables[group, live.row, : live.num_blocks[group]]

    def all_tables(self, columns: int) -> NDArray[np.int32]:
        """[K, R, at least `columns`] of all rows; what the next plan may change, and another array once it has grown.

        Entries past a sequence's last block are undefined.
        """
        if columns > self._tables.shape[2]:
            self._reserve(0, columns)
        return self._tables_by_group

    def state_blocks(self, rows: abc.Sequence[int]) -> NDArray[np.int64]:
        """The block of states of each of these rows, [B]. Raises IndexError where there is none."""
        found = self._states[0, list(rows)].astype(np.int64)
        if found.size and found.min() < 0:
            raise IndexError("a scheduled sequence has no state to change")
        return found

    def draft_state_blocks(self, live: RunnerSequence) -> NDArray[np.int32]:
        """The blocks of the states behind the last known token and those proposed behind it, but for the last one; a view."""
        return self._tables[self._num_groups, live.row, 1 : live.num_blocks[self._num_groups]]

    def tables(self, rows: list[int], max_blocks: int) -> NDArray[np.int32]:
        """[K, B, max_blocks] of these rows; a view of what the next plan may change, where they lie side by side.

        Entries past a sequence's last block are undefined.
        """
        if max_blocks > self._tables.shape[2]:
            self._reserve(0, max_blocks)
        first, count = rows[0], len(rows)
        if rows == list(range(first, first + count)):
            return self._tables_by_group[:, first : first + count, :max_blocks]
        return self._tables_by_group[:, rows, :max_blocks]

    def tables_with_second_keys(self, sequences: abc.Sequence[tuple[int, int]], max_blocks: int) -> NDArray[np.int32]:
        """[K, B, max_blocks] of these (row, leading blocks of far keys that come first); entries past the last are -1."""
        groups, _, held = self._tables_by_group.shape
        tables = np.full((groups, len(sequences), max_blocks), -1, dtype=np.int32)
        for b, (row, second_blocks) in enumerate(sequences):
            num_tables, own = min(second_blocks, held), min(max_blocks - second_blocks, held)
            tables[:, b, :num_tables] = self._second_tables[:, row, :num_tables]
            tables[:, b, second_blocks : second_blocks + own] = self._tables_by_group[:, row, :own]
        return tables

    def _add(self, new: NewSequence) -> None:
        if new.seq_id in self.by_id:
            raise MissedPlanError(
                f"sequence {new.seq_id} is new and known at once: a snapshot of the scheduler heals it"
            )
        token_ids, groups = list(new.token_ids), len(self._tables)
        slot = SampleSlot(new.seq_id, new.index, new.sampling, new.seed, new.num_prompt_tokens, token_ids, new.stop_ids)
        row, rule = self._take_row(), (new.layout, new.window, new.sinks, new.adapter)
        live = RunnerSequence(slot, token_ids, row, new.rotary_id, *rule, [0] * groups, [0] * groups)
        self.by_id[new.seq_id] = live
        if new.pooling is not None:
            self.pooled[new.seq_id] = new.pooling
        self._update_tables(live, new.tables)

    def _remove(self, seq_id: int) -> None:
        self.pooled.pop(seq_id, None)
        live = self.by_id.pop(seq_id, None)  # one that ended since a snapshot was taken is unknown here
        if live is not None:
            self._free.append(live.row)

    def _update_tables(self, live: RunnerSequence, changes: TableChanges) -> None:
        for group, change in enumerate(changes.groups):
            end = change.length + len(change.appended)
            if end > self._tables.shape[2]:
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
        """The parts of the tables: [K, R, blocks] of sequences' own keys and of their far keys, and those of states."""
        own, second_blocks = np.split(self._tables, 2)
        self._tables_by_group, self._second_tables = own[: self._num_groups], second_blocks[: self._num_groups]
        self._states = own[self._num_groups :, :, 0]  # [1, R], or none

    def _take_row(self) -> int:
        if not self._free:
            self._reserve(self._tables.shape[1] + 1, 0)
        return self._free.pop()

    def _reserve(self, rows: int, columns: int) -> None:
        """Grow to at least this size by doubling, so that growing costs little per token."""
        groups, have_rows, have_columns = self._tables.shape
        grown_rows = max(rows, 2 * have_rows) if rows > have_rows else have_rows
        grown_columns = max(columns, 2 * have_columns) if columns > have_columns else have_columns
        grown = np.full((groups, grown_rows, grown_columns), -1, dtype=np.int32)
        grown[:, :have_rows, :have_columns] = self._tables
        self._tables = grown
        self._split_tables()
        self._free = [*range(grown_rows - 1, have_rows - 1, -1), *self._free]
