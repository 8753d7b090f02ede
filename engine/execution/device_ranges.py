"""The slot ranges of decode steps' rows in a device's memory, and what a step that was captured takes of them.

A step has room for so many rows and so many ranges of each, and every row has as many versions of its query, less one: what is
none is never met. Responsible for that memory and for what follows from it and the rows' positions: see `row_ranges`, and
`ranges` for the words and an example.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.engine.execution.row_ranges import COPIES, ENDS, GAPS, LAST_UNCLAMPED, NUM_MISSING, REACHES, ROTATIONS
from windlass.engine.model.batch import RotatedQueryCopies
from windlass.engine.rotary.tables import RotaryTables


class DeviceQueryRanges:
    """cells: rows times ranges of a step at most. windows: how many kinds the layers have. anchored: see `query_ranges`."""

    def __init__(self, rotary: RotaryTables, *, cells: int, windows: int, absolute_scores: bool) -> None:
        self._rotary, self._absolute_scores, self._device = rotary, absolute_scores, rotary.inv_freq.device
        self.fields, self.cells = REACHES + windows, cells
        self._numbers = torch.zeros(self.fields * cells, dtype=torch.int64, device=self._device)

    def load(self, numbers: Tensor) -> None:
        """Let these be the numbers. numbers: int64 [fields * rows * ranges], in the host's memory."""
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)

    def query_copies(
        self, rows: int, ranges: int, positions: Tensor, rotary: Tensor
    ) -> tuple[RotatedQueryCopies, Tensor]:
        """Of a step of so many rows and ranges, 2 at least; and positions as if what is missing before them had never been.

        positions, rotary: [rows] int64, where they stand and whose frequencies they have.
        """
        numbers = self._numbers[: self.fields * rows * ranges].view(self.fields, rows, ranges)
        own = torch.arange(rows, device=self._device).unsqueeze(1)  # [B, 1]
        each = ranges - 1
        sources = own.expand(rows, each).reshape(-1)  # [V]
        version, copy_table = numbers[COPIES], numbers[:, :, :each]
        unrotated_rows = torch.where(version < 0, version, own)
        rotations = copy_table[ROTATIONS] + (copy_table[LAST_UNCLAMPED] - positions.unsqueeze(1)).clamp(max=0)
        cos, sin = self._rotary.angles(rotary.index_select(0, sources), rotations.reshape(-1))
        closed = numbers[NUM_MISSING, :, 0]
        found = RotatedQueryCopies(
            ends=numbers[ENDS],
            rows=torch.where(version > 0, rows - 1 + own * each + version, unrotated_rows),
            unrotated_rows=unrotated_rows,
            reaches=numbers[REACHES:],
            gaps=numbers[GAPS],
            sources=sources,
            cos=cos,
            sin=sin,
        )
        if self._absolute_scores:
            found.anchor_cos, found.anchor_sin = self._rotary.angles(rotary, -closed)
            found.query_indices = own.squeeze(1)
        return found, positions - closed
