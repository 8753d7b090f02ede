"""Activations, gates and sums by element: the arguments of their programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.kernels.triton.launch import launch, power_of_two, strided
from windlass.kernels.triton.programs import pointwise as programs

_KINDS = ("silu", "gelu_tanh", "gelu", "relu2")
_BLOCK = 1024


def check_activation(kind: str) -> None:
    if kind not in _KINDS:
        raise ValueError(f"unknown activation {kind!r}")


def activation(x: Tensor, kind: str, *, gated: bool = False) -> Tensor:
    """activation(x) of [T, F], or activation(gate) * up of [T, 2F]. Raises ValueError for a kind that is not known."""
    check_activation(kind)
    x = strided(x)
    columns = x.shape[1] // 2 if gated else x.shape[1]
    out = x.new_empty(x.shape[0], columns)
    _by_row(programs.activation_kernel, x, columns, x, x.stride(0), out, columns, KIND=kind, GATED=gated)
    return out


def clamped_glu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """See `Backend.clamped_glu`."""
    gate_up = strided(gate_up)
    columns = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], columns)
    _by_row(programs.clamped_glu_kernel, gate_up, columns, gate_up, gate_up.stride(0), out, columns, alpha, limit)
    return out


def gate_by_sigmoid(x: Tensor, gate: Tensor) -> None:
    """See `Backend.gate_by_sigmoid`; x's columns are adjacent."""
    gate, whole = strided(gate), gate.shape[1] == 1
    operands = x, x.stride(0), gate, gate.stride(0), x.shape[1]
    _by_row(programs.gate_by_sigmoid_kernel, x, x.shape[1], *operands, WHOLE_ROW=whole)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """See `Backend.soft_cap`."""
    x = strided(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _by_row(programs.soft_cap_kernel, x, x.shape[1], x, x.stride(0), out, x.shape[1], cap)
    return out


def sum_of_experts(x: Tensor, weights: Tensor) -> Tensor:
    """See `Backend.sum_of_experts`."""
    tokens, count = weights.shape
    out = x.new_empty(tokens, x.shape[1])
    columns = x.shape[1]
    _by_row(
        programs.sum_of_experts_kernel, out, columns, x.contiguous(), weights.contiguous(), out, columns, COUNT=count
    )
    return out


def _by_row(program: Any, rows: Tensor, columns: int, *operands: Any, **sizes: Any) -> None:
    block = min(_BLOCK, power_of_two(columns))
    launch(program, (rows.shape[0], -(-columns // block)), rows, *operands, BLOCK=block, **sizes)
