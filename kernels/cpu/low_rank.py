"""What adapters add to products, through the compiled kernels. Knows shapes and types; nothing of adapters' files."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.cpu.structs import LowRankFields, LowRankPartFields
from windlass.kernels.layouts.low_rank import PANEL_COLUMNS, PANEL_ROWS, STRIP, LowRankPart, LowRankTable, LowRankUpdate


class CompiledLowRankTable(LowRankTable):
    """The same as C reads it. columns, inner: of the matrix."""

    def __init__(self, slots: int, columns: int, inner: int) -> None:
        super().__init__(slots)
        self.columns, self.inner = columns, inner
        self._entries = (LowRankFields * slots)()
        self._parts: list[ctypes.Array[LowRankPartFields] | None] = [None] * slots
        self.address = ctypes.addressof(self._entries)

    def put(self, slot: int, change: LowRankUpdate | None) -> None:
        """Raises ValueError for a change of another matrix."""
        if change is None:
            self._entries[slot] = LowRankFields()
            self._parts[slot] = None
        else:
            self._check(change)
            parts = (LowRankPartFields * len(change.parts))(*map(_low_rank_fields, change.parts))
            down = change.down
            sizes = TYPE_CODES[down.dtype], change.rank, len(parts)
            self._entries[slot] = LowRankFields(down.data_ptr(), *sizes, ctypes.addressof(parts))
            self._parts[slot] = parts
        super().put(slot, change)

    def _check(self, change: LowRankUpdate) -> None:
        down = change.down
        wanted = (-(-change.rank // PANEL_ROWS), -(-self.inner // STRIP), PANEL_ROWS, STRIP)
        check(
            down.dtype in TYPE_CODES
            and down.is_cpu
            and down.is_contiguous()
            and down.shape == wanted
            and change.inner == self.inner,
            f"low rank: A [R, {change.inner}] is {down.dtype} {tuple(down.shape)}, not contiguous floats {wanted} for "
            f"[R, {self.inner}]",
        )
        for part in change.parts:
            shape = (-(-part.columns // PANEL_COLUMNS), part.rank, PANEL_COLUMNS)
            check(
                part.up.dtype in TYPE_CODES and part.up.is_cpu and part.up.is_contiguous() and part.up.shape == shape,
                f"low rank: B is {part.up.dtype} {tuple(part.up.shape)}, not contiguous floats {shape}",
            )
            check(
                0 <= part.first <= part.first + part.columns <= self.columns
                and 0 <= part.rank_first <= part.rank_first + part.rank <= change.rank,
                f"low rank: a part lies outside [{self.columns}, {change.rank}]",
            )


def _low_rank_fields(part: LowRankPart) -> LowRankPartFields:
    sizes = TYPE_CODES[part.up.dtype], part.first, part.columns, part.rank_first, part.rank
    return LowRankPartFields(part.up.data_ptr(), *sizes, part.scale)


def add_low_rank(out: Tensor, x: Tensor, table: CompiledLowRankTable, slots: Tensor, *, library: Library) -> None:
    """See `Backend.add_low_rank`. out, x: float32, bfloat16 or float16, of one type, with adjacent elements in a row.

    Raises ValueError, IndexError for a slot that the table lacks, and MemoryError.
    """
    rows, inner = x.shape
    check(
        x.dtype == out.dtype
        and x.dtype in TYPE_CODES
        and x.is_cpu
        and out.is_cpu
        and out.shape == (rows, table.columns)
        and inner == table.inner
        and (inner < 2 or x.stride(1) == 1)
        and (table.columns < 2 or out.stride(1) == 1),
        f"add_low_rank: {out.dtype} {tuple(out.shape)} and {x.dtype} {tuple(x.shape)} are not [T, {table.columns}] and "
        f"[T, {table.inner}] of one type with adjacent elements",
    )
    check(vector_ok(slots, torch.int64, rows), f"add_low_rank: slots are {slots.dtype} {tuple(slots.shape)}")
    code = library.add_low_rank(
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        TYPE_CODES[x.dtype],
        slots.data_ptr(),
        rows,
        inner,
        table.address,
        len(table.changes),
    )
    if code == 2:
        raise IndexError(f"add_low_rank: a row's slot is not one of {len(table.changes)}")
    if code:
        raise MemoryError("add_low_rank: no memory")
