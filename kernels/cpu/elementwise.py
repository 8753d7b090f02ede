"""Activations without a gate, the norm around the mean, limits and factors on the CPU, through the compiled kernels.

Checks what would make the C code read or write astray, cheaply, and raises ValueError with what is wrong. Arithmetic is
float32 whatever the storage. Knows nothing of requests, models or other backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.cpu.ops import ACTIVATIONS


def _check_matrix(x: Tensor, name: str) -> None:
    check(
        x.dim() == 2 and x.dtype in TYPE_CODES and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"{name}: x is {x.dtype} {tuple(x.shape)}, not a float CPU tensor [T, N] with adjacent elements",
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, library: Library) -> Tensor:
    """See `Backend.layer_norm`. x: [T, D] or [T, H, D], any strides but the last. Raises ValueError."""
    shape = x.shape
    check(
        2 <= len(shape) <= 3 and x.dtype in TYPE_CODES and x.is_cpu and (shape[-1] < 2 or x.stride(-1) == 1),
        f"layer_norm: x is {x.dtype} {tuple(shape)}, not a float CPU tensor [T, D] or [T, H, D] with adjacent elements",
    )
    dim = shape[-1]
    check(
        vector_ok(weight, torch.float32, dim) and (bias is None or vector_ok(bias, torch.float32, dim)),
        f"layer_norm: weight and bias must be float32 [{dim}], contiguous",
    )
    out = torch.empty(shape, dtype=x.dtype)
    group = shape[1] if len(shape) == 3 else 1  # rows of one token
    library.layer_norm(
        *(x.data_ptr(), x.stride(-2), max(group, 1), x.stride(0), TYPE_CODES[x.dtype]),
        *(weight.data_ptr(), None if bias is None else bias.data_ptr(), eps, out.data_ptr(), shape[0] * group, dim),
    )
    return out


def activate(x: Tensor, activation: str, *, library: Library) -> Tensor:
    """See `Backend.activation`. x: [T, N], any row stride. Returns [T, N], contiguous, in its dtype. Raises ValueError."""
    _check_matrix(x, "activate")
    check(activation in ACTIVATIONS, f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    library.activate(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], ACTIVATIONS[activation], out.data_ptr(), *x.shape)
    return out


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor, *, library: Library) -> Tensor:
    """See `Backend.xielu`. x: [T, N], any row stride. Returns [T, N], contiguous, in its dtype. Raises ValueError."""
    _check_matrix(x, "xielu")
    numbers = (alpha_p, alpha_n, beta, eps)
    check(all(vector_ok(one, torch.float32, 1) for one in numbers), "xielu: its numbers must be float32 [1]")
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    library.xielu(
        x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], *(one.data_ptr() for one in numbers), out.data_ptr(), *x.shape
    )
    return out


def clip(x: Tensor, limit: float, *, library: Library) -> None:
    """See `Backend.clip`. x: [T, N], any row stride. Raises ValueError."""
    _check_matrix(x, "clip")
    library.clip(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], limit, *x.shape)


def scale_rows(x: Tensor, factors: Tensor, *, library: Library) -> None:
    """See `Backend.scale_rows`. x: [T, N], any row stride. Raises ValueError."""
    _check_matrix(x, "scale_rows")
    check(
        vector_ok(factors, torch.float32, x.shape[0]), f"scale_rows: factors must be float32 [{x.shape[0]}], contiguous"
    )
    library.scale_rows(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], factors.data_ptr(), *x.shape)


def scale_columns(x: Tensor, first: Tensor, second: Tensor, *, library: Library) -> None:
    """See `Backend.scale_columns`. x: [T, N], any row stride. Raises ValueError."""
    _check_matrix(x, "scale_columns")
    for factors in (first, second):
        check(
            vector_ok(factors, torch.float32, x.shape[1]),
            f"scale_columns: factors must be float32 [{x.shape[1]}], contiguous",
        )
    library.scale_columns(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], first.data_ptr(), second.data_ptr(), *x.shape)


def multiply(x: Tensor, by: Tensor, *, library: Library) -> None:
    """See `Backend.multiply`. x and a `by` of its shape: any row strides. Raises ValueError."""
    _check_matrix(x, "multiply")
    single = by.dim() == 1
    if single:
        check(vector_ok(by, torch.float32, 1), f"multiply: the factor is {by.dtype} {tuple(by.shape)}, not float32 [1]")
    else:
        _check_matrix(by, "multiply")
        check(by.shape == x.shape and by.dtype == x.dtype, f"multiply: by must be {x.dtype} {tuple(x.shape)}")
    library.multiply(
        *(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype]),
        *((None, 0, by.data_ptr()) if single else (by.data_ptr(), by.stride(0), None)),
        *x.shape,
    )
