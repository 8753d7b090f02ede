"""Low-rank weights: LoRA updates of a matrix, x A^T B^T, in panels, and the table of updates that rows select by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.device_memory import to_device

PANEL_COLUMNS = 32  # of B^T

PANEL_ROWS, STRIP = 4, 16  # of A


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """The update of columns first .. first + columns of the product, from numbers rank_first .. rank_first + r of x A^T.

    up: [columns / 32 rounded up, r, 32], B^T in consecutive panels of columns, padded with zeros.
    """

    first: int
    columns: int
    rank_first: int
    up: Tensor
    scale: float

    @classmethod
    def of(cls, up: Tensor, first: int, rank_first: int, scale: float) -> LowRankPart:
        """up: B [columns, r]."""
        columns, rank = up.shape
        padded = F.pad(up, (0, 0, 0, -columns % PANEL_COLUMNS))
        panels = padded.view(-1, PANEL_COLUMNS, rank).transpose(1, 2).contiguous()
        return cls(first, columns, rank_first, panels, scale)

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    def plain(self) -> Tensor:
        """A copy of B as [columns, r]."""
        return self.up.transpose(1, 2).reshape(-1, self.rank)[: self.columns]


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """An update of a matrix. A fused matrix has one part for each of its matrices that has an update; ranks and types may
    differ.

    down: [R / 4, K / 16, 4, 16], both rounded up: A of all parts in panels of four rows, strip by strip, padded with zeros.
    """

    rank: int
    inner: int
    down: Tensor
    parts: tuple[LowRankPart, ...]

    @classmethod
    def of(cls, down: Tensor, parts: Sequence[LowRankPart]) -> LowRankUpdate:
        """down: A [R, K]."""
        rank, inner = down.shape
        padded = F.pad(down, (0, -inner % STRIP, 0, -rank % PANEL_ROWS))
        panels = padded.view(-1, PANEL_ROWS, padded.shape[1] // STRIP, STRIP).transpose(1, 2).contiguous()
        return cls(rank, inner, panels, tuple(parts))

    def plain(self) -> Tensor:
        """A copy of A as [R, K]."""
        return self.down.transpose(1, 2).reshape(-1, self.down.shape[1] * STRIP)[: self.rank, : self.inner]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(part.up.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class LowRankTarget:
    """A matrix with low-rank updates, and their limits for tables of fixed size and type.

    parts: columns of the product of each fused matrix; an update has parts for some of them. inner: K. rank: largest total
    rank of an update. dtype: of its numbers.
    """

    parts: tuple[int, ...]
    inner: int
    rank: int
    dtype: torch.dtype = torch.float32

    @property
    def columns(self) -> int:
        return sum(self.parts)


class LowRankTable:
    """Updates of one matrix by slot.

    The table stays in place: recorded and captured steps read its current contents when they are repeated.
    """

    def __init__(self, slots: int) -> None:
        self.changes: list[LowRankUpdate | None] = [None] * slots

    def put(self, slot: int, update: LowRankUpdate | None) -> None:
        """Set the update of a slot from the next step on; None removes it. Never called while a step runs; an asynchronous
        device orders it after all submitted work."""
        self.changes[slot] = update


class AdapterSlots:
    """The slot in the tables of each row of a step, -1 for none.

    slots: [T] int64, on the host, where it may be rewritten; for steps that a device advances by itself, on that device.
    """

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self._segments: tuple[tuple[int, Tensor | None], ...] | None = None
        self._sent: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The slots on a device, without waiting; copied there at most once per step."""
        if self.slots.device.type == device.type:
            return self.slots
        if self._sent is None:
            self._sent = to_device(self.slots, device)
        return self._sent

    def at(self, rows: Tensor) -> AdapterSlots:
        """The slots of these rows. rows: [n] int64."""
        return AdapterSlots(self.on(rows.device)[rows])

    def segments(self, device: torch.device) -> Sequence[tuple[int, Tensor | None]]:
        """Each used slot with its rows, int64 [n] on the device, or None for all rows. Computed once per step."""
        if self._segments is None:
            rows: dict[int, list[int]] = {}
            for row, slot in enumerate(self.slots.tolist()):
                rows.setdefault(slot, []).append(row)
            whole = len(rows) == 1
            self._segments = tuple(
                (slot, None if whole else to_device(torch.tensor(own), device))
                for slot, own in rows.items()
                if slot >= 0
            )
        return self._segments
