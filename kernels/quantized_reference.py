"""Quantized weights in plain torch: the oracle of the compiled kernels, and what runs where those were not compiled.

Integer sums are formed in float64, where they are exact in any order, so a row's bits depend on that row only. Rounding is
to nearest, ties to even. Symmetric scales: largest magnitude / 127, over a whole row of x for weights of 8 bits, over groups
of 32 for 4 bits. Values below 2^-100 count as zeros; a row, or a group, that holds NaN or infinity gets the scale NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.packed import GROUP, PackedRows, PackedWeight, integers, store

TINY = 2.0**-100
_CHUNK = 1 << 22  # weights turned into float64 at a time
# Where the value of largest magnitude may fall on the grid -8 .. 7; past its end it is clipped.
RANGES = tuple(7.0 + 0.25 * i for i in range(9))


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
    """Rows of x, float32 [R, K], as int8 in -8 .. 7 and bfloat16 scales [R, groups]: of RANGES, the least squared error."""
    groups = _in_groups(x)  # [R, G, 32]
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    finite, usable = groups.isfinite().all(2, keepdim=True), extreme.abs() >= TINY
    unit = torch.where(finite & usable, groups / extreme, 0.0)
    best, chosen = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for by in (*(-r for r in RANGES), *(r - 1.0 for r in RANGES)):
        q = (unit * by).round().clamp(-8, 7)
        xq, qq = (unit * q).sum(2, keepdim=True), (q * q).sum(2, keepdim=True).clamp_min(1e-30)
        better = xq * xq / qq > best
        best, chosen = torch.where(better, xq * xq / qq, best), torch.where(better, xq / qq * extreme, chosen)
    scale = torch.where(finite, chosen, torch.nan).to(torch.bfloat16)
    inverse = torch.where(finite & usable, 1.0 / scale.float(), 0.0)
    q = torch.where(inverse == 0, 0.0, (groups * inverse).round().clamp(-8, 7)).to(torch.int8)
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
