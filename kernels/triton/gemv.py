"""Matrix-vector product in Triton: one row times a plain 16-bit weight, with optional gated activation."""

import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton.elementwise import activated, check_activation
from windlass.kernels.triton.launch import launch, power_of_two, strided, wait_for_predecessor


@triton.jit
def gemv_kernel(
    x,
    weight,
    weight_stride,
    bias,
    out,
    columns,
    inner,
    KIND: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of columns): out[columns] = weight @ x + bias. KIND: an activation or None; with one, the weight has gates,
    then as many ups, and both products are rounded before activation(gate) * up. MANY: offsets into the weight need 64 bits."""
    wait_for_predecessor()
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < columns
    row = column
    if MANY:
        row = column.to(tl.int64)
    at_weight = weight + row[:, None] * weight_stride
    at_up = weight + (row + columns)[:, None] * weight_stride
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_total = total
    for begin in range(0, inner, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        ok = column_ok[:, None] & (k < inner)[None, :]
        right = tl.load(at_weight + k[None, :], mask=ok, other=0.0)
        left = tl.load(x + k, mask=k < inner, other=0.0).to(tl.float32)[None, :]
        if KIND is not None:
            up_total += left * tl.load(at_up + k[None, :], mask=ok, other=0.0).to(tl.float32)
        total += left * right.to(tl.float32)
    kind = out.dtype.element_ty
    found = tl.sum(total, 1)
    if bias is not None:
        found += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)
    if KIND is not None:
        other = tl.sum(up_total, 1)
        if bias is not None:
            other += tl.load(bias + columns + column, mask=column_ok, other=0.0).to(tl.float32)
        gate = activated(found.to(kind).to(tl.float32), KIND).to(kind)
        found = gate.to(tl.float32) * other.to(kind).to(tl.float32)
    tl.store(out + column, found.to(kind), mask=column_ok)


_NUMBERS, _LONGEST = 4096, 2048  # elements of a weight, and of one of its rows, per program at a time


def takes_single_row(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one row, and the rows of the weight are aligned for vector loads."""
    return (
        x.shape[0] == 1
        and weight.dtype == x.dtype
        and x.element_size() == 2
        and weight.stride(1) == 1
        and weight.stride(0) % 8 == 0
    )


def linear_single_row(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """x @ weight.T + bias; with an activation `Backend.gated_linear`. Requires `takes_single_row`. x: [1, K]."""
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
        KIND=activation,
        MANY=weight.shape[0] * weight.stride(0) >= 1 << 31,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out
