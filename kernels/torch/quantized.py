"""Quantized weights in plain torch: the oracle of the compiled kernels, and what runs where those were not compiled.

Integer sums are formed in float64, where they are exact in any order, so a row's bits depend on that row only. Rounding is
to nearest, ties to even. Symmetric scales: largest magnitude / 127, over a whole row of x for weights of 8 bits, over groups
of 32 for 4 bits. Values below 2^-100 count as zeros; a row, or a group, that holds NaN or infinity gets the scale NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.layouts.packed import GROUP, PackedRows, PackedWeight, integers, store

TINY = 2.0**-100
_CHUNK = 1 << 22  # weights turned into float64 at a time
# Where the value of largest magnitude may fall on the grid -8 .. 7, in quarters; past its end it is clipped. It comes out
# negative under the first of these factors: that side has room for -8.
FACTORS = (*(-r for r in range(28, 37)), *(r - 4 for r in range(28, 37)))
UNITS = 8192.0  # of which the largest magnitude has 2^13 while factors are tried: products with quarters, over 2^15, are integers


def pack(target: PackedRows, source: Tensor) -> None:
    """Quantize source [count, columns], any float type, into rows of a packed weight."""
    source = source.float()
    quantize = quantize_eight if target.weight.bits == 8 else quantize_four
    store(target, *quantize(source))


def quantize_eight(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x, float32 [R, K], as int8 in -127 .. 127 and float32 scales [R]."""
    largest = x.abs().amax(dim=-1)
    usable = largest.isfinite() & (largest >= TINY)
    scale = torch.where(largest < TINY, 0.0, largest * (1.0 / 127.0)).where(largest.isfinite(), torch.nan)
    # Not 127 / largest, which torch forms as a product with the reciprocal.
    by = torch.where(usable, torch.full_like(largest, 127.0) / largest, 0.0)[:, None]
    return torch.where(by == 0, 0.0, (x * by).round()).to(torch.int8), scale


def quantize_four(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x, float32 [R, K], as int8 in -8 .. 7 and bfloat16 scales [R, groups]: of FACTORS, the least squared error.

    They are tried on x rounded to 14 bits, in integers, so that the choice is the same wherever it is made; with both signs
    turned, so that a tie, which goes upwards, takes the largest magnitude from 7.5 to -8.
    """
    groups = _in_groups(x)  # [R, G, 32]
    finite, largest = groups.isfinite().all(2, keepdim=True), groups.abs().amax(2, keepdim=True)
    usable = finite & (largest >= TINY)
    extreme = torch.where(groups.amax(2, keepdim=True) == largest, largest, -largest)
    unit = torch.where(usable, torch.full_like(extreme, -UNITS) / extreme, 0.0)
    whole = torch.where(usable, groups * unit, 0.0).round().int()
    square, norm, products = torch.zeros_like(extreme), torch.ones_like(extreme), torch.zeros_like(extreme)
    for quarters in FACTORS:
        q = (whole * quarters + (1 << 14) >> 15).clamp(-7, 8)
        # Both sums stay below 2^24: float32 has them exactly.
        xq, qq = (whole * q).sum(2, keepdim=True).float(), (q * q).sum(2, keepdim=True).float()
        better = xq * xq * norm > square * qq
        square, norm = torch.where(better, xq * xq, square), torch.where(better, qq, norm)
        products = torch.where(better, xq, products)
    chosen = torch.where(usable, products / norm * (extreme * (1.0 / UNITS)), 0.0)
    scale = torch.where(finite, chosen, torch.nan).to(torch.bfloat16)
    inverse = torch.where(usable, 1.0 / scale.float(), 0.0)
    q = torch.where(usable, (groups * inverse).round().clamp(-8, 7), 0.0).to(torch.int8)
    return q.flatten(1)[:, : x.shape[1]], scale[:, :, 0]


def _in_groups(x: Tensor) -> Tensor:
    groups = -(-x.shape[1] // GROUP)
    return F.pad(x, (0, -x.shape[1] % GROUP)).view(x.shape[0], groups, GROUP)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias of x rounded to 8 bits. x: [M, K]; returns [M, N] in x's dtype. See the module."""
    wide = x.float()
    out = torch.empty(x.shape[0], weight.rows, dtype=torch.float32)
    step = max(1, _CHUNK // weight.columns)
    for begin in range(0, weight.rows, step):
        rows = torch.arange(begin, min(begin + step, weight.rows))
        out[:, rows] = _eight(wide, weight, rows) if weight.bits == 8 else _four(wide, weight, rows)
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


def _eight(x: Tensor, weight: PackedWeight, rows: Tensor) -> Tensor:
    values, scale = quantize_eight(x)
    sums = values.double() @ integers(weight, rows).double().T
    return sums.float() * (scale[:, None] * weight.scales[rows])


def _four(x: Tensor, weight: PackedWeight, rows: Tensor) -> Tensor:
    groups = _in_groups(x)
    values, scale = quantize_eight(groups.reshape(-1, GROUP))
    values, scale = values.view(groups.shape).double(), scale.view(groups.shape[:2])
    own = _in_groups(integers(weight, rows).double())  # [R, G, 32]
    own_scale = weight.scales[rows // 16, :, rows % 16].float()
    out = torch.zeros(x.shape[0], len(rows))
    for g in range(groups.shape[1]):
        sums = values[:, g] @ own[:, g].T
        out += sums.float() * (scale[:, g, None] * own_scale[:, g])
    return out
