"""What stands around the layers of a decode step, through the compiled kernels: where its rows are, the largest logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.cpu.checks import check
from windlass.kernels.cpu.library import Library, load
from windlass.kernels.step_rows import RowsFiller, StepRows


def rows_filler(
    rows: StepRows,
    inv_freq: Tensor,
    q_scale: Tensor,
    score_scale: Tensor,
    block_size: int,
    *,
    library: Library | None = None,
) -> RowsFiller:
    """See `Backend.rows_filler`. Operands are checked here, once: a step is short, and checks are most of it."""
    count, (groups, table_rows, half) = rows.said.shape[1], inv_freq.shape
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
        all(array.flags.c_contiguous for array in (rows.said, rows.positions, rows.lengths, rows.slots, rows.tables))
        and rows.tables.shape[:2] == rows.slots.shape
        and rows.positions.shape == rows.lengths.shape == (count,),
        "rows_filler: the rows' arrays do not fit each other",
    )
    bound = library or load()
    kv_groups, width = len(rows.tables), rows.tables.shape[2]
    said, slots, positions = rows.said.ctypes.data, rows.slots.ctypes.data, rows.positions.ctypes.data
    lengths, own = rows.lengths.ctypes.data, rows.tables.ctypes.data
    rotary, rotary_rows = rows.said[3], rows.said[3].ctypes.data
    angles = (inv_freq.data_ptr(), groups, table_rows, half, rotary_rows, positions, count)
    cos, sin = rows.cos.data_ptr(), rows.sin.data_ptr()
    scales, own_scales = q_scale.numpy(), rows.q_scale.numpy()
    whole, own_whole = score_scale.numpy(), rows.score_scale.numpy()
    known: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the tables: who they are, address, strides
    held: NDArray[np.int32] | None = None

    def fill(tables: NDArray[np.int32], blocks: int) -> None:
        nonlocal known, held
        if tables is not held:
            check(
                tables.dtype == np.int32
                and tables.ndim == 3
                and len(tables) == kv_groups
                and tables.strides[2] == 4
                and tables.strides[1] >= 0,
                f"rows_filler: tables are {tables.dtype} {tables.shape}",
            )
            known = (tables.ctypes.data, tables.strides[0] // 4, tables.strides[1] // 4, min(tables.shape[2], width))
            held = tables
        address, group_stride, row_stride, most = known
        if not 0 < blocks <= most or blocks * block_size <= int(rows.said[1].max()):
            raise IndexError(f"rows_filler: {blocks} blocks of a table of {most} do not hold every row")
        if bound.fill_rows(
            said, count, address, group_stride, row_stride, kv_groups, blocks, block_size, positions, lengths, slots, own, width
        ):  # fmt: skip
            raise IndexError("a scheduled token has no block to go to")
        if bound.rotary_angles(*angles, cos, sin):
            raise IndexError(f"rows_filler: a row lies outside the rotary table of {table_rows}")
        scales.take(rotary, axis=1, out=own_scales, mode="clip")  # checked above; "clip" spares a copy
        whole.take(rotary, out=own_whole, mode="clip")

    return fill


def row_maxima(logits: Tensor, *, library: Library | None = None) -> tuple[Tensor, Tensor]:
    """Of each row of logits [R, V] the first index of its largest value, int64 [R], and that value, float32 [R].

    A NaN counts as the largest. logits: float32, any row stride. Raises ValueError, and MemoryError.
    """
    rows, vocab = logits.shape
    check(
        logits.dtype == torch.float32 and logits.is_cpu and vocab > 0 and (vocab == 1 or logits.stride(1) == 1),
        f"row_maxima: logits are {logits.dtype} {tuple(logits.shape)}, not float32 [R, V] with adjacent elements",
    )
    ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    if (library or load()).row_maxima(
        logits.data_ptr(), logits.stride(0), rows, vocab, ids.data_ptr(), values.data_ptr()
    ):
        raise MemoryError("row_maxima: no memory")
    return ids, values
