"""What adapters add to products: the table of their matrices in the device's memory, and the arguments of programs that read it.

Nothing here waits for the device. Knows shapes and types; nothing of adapters' files.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from windlass.kernels.layouts.low_rank import PANEL_COLUMNS, LowRankTable, LowRankTarget, LowRankUpdate
from windlass.kernels.layouts.pinned import copy_into
from windlass.kernels.triton.launch import Device, dot_type, launch, power_of_two, strided
from windlass.kernels.triton.programs import low_rank as programs

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_HEAD, _FIELDS = programs.HEAD.value, programs.FIELDS.value
_BY_ROW = 128  # rows up to which each has programs of its own
_MOST_SPLITS = 16  # of K; all are read again for each tile of columns


class DeviceLowRankTable(LowRankTable):
    """The same as programs read it. Changes are kept in the matrix's dtype.

    entries: int64 [slots, 2 + 6 parts], see `programs.low_rank`; it stays where it is.
    """

    def __init__(self, slots: int, matrix: LowRankTarget, device: torch.device) -> None:
        super().__init__(slots)
        self.matrix = matrix
        self.entries = torch.zeros(slots, _HEAD + _FIELDS * len(matrix.parts), dtype=torch.int64, device=device)
        self._read: list[list[Tensor]] = [[] for _ in range(slots)]  # what entries have addresses of

    def put(self, slot: int, change: LowRankUpdate | None) -> None:
        """Raises ValueError for a change of another matrix, or one that is larger than the table has room for."""
        entry, read = [0] * self.entries.shape[1], list[Tensor]()
        if change is not None:
            self._check(change)
            read = [self._own(matrix) for matrix in (change.down, *[part.up for part in change.parts])]
            fields = [change.rank, read[0].data_ptr()]
            for part, up in zip(change.parts, read[1:], strict=True):
                (scale,) = struct.unpack("<i", struct.pack("<f", part.scale))
                fields += [part.first, part.columns, part.rank_first, part.rank, up.data_ptr(), scale]
            entry[: len(fields)] = fields
        copy_into(self.entries[slot], torch.tensor(entry, device="cpu"))
        self._read[slot] = read
        super().put(slot, change)

    def _own(self, matrix: Tensor) -> Tensor:
        matrix = matrix.to(self.entries.device, self.matrix.dtype).contiguous()
        return matrix if matrix.data_ptr() % 16 == 0 else matrix.clone()

    def _check(self, change: LowRankUpdate) -> None:
        matrix = self.matrix
        ends = itertools.accumulate(matrix.parts)
        known = {(end - columns, columns) for end, columns in zip(ends, matrix.parts, strict=True)}
        fits = change.inner == matrix.inner and change.rank <= matrix.rank
        fits = fits and known.issuperset((part.first, part.columns) for part in change.parts)
        for part in change.parts:
            fits = fits and 0 <= part.rank_first <= part.rank_first + part.rank <= change.rank
        if not fits:
            raise ValueError(
                f"low rank: a change of rank {change.rank} with {len(change.parts)} parts is none of {matrix}"
            )


class _LowRankTile(NamedTuple):
    """Of programs: rows, columns, ranks and numbers of K at once."""

    rows: int
    columns: int
    ranks: int
    inner: int


def add_low_rank(
    out: Tensor, x: Tensor, table: DeviceLowRankTable, slots: Tensor, *, fixed: bool, device: Device
) -> None:
    """See `Backend.add_low_rank`. slots: [T] int64, on the device. fixed: tiles of one size, however many rows there are."""
    matrix, rows, x = table.matrix, x.shape[0], strided(x)
    # Tiles are multiplied in the type that both have, everything else in float32.
    dot, precision = dot_type(x.dtype if x.dtype == matrix.dtype else torch.float32)
    fits = out.shape == (rows, matrix.columns) and x.shape[1] == matrix.inner and len(slots) == rows
    if not fits or (matrix.columns > 1 and out.stride(1) != 1):
        raise ValueError(f"add_low_rank: {tuple(x.shape)} and {tuple(out.shape)} are not rows of {matrix}")
    by_row = rows <= _BY_ROW and not fixed
    sizes = _row_sizes(matrix) if by_row else _tile_sizes(matrix, wide=dot == tl.float32, fixed=fixed)
    row_tiles, tiles = -(-rows // sizes.rows), matrix.columns // sizes.columns + len(matrix.parts)
    splits = 1 if fixed else _splits(row_tiles, -(-matrix.inner // sizes.inner), device)
    low = torch.empty(rows, splits, matrix.rank, dtype=torch.float32, device=x.device)
    same: dict[str, Any] = {
        "SLOTS": len(table.changes),
        "PARTS": len(matrix.parts),
        "KIND": _TYPES[matrix.dtype],
        "BLOCK_R": sizes.ranks,
        "num_warps": 4,
    }
    of_down = {"BLOCK_K": sizes.inner}
    of_up = {"ALIGNED": all(columns % 16 == 0 for columns in matrix.parts), "BLOCK_N": sizes.columns}
    from_x, to_out = (x, x.stride(0), slots, table.entries, low), (slots, table.entries, low, out, out.stride(0))
    inner, columns = (matrix.inner, splits, matrix.rank), (matrix.columns, splits, matrix.rank)
    if by_row:
        launch(programs.low_rank_down_by_row_kernel, (rows, splits), x, *from_x, *inner, **same, **of_down)
        launch(programs.low_rank_up_by_row_kernel, (tiles, rows), x, *to_out, *columns, **same, **of_up)
        return
    same |= {"DOT": dot, "PRECISION": precision, "BLOCK_M": sizes.rows}
    launch(programs.low_rank_down_kernel, (row_tiles, splits), x, *from_x, rows, *inner, **same, **of_down)
    launch(programs.low_rank_up_kernel, (tiles, row_tiles), x, *to_out, rows, *columns, **same, **of_up)


def _row_sizes(matrix: LowRankTarget) -> _LowRankTile:
    return _LowRankTile(1, max(PANEL_COLUMNS, min(256, power_of_two(matrix.columns))), 16, 256)


def _tile_sizes(matrix: LowRankTarget, *, wide: bool, fixed: bool) -> _LowRankTile:
    """wide: whether numbers are multiplied in float32, one by one and out of registers."""
    if wide:
        return _LowRankTile(16 if fixed else 32, 64, 16, 32)
    return _LowRankTile(16 if fixed else 64, 64, min(32, power_of_two(matrix.rank, 16)), 64)


def _splits(row_tiles: int, parts: int, device: Device) -> int:
    """Of K, so that every processor has a program. parts: of K that there are."""
    return max(1, min(_MOST_SPLITS, parts, device.processors // max(row_tiles, 1)))
