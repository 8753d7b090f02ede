"""Weights of 8 or 4 bits, packed once at load: the type, its layout, and how rows get into it and out again.

Knows the layout that the compiled kernels read and plain torch can produce; which backend packs or multiplies is not
its business. The layout: panels of 16 rows; in a panel, for each four elements of K (a quad), the quads of its 16
rows side by side. 8 bits: an int8 each and a float32 scale per row, values in -127 .. 127. 4 bits: values -8 .. 7 kept plus
8, a byte holds the element of quad 2j in its lower half and that of quad 2j + 1 in its upper half; a bfloat16 scale for
every 32 elements of K. Rows are padded to whole panels and K to whole quads (8 bits) or groups (4 bits).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

# Packed weights are kept on disk: raise it when the layout or the rounding changes.
LAYOUT_VERSION = 2

PANEL = 16
GROUP = 32
MAX_COLUMNS = 1 << 17  # int32 sums of products of at most 127 * 127, and 128 times the sum of x, stay below 2^31

Bits: TypeAlias = Literal[8, 4]
# Makes an uninitialised contiguous CPU tensor of a shape and a type.
Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocate_plainly(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [rows, columns] in panels.

    data: uint8 [panels, quads, 16, 4] (8 bits: the bytes of int8) or [panels, groups, 4, 16, 4] (4 bits).
    scales: float32 [panels * 16] or bfloat16 [panels, groups, 16].
    """

    bits: Bits
    rows: int
    columns: int
    data: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, bits: Bits, allocate: Allocate = allocate_plainly) -> PackedWeight:
        """Room for a weight; rows and columns of padding hold zeros, the rest nothing in particular.

        allocate: where from. Raises ValueError for more columns than int32 sums allow.
        """
        if not 0 < columns <= MAX_COLUMNS:
            raise ValueError(f"a packed weight has 1 to {MAX_COLUMNS} columns, not {columns}")
        panels = -(-rows // PANEL)
        if bits == 8:
            data = allocate((panels, -(-columns // 4), PANEL, 4), torch.uint8)
            scales = allocate((panels * PANEL,), torch.float32)
            scales[rows:] = 0.0
        else:
            groups = -(-columns // GROUP)
            data = allocate((panels, groups, GROUP // 8, PANEL, 4), torch.uint8)
            scales = allocate((panels, groups, PANEL), torch.bfloat16)
            if rows % PANEL:
                scales[-1, :, rows % PANEL :] = 0.0
        if rows % PANEL:
            data[-1, ..., rows % PANEL :, :] = 0 if bits == 8 else 0x88
        return cls(bits, rows, columns, data, scales)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.columns))

    @property
    def device(self) -> torch.device:
        return self.data.device

    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding and scales included."""
        return self.data.nbytes + self.scales.nbytes

    def narrow(self, first: int, count: int) -> PackedRows:
        """Rows first .. first + count, to be written to. Raises IndexError for rows it does not have."""
        if first < 0 or count < 0 or first + count > self.rows:
            raise IndexError(f"rows {first} .. {first + count} of a weight of {self.rows}")
        return PackedRows(self, first, count)

    def dequantize(self, ids: Tensor | None = None) -> Tensor:
        """The rows `ids` (any shape), or all of them, as they are multiplied: float32 [..., columns]."""
        index = torch.arange(self.rows) if ids is None else ids
        flat = index.flatten()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.rows:
            raise IndexError(f"rows outside 0 .. {self.rows - 1}")
        panel, row = flat // PANEL, flat % PANEL
        values, scales = integers(self, flat).float(), self.scales
        if self.bits == 8:
            values *= scales[flat][:, None]
        else:
            values *= scales[panel, :, row].float().repeat_interleave(GROUP, dim=1)[:, : self.columns]
        return values.view(*index.shape, self.columns)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Consecutive rows of a PackedWeight, to be filled from a checkpoint's tensor."""

    weight: PackedWeight
    first: int
    count: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, self.weight.columns))


def integers(weight: PackedWeight, rows: Tensor) -> Tensor:
    """The quantized values of some rows, without their scales: int8 [len(rows), columns]."""
    panel, row = rows // PANEL, rows % PANEL
    if weight.bits == 8:
        return weight.data[panel, :, row].view(torch.int8).flatten(1)[:, : weight.columns]
    both = weight.data[panel, :, :, row]  # [R, groups, 4, 4]
    halves = torch.stack((both & 0x0F, both >> 4), dim=3)  # [R, groups, 4, 2, 4]
    return (halves.view(torch.int8) - 8).flatten(1)[:, : weight.columns]


def store(target: PackedRows, values: Tensor, scales: Tensor) -> None:
    """Write quantized rows. values: int8 [count, columns]; scales: [count] or [count, groups]."""
    weight = target.weight
    rows = torch.arange(target.first, target.first + target.count)
    panel, row = rows // PANEL, rows % PANEL
    unit = 4 if weight.bits == 8 else GROUP
    values = torch.nn.functional.pad(values, (0, -weight.columns % unit))
    if weight.bits == 8:
        weight.data[panel, :, row] = values.view(target.count, -1, 4).view(torch.uint8)
        weight.scales[rows] = scales
    else:
        halves = (values + 8).view(torch.uint8).view(target.count, -1, GROUP // 8, 2, 4)
        weight.data[panel, :, :, row] = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)
        weight.scales[panel, :, row] = scales.to(torch.bfloat16)
