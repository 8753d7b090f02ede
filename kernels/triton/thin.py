"""Products of one row with plain weights of 16 bits, as the step of a stream has them; see `programs.thin`. Of two rows on, what
torch has is quicker."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.triton.launch import launch, power_of_two, strided
from windlass.kernels.triton.pointwise import check_activation
from windlass.kernels.triton.programs.thin import gemv_kernel

_NUMBERS, _LONGEST = 4096, 2048  # of a weight at once in a program, and of a row of it


def takes_single_row(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one row, and rows of the weight lie so that they are read in whole pieces."""
    return (
        x.shape[0] == 1
        and weight.dtype == x.dtype
        and x.element_size() == 2
        and weight.stride(1) == 1
        and weight.stride(0) % 8 == 0
    )


def linear_single_row(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """x @ weight.T + bias; with an activation `Backend.gated_linear`. x: [1, K] that `takes_single_row` accepts."""
    if activation is not None:
        check_activation(activation)
    x, inner = strided(x), x.shape[1]
    columns = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = x.new_empty(1, columns)
    block_k = min(power_of_two(inner), _LONGEST)
    block_n = max(1, _NUMBERS // block_k // (1 if activation is None else 2))
    launch(
        gemv_kernel,
        (-(-columns // block_n),),
        x,
        x,
        weight,
        weight.stride(0),
        bias,
        out,
        columns,
        inner,
        GATED=activation is not None,
        KIND=activation,
        BIAS=bias is not None,
        MANY=weight.shape[0] * weight.stride(0) >= 1 << 31,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out
