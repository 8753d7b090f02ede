"""Products of many rows with plain weights of experts, in tiles that keep matrix units busy.

A tile that is twice as wide and twice as high reads twice the bytes for four times the operations, and what the cache can give is
their bound. So tiles are large; few run at once, and what comes before and after their loop has to be short. Rows of x that are
not there are not read. In place of columns that are not there the last one is read again, so loads of a weight need no mask.
"""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.order import wait_for_predecessor
from windlass.kernels.triton.programs.pointwise import activated
from windlass.kernels.triton.programs.product import part_of_expert


@triton.jit
def grouped_gemm_kernel(
    x,
    x_stride,
    out,
    out_stride,
    weights,
    weight_stride,
    biases,
    order,
    ends,
    columns,
    inner,
    PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GATHERED: tl.constexpr,
    SCATTERED: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of columns, tile of rows): x @ weight.T + bias, where `weights` and `biases` are addresses by expert.

    order, ends: see `routing.by_expert`. GATHERED, SCATTERED: whether rows of x, or of the result, lie by place; else they lie in
    the order of experts. PER_ROW: how many places a row of x has where they are gathered. KIND: an activation, or None; with one
    the first half of the columns are gates, the others what they open. WHOLE: whether BLOCK_K divides `inner`.
    """
    wait_for_predecessor()
    expert, first, end = part_of_expert(tl.program_id(1), ends, EXPERTS, BLOCK_E, BLOCK_M, BY_PLACE=False)
    if first >= end:
        return
    weight = tl.multiple_of(tl.load(weights + expert).to(tl.pointer_type(x.dtype.element_ty)), 16)
    place = first + tl.arange(0, BLOCK_M)
    row_ok = place < end
    place = tl.minimum(place, end - 1)
    x_row = place
    to_row = place
    if GATHERED:
        x_row = tl.load(order + place) // PER_ROW
    if SCATTERED:
        to_row = tl.load(order + place)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(column, columns - 1)
    if KIND is not None:  # gates and what they open take turns, so that a thread has both
        weight_row = weight_row // 2 + weight_row % 2 * (columns // 2)
    k = tl.arange(0, BLOCK_K)
    at_x = x + x_row[:, None] * x_stride + k[None, :]
    at_weight = weight + weight_row[None, :].to(tl.int64) * weight_stride + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin_k in range(0, inner, BLOCK_K):
        if WHOLE:
            left = tl.load(at_x, mask=row_ok[:, None], other=0.0)
            right = tl.load(at_weight)
        else:
            k_ok = k < inner - begin_k
            left = tl.load(at_x, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
            right = tl.load(at_weight, mask=k_ok[:, None], other=0.0)
        total = tl.dot(left, right, total)
        at_x += BLOCK_K
        at_weight += BLOCK_K
    if BIAS:
        bias = tl.load(biases + expert).to(tl.pointer_type(BIAS_TYPE))
        total += tl.load(bias + weight_row).to(tl.float32)[None, :]
    if KIND is not None:
        gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
        total = activated(gate, KIND, QUICK=True) * up
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        columns = columns // 2
    at_out = out + to_row[:, None] * out_stride + column[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=row_ok[:, None] & (column < columns)[None, :])
