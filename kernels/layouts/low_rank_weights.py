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
    """The change of columns first .. first + columns of the product, by numbers rank_first .. rank_first + r of x A^T.

    up: [columns / 32 rounded up, r, 32], B^T in panels of columns, one after the other; past the last column are zeros.
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
        """B [columns, r] again, a copy."""
        return self.up.transpose(1, 2).reshape(-1, self.rank)[: self.columns]


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """A fused matrix has a part for each of the matrices that it is made of and that change; ranks and types may differ.

    down: [R / 4, K / 16, 4, 16], both rounded up: A of all parts, four rows at a time, strip by strip; zeros past the ends.
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
        """A [R, K] again, a copy."""
        return self.down.transpose(1, 2).reshape(-1, self.down.shape[1] * STRIP)[: self.rank, : self.inner]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(part.up.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class LowRankTarget:
    """A matrix whose product changes, and what a change may be, where a table has one size and one type for all.

    parts: columns of the product of each of the matrices that it is made of; a change has a part for some of them. inner: K.
    rank: of a change at most, all parts together. dtype: of numbers.
    """

    parts: tuple[int, ...]
    inner: int
    rank: int
    dtype: torch.dtype = torch.float32

    @property
    def columns(self) -> int:
        return sum(self.parts)


class LowRankTable:
    """The changes of one matrix that rows of a step may have, by slot. It holds what is put in.

    It stays where it is: a recording that names it, or a captured step, finds what stands there when it is repeated.
    """

    def __init__(self, slots: int) -> None:
        self.changes: list[LowRankUpdate | None] = [None] * slots

    def put(self, slot: int, change: LowRankUpdate | None) -> None:
        """From the next step on, rows of this slot have this change; None for none. Never called while a step runs: a device that
        runs beside its host does this behind all that it was asked for."""
        self.changes[slot] = change


class AdapterSlots:
    """Of each row of a step its slot in the tables, -1 for none.

    slots: [T] int64, on the host, where it may be filled in again; of steps that a device goes on with by itself, on that.
    """

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self._segments: tuple[tuple[int, Tensor | None], ...] | None = None
        self._sent: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The slots on a device, without a wait: sent there once per step, unless they lie there."""
        if self.slots.device.type == device.type:
            return self.slots
        if self._sent is None:
            self._sent = to_device(self.slots, device)
        return self._sent

    def at(self, rows: Tensor) -> AdapterSlots:
        """Of these rows alone. rows: [n] int64."""
        return AdapterSlots(self.on(rows.device)[rows])

    def segments(self, device: torch.device) -> Sequence[tuple[int, Tensor | None]]:
        """Each slot that rows have, with those rows, int64 [n] on the device; None for all of them. Asked once per step."""
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
