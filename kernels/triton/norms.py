"""RMS norm and layer norm in Triton, in float32."""

import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton.launch import launch, power_of_two, strided, wait_for_predecessor


# Rows differ from step to step: Triton would compile variants for 1, multiples of 16 and other values.
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
    ROWS: tl.constexpr,
):
    """Program (ROWS rows): row r of x is token r // HEADS, head r % HEADS. residual: None, or its row is added
    and the sum stored in it."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, power_of_two(DIM))[None, :]
    ok = (row < rows) & (dims < DIM)
    at = x + row // HEADS * stride + row % HEADS * head_stride + dims
    wide = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    if residual is not None:
        to = residual + row * residual_stride + dims
        # The rounded sum is normed.
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
):
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, power_of_two(DIM))
    ok = dims < DIM
    at = x + row // HEADS * stride + row % HEADS * head_stride + dims
    wide = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    away = tl.where(ok, wide - tl.sum(wide, 0) / DIM, 0.0)
    normed = away * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(away * away, 0) / DIM + eps))
    normed = normed * tl.load(weight + dims, mask=ok, other=0.0)
    if bias is not None:
        normed = normed + tl.load(bias + dims, mask=ok, other=0.0)
    tl.store(out + row * DIM + dims, normed.to(out.dtype.element_ty), mask=ok)


_LEAST = 1024  # elements per program: queries and keys have many short rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    x = strided(x)
    out = x.new_empty(x.shape)
    _rms_norm(x, out, weight, eps, residual)
    return out


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps, residual)


def rms_norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    _rms_norm(x, x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x = strided(x)
    out, dim, heads = x.new_empty(x.shape), x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    launch(
        layer_norm_kernel,
        (x.shape[0] * heads,),
        x,
        x,
        x.stride(0),
        x.stride(1),
        out,
        weight,
        bias,
        eps,
        HEADS=heads,
        DIM=dim,
        num_warps=_warps(power_of_two(dim)),
    )
    return out


def _rms_norm(x: Tensor, out: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> None:
    """out: the result, contiguous unless it is x. residual: [T, D], to which x is added."""
    dim, heads = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    block = power_of_two(dim)
    rows, each = x.shape[0] * heads, max(1, _LEAST // block)
    launch(
        rms_norm_kernel,
        (-(-rows // each),),
        x,
        x,
        x.stride(0),
        x.stride(1),
        out,
        x.stride(0) if out is x else dim,
        residual,
        0 if residual is None else residual.stride(0),
        weight,
        eps,
        rows,
        HEADS=heads,
        DIM=dim,
        ROWS=each,
        num_warps=_warps(each * block),
    )


def _warps(block: int) -> int:
    return 1 if block <= 256 else 4 if block <= 4096 else 8
