"""Weights of 16 bits in panels, laid out once at load: the type, its layout, and rows of it to be filled.

Knows the layout that the compiled kernels read at the memory's full speed; only they put rows into it and multiply by it.
The layout: panels of 16 rows; in a panel, for each two elements of K (a line of 64 bytes), those of its 16 rows. bfloat16:
the two elements of a row side by side. float16: the first elements of all rows, then the second ones. Rows are padded to
whole panels and K to whole lines, with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.kernels.layouts.blocks import PANEL, Allocate, allocate_default

PANEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A bfloat16 or float16 weight [rows, columns] in panels.

    data: [panels, lines, 16, 2] (bfloat16) or [panels, lines, 2, 16] (float16).
    """

    rows: int
    columns: int
    data: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, allocate: Allocate = allocate_default) -> PanelWeight:
        """Room for a weight; rows and columns of padding hold zeros, the rest nothing in particular.

        allocate: where from. Raises ValueError for other types than bfloat16 and float16.
        """
        if dtype not in PANEL_DTYPES:
            raise ValueError(f"a weight in panels is bfloat16 or float16, not {dtype}")
        line = (PANEL, 2) if dtype == torch.bfloat16 else (2, PANEL)
        weight = cls(rows, columns, allocate((-(-rows // PANEL), -(-columns // 2), *line), dtype))
        by_row = weight._by_row()
        if rows % PANEL:
            by_row[-1, rows % PANEL :] = 0
        if columns % 2:
            by_row[:, :, -1, 1] = 0
        return weight

    def _by_row(self) -> Tensor:
        """The data as [panels, 16, lines, 2], a view."""
        return self.data.permute(0, 2, 1, 3) if self.dtype == torch.bfloat16 else self.data.permute(0, 3, 1, 2)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.columns))

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding included."""
        return self.data.nbytes

    def narrow(self, first: int, count: int) -> PanelRows:
        """Rows first .. first + count, to be written to. Raises IndexError for rows it does not have."""
        if first < 0 or count < 0 or first + count > self.rows:
            raise IndexError(f"rows {first} .. {first + count} of a weight of {self.rows}")
        return PanelRows(self, first, count)

    def unpack(self) -> Tensor:
        """The weight as rows: [rows, columns] of its dtype, memory of its own."""
        return self._by_row().flatten(2).flatten(0, 1)[: self.rows, : self.columns].clone()


@dataclass(frozen=True, slots=True)
class PanelRows:
    """Consecutive rows of a PanelWeight, to be filled from a checkpoint's tensor."""

    weight: PanelWeight
    first: int
    count: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, self.weight.columns))
