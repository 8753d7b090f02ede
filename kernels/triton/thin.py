"""Products of a few rows with plain weights of 16 bits, such as the step of a stream has; see `programs.thin`."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.triton.launch import launch, power_of_two, strided
from windlass.kernels.triton.pointwise import check_activation
from windlass.kernels.triton.programs.thin import thin_product

MOST_ROWS = 4
_WARPS = 4
_NUMBERS = 4096  # of a weight at once in a program


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether rows are few enough, and rows of the weight lie so that they are read in whole pieces."""
    return (
        0 < x.shape[0] <= MOST_ROWS
        and weight.dtype == x.dtype
        and x.element_size() == 2
        and weight.stride(1) == 1
        and weight.stride(0) % 8 == 0
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """x @ weight.T + bias; with an activation `Backend.gated_linear`. x: [T, K] that `takes` accepts."""
    if activation is not None:
        check_activation(activation)
    x, (rows, inner) = strided(x), x.shape
    columns = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = x.new_empty(rows, columns)
    of_rows = power_of_two(rows)
    block_k = min(power_of_two(inner), 2048 // of_rows)
    block_n = max(1, _NUMBERS // (block_k * of_rows) // (1 if activation is None else 2))
    launch(
        thin_product,
        (-(-columns // block_n),),
        x,
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        bias,
        out,
        columns,
        columns,
        inner,
        ROWS=rows,
        GATED=activation is not None,
        KIND=activation,
        BIAS=bias is not None,
        MANY=weight.shape[0] * weight.stride(0) >= 1 << 31,
        BLOCK_R=of_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=_WARPS,
    )
    return out
