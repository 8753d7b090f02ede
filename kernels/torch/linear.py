"""Products with plain weights in torch: as torch has them, or with narrow weights widened a panel at a time.

Knows shapes, types and what processors are good at.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

_PANEL_BYTES = 8 << 20  # float32 weights widened at a time: they stay in the last-level cache for the product


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 natively; elsewhere library products emulate it, several times slower."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()) or multiplies_tiles()


@functools.cache
def multiplies_tiles() -> bool:
    """Whether this processor multiplies whole tiles of bfloat16 (AMX), far quicker than by any vector instruction."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def widens(device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether products of such rows and weights are to be formed by `linear_widened`: on a CPU sums are float32."""
    if device.type != "cpu" or weight_dtype == torch.float32:
        return False
    return not (dtype == weight_dtype == torch.bfloat16 and multiplies_bfloat16())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [M, K]. weight: [N, K] in x's dtype or a narrower one. Returns [M, N] in x's dtype."""
    return F.linear(x, weight.to(x.dtype), bias)


def linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for many rows and a narrow weight: panels of it are widened to float32 for torch's GEMM.

    x: [M, K] float32 or narrower. weight: [N, K] in any float type. The product is float32; returns [M, N] in x's dtype.
    Extra memory: one panel of 8 MiB (at least 64 rows of the weight), and x and the result in float32 when x is narrower.
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
