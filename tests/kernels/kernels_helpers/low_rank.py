"""Random low-rank updates of matrices, and the products with them in float64."""

from __future__ import annotations

import torch

from windlass.kernels import LowRankPart, LowRankUpdate

Expected = tuple[torch.Tensor, torch.Tensor]


def change(columns: list[int], inner: int, ranks: list[int], *, down: torch.dtype, up: torch.dtype) -> LowRankUpdate:
    """Return an update of a matrix with parts of these columns. A part of rank 0 does not change."""
    parts, first, rank_first = [], 0, 0
    for size, rank in zip(columns, ranks, strict=True):
        if rank:
            parts.append(LowRankPart.of(torch.randn(size, rank).to(up), first, rank_first, 0.5 + rank))
        first, rank_first = first + size, rank_first + rank
    return LowRankUpdate.of(torch.randn(rank_first, inner).to(down), parts)


def expected(out: torch.Tensor, x: torch.Tensor, changes: list[LowRankUpdate | None], slots: list[int]) -> Expected:
    """Return the float64 result, and the sum of magnitudes that limits rounding errors."""
    wanted, size = out.double(), out.double().abs()
    for row, slot in enumerate(slots):
        own = changes[slot] if slot >= 0 else None
        for part in own.parts if own is not None else ():
            a, b = (
                own.plain()[part.rank_first : part.rank_first + part.rank].double(),
                part.plain().double() * part.scale,
            )
            here = slice(part.first, part.first + part.columns)
            wanted[row, here] += b @ (a @ x[row].double())
            size[row, here] += b.abs() @ (a.norm(dim=1) * x[row].double().norm())
    return wanted, size
