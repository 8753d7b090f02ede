"""Device batch: persistent buffers of decode rows in device memory, where captured CUDA graphs read them.

A row is the next token of a sequence. The host sends row metadata and block tables in two copies of a few kilobytes; everything
else is derived on the device. After sampling, the rows advance to the sampled tokens, so steps follow each other without the
host, and the tokens are fetched at the end. Ranges (`DeviceQueryRanges`) and recurrent-state rows are stored in the same way.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.cache.block_manager import MAX_RUNS
from windlass.engine.execution.batch_builder import DecodeRows
from windlass.engine.execution.query_ranges import COPIES, ENDS, GAPS, LAST_UNCLAMPED, NUM_MISSING, REACHES, ROTATIONS
from windlass.engine.model.forward_batch import ForwardBatch, RotatedQueryCopies
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.scheduling.async_scheduling import MAX_PASSES
from windlass.kernels import DeviceEvent, Graphs, SamplingTensors, StateRows


class DeviceQueryRanges:
    """The range tables of decode rows, in device memory.

    cells: maximum of rows times ranges. windows: number of distinct windows. absolute_scores: see `query_ranges`. tables: the
    `pad_range_tables` of the rows come first, flattened; int64 [fields * cells].
    """

    def __init__(self, rotary: RotaryTables, *, cells: int, windows: int, absolute_scores: bool) -> None:
        self._rotary, self._absolute_scores, self._device = rotary, absolute_scores, rotary.inv_freq.device
        self._fields = REACHES + windows
        self.tables = torch.zeros(self._fields * cells, dtype=torch.int64, device=self._device)

    def query_copies(
        self, rows: int, ranges: int, positions: Tensor, rotary: Tensor
    ) -> tuple[RotatedQueryCopies, Tensor]:
        """The query copies of a step with at least 2 ranges, and its positions less the tokens dropped before them, [rows].

        positions, rotary: the rows' positions and rotary rows, int64 [rows].
        """
        tables = self.tables[: self._fields * rows * ranges].view(self._fields, rows, ranges)
        own = torch.arange(rows, device=self._device).unsqueeze(1)  # [B, 1]
        each = ranges - 1
        sources = own.expand(rows, each).reshape(-1)  # [V]
        copy, copy_table = tables[COPIES], tables[:, :, :each]
        unrotated_rows = torch.where(copy < 0, copy, own)
        rotations = copy_table[ROTATIONS] + (copy_table[LAST_UNCLAMPED] - positions.unsqueeze(1)).clamp(max=0)
        cos, sin = self._rotary.angles(rotary.index_select(0, sources), rotations.reshape(-1))
        missing = tables[NUM_MISSING, :, 0]
        found = RotatedQueryCopies(
            ends=tables[ENDS],
            rows=torch.where(copy > 0, rows - 1 + own * each + copy, unrotated_rows),
            unrotated_rows=unrotated_rows,
            reaches=tables[REACHES:],
            gaps=tables[GAPS],
            sources=sources,
            cos=cos,
            sin=sin,
        )
        if self._absolute_scores:
            found.anchor_cos, found.anchor_sin = self._rotary.angles(rotary, -missing)
            found.query_indices = own.squeeze(1)
        return found, positions - missing


# The slot index of a row that does not exist and so reads and writes nothing, the state block of such a row, and no adapter.
_NONE = -1

_EXTRA_TABLE_COLUMNS = 2 * MAX_RUNS  # of steps with ranges: blocks around reused passages are partly empty

TOKEN, _INDEX, ADAPTER, NUM_FIELDS = 0, 1, 4, 5  # fields of `DecodeRows.metadata`, and how many there are


class RowSampling(NamedTuple):
    """The sampling of a row: `encode_filters` of its filters, and a uniform number for each pass."""

    filters: tuple[float, int, int, float]
    uniforms: abc.Sequence[float]


GREEDY = RowSampling((0.0, 0, 0, 1.0), ())


class PendingTokens:
    """Sampled tokens on their way to the host."""

    def __init__(self, sampled: Tensor, mark: DeviceEvent) -> None:
        self._sampled, self._mark = sampled, mark

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and statuses, [passes, rows] each. Raises the errors that the device reports."""
        self._mark.wait()
        ids, statuses = self._sampled.numpy().copy()
        return ids, statuses


class _StagingBuffers:
    """Host memory, allocated like `device`, for the copies of one step; free again once the device has passed `mark`."""

    def __init__(self, graphs: Graphs, device: DeviceBatch) -> None:
        def host(tensor: Tensor) -> Tensor:
            return graphs.host_memory(tuple(tensor.shape), tensor.dtype)

        self.metadata, self.order, self.sampling = host(device.metadata), host(device.order), host(device.sampling)
        self.tables, self.ranges = host(device.new_tables), host(device.ranges.tables)
        self.sampled = host(device.sampled)
        self.states = None if device.states is None else host(device.states)
        self.mark: DeviceEvent | None = None

    def set_rows(self, metadata: NDArray[np.int64]) -> None:
        """Store the metadata of the first rows; the others do not exist."""
        self.metadata[_INDEX] = self.metadata[ADAPTER] = _NONE
        self.metadata[:, : metadata.shape[1]] = torch.from_numpy(metadata)

    def set_states(self, rows: StateRows) -> None:
        """Store state rows as [4, rows + 1]: blocks, starts, lengths, snapshots. Further rows belong to no sequence."""
        assert self.states is not None and rows.snapshots is not None
        count = len(rows.snapshots)
        states: NDArray[np.int64] = self.states.numpy()
        for target, source in zip(states, rows, strict=True):
            if source is not None:
                target[: len(source)] = source.numpy()
        states[1, count + 1 :] = count
        states[3, count:] = _NONE


class DeviceBatch:
    """Up to `max_rows` decode rows of a model, with block tables of `max_blocks` columns for each KV group.

    Steps with ranges have `max_cells` rows times ranges at most, and wider tables, as their slots may outnumber their tokens.
    """

    def __init__(
        self,
        graphs: Graphs,
        spec: ModelSpec,
        rotary: RotaryTables,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        max_cells: int,
    ) -> None:
        self.max_rows, self._max_blocks, self._block_size = max_rows, max_blocks, block_size
        self._graphs, self._rotary = graphs, rotary
        self._groups, ranged_width = len(spec.kv_groups), max_blocks + _EXTRA_TABLE_COLUMNS
        self._device = device = rotary.inv_freq.device
        # See `DecodeRows.metadata`. The last column never exists.
        self.metadata = torch.zeros(NUM_FIELDS, max_rows + 1, dtype=torch.int64, device=device)
        self.metadata[_INDEX] = self.metadata[ADAPTER] = _NONE
        self.order = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.sampling = torch.zeros(4 + MAX_PASSES, max_rows, dtype=torch.float64, device=device)
        self._tables = torch.zeros(self._groups, max_rows, ranged_width, dtype=torch.int32, device=device)
        self.new_tables = self._tables.new_zeros(self._tables.numel())
        self.ranges = DeviceQueryRanges(
            rotary,
            cells=max_cells,
            windows=len(spec.attention_windows),
            absolute_scores=spec.scores_by_absolute_position,
        )
        self.sampled = torch.zeros(2, MAX_PASSES, max_rows, dtype=torch.int64, device=device)
        self._pass = torch.zeros(1, dtype=torch.int64, device=device)
        # Blocks, starts, lengths and snapshots of `StateRows`.
        has_states = spec.state_group is not None
        self.states = torch.zeros(4, max_rows + 1, dtype=torch.int64, device=device) if has_states else None
        # The device may still read a step's copies while those of the next step are written, but not any longer.
        self._staging = [_StagingBuffers(graphs, self) for _ in range(2)]
        self._staging_index = 0
        self._sent_tables: NDArray[np.int32] | None = None  # the tables that the device has
        self._sent_ranges: NDArray[np.int64] | None = None

    # -- captured work on the device ---------------------------------------------------------------------------

    def width(self, ranges: int) -> int:
        """Columns of the block tables of a step with this many ranges per row, 0 for none."""
        return self._max_blocks + _EXTRA_TABLE_COLUMNS * (ranges > 0)

    def batch(self, rows: int, ranges: int = 0) -> ForwardBatch:
        """The first `rows` rows as a forward batch, with `ranges` ranges each."""
        ids, index, first, rotary, _ = self.metadata[:, :rows].unbind(0)
        is_row, size = index >= 0, self._block_size
        positions = torch.where(is_row, index + first, 0)
        tables = self._tables[:, :rows, : self.width(ranges)]
        column = (index.clamp(min=0) // size).expand(self._groups, rows).unsqueeze(-1)
        blocks = tables.gather(2, column).squeeze(-1).long()  # [K, B]
        query_copies, context_positions = None, positions
        if ranges:
            query_copies, context_positions = self.ranges.query_copies(rows, ranges, positions, rotary)
        return ForwardBatch(
            input_ids=ids,
            positions=positions,
            rotary_ids=rotary,
            slots=torch.where(is_row, blocks * size + index % size, -1),
            block_tables=tables,
            query_start=torch.arange(rows + 1, device=self._device),
            seq_lens=index + 1,
            context_positions=context_positions,
            **self._rotary.cos_sin(rotary, positions)._asdict(),
            query_copies=query_copies,
            state_rows=self._state_rows(rows),
        )

    def _state_rows(self, rows: int) -> StateRows | None:
        """The state rows of the first `rows` rows, and one more sequence for the rows that do not exist."""
        if self.states is None:
            return None
        blocks, starts, lengths, snapshots = self.states.unbind(0)
        none = torch.full((1,), _NONE, dtype=torch.int64, device=self._device)
        return StateRows(
            torch.cat((blocks[:rows], none)),
            torch.cat((starts[: rows + 1], torch.full_like(none, rows))),
            torch.cat((lengths[:rows], none)),
            snapshots[:rows],
        )

    def adapter_slots(self, rows: int) -> Tensor:
        """The adapter slots of the first `rows` rows, int64 [rows], -1 for none."""
        return self.metadata[ADAPTER, :rows]

    def sampling_tensors(self, rows: int) -> SamplingTensors:
        """The sampling of the first `rows` rows in this pass."""
        temperature, magnitude, top_k, top_p = self.sampling[:4, :rows].unbind(0)
        uniform = self.sampling[4:, :rows].index_select(0, self._pass).squeeze(0)
        return SamplingTensors(temperature.float(), magnitude.int(), top_k.int(), top_p, uniform)

    def advance(self, rows: int, ids: Tensor, statuses: Tensor) -> None:
        """Store the tokens of this pass, and make them the input of the next one. ids, statuses: int64 [rows]."""
        for target, found in zip(self.sampled, (ids, statuses), strict=True):
            target[:, :rows].index_copy_(0, self._pass, found.unsqueeze(0))
        metadata = self.metadata[:, :rows]
        metadata[TOKEN].copy_(ids.clamp(min=0))  # id -1: the logits are not finite, which the host checks
        metadata[_INDEX].add_((metadata[_INDEX] >= 0).long())
        self._pass.add_(1)

    # -- submission by the host ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Remove all rows."""
        self._graphs.submit(self._clear)
        self._sent_tables = None

    def fill(
        self,
        rows: DecodeRows,
        sampling_rows: abc.Sequence[RowSampling],
        ranges: NDArray[np.int64] | None = None,
        order: abc.Sequence[int] | None = None,
    ) -> None:
        """Set the rows, and send their block tables and ranges if the device does not have them.

        ranges: their `pad_range_tables` in the shape of the steps to come; None if those have no ranges. order: for rows that
        continue from the tokens of the steps submitted last, which only the device knows, each row's index among the rows of
        those steps.
        """
        staging = self._next_staging()
        staging.set_rows(rows.metadata)
        if order is not None:
            staging.order[: len(order)] = torch.tensor(order, dtype=torch.int64)
            staging.order[len(order) :] = self.max_rows
        self._graphs.submit(lambda: self._copy_metadata(staging, continues=order is not None))
        sampling = staging.sampling.numpy()
        for row, one in enumerate(sampling_rows):
            sampling[:4, row] = one.filters
            sampling[4 : 4 + len(one.uniforms), row] = one.uniforms
        self._copy(self.sampling, staging.sampling)
        if rows.states is not None:
            assert self.states is not None and staging.states is not None
            staging.set_states(rows.states)
            self._copy(self.states, staging.states)
        known = self._sent_ranges
        if ranges is not None and (known is None or not np.array_equal(ranges, known)):
            self._sent_ranges, count = None, ranges.size  # None for the case that the submission fails
            staging.ranges.numpy()[:count] = ranges.ravel()
            self._copy(self.ranges.tables[:count], staging.ranges[:count])
            self._sent_ranges = ranges
        tables = rows.tables
        if self._sent_tables is None or not np.array_equal(self._sent_tables, tables):
            self._sent_tables, shape = None, tables.shape
            staging.tables.numpy()[: tables.size].reshape(shape)[...] = tables
            self._graphs.submit(lambda: self._copy_tables(staging, shape))
            self._sent_tables = tables.copy()

    def fetch(self, num_passes: int, rows: int) -> PendingTokens:
        """The tokens of the passes submitted since `fill`."""
        staging = self._staging[self._staging_index]
        self._copy(staging.sampled, self.sampled)
        return PendingTokens(staging.sampled[:, :num_passes, :rows], self.record_end())

    def record_end(self) -> DeviceEvent:
        """Mark the end of the work submitted since `fill`."""
        mark = self._staging[self._staging_index].mark = self._graphs.record_event()
        return mark

    def _next_staging(self) -> _StagingBuffers:
        self._staging_index = (self._staging_index + 1) % len(self._staging)
        staging = self._staging[self._staging_index]
        if staging.mark is not None:
            staging.mark.wait()
            staging.mark = None
        return staging

    def _clear(self) -> None:
        self.metadata[_INDEX].fill_(_NONE)
        self.metadata[ADAPTER].fill_(_NONE)
        self._pass.zero_()
        if self.states is not None:
            self.states[1].zero_()
            self.states[3].fill_(_NONE)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        def copy() -> None:
            target.copy_(source, non_blocking=True)

        self._graphs.submit(copy)

    def _copy_metadata(self, staging: _StagingBuffers, *, continues: bool) -> None:
        if continues:
            self.order.copy_(staging.order, non_blocking=True)
        tokens = self.metadata[TOKEN].index_select(0, self.order) if continues else None
        self.metadata.copy_(staging.metadata, non_blocking=True)
        self._pass.zero_()
        if tokens is not None:
            self.metadata[TOKEN].copy_(tokens)

    def _copy_tables(self, staging: _StagingBuffers, shape: tuple[int, ...]) -> None:
        groups, rows, columns = shape
        count = groups * rows * columns
        self.new_tables[:count].copy_(staging.tables[:count], non_blocking=True)
        self._tables[:, :rows, :columns].copy_(self.new_tables[:count].view(shape))
