"""Products with weights in blocks in plain torch: the oracle of the compiled kernels, and what runs where there are none.

Rows of x are rounded to 8 bits group by group, symmetrically: the scale is the largest magnitude / 127, rounding is to nearest
with ties to even, values below 2^-100 count as zeros, and a group that holds NaN or infinity gets the scale NaN. Integer sums are
formed in float64, where they are exact in any order. What follows is float32, group after group, in the order of the compiled
kernels; those may fuse a product with its addition, so the two agree to the rounding of one sum per group. A row's bits depend
on that row only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.layouts.blocks import BlockWeight, group_scales, unpack_codes

TINY = 2.0**-100
_CHUNK = 1 << 22  # weights turned into float64 at a time, in groups
_WIDENED = 1 << 21  # into float32: 8 MiB


def round_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [M, K] float32 in groups of K, padded with zeros: int8 [M, G, group] in -127 .. 127, and float32 scales [M, G]."""
    groups = F.pad(x, (0, -x.shape[1] % group)).view(x.shape[0], -(-x.shape[1] // group), group)
    largest = groups.abs().amax(dim=2)
    usable = largest.isfinite() & (largest >= TINY)
    scale = torch.where(largest < TINY, 0.0, largest * (1.0 / 127.0)).where(largest.isfinite(), torch.nan)
    # Not 127 / largest, which torch forms as a product with the reciprocal.
    by = torch.where(usable, torch.full_like(largest, 127.0) / largest, 0.0)[:, :, None]
    return torch.where(by == 0, 0.0, (groups * by).round()).to(torch.int8), scale


def linear_blocks(x: Tensor, weight: BlockWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias of x rounded to 8 bits. x: [M, K]; returns [M, N] in x's dtype. See the module."""
    values, scale = round_groups(x.float(), weight.form.group)
    rounded = values.double().transpose(0, 1)  # [G, M, group]
    totals = rounded.sum(2)  # [G, M]
    out = torch.empty(x.shape[0], weight.rows, dtype=torch.float32, device=x.device)
    step = max(1, _CHUNK // weight.columns)
    for begin in range(0, weight.rows, step):
        rows = torch.arange(begin, min(begin + step, weight.rows), device=x.device)
        codes = unpack_codes(weight, rows).double().permute(1, 2, 0)  # [G, group, R]
        own, minimum = group_scales(weight, rows)  # [R, G, 1]
        part = torch.zeros(x.shape[0], len(rows), device=x.device)
        for g in range(codes.shape[0]):
            sums = rounded[g] @ codes[g] - weight.form.offset * totals[g, :, None]
            part += sums.float() * (own[:, g, 0] * scale[:, g, None])
            if minimum is not None:
                part += minimum[:, g, 0] * (scale[:, g] * totals[g].float())[:, None]
        out[:, begin : begin + len(rows)] = part
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


def linear_blocks_widened(x: Tensor, weight: BlockWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias with nothing rounded: some rows of the weight at a time become float32 for torch's product.

    x: [M, K]; returns [M, N] in x's dtype.
    """
    wide = x.float()
    out = torch.empty(x.shape[0], weight.rows, dtype=torch.float32, device=x.device)
    for rows, numbers in widened_block_rows(weight):
        torch.mm(wide, numbers.t(), out=out[:, rows])
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


def widened_block_rows(weight: BlockWeight) -> Iterator[tuple[slice, Tensor]]:
    """All rows of a weight in order, 8 MiB at a time: which they are, and their numbers as float32 [rows, columns]."""
    step = max(1, _WIDENED // weight.columns)
    for begin in range(0, weight.rows, step):
        end = min(begin + step, weight.rows)
        yield slice(begin, end), weight.dequantize(torch.arange(begin, end, device=weight.device))
