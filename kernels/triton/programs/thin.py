"""Products of one row with a plain weight. What they take is reading the weight, so each program reads some of its rows in long
pieces, multiplies number by number, and sums at the end. Gates may be opened on the way."""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.order import wait_for_predecessor
from windlass.kernels.triton.programs.pointwise import activated


@triton.jit
def gemv_kernel(
    x,
    weight,
    weight_stride,
    bias,
    out,
    columns,
    inner,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of columns): out[columns] = weight @ x + bias. GATED: weight has as many rows again, whose products the
    activated ones multiply, both rounded first as they are without it. MANY: offsets into the weight need 64 bits."""
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
        if GATED:
            up_total += left * tl.load(at_up + k[None, :], mask=ok, other=0.0).to(tl.float32)
        total += left * right.to(tl.float32)
    kind = out.dtype.element_ty
    found = tl.sum(total, 1)
    if BIAS:
        found += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(up_total, 1)
        if BIAS:
            other += tl.load(bias + columns + column, mask=column_ok, other=0.0).to(tl.float32)
        gate = activated(found.to(kind).to(tl.float32), KIND).to(kind)
        found = gate.to(tl.float32) * other.to(kind).to(tl.float32)
    tl.store(out + column, found.to(kind), mask=column_ok)
