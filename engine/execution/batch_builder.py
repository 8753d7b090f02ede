"""Forward batch builder: scheduled chunks and the input batch in, a `ForwardBatch` of tensors out.

On a CPU, a decode step of single tokens is written into persistent buffers, the same memory in every step. Every other batch is allocated. Recurrent states are addressed per sequence (`StateRowArrays`), whatever the chunks that attend separately.
"""

from __future__ import annotations

import math
from collections import OrderedDict, abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.execution.input_batch import InputBatch, RunnerSequence, table_width
from windlass.engine.execution.query_ranges import (
    RangeTables,
    RowRanges,
    attention_chunks_of,
    needs_ranges,
    query_ranges,
    second_key_positions,
)
from windlass.engine.model.forward_batch import ForwardBatch, RotatedQueryCopies
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.rotary.attention_distances import Distances
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.scheduling.chunked_prefill import NO_BOUNDARIES, ChunkBoundaries
from windlass.engine.scheduling.scheduler_output import ScheduledSequence
from windlass.kernels import (
    Backend,
    MultiStepInputs,
    PersistentBuffers,
    PrefillTotals,
    StateRows,
    blocks_per_split,
    to_device,
)


def _host_state_rows(sequences: int, tokens: int) -> StateRows:
    """Zeros in host memory, for `fill_state_rows`."""
    return StateRows(*(torch.zeros(size, dtype=torch.int64) for size in (sequences, sequences + 1, sequences, tokens)))


def _fill_state_rows(rows: StateRows, items: Sequence[ScheduledSequence], input_batch: InputBatch) -> None:
    """Write the states that these chunks change, in order, into host memory. Sequences beyond them have no tokens.

    A snapshot is stored of the state after each token that precedes a proposed one.
    """
    assert rows.snapshots is not None
    blocks, starts, lengths, snapshots = (tensor.numpy() for tensor in rows if tensor is not None)
    count, live = len(items), [input_batch.by_id[item.seq_id] for item in items]
    blocks[:count] = input_batch.state_blocks([one.row for one in live])
    starts[1 : count + 1] = np.cumsum([item.num_tokens for item in items])
    starts[count + 1 :] = starts[count]
    lengths[:count] = [item.start + item.num_tokens for item in items]
    snapshots.fill(-1)
    for item, one, first in zip(items, live, starts.tolist(), strict=False):
        draft_blocks = input_batch.draft_state_blocks(one)
        if draft_blocks.size:
            # Block i receives the state after the i-th token from the last known one on. A draft model's chunks have one token
            # each, so they begin at any of these. Blocks before a step that was planned ahead belong to none of its tokens.
            ahead = item.start + 1 - item.num_known_tokens
            begin, end = max(0, -ahead), min(item.num_tokens, draft_blocks.size - ahead)
            snapshots[first + begin : first + end] = draft_blocks[begin + ahead : end + ahead]


class PersistentBatch:
    """The arrays behind one batch of B rows and block tables of `width` columns. has_states: whether layers carry states."""

    def __init__(
        self,
        groups: int,
        rows: int,
        width: int,
        rotary: RotaryTables,
        block_size: int,
        backend: Backend,
        *,
        has_states: bool,
    ) -> None:
        rotary_groups, _, half = rotary.inv_freq.shape
        self.rows = PersistentBuffers.zeros(groups, rows, width, rotary_groups, half)
        self.fill = backend.buffer_filler(self.rows, rotary.inv_freq, rotary.q_scale, rotary.score_scale, block_size)
        ids, _, _, rotary_ids, _ = (torch.from_numpy(row) for row in self.rows.metadata)
        positions, lengths = torch.from_numpy(self.rows.positions), torch.from_numpy(self.rows.lengths)
        self.states = _host_state_rows(rows, rows) if has_states else None
        self.batch = ForwardBatch(
            input_ids=ids,
            positions=positions,
            rotary_ids=rotary_ids,
            slots=torch.from_numpy(self.rows.slots),
            block_tables=torch.from_numpy(self.rows.tables),
            query_start=torch.arange(rows + 1),
            seq_lens=lengths,
            context_positions=positions,
            cos=self.rows.cos,
            sin=self.rows.sin,
            q_scale=self.rows.q_scale,
            score_scale=self.rows.score_scale,
            persistent=True,
            state_rows=self.states,
        )
        self.adapter_slots = torch.full((rows,), -1)


_MAX_SHAPES = 4

# Longest context over which proposed tokens are attended row by row.
_MAX_ROW_BY_ROW_CONTEXT = 1024

# On a device beside its host: keys that all rows of such a step may read. A step of its own takes longer than a repeated one
# that reads more, until that is about half of what the weights of an 8B model are.
_MAX_ROW_BY_ROW_KEYS = 1 << 16


class DecodeRows(NamedTuple):
    """B rows, each a token that attends alone.

    said: [FACTS, B] int64, of each its token, its slot's number in its sequence, its position less that number, its rotary row,
    and the slot of its adapter, -1 for none.
    tables: int32 [K, B, blocks]. ranges: None where every row meets all keys before it as it is. states: None where no layer
    carries a state.
    """

    metadata: NDArray[np.int64]
    tables: NDArray[np.int32]
    ranges: RowRanges | None
    states: StateRows | None


class ForwardBatchBuilder:
    """Batches of the sequences in `sequences`, whose blocks hold `block_size` tokens, under the rows of `rotary`.

    num_groups: KV groups. windows: the kinds that the layers have, None for none. anchored: see `query_ranges`. lasting:
    whether batches of single tokens stand in lasting memory, which takes a backend that reads host memory. cuts: which
    parts of a prompt attend on their own. has_states: whether layers carry states. adapters: those that sequences name; None:
    their rows run without.
    """

    def __init__(
        self,
        sequences: InputBatch,
        rotary: RotaryTables,
        *,
        num_groups: int,
        block_size: int,
        windows: abc.Sequence[int | None],
        absolute_scores: bool,
        backend: Backend,
        has_states: bool = False,
        chunk_boundaries: ChunkBoundaries = NO_BOUNDARIES,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self._adapters, self._cuts = adapters, chunk_boundaries
        self._windows, self._absolute_scores = windows, absolute_scores
        self._range_tables = RangeTables(windows, absolute_scores=absolute_scores)
        self._input_batch, self._rotary = sequences, rotary
        self._has_states = has_states
        self._groups, self._block_size, self._device = num_groups, block_size, backend.device
        self._backend = backend
        # However many far keys there are, those nearby stand in the same cuts.
        self._second_key_alignment = blocks_per_split(block_size)
        self._buffers: OrderedDict[tuple[int, int], PersistentBatch] = OrderedDict()  # by rows and width
        self.persistent = backend.reads_host_memory

    def build(self, items: abc.Sequence[ScheduledSequence]) -> ForwardBatch:
        """The flat batch of the scheduled chunks, in order. One of single tokens may be overwritten by the next."""
        batch = self._build(items)
        if self._adapters is None or len(self._adapters) == 0:
            return batch
        out = self._buffers_of(batch).adapter_slots if batch.persistent else None
        changed = self._adapters.rows(*self._adapted(items), out)
        return batch if changed is None else replace(batch, adapters=changed)

    def _adapted(self, items: abc.Sequence[ScheduledSequence]) -> tuple[list[int | None], list[int]]:
        """The adapter of each chunk, and how many rows it has."""
        live = self._input_batch.by_id
        return [live[item.seq_id].adapter for item in items], [item.num_tokens for item in items]

    def _build(self, items: abc.Sequence[ScheduledSequence]) -> ForwardBatch:
        row_by_row = self._is_row_by_row(items)
        live_sequences = self._input_batch.by_id
        distances = self._rotary.distances
        live_rows = [live_sequences[item.seq_id] for item in items]
        ranged = any(needs_ranges(live) or distances[live.rotary_id].changes_distances for live in live_rows)
        plain = not ranged and all(distances[live.rotary_id].is_plain for live in live_rows)
        if row_by_row and self.persistent and plain:
            return self._fill_buffers(items)
        chunks = []
        for item in items:
            live, start = live_sequences[item.seq_id], item.start
            token_ids = [*live.token_ids[start : start + item.num_tokens - len(item.draft)], *item.draft]
            if row_by_row:
                chunks += [(live, start + i, [token]) for i, token in enumerate(token_ids)]
            else:
                for first, count in self._attention_chunks(item, distances[live.rotary_id], len(token_ids)):
                    chunks.append((live, first, token_ids[first - start : first - start + count]))
        batch = self._build_chunks(chunks, ranged=ranged)
        if self._has_states:
            batch.state_rows = self._state_rows(items, batch)
        return batch

    def _state_rows(self, items: abc.Sequence[ScheduledSequence], batch: ForwardBatch) -> StateRows:
        """The states that these chunks change.

        Where steps of single tokens are recorded, those of equally many tokens have arrays of equal shapes, whichever tokens are
        proposed.
        """
        tokens, attending = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        one_shape = self.persistent and attending == tokens
        rows = _host_state_rows(tokens if one_shape else len(items), tokens)
        _fill_state_rows(rows, items, self._input_batch)
        live = self._input_batch.by_id
        if not one_shape and not any(self._input_batch.draft_state_blocks(live[item.seq_id]).size for item in items):
            rows = rows._replace(snapshots=None)
        return StateRows._make(None if tensor is None else to_device(tensor, self._device) for tensor in rows)

    def _attention_chunks(self, item: ScheduledSequence, distances: Distances, count: int) -> list[tuple[int, int]]:
        """(first index, tokens) of the parts of a chunk of `count` tokens that attend as sequences of their own."""
        attention_chunks = attention_chunks_of(distances, item.start, count)
        if item.start + count != item.num_known_tokens:
            return attention_chunks
        return [part for piece in attention_chunks for part in self._cuts.parts(*piece, item.num_known_tokens)]

    def _build_chunks(self, chunks: list[tuple[RunnerSequence, int, list[int]]], *, ranged: bool) -> ForwardBatch:
        """A batch of chunks (sequence, index of the first token, tokens) in memory of its own."""
        counts, starts, first, num_missing, rotary = np.array(
            [
                (
                    len(ids),
                    start + live.layout.slot_offset,
                    live.layout.first_position - live.layout.slot_offset,
                    live.layout.num_gap_closed,
                    live.rotary_id,
                )
                for live, start, ids in chunks
            ],
            dtype=np.int64,
        ).T.copy()
        rules = [self._rotary.distances[live.rotary_id] for live, _, _ in chunks]
        rows = [live.row for live, _, _ in chunks]
        num_second_blocks = [
            -(-live.num_blocks[0] // self._second_key_alignment) * self._second_key_alignment
            if rule.has_second_keys
            else 0
            for (live, _, _), rule in zip(chunks, rules, strict=True)
        ]
        has_second_keys = any(num_second_blocks)
        if has_second_keys:  # they come first, so that those nearby stand at the end as everywhere
            second_key_slots = np.array(num_second_blocks) * self._block_size
            starts, first = starts + second_key_slots, first - second_key_slots
        lengths = starts + counts
        query_start = np.zeros(len(chunks) + 1, dtype=np.int64)
        counts.cumsum(out=query_start[1:])
        columns = -(-int(lengths.max()) // self._block_size)
        if has_second_keys:
            tables = self._input_batch.tables_with_second_keys(list(zip(rows, num_second_blocks, strict=True)), columns)
        else:
            tables = self._input_batch.tables(rows, columns)
        ids = np.concatenate([np.array(ids, dtype=np.int64) for _, _, ids in chunks])
        row = np.arange(len(chunks)).repeat(counts)  # [T]
        index = np.arange(len(ids)) - (query_start[:-1] - starts).repeat(counts)  # [T], its slot in its sequence
        block, offset = np.divmod(index, self._block_size)
        slots = np.ascontiguousarray(tables[:, row, block] * np.int64(self._block_size) + offset)  # [K, T]
        if slots.min() < 0:
            raise IndexError("a scheduled token has no block to go to")
        token_positions = index + first[row]
        rotated_at, score_scale = _positions_and_scales(rules, counts, token_positions)
        positions, rotary_ids = self._tensor(rotated_at), self._tensor(rotary[row])
        rotation = self._rotary.cos_sin(rotary_ids, positions)
        rotation = rotation._replace(score_scale=rotation.score_scale * self._tensor(score_scale))
        query_copies = (
            self._rotated_queries(chunks, rules, token_positions, num_missing[row], rotary[row], num_second_blocks)
            if ranged
            else None
        )
        if query_copies is not None and has_second_keys:
            has_copy, copy_positions, slopes = second_key_positions(rules, counts, token_positions)
            block, offset = np.divmod(index - second_key_slots[row], self._block_size)
            far = tables[:, row, np.where(has_copy, block, 0)] * np.int64(self._block_size) + offset  # [K, T]
            query_copies.second_key_slots = self._tensor(np.where(has_copy, far, -1))
            query_copies.second_key_cos, query_copies.second_key_sin = self._cos_sin(
                rotary[row], copy_positions, slopes
            )
        return ForwardBatch(
            input_ids=self._tensor(ids),
            positions=positions,
            rotary_ids=rotary_ids,
            slots=self._tensor(slots),
            block_tables=self._tensor(tables),
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(lengths),
            context_positions=positions if query_copies is None else self._tensor(token_positions - num_missing[row]),
            **rotation._asdict(),
            query_copies=query_copies,
            prompts=_prompts(counts, lengths),
        )

    def _rotated_queries(
        self,
        chunks: list[tuple[RunnerSequence, int, list[int]]],
        rules: list[Distances],
        positions: NDArray[np.int64],
        num_missing: NDArray[np.int64],
        rotary: NDArray[np.int64],
        num_second_blocks: list[int],
    ) -> RotatedQueryCopies:
        """positions, closed, rotary: [T], of each token, the tokens missing before it, and its rotary row. num_second_blocks: of each
        chunk, leading blocks of its table that hold far keys."""
        spans, token = [], 0
        for live, _, ids in chunks:
            spans.append((live, int(positions[token]), len(ids)))
            token += len(ids)
        second_key_slots = [blocks * self._block_size for blocks in num_second_blocks]
        found = query_ranges(
            spans, rules, self._windows, absolute_scores=self._absolute_scores, second_key_slots=second_key_slots
        )
        cos, sin = self._cos_sin(rotary[found.sources], found.rotations, found.slopes)
        anchor_cos = anchor_sin = query_indices = None
        if self._absolute_scores and num_missing.any():
            anchor_cos, anchor_sin = self._rotary.angles(self._tensor(rotary), self._tensor(-num_missing))
            query_indices = torch.arange(len(positions), device=self._device)
        names = ("ends", "rows", "unrotated_rows", "reaches", "gaps", "sources")
        return RotatedQueryCopies(
            **{name: self._tensor(getattr(found, name)) for name in names},
            cos=cos,
            sin=sin,
            anchor_cos=anchor_cos,
            anchor_sin=anchor_sin,
            query_indices=query_indices,
        )

    def _cos_sin(
        self, rotary: NDArray[np.int64], positions: NDArray[np.int64], slopes: NDArray[np.float64] | None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines [G, N, rotary_dim / 2] under these rows. slopes: share of their frequencies, None for the whole."""
        ids, at = self._tensor(rotary), self._tensor(positions)
        if slopes is None:
            return self._rotary.angles(ids, at)
        return self._rotary.slowed_cos_sin(ids, at, self._tensor(slopes))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(array), self._device)

    def _fill_buffers(self, items: abc.Sequence[ScheduledSequence]) -> ForwardBatch:
        """A batch in which every token counts as a sequence of its own, in lasting memory."""
        metadata, blocks = self._row_metadata(items)
        buffers = self._acquire_buffers(len(metadata), blocks)
        buffers.rows.metadata.T[...] = metadata
        buffers.fill(self._input_batch.all_tables(blocks), blocks)
        if buffers.states is not None:
            _fill_state_rows(buffers.states, items, self._input_batch)
        return buffers.batch

    def _row_metadata(self, items: abc.Sequence[ScheduledSequence]) -> tuple[list[tuple[int, int, int, int, int]], int]:
        """Of each row what `PersistentBuffers.metadata` has, 0 for a token that nobody knows yet; and the blocks that hold all of them."""
        metadata, last, live_sequences = [], 0, self._input_batch.by_id
        for item in items:
            live, start = live_sequences[item.seq_id], item.start
            offset = live.layout.slot_offset
            position = live.layout.first_position - offset
            count = item.num_tokens - len(item.draft)
            known = live.token_ids[start : start + count]
            unknown = [0] * (count - len(known))
            for i, token in enumerate((*known, *unknown, *item.draft), start=start + offset):
                metadata.append((token, i, position, live.rotary_id, live.row))
            last = max(last, start + offset + item.num_tokens - 1)
        return metadata, last // self._block_size + 1

    def decode_rows(self, items: abc.Sequence[ScheduledSequence], num_passes: int = 1) -> DecodeRows | None:
        """The rows of a step in which every token is a row that needs nothing else; None where one has more tokens than that, or
        distances of its own."""
        if not self._is_row_by_row(items):
            return None
        live_sequences, distances, ranged = self._input_batch.by_id, self._rotary.distances, False
        for item in items:
            live = live_sequences[item.seq_id]
            if not distances[live.rotary_id].is_plain:
                return None
            ranged = ranged or needs_ranges(live)
        metadata, blocks = self._row_metadata(items)
        if num_passes > 1:
            blocks = max(row[1] + num_passes - 1 for row in metadata) // self._block_size + 1
        numbers = np.array(metadata, dtype=np.int64).T
        tables, ranges = self._input_batch.tables(numbers[4].tolist(), blocks), None
        if ranged:
            of_rows = [live_sequences[item.seq_id] for item in items for _ in range(item.num_tokens)]
            ranges = self._range_tables.of(of_rows)
        states = None
        if self._has_states:
            states = _host_state_rows(len(metadata), len(metadata))
            _fill_state_rows(states, items, self._input_batch)
        numbers[4] = -1 if not self._adapters else self._adapters.slots_of(*self._adapted(items))
        return DecodeRows(numbers, tables, ranges, states)

    def ahead(self, batch: ForwardBatch, num_passes: int) -> MultiStepInputs | None:
        """What the rows of a lasting batch of single tokens need to go on for so many passes in all.

        None where the batch is another kind, and where its memory is too narrow for them.
        """
        if not batch.persistent:
            return None
        buffers = self._buffers_of(batch)
        blocks = (int(buffers.rows.metadata[1].max()) + num_passes - 1) // self._block_size + 1
        if blocks > batch.block_tables.shape[2]:
            return None
        return MultiStepInputs(buffers.fill, self._input_batch.all_tables(blocks), blocks)

    def _is_row_by_row(self, items: abc.Sequence[ScheduledSequence]) -> bool:
        """Whether every row is run as if it were a sequence of its own: single tokens, and proposed tokens behind them.

        Then it is an ordinary decode step, which can be repeated, and each row reads all keys before it. Over a long context
        that reading is the dearer part: there the rows of a sequence with proposed tokens go as a chunk and share it.
        """
        drafts = False
        for item in items:
            if item.num_tokens > 1 + len(item.draft):
                return False
            drafts |= item.num_tokens > 1
        if not drafts:
            return True
        if self.persistent:
            return max(item.start + item.num_tokens for item in items) <= _MAX_ROW_BY_ROW_CONTEXT
        return sum(item.num_tokens * (item.start + item.num_tokens) for item in items) <= _MAX_ROW_BY_ROW_KEYS

    def _buffers_of(self, batch: ForwardBatch) -> PersistentBatch:
        """The memory that a lasting batch stands in."""
        return self._buffers[batch.input_ids.shape[0], batch.block_tables.shape[2]]

    def _acquire_buffers(self, rows: int, blocks: int) -> PersistentBatch:
        width = table_width(blocks)
        found = self._buffers.get((rows, width))
        if found is None:
            found = PersistentBatch(
                self._groups,
                rows,
                width,
                self._rotary,
                self._block_size,
                self._backend,
                has_states=self._has_states,
            )
            self._buffers[rows, width] = found
            while len(self._buffers) > _MAX_SHAPES:
                self._buffers.popitem(last=False)
        else:
            self._buffers.move_to_end((rows, width))
        return found


def _prompts(counts: NDArray[np.int64], lengths: NDArray[np.int64]) -> PrefillTotals:
    """Of the new tokens and keys of each sequence."""
    several = counts > 1
    return PrefillTotals(int(several.sum()), int(counts[several].sum()), int(lengths[several].sum()))


def _positions_and_scales(
    rules: abc.Sequence[Distances], counts: NDArray[np.int64], token_positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Where the tokens are rotated, and what the scores of their queries are multiplied by, both [T].

    rules, counts: of each chunk, its distances and tokens. places: [T], their positions.
    """
    rotated_at, score_scale, start = token_positions, np.ones(len(token_positions), dtype=np.float32), 0
    for rule, count in zip(rules, counts.tolist(), strict=True):
        own = slice(start, start + count)
        start += count
        if rule.is_plain:
            continue
        if rule.chunk is not None:
            rotated_at = token_positions.copy() if rotated_at is token_positions else rotated_at
            rotated_at[own] %= rule.chunk
        grown = (
            1.0
            if rule.log_base is None
            else np.maximum(1.0, np.log(token_positions[own] + 1.0) / math.log(rule.log_base))
        )
        score_scale[own] = grown * rule.score_factor
    return rotated_at, score_scale
