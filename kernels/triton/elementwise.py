"""Elementwise operations in Triton: activations, gates, soft caps and weighted sums of experts."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.triton.launch import launch, power_of_two, strided, wait_for_predecessor

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x, QUICK: tl.constexpr = False):
    """QUICK: an error of at most two units in the last place, for results that are rounded further, with few registers."""
    if QUICK:
        return 1.0 / (1.0 + tl.exp(-x))
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    grown = tl.exp(tl.abs(x) * -2.0)
    bent = tl.div_rn(1.0 - grown, 1.0 + grown)
    return tl.where(x < 0, -bent, bent)


@triton.jit
def activated(x, KIND: tl.constexpr, QUICK: tl.constexpr = False):
    if KIND == "silu":
        return x * sigmoid(x, QUICK)
    if KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    positive = tl.where(x > 0, x, x * 0.0)  # relu2
    return positive * positive


@triton.jit
def part_of_row(columns, BLOCK: tl.constexpr):
    """The row of a program (row, part of the columns), its columns, and a mask of valid ones."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64), column, column < columns


@triton.jit
def activation_kernel(x, stride, out, columns, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part of the columns). GATED: x holds as many further columns, by which the activated ones are
    multiplied."""
    wait_for_predecessor()
    row, column, ok = part_of_row(columns, BLOCK)
    kind = out.dtype.element_ty
    at = x + row * stride + column
    # Rounded as in the plain form: each function returns its operand's type.
    found = activated(tl.load(at, mask=ok, other=0.0).to(tl.float32), KIND).to(kind)
    if GATED:
        found = (found.to(tl.float32) * tl.load(at + columns, mask=ok, other=0.0).to(tl.float32)).to(kind)
    tl.store(out + row * columns + column, found, mask=ok)


@triton.jit
def clamped_glu_kernel(x, stride, out, columns, alpha, limit, BLOCK: tl.constexpr):
    wait_for_predecessor()
    row, column, ok = part_of_row(columns, BLOCK)
    at = x + row * stride + column
    gate = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=ok, other=0.0).to(tl.float32)
    # Comparisons are false for NaN, so that it is kept.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    found = (up + 1.0) * gate * sigmoid(alpha * gate)
    tl.store(out + row * columns + column, found.to(out.dtype.element_ty), mask=ok)


@triton.jit
def gate_by_sigmoid_kernel(x, stride, gate, gate_stride, columns, WHOLE_ROW: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_predecessor()
    row, column, ok = part_of_row(columns, BLOCK)
    at = x + row * stride + column
    if WHOLE_ROW:
        by = sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
    else:
        by = sigmoid(tl.load(gate + row * gate_stride + column, mask=ok, other=0.0).to(tl.float32))
    found = tl.load(at, mask=ok, other=0.0).to(tl.float32) * by
    tl.store(at, found.to(x.dtype.element_ty), mask=ok)


@triton.jit
def soft_cap_kernel(x, stride, out, columns, cap, BLOCK: tl.constexpr):
    wait_for_predecessor()
    row, column, ok = part_of_row(columns, BLOCK)
    found = cap * tanh(tl.div_rn(tl.load(x + row * stride + column, mask=ok, other=0.0), cap))
    tl.store(out + row * columns + column, found, mask=ok)


@triton.jit
def sum_of_experts_kernel(x, weights, out, columns, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, part of the columns): the weighted sum of its COUNT rows of x, in order."""
    wait_for_predecessor()
    token, column, ok = part_of_row(columns, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(COUNT):
        row = token * COUNT + place
        total += tl.load(x + row * columns + column, mask=ok, other=0.0).to(tl.float32) * tl.load(weights + row)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=ok)


_KINDS = ("silu", "gelu_tanh", "gelu", "relu2")

_BLOCK = 1024


def check_activation(kind: str) -> None:
    if kind not in _KINDS:
        raise ValueError(f"unknown activation {kind!r}")


def activation(x: Tensor, kind: str, *, gated: bool = False) -> Tensor:
    """activation(x) of [T, F], or activation(gate) * up of [T, 2F]. Raises ValueError for an unknown kind."""
    check_activation(kind)
    x = strided(x)
    columns = x.shape[1] // 2 if gated else x.shape[1]
    out = x.new_empty(x.shape[0], columns)
    _by_row(activation_kernel, x, columns, x, x.stride(0), out, columns, KIND=kind, GATED=gated)
    return out


def clamped_glu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    gate_up = strided(gate_up)
    columns = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], columns)
    _by_row(clamped_glu_kernel, gate_up, columns, gate_up, gate_up.stride(0), out, columns, alpha, limit)
    return out


def gate_by_sigmoid(x: Tensor, gate: Tensor) -> None:
    """See `Backend.gate_by_sigmoid`; x's columns are adjacent."""
    gate, whole = strided(gate), gate.shape[1] == 1
    operands = x, x.stride(0), gate, gate.stride(0), x.shape[1]
    _by_row(gate_by_sigmoid_kernel, x, x.shape[1], *operands, WHOLE_ROW=whole)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    x = strided(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _by_row(soft_cap_kernel, x, x.shape[1], x, x.stride(0), out, x.shape[1], cap)
    return out


def sum_of_experts(x: Tensor, weights: Tensor) -> Tensor:
    tokens, count = weights.shape
    out = x.new_empty(tokens, x.shape[1])
    columns = x.shape[1]
    _by_row(sum_of_experts_kernel, out, columns, x.contiguous(), weights.contiguous(), out, columns, COUNT=count)
    return out


def _by_row(program: Any, rows: Tensor, columns: int, *operands: Any, **sizes: Any) -> None:
    block = min(_BLOCK, power_of_two(columns))
    launch(program, (rows.shape[0], -(-columns // block)), rows, *operands, BLOCK=block, **sizes)
