"""Linear layers of few rows on the CPU, by a kernel that reads the weight once.

Knows shapes, types and a measured crossover; knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check_out
from windlass.kernels.cpu.library import TYPE_CODES, Library

# Measured on AVX2 with two threads on whole prefill chunks of a 1B Llama: ours leads up to 192 rows, from 256 on torch's
# product is as quick, at 512 quicker.
LINEAR_MAX_ROWS = 192
ACTIVATION_TYPES = (torch.float32, torch.bfloat16)


def linear_refusal(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Why `linear_small` cannot take these operands, or None when it can."""
    if (
        # What a model's own calls look like, accepted with few looks: a step makes dozens of them.
        bias is None
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.dim() == 2 == weight.dim()
        and x.shape[1] == weight.shape[1]
        and x.dtype in ACTIVATION_TYPES
        and weight.dtype in TYPE_CODES
        and x.is_cpu
        and weight.is_cpu
    ):
        return None
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return f"shapes {tuple(x.shape)} and {tuple(weight.shape)} are not [M, K] and [N, K]"
    if x.dtype not in ACTIVATION_TYPES:
        return f"activations are {x.dtype}, not float32 or bfloat16"
    if weight.dtype not in TYPE_CODES:
        return f"weights are {weight.dtype}, not float32, bfloat16 or float16"
    if not (x.is_cpu and weight.is_cpu):
        return "an operand is not on the CPU"
    if (x.shape[1] > 1 and (x.stride(1) != 1 or weight.stride(1) != 1)) or weight.stride(0) < 0:
        return "the last dimension is not contiguous"
    if bias is not None and (
        bias.shape != weight.shape[:1] or bias.dtype not in TYPE_CODES or not bias.is_contiguous()
    ):
        return f"the bias is {bias.dtype} {tuple(bias.shape)}, not a contiguous vector of {weight.shape[0]} floats"
    return None


def linear_small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    library: Library,
) -> Tensor:
    """x @ weight.T + bias, summed in float32 in an order that does not depend on M: a row's bits are batch-independent.

    x: [M, K] float32 or bfloat16, any row stride. weight: [N, K] float32, bfloat16 or float16, any row stride. bias: [N]
    of any of these. out: [M, N] in x's dtype with adjacent elements, to be written. Any M is right; it is quick for few rows.
    Returns [M, N] in x's dtype, out where it is given. Raises ValueError.
    """
    if (reason := linear_refusal(x, weight, bias)) is not None:
        raise ValueError(f"linear_small: {reason}")
    rows, inner = x.shape
    columns = weight.shape[0]
    if out is None:
        out = torch.empty((rows, columns), dtype=x.dtype)
    else:
        check_out(out, rows, columns, x.dtype)
    if inner == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    if rows and columns:
        code = library.linear(
            x.data_ptr(),
            x.stride(0),
            TYPE_CODES[x.dtype],
            weight.data_ptr(),
            weight.stride(0),
            TYPE_CODES[weight.dtype],
            None if bias is None else bias.data_ptr(),
            0 if bias is None else TYPE_CODES[bias.dtype],
            out.data_ptr(),
            out.stride(0),
            rows,
            columns,
            inner,
        )
        if code:
            raise MemoryError("linear_small: no memory for the packed activations")
    return out
