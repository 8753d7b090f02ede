"""Products of few rows with a plain weight: what they take is reading the weight, so each program reads some of its rows in long
pieces, multiplies number by number, and sums at the end. Gates may be opened on the way."""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.order import follow
from windlass.kernels.triton.programs.pointwise import activated


@triton.jit
def thin_product(
    x,
    x_stride,
    weight,
    weight_stride,
    bias,
    out,
    out_stride,
    columns,
    inner,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of columns): out[ROWS, columns] = x @ weight.T + bias. GATED: weight has as many rows again, whose products the
    activated ones multiply, both rounded first as they are without it. MANY: offsets into the weight need 64 bits."""
    follow()
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < columns
    at_row = column
    if MANY:
        at_row = column.to(tl.int64)
    row = tl.arange(0, BLOCK_R)
    row_ok = row < ROWS
    at_weight = weight + at_row[:, None] * weight_stride
    at_up = weight + (at_row + columns)[:, None] * weight_stride
    at_x = x + row[:, None] * x_stride
    total = tl.zeros([BLOCK_R, BLOCK_N, BLOCK_K], tl.float32)
    up_total = total
    for begin in range(0, inner, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        k_ok = k < inner
        ok = column_ok[:, None] & k_ok[None, :]
        right = tl.load(at_weight + k[None, :], mask=ok, other=0.0)
        left = tl.load(at_x + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(at_up + k[None, :], mask=ok, other=0.0)
            up_total += left[:, None, :] * up.to(tl.float32)[None, :, :]
        total += left[:, None, :] * right.to(tl.float32)[None, :, :]
    kind = out.dtype.element_ty
    found = tl.sum(total, 2)
    if BIAS:
        found += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if GATED:
        other = tl.sum(up_total, 2)
        if BIAS:
            other += tl.load(bias + columns + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
        gate = activated(found.to(kind).to(tl.float32), KIND).to(kind)
        found = gate.to(tl.float32) * other.to(kind).to(tl.float32)
    at_out = out + row[:, None] * out_stride + column[None, :]
    tl.store(at_out, found.to(kind), mask=row_ok[:, None] & column_ok[None, :])
