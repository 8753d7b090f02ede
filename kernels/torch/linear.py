"""Linear layers in plain torch: float weights, converted panel by panel if narrow, and block weights.

For block weights, rows of x are rounded to 8 bits group by group, symmetrically: scale = max|x| / 127, round to nearest, ties
to even. Values below 2^-100 count as zero; a group with NaN or infinity has the scale NaN. Integer sums are exact (float64).
The rest is float32, group by group, in the order of the compiled kernels, which may fuse a product with its addition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.layouts.weight_layouts import BlockWeight, group_scales, unpack_codes

_PANEL_BYTES = 8 << 20  # float32 weights converted at a time; they stay in the last-level cache for the product


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 natively; elsewhere library products emulate it, several times slower."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()) or multiplies_tiles()


@functools.cache
def multiplies_tiles() -> bool:
    """Whether this processor multiplies tiles of bfloat16 (AMX), far faster than with vector instructions."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def widens(device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether products of such rows and weights use `linear_widened`: on a CPU sums are float32."""
    if device.type != "cpu" or weight_dtype == torch.float32:
        return False
    return not (dtype == weight_dtype == torch.bfloat16 and multiplies_bfloat16())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [M, K]. weight: [N, K] in x's dtype or a narrower one. Returns [M, N] in x's dtype."""
    return F.linear(x, weight.to(x.dtype), bias)


def linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for many rows and a narrow weight, converted in panels to float32 for torch's GEMM.

    x: [M, K] float32 or narrower. weight: [N, K] in any float type. The product is float32; returns [M, N] in x's dtype.
    Extra memory: one panel of 8 MiB (at least 64 rows of the weight), and x and the result in float32 if x is narrower.
    """
    columns, inner = weight.shape
    wide = x.float()
    out = torch.empty((x.shape[0], columns), dtype=torch.float32, device=x.device)
    step = min(columns, max(64, _PANEL_BYTES // (4 * max(inner, 1))))
    panel = torch.empty((step, inner), dtype=torch.float32, device=x.device)
    for begin in range(0, columns, max(step, 1)):
        end = min(begin + step, columns)
        part = panel[: end - begin].copy_(weight[begin:end])
        torch.mm(wide, part.t(), out=out[:, begin:end])
    if bias is not None:
        out += bias
    return out if x.dtype == torch.float32 else out.to(x.dtype)


TINY = 2.0**-100

_CHUNK = 1 << 22  # weights converted to float64 at a time, in groups

_WIDENED = 1 << 21  # into float32: 8 MiB


def round_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [M, K] float32 in groups of K, padded with zeros: int8 [M, G, group] in -127 .. 127, and float32 scales [M, G]."""
    groups = F.pad(x, (0, -x.shape[1] % group)).view(x.shape[0], -(-x.shape[1] // group), group)
    largest = groups.abs().amax(dim=2)
    usable = largest.isfinite() & (largest >= TINY)
    scale = torch.where(largest < TINY, 0.0, largest * (1.0 / 127.0)).where(largest.isfinite(), torch.nan)
    # Not 127 / largest, which torch computes as a product with the reciprocal.
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


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t())


def linear_blocks_widened(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    product: Callable[[Tensor, Tensor], Tensor] = _product,
) -> Tensor:
    """x @ weight.T + bias without rounding x: 8 MiB of the weight at a time are converted to float32 for a product.

    x: [M, K]; returns [M, N] in x's dtype. product: of float32 [M, K] and [n, K], [M, n].
    """
    wide = x.float()
    out = torch.empty(x.shape[0], weight.rows, dtype=torch.float32, device=x.device)
    step = max(1, _WIDENED // weight.columns)
    for begin in range(0, weight.rows, step):
        rows = torch.arange(begin, min(begin + step, weight.rows), device=weight.device)
        out[:, begin : begin + len(rows)] = product(wide, weight.dequantize(rows))
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)
