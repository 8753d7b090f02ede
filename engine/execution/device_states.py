"""Whose states the rows of decode steps change, in a device's memory, where captured steps find them, whatever their number.

Responsible for those numbers alone: it knows no model, and no states themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.execution.state_rows import StateRowArrays

_NONE = -1  # the block of rows that are none


class DeviceStateRows:
    """most: rows at once. A captured step takes one sequence more than it has rows: of the rows that are none."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._numbers = torch.zeros(self.shape(most), dtype=torch.int64, device=device)
        self._none = torch.full((1,), _NONE, dtype=torch.int64, device=device)

    @staticmethod
    def shape(most: int) -> tuple[int, int]:
        """Of what the host says: blocks, starts, lengths, kept."""
        return 4, most + 1

    def batch_fields(self, rows: int) -> dict[str, Any]:
        """The fields of a batch of the first `rows` rows that tell whose states they change, see `StateRows`."""
        blocks, starts, lengths, kept = self._numbers.unbind(0)
        return {
            "state_blocks": torch.cat((blocks[:rows], self._none)),
            "state_starts": torch.cat((starts[: rows + 1], torch.full_like(self._none, rows))),
            "state_lengths": torch.cat((lengths[:rows], self._none)),
            "state_snapshots": kept[:rows],
        }

    def forget(self) -> None:
        """Let no row change a state."""
        self._numbers[1].zero_()
        self._numbers[3].fill_(_NONE)

    def load(self, staged: Tensor) -> None:
        """Take over what `write_state_rows` has written."""
        self._numbers.copy_(staged, non_blocking=True)


def write_state_rows(numbers: StateRowArrays, staged: Tensor) -> None:
    """Write what a step says into host memory of `DeviceStateRows.shape`. Of rows behind its own, no sequence has any."""
    to: NDArray[np.int64] = staged.numpy()
    rows = len(numbers.kept)
    to[0, :rows], to[1, : rows + 1], to[2, :rows], to[3, :rows] = numbers
    to[1, rows + 1 :] = rows
    to[3, rows:] = _NONE
