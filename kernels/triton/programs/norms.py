"""Norms of rows, float32. A program has a row in one piece, or a few of them where they are short; how many follows from their
length, so a row's bits follow from that row alone."""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.order import wait_for_predecessor


# Rows differ from step to step: Triton would compile a program for each of 1, a multiple of 16 and anything else.
@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    stride,
    head_stride,
    out,
    out_stride,
    residual,
    residual_stride,
    weight,
    eps,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (ROWS rows): row r of x is token r // HEADS, head r % HEADS. ADD: the sum with the residual's row, which it
    becomes."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    ok = (row < rows) & (dims < DIM)
    at = x + row // HEADS * stride + row % HEADS * head_stride + dims
    wide = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        to = residual + row * residual_stride + dims
        # Of the sum, its rounded form is normed.
        rounded = (tl.load(to, mask=ok, other=0.0).to(tl.float32) + wide).to(residual.dtype.element_ty)
        tl.store(to, rounded, mask=ok)
        wide = rounded.to(tl.float32)
    mean = tl.sum(wide * wide, 1)[:, None] / DIM
    normed = wide * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * tl.load(weight + dims, mask=dims < DIM, other=0.0)
    tl.store(out + row * out_stride + dims, normed.to(out.dtype.element_ty), mask=ok)


@triton.jit
def layer_norm_kernel(
    x,
    stride,
    head_stride,
    out,
    weight,
    bias,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    ok = dims < DIM
    at = x + row // HEADS * stride + row % HEADS * head_stride + dims
    wide = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    away = tl.where(ok, wide - tl.sum(wide, 0) / DIM, 0.0)
    normed = away * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(away * away, 0) / DIM + eps))
    normed = normed * tl.load(weight + dims, mask=ok, other=0.0)
    if BIAS:
        normed = normed + tl.load(bias + dims, mask=ok, other=0.0)
    tl.store(out + row * DIM + dims, normed.to(out.dtype.element_ty), mask=ok)
