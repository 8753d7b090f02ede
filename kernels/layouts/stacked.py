"""Weights whose rows are stored in several ways, one part under the other. Knows the parts by their shapes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from windlass.kernels.layouts.blocks import BlockRows, BlockWeight
from windlass.kernels.layouts.panels import PanelRows, PanelWeight

Part: TypeAlias = Tensor | PanelWeight | BlockWeight
PartRows: TypeAlias = Tensor | PanelRows | BlockRows


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """A weight [rows, columns] in parts [rows of the part, columns], in the order of its rows."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for parts that do not stand under each other."""
        if not self.parts or len({part.shape[1] for part in self.parts}) > 1:
            raise ValueError(f"parts of one weight have the same columns, not {[tuple(p.shape) for p in self.parts]}")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, padding and scales included."""
        return sum(part.nbytes for part in self.parts)

    def spans(self) -> list[tuple[Part, int, int]]:
        """Each part with its first row and the one after its last."""
        found, first = [], 0
        for part in self.parts:
            found.append((part, first, first + part.shape[0]))
            first += part.shape[0]
        return found

    def narrow(self, first: int, count: int) -> PartRows:
        """Rows first .. first + count, to be written to. Raises IndexError for rows that are not all of one part."""
        for part, begin, end in self.spans():
            if begin <= first and count >= 0 and first + count <= end:
                return (
                    part.narrow(0, first - begin, count)
                    if isinstance(part, Tensor)
                    else part.narrow(first - begin, count)
                )
        raise IndexError(
            f"rows {first} .. {first + count} are not all in one part of {[p.shape[0] for p in self.parts]}"
        )
