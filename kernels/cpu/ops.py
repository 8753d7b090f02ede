"""Embedding, RMS norm, gated activations and soft cap on the CPU, through the compiled kernels.

Checks what would make the C code read or write astray, cheaply, and raises ValueError with what is wrong. Arithmetic is
float32 whatever the storage. Knows nothing of requests, models or other backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3}


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, library: Library) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (1910.07467).

    x: [T, D] or [T, H, D] float32, bfloat16 or float16, any strides but the last. weight: [D] float32. With `residual`
    ([T, D], x's dtype) the input is residual + x, which is stored back into `residual`. Returns x's shape, contiguous, in
    its dtype. Raises ValueError.
    """
    shape = x.shape
    check(
        2 <= len(shape) <= 3 and x.dtype in TYPE_CODES and x.is_cpu and (shape[-1] < 2 or x.stride(-1) == 1),
        f"rms_norm: x is {x.dtype} {tuple(shape)}, not a float CPU tensor [T, D] or [T, H, D] with adjacent elements",
    )
    dim = shape[-1]
    check(vector_ok(weight, torch.float32, dim), f"rms_norm: weight must be float32 [{dim}], contiguous")
    if residual is not None:
        check(
            len(shape) == 2
            and residual.shape == shape
            and residual.dtype == x.dtype
            and residual.is_cpu
            and (dim < 2 or residual.stride(1) == 1),
            "rms_norm: residual must have x's shape [T, D] and dtype",
        )
    out = torch.empty(shape, dtype=x.dtype)
    group = shape[1] if len(shape) == 3 else 1  # rows of one token
    library.rms_norm(
        x.data_ptr(),
        x.stride(-2),
        max(group, 1),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        TYPE_CODES[x.dtype],
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        shape[0] * group,
        dim,
    )
    return out


def gated_activation(gate_up: Tensor, activation: str, *, library: Library) -> Tensor:
    """activation(gate) * up of [T, 2F] holding (gate, up), any row stride. activation: one of ACTIVATIONS.

    Returns [T, F], contiguous, rounded once to gate_up's dtype. Raises ValueError.
    """
    check(
        gate_up.dim() == 2 and gate_up.dtype in TYPE_CODES and gate_up.is_cpu and gate_up.shape[1] % 2 == 0,
        f"gated_activation: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, not a float CPU tensor [T, 2F]",
    )
    check(gate_up.shape[1] < 2 or gate_up.stride(1) == 1, "gated_activation: the last dimension is not contiguous")
    check(activation in ACTIVATIONS, f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, dim), dtype=gate_up.dtype)
    library.gated_activation(
        gate_up.data_ptr(),
        gate_up.stride(0),
        TYPE_CODES[gate_up.dtype],
        ACTIVATIONS[activation],
        out.data_ptr(),
        rows,
        dim,
    )
    return out


def clamped_glu(gate_up: Tensor, alpha: float, limit: float, *, library: Library) -> Tensor:
    """See `Backend.clamped_glu`. gate_up: [T, 2F], any row stride. Returns [T, F] in its dtype. Raises ValueError."""
    check(
        gate_up.dim() == 2
        and gate_up.dtype in TYPE_CODES
        and gate_up.is_cpu
        and gate_up.shape[1] % 2 == 0
        and (gate_up.shape[1] < 2 or gate_up.stride(1) == 1),
        f"clamped_glu: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, not a float CPU tensor [T, 2F]",
    )
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, dim), dtype=gate_up.dtype)
    library.clamped_glu(
        gate_up.data_ptr(), gate_up.stride(0), TYPE_CODES[gate_up.dtype], alpha, limit, out.data_ptr(), rows, dim
    )
    return out


def gate_by_sigmoid(x: Tensor, gate: Tensor, *, library: Library) -> None:
    """x *= sigmoid(gate). x: [T, N]. gate: [T, N] or [T, 1]; both of any float type and row stride. Raises ValueError."""
    check(
        x.dim() == 2
        and all(one.dtype in TYPE_CODES and one.is_cpu for one in (x, gate))
        and gate.shape in (x.shape, (x.shape[0], 1))
        and all(one.shape[1] < 2 or one.stride(1) == 1 for one in (x, gate)),
        f"gate_by_sigmoid: x is {x.dtype} {tuple(x.shape)}, gate {gate.dtype} {tuple(gate.shape)}",
    )
    library.gate_by_sigmoid(
        x.data_ptr(),
        x.stride(0),
        TYPE_CODES[x.dtype],
        gate.data_ptr(),
        gate.stride(0),
        TYPE_CODES[gate.dtype],
        gate.shape[1],
        *x.shape,
    )


def soft_cap(x: Tensor, cap: float, *, library: Library) -> Tensor:
    """cap * tanh(x / cap) of [T, N] float32, any row stride. Returns [T, N], contiguous. Raises ValueError."""
    check(
        x.dim() == 2 and x.dtype == torch.float32 and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"soft_cap: x is {x.dtype} {tuple(x.shape)}, not a float32 CPU tensor [T, N] with adjacent elements",
    )
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    library.soft_cap(x.data_ptr(), x.stride(0), cap, out.data_ptr(), x.shape[0], x.shape[1])
    return out


def embed_rows(
    table: Tensor,
    ids: Tensor,
    scale: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    library: Library,
) -> Tensor:
    """table[ids] * scale, multiplied in float32. table: [N, D] float32, bfloat16 or float16, any row stride. ids: [T] int64,
    contiguous. dtype: any of the three.

    Returns [T, D] of dtype. Raises ValueError, and IndexError for an id that is no row.
    """
    check(
        table.dim() == 2
        and table.dtype in TYPE_CODES
        and table.is_cpu
        and (table.shape[1] < 2 or table.stride(1) == 1),
        f"embed_rows: the table is {table.dtype} {tuple(table.shape)}, not a float CPU tensor [N, D] with adjacent elements",
    )
    rows, dim = ids.shape[0], table.shape[1]
    check(vector_ok(ids, torch.int64, rows), "embed_rows: ids must be int64, contiguous [T]")
    out = torch.empty((rows, dim), dtype=dtype)
    code = library.embed_rows(
        table.data_ptr(),
        table.stride(0),
        TYPE_CODES[table.dtype],
        table.shape[0],
        ids.data_ptr(),
        scale,
        out.data_ptr(),
        TYPE_CODES[dtype],
        rows,
        dim,
    )
    if code:
        raise IndexError(f"embed_rows: an id is no row of a table of {table.shape[0]}")
    return out
