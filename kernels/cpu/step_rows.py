"""What stands around the layers of a decode step, through the compiled kernels: where its rows are, the largest logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.cpu.checks import check
from windlass.kernels.cpu.library import Library
from windlass.kernels.step_rows import PersistentBuffers


class CompiledBufferFiller:
    """See `Backend.buffer_filler`. Operands are checked here, once: a step is short, and checks are most of it."""

    def __init__(
        self,
        rows: PersistentBuffers,
        inv_freq: Tensor,
        q_scale: Tensor,
        score_scale: Tensor,
        block_size: int,
        *,
        library: Library,
    ) -> None:
        count, (groups, table_rows, half) = rows.metadata.shape[1], inv_freq.shape
        check(
            inv_freq.dtype == torch.float64 and inv_freq.is_cpu and inv_freq.is_contiguous(),
            f"rows_filler: inv_freq is {inv_freq.dtype} on {inv_freq.device}, not contiguous float64 [G, R, d/2]",
        )
        check(
            rows.cos.shape == rows.sin.shape == (groups, count, half)
            and q_scale.shape == (groups, table_rows)
            and score_scale.shape == (table_rows,),
            f"rows_filler: angles {tuple(rows.cos.shape)} and scales {tuple(q_scale.shape)} do not fit",
        )
        check(
            all(
                array.flags.c_contiguous
                for array in (rows.metadata, rows.positions, rows.lengths, rows.slots, rows.tables)
            )
            and rows.tables.shape[:2] == rows.slots.shape
            and rows.positions.shape == rows.lengths.shape == (count,),
            "buffer_filler: the rows' arrays do not fit each other",
        )
        self.rows, self._block_size, self._table_rows = rows, block_size, table_rows
        self._library = library
        metadata, positions = rows.metadata.ctypes.data, rows.positions.ctypes.data
        self._count, self._said = count, metadata
        self._own = (
            positions,
            rows.lengths.ctypes.data,
            rows.slots.ctypes.data,
            rows.tables.ctypes.data,
            rows.tables.shape[2],
        )
        self._frequencies = inv_freq.data_ptr(), groups, table_rows, half
        self._turned = rows.metadata[3].ctypes.data, positions, count
        self._angles = rows.cos.data_ptr(), rows.sin.data_ptr()
        self._scales = [(q_scale.numpy(), rows.q_scale.numpy()), (score_scale.numpy(), rows.score_scale.numpy())]
        self._known: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the tables: who they are, address, strides
        self._held: NDArray[np.int32] | None = None
        self._kept = inv_freq  # its memory is read

    def __call__(self, tables: NDArray[np.int32], blocks: int) -> None:
        """Fill the rows: see `BufferFiller`."""
        described = self._described(tables, blocks, int(self.rows.metadata[1].max()))
        if self._library.fill_rows(self._said, self._count, *described, *self._own):
            raise IndexError("a scheduled token has no block to go to")
        if self._library.rotary_angles(*self._frequencies, *self._turned, *self._angles):
            raise IndexError(f"rows_filler: a row lies outside the rotary table of {self._table_rows}")
        rotary = self.rows.metadata[3]
        for whole, own in self._scales:  # rows are checked above; "clip" spares a copy
            whole.take(rotary, axis=whole.ndim - 1, out=own, mode="clip")

    def arguments(self, tables: NDArray[np.int32], blocks: int, passes: int) -> tuple[int, ...]:
        """What `draw_passes` takes of rows that are filled and go on for so many passes in all. Raises IndexError where
        their blocks do not hold all."""
        described = self._described(tables, blocks, int(self.rows.metadata[1].max()) + passes - 1)
        return self._said, self._count, *described, *self._own, *self._frequencies, *self._angles

    def _described(self, tables: NDArray[np.int32], blocks: int, last: int) -> tuple[int, int, int, int, int, int]:
        """Tables as `fill_rows` takes them. last: the furthest slot of a row."""
        if tables is not self._held:
            kv_groups, _, width = self.rows.tables.shape
            check(
                tables.dtype == np.int32
                and tables.ndim == 3
                and len(tables) == kv_groups
                and tables.strides[2] == 4
                and tables.strides[1] >= 0,
                f"rows_filler: tables are {tables.dtype} {tables.shape}",
            )
            strides = tables.strides
            self._known = (tables.ctypes.data, strides[0] // 4, strides[1] // 4, min(tables.shape[2], width))
            self._held = tables
        address, group_stride, row_stride, most = self._known
        if not 0 < blocks <= most or blocks * self._block_size <= last:
            raise IndexError(f"rows_filler: {blocks} blocks of a table of {most} do not hold every row")
        return address, group_stride, row_stride, len(tables), blocks, self._block_size


def row_maxima(logits: Tensor, *, library: Library) -> tuple[Tensor, Tensor]:
    """Of each row of logits [R, V] the first index of its largest value, int64 [R], and that value, float32 [R].

    A NaN counts as the largest. logits: float32, any row stride. Raises ValueError, and MemoryError.
    """
    rows, vocab = logits.shape
    check(
        logits.dtype == torch.float32 and logits.is_cpu and vocab > 0 and (vocab == 1 or logits.stride(1) == 1),
        f"row_maxima: logits are {logits.dtype} {tuple(logits.shape)}, not float32 [R, V] with adjacent elements",
    )
    ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    if library.row_maxima(logits.data_ptr(), logits.stride(0), rows, vocab, ids.data_ptr(), values.data_ptr()):
        raise MemoryError("row_maxima: no memory")
    return ids, values
