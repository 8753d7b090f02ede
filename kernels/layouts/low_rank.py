"""A low-rank change of a matrix: what is added to its product, x A^T B^T, without the matrix being touched."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """The change of columns first .. first + N of the product, by numbers rank_first .. rank_first + r of x A^T."""

    first: int
    rank_first: int
    up: Tensor  # [r, N]: B^T, scaled, contiguous


@dataclass(frozen=True, slots=True)
class LowRank:
    """A fused matrix has a part for each of the matrices that it is made of and that change; ranks may differ."""

    down: Tensor  # [R, K]: A of all parts, contiguous
    parts: tuple[LowRankPart, ...]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(part.up.nbytes for part in self.parts)
