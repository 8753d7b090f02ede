"""Forward batch builder: makes a `ForwardBatch` of tensors from scheduled chunks and the input batch.

On a CPU, a decode step of single tokens is written into persistent buffers, the same memory in every step. Every other batch is
allocated. Recurrent states are addressed per sequence, not per chunk that attends separately.
"""

from __future__ import annotations

import math
from collections import OrderedDict, abc
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.execution.input_batch import InputBatch, RunnerSequence, table_width
from windlass.engine.execution.query_ranges import (
    RangeTables,
    attention_chunks_of,
    needs_ranges,
    query_ranges,
    second_key_positions,
)
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.forward_batch import ForwardBatch, RotatedQueryCopies
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.rotary.attention_distances import Distances
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.scheduling.chunked_prefill import ChunkBoundaries
from windlass.engine.scheduling.scheduler_output import ScheduledSequence
from windlass.kernels import (
    BufferFiller,
    MultiStepInputs,
    PersistentBuffers,
    PrefillTotals,
    StateRows,
    blocks_per_split,
    to_device,
)


def _host_state_rows(sequences: int, tokens: int) -> StateRows:
    """Zeros in host memory, for `_fill_state_rows`."""
    return StateRows(*(torch.zeros(size, dtype=torch.int64) for size in (sequences, sequences + 1, sequences, tokens)))


def _fill_state_rows(rows: StateRows, items: abc.Sequence[ScheduledSequence], input_batch: InputBatch) -> None:
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


_MAX_SHAPES = 4

# Longest context over which proposed tokens are attended row by row.
_MAX_ROW_BY_ROW_CONTEXT = 1024

# Number of keys that all rows of such a step may read on an asynchronous device. A step that is not a CUDA graph takes longer
# than a graph that reads more keys, up to about half the bytes of an 8B model's weights.
_MAX_ROW_BY_ROW_KEYS = 1 << 16


class _PersistentBatch(NamedTuple):
    """A batch of single tokens, the buffers that it is a view of, and the function that fills them from their metadata."""

    batch: ForwardBatch
    buffers: PersistentBuffers
    fill: BufferFiller
    adapter_slots: Tensor  # [B] int64


class DecodeRows(NamedTuple):
    """B rows, each a token that attends alone.

    metadata: for each row its token, the index of its slot in its sequence, its position minus that index, its rotary row, and
    the slot of its adapter, -1 for none. range_tables: None if every row attends unrotated to all keys before it. states: in
    host memory; None if no layer has recurrent states.
    """

    metadata: NDArray[np.int64]  # [NUM_FIELDS, B]
    tables: NDArray[np.int32]  # [K, B, blocks]; entries past a row's blocks are undefined
    range_tables: list[NDArray[np.int64]] | None
    states: StateRows | None


class ForwardBatchBuilder:
    """Builds batches of the sequences in `input_batch`, whose blocks hold `block_size` tokens.

    chunk_boundaries: the parts of a prompt that attend separately. adapters: None runs the rows of every sequence without.
    persistent: whether batches of single tokens use persistent buffers, which needs a backend that reads host memory.
    """

    def __init__(
        self,
        input_batch: InputBatch,
        rotary: RotaryTables,
        decoder: Decoder,
        block_size: int,
        chunk_boundaries: ChunkBoundaries,
        adapters: LoadedAdapters | None,
    ) -> None:
        self.adapters, self._chunk_boundaries = adapters, chunk_boundaries
        self._backend, self._device = decoder.backend, decoder.backend.device
        spec = decoder.spec
        self._groups, self._has_states = len(spec.kv_groups), spec.state_group is not None
        self._windows, self._absolute_scores = spec.attention_windows, spec.scores_by_absolute_position
        self._range_tables = RangeTables(self._windows, absolute_scores=self._absolute_scores)
        self._input_batch, self.rotary, self.block_size = input_batch, rotary, block_size
        # Whatever the number of second key copies, the keys after them are split at the same places.
        self._second_key_alignment = blocks_per_split(block_size)
        self._persistent: OrderedDict[tuple[int, int], _PersistentBatch] = OrderedDict()  # by rows and width
        self.persistent = decoder.backend.reads_host_memory

    def build(self, items: abc.Sequence[ScheduledSequence]) -> ForwardBatch:
        """The flat batch of the scheduled chunks, in order. The next call may overwrite a batch of single tokens."""
        batch = self._build(items)
        if self.adapters is None or len(self.adapters) == 0:
            return batch
        out = self._persistent_batch_of(batch).adapter_slots if batch.persistent else None
        adapters = self.adapters.rows(*self._adapters_of(items), out)
        return batch if adapters is None else replace(batch, adapters=adapters)

    def _adapters_of(self, items: abc.Sequence[ScheduledSequence]) -> tuple[list[int | None], list[int]]:
        """The adapter and the number of rows of each chunk."""
        live = self._input_batch.by_id
        return [live[item.seq_id].adapter for item in items], [item.num_tokens for item in items]

    def _build(self, items: abc.Sequence[ScheduledSequence]) -> ForwardBatch:
        row_by_row = self._is_row_by_row(items)
        live_sequences = self._input_batch.by_id
        distances = self.rotary.distances
        live_rows = [live_sequences[item.seq_id] for item in items]
        ranged = any(needs_ranges(live) or distances[live.rotary_id].changes_distances for live in live_rows)
        plain = not ranged and all(distances[live.rotary_id].is_plain for live in live_rows)
        if row_by_row and self.persistent and plain:
            return self._fill_persistent(items)
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
        """(first index, tokens) of the parts of a chunk of `count` tokens that attend separately."""
        attention_chunks = attention_chunks_of(distances, item.start, count)
        if item.start + count != item.num_known_tokens:
            return attention_chunks
        return [
            part
            for piece in attention_chunks
            for part in self._chunk_boundaries.attention_segments(*piece, item.num_known_tokens)
        ]

    def _build_chunks(self, chunks: list[tuple[RunnerSequence, int, list[int]]], *, ranged: bool) -> ForwardBatch:
        """Allocate a batch of chunks (sequence, index of the first token, tokens)."""
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
        rules = [self.rotary.distances[live.rotary_id] for live, _, _ in chunks]
        rows = [live.row for live, _, _ in chunks]
        num_second_blocks = [
            -(-live.num_blocks[0] // self._second_key_alignment) * self._second_key_alignment
            if rule.has_second_keys
            else 0
            for (live, _, _), rule in zip(chunks, rules, strict=True)
        ]
        has_second_keys = any(num_second_blocks)
        if has_second_keys:  # they come first, so that the sequence's own keys are at the end, as in every batch
            second_key_slots = np.array(num_second_blocks) * self.block_size
            starts, first = starts + second_key_slots, first - second_key_slots
        lengths = starts + counts
        query_start = np.zeros(len(chunks) + 1, dtype=np.int64)
        counts.cumsum(out=query_start[1:])
        columns = -(-int(lengths.max()) // self.block_size)
        if has_second_keys:
            tables = self._input_batch.tables_with_second_keys(list(zip(rows, num_second_blocks, strict=True)), columns)
        else:
            tables = self._input_batch.tables(rows, columns)
        ids = np.concatenate([np.array(ids, dtype=np.int64) for _, _, ids in chunks])
        row = np.arange(len(chunks)).repeat(counts)  # [T]
        # [T], index of the slot in its sequence
        index = np.arange(len(ids)) - (query_start[:-1] - starts).repeat(counts)
        block, offset = np.divmod(index, self.block_size)
        slots = np.ascontiguousarray(tables[:, row, block] * np.int64(self.block_size) + offset)  # [K, T]
        if slots.min() < 0:
            raise IndexError("a scheduled token has no block")
        token_positions = index + first[row]
        rotated_at, score_scale = _positions_and_scales(rules, counts, token_positions)
        positions, rotary_ids = self._tensor(rotated_at), self._tensor(rotary[row])
        rotation = self.rotary.cos_sin(rotary_ids, positions)
        rotation = rotation._replace(score_scale=rotation.score_scale * self._tensor(score_scale))
        query_copies = (
            self._rotated_queries(chunks, rules, token_positions, num_missing[row], rotary[row], num_second_blocks)
            if ranged
            else None
        )
        if query_copies is not None and has_second_keys:
            has_copy, copy_positions, slopes = second_key_positions(rules, counts, token_positions)
            block, offset = np.divmod(index - second_key_slots[row], self.block_size)
            second = tables[:, row, np.where(has_copy, block, 0)] * np.int64(self.block_size) + offset  # [K, T]
            query_copies.second_key_slots = self._tensor(np.where(has_copy, second, -1))
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
        """The ranges of chunks and their query copies.

        positions, num_missing, rotary: [T], each token's position, the number of tokens dropped before it, and its rotary row.
        num_second_blocks: for each chunk, the leading blocks of its table that hold second key copies.
        """
        spans, token = [], 0
        for live, _, ids in chunks:
            spans.append((live, int(positions[token]), len(ids)))
            token += len(ids)
        copies = query_ranges(
            spans,
            rules,
            self._windows,
            lambda sources, rotations, slopes: self._cos_sin(rotary[sources], rotations, slopes),
            absolute_scores=self._absolute_scores,
            second_key_slots=[blocks * self.block_size for blocks in num_second_blocks],
        )
        if self._absolute_scores and num_missing.any():
            copies.anchor_cos, copies.anchor_sin = self.rotary.angles(self._tensor(rotary), self._tensor(-num_missing))
            copies.query_indices = torch.arange(len(positions), device=self._device)
        return copies

    def _cos_sin(
        self, rotary: NDArray[np.int64], positions: NDArray[np.int64], slopes: NDArray[np.float64] | None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines [G, N, rotary_dim / 2] under these rotary rows. slopes: share of the frequencies, None for 1."""
        ids, at = self._tensor(rotary), self._tensor(positions)
        if slopes is None:
            return self.rotary.angles(ids, at)
        return self.rotary.slowed_cos_sin(ids, at, self._tensor(slopes))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(array), self._device)

    def _fill_persistent(self, items: abc.Sequence[ScheduledSequence]) -> ForwardBatch:
        """A batch in persistent buffers, in which every token counts as a sequence of its own."""
        metadata, blocks = self._row_metadata(items)
        found = self._acquire_persistent(len(metadata), blocks)
        found.buffers.metadata.T[...] = metadata
        found.fill(self._input_batch.all_tables(blocks), blocks)
        if found.batch.state_rows is not None:
            _fill_state_rows(found.batch.state_rows, items, self._input_batch)
        return found.batch

    def _row_metadata(
        self, items: abc.Sequence[ScheduledSequence], num_passes: int = 1
    ) -> tuple[list[tuple[int, int, int, int, int]], int]:
        """The `PersistentBuffers.metadata` of each row, and the number of blocks that hold all rows and further passes.

        A token that the host does not know yet is 0.
        """
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
        return metadata, (last + num_passes - 1) // self.block_size + 1

    def decode_rows(self, items: abc.Sequence[ScheduledSequence], num_passes: int = 1) -> DecodeRows | None:
        """The rows of a step that runs row by row; None if it does not, or if a sequence has a distance rule."""
        if not self._is_row_by_row(items):
            return None
        live_sequences, distances, ranged = self._input_batch.by_id, self.rotary.distances, False
        for item in items:
            live = live_sequences[item.seq_id]
            if not distances[live.rotary_id].is_plain:
                return None
            ranged = ranged or needs_ranges(live)
        rows, blocks = self._row_metadata(items, num_passes)
        metadata = np.array(rows, dtype=np.int64).T
        tables, range_tables = self._input_batch.tables(metadata[4].tolist(), blocks), None
        if ranged:
            range_tables = self._range_tables.of(
                [live_sequences[item.seq_id] for item in items for _ in range(item.num_tokens)]
            )
        states = None
        if self._has_states:
            states = _host_state_rows(len(rows), len(rows))
            _fill_state_rows(states, items, self._input_batch)
        metadata[4] = -1 if not self.adapters else self.adapters.slots_of(*self._adapters_of(items))
        return DecodeRows(metadata, tables, range_tables, states)

    def multi_step_inputs(self, batch: ForwardBatch, num_passes: int) -> MultiStepInputs | None:
        """Inputs for `num_passes` passes over the rows of a persistent batch; None for another batch, or if its tables are too
        narrow."""
        if not batch.persistent:
            return None
        found = self._persistent_batch_of(batch)
        blocks = (int(found.buffers.metadata[1].max()) + num_passes - 1) // self.block_size + 1
        if blocks > batch.block_tables.shape[2]:
            return None
        return MultiStepInputs(found.fill, self._input_batch.all_tables(blocks), blocks)

    def _is_row_by_row(self, items: abc.Sequence[ScheduledSequence]) -> bool:
        """Whether every row runs as a sequence of its own: single tokens, each with any proposed tokens.

        Such a step is a decode step, which can be recorded or captured, and each row reads all keys before it. Over a long
        context those reads dominate, so there the rows of a sequence with proposed tokens are a chunk, which reads them once.
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

    def _persistent_batch_of(self, batch: ForwardBatch) -> _PersistentBatch:
        return self._persistent[batch.input_ids.shape[0], batch.block_tables.shape[2]]

    def _acquire_persistent(self, rows: int, blocks: int) -> _PersistentBatch:
        key = rows, table_width(blocks)
        found = self._persistent.pop(key, None) or self._allocate_persistent(*key)
        self._persistent[key] = found  # most recently used last
        while len(self._persistent) > _MAX_SHAPES:
            self._persistent.popitem(last=False)
        return found

    def _allocate_persistent(self, rows: int, width: int) -> _PersistentBatch:
        rotary = self.rotary
        rotary_groups, _, half = rotary.inv_freq.shape
        buffers = PersistentBuffers.zeros(self._groups, rows, width, rotary_groups, half)
        fill = self._backend.buffer_filler(
            buffers, rotary.inv_freq, rotary.q_scale, rotary.score_scale, self.block_size
        )
        ids, _, _, rotary_ids, _ = (torch.from_numpy(field) for field in buffers.metadata)
        positions = torch.from_numpy(buffers.positions)
        batch = ForwardBatch(
            input_ids=ids,
            positions=positions,
            rotary_ids=rotary_ids,
            slots=torch.from_numpy(buffers.slots),
            block_tables=torch.from_numpy(buffers.tables),
            query_start=torch.arange(rows + 1),
            seq_lens=torch.from_numpy(buffers.lengths),
            context_positions=positions,
            cos=buffers.cos,
            sin=buffers.sin,
            q_scale=buffers.q_scale,
            score_scale=buffers.score_scale,
            persistent=True,
            state_rows=_host_state_rows(rows, rows) if self._has_states else None,
        )
        return _PersistentBatch(batch, buffers, fill, torch.full((rows,), -1))


def _prompts(counts: NDArray[np.int64], lengths: NDArray[np.int64]) -> PrefillTotals:
    """Totals over the sequences with several new tokens, given each one's new tokens and keys."""
    several = counts > 1
    return PrefillTotals(int(several.sum()), int(counts[several].sum()), int(lengths[several].sum()))


def _positions_and_scales(
    rules: abc.Sequence[Distances], counts: NDArray[np.int64], token_positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The positions at which the tokens are rotated, and the factors of their queries' scores, both [T].

    rules, counts: the distance rule and number of tokens of each chunk. token_positions: [T].
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
