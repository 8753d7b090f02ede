"""Norms: the arguments of their programs."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.triton.launch import launch, power_of_two, strided
from windlass.kernels.triton.programs import norms as programs

_LEAST = 1024  # numbers of a program: queries and keys have many short rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Backend.rms_norm`."""
    x = strided(x)
    out = x.new_empty(x.shape)
    _rms_norm(x, out, weight, eps)
    return out


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Backend.add_rms_norm`."""
    x = strided(x)
    out = x.new_empty(x.shape)
    _rms_norm(x, out, weight, eps, residual)
    return out


def rms_norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `Backend.rms_norm_in_place`."""
    _rms_norm(x, x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Backend.layer_norm`."""
    x = strided(x)
    out, dim, heads = x.new_empty(x.shape), x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    block = power_of_two(dim)
    launch(
        programs.layer_norm_kernel,
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
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


def _rms_norm(x: Tensor, out: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> None:
    """out: where the rows go, side by side unless it is x. residual: [T, D], to which x is added."""
    dim, heads = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    block = power_of_two(dim)
    rows, each = x.shape[0] * heads, max(1, _LEAST // block)
    launch(
        programs.rms_norm_kernel,
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
        ADD=residual is not None,
        ROWS=each,
        BLOCK=block,
        num_warps=_warps(each * block),
    )


def _warps(block: int) -> int:
    return 1 if block <= 256 else 4 if block <= 4096 else 8
