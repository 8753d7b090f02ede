"""Layers that carry a state, on the CPU through the compiled kernels. See `Recurrences`.

Checks what would make the C code read or write astray, cheaply. What the rows of a step say is checked by the kernels: it may be
something else when a recorded call is repeated.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.operations.recurrence import Recurrences, StateRows

WIDTHS = range(2, 9)  # of convolutions


def short_convolution(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
    bias: Tensor | None = None,
    *,
    library: Library,
) -> Tensor:
    """See `Recurrences.short_convolution`. x: float32, bfloat16 or float16. weight, window: contiguous; W: one of WIDTHS.

    Raises ValueError, and IndexError for a block that the window lacks (nothing is written then).
    """
    _check_state_rows(x, "short_convolution: x")
    tokens, channels = x.shape
    width = weight.shape[-1]
    check(
        _floats_ok(weight, (channels, width)) and width in WIDTHS,
        f"short_convolution: weight is {weight.dtype} {tuple(weight.shape)}, not float32 [{channels}, 2 to 8], contiguous",
    )
    check(
        _floats_ok(window, (*window.shape[:1], width - 1, channels)),
        f"short_convolution: window is {window.dtype} {tuple(window.shape)}, not float32 [N, {width - 1}, {channels}], "
        "contiguous",
    )
    check(
        bias is None or vector_ok(bias, torch.float32, channels),
        f"short_convolution: bias must be float32 [{channels}], contiguous",
    )
    check(activation in (None, "silu"), f"short_convolution: activation {activation!r} is not silu")
    out = torch.empty((tokens, channels), dtype=x.dtype)
    code = library.short_convolution(
        *(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], weight.data_ptr(), width),
        *(None if bias is None else bias.data_ptr(), int(activation is not None), window.data_ptr(), window.shape[0]),
        *_sequence_addresses(rows, tokens, "short_convolution"),
        *(out.data_ptr(), tokens, channels),
    )
    _raise_recurrent_error(code, "short_convolution", tokens, window.shape[0])
    return out


def gated_delta_rule(
    qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
    rate: Tensor,
    bias: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    tiled_heads: bool = False,
    library: Library,
) -> Tensor:
    """See `Recurrences.gated_delta_rule`. qkv: float32, bfloat16 or float16. memory: contiguous.

    Raises ValueError, IndexError for a block that the memory lacks (nothing is written then), and MemoryError.
    """
    _check_state_rows(qkv, "gated_delta_rule: qkv")
    key_heads, heads = _head_counts(memory, qkv, "gated_delta_rule", "queries, keys and values")
    tokens, (blocks, _, key_dim, value_dim) = qkv.shape[0], memory.shape
    _check_gate(decay, qkv, heads, "gated_delta_rule: decay")
    _check_gate(strength, qkv, heads, "gated_delta_rule: strength")
    check(
        vector_ok(rate, torch.float32, heads) and vector_ok(bias, torch.float32, heads),
        f"gated_delta_rule: rate and bias must be float32 [{heads}], contiguous",
    )
    out = torch.empty((tokens, heads * value_dim), dtype=qkv.dtype)
    code = library.gated_delta_rule(
        *(qkv.data_ptr(), qkv.stride(0), TYPE_CODES[qkv.dtype], decay.data_ptr(), decay.stride(0)),
        *(strength.data_ptr(), strength.stride(0), rate.data_ptr(), bias.data_ptr()),
        *(memory.data_ptr(), blocks, key_heads, heads, key_dim, value_dim, int(tiled_heads)),
        *_sequence_addresses(rows, tokens, "gated_delta_rule"),
        *(out.data_ptr(), tokens),
    )
    _raise_recurrent_error(code, "gated_delta_rule", tokens, blocks)
    return out


def state_space(
    mixed: Tensor,
    step: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    limits: tuple[float, float] = (0.0, math.inf),
    library: Library,
) -> Tensor:
    """See `Recurrences.state_space`. mixed: float32, bfloat16 or float16. memory: contiguous. limits: ascending.

    Raises ValueError, IndexError for a block that the memory lacks (nothing is written then), and MemoryError.
    """
    _check_state_rows(mixed, "state_space: mixed")
    key_heads, heads = _head_counts(memory, mixed, "state_space", "values, keys and queries")
    tokens, (blocks, _, key_dim, value_dim) = mixed.shape[0], memory.shape
    _check_gate(step, mixed, heads, "state_space: step")
    check(
        all(vector_ok(one, torch.float32, heads) for one in (rate, bias, skip)),
        f"state_space: rate, bias and skip must be float32 [{heads}], contiguous",
    )
    check(limits[0] <= limits[1], f"state_space: limits {limits} do not ascend")
    out = torch.empty((tokens, heads * value_dim), dtype=mixed.dtype)
    code = library.state_space(
        *(mixed.data_ptr(), mixed.stride(0), TYPE_CODES[mixed.dtype], step.data_ptr(), step.stride(0)),
        *(rate.data_ptr(), bias.data_ptr(), skip.data_ptr()),
        *(memory.data_ptr(), blocks, key_heads, heads, key_dim, value_dim, *limits),
        *_sequence_addresses(rows, tokens, "state_space"),
        *(out.data_ptr(), tokens),
    )
    _raise_recurrent_error(code, "state_space", tokens, blocks)
    return out


def _head_counts(memory: Tensor, columns: Tensor, name: str, parts: str) -> tuple[int, int]:
    """Heads of keys, and of a memory. Raises ValueError where they do not fit."""
    check(
        memory.dim() == 4 and _floats_ok(memory, tuple(memory.shape)) and 0 not in memory.shape[1:],
        f"{name}: memory is {memory.dtype} {tuple(memory.shape)}, not float32 [N, Hv, Dk, Dv], contiguous",
    )
    _, heads, key_dim, value_dim = memory.shape
    key_heads, rest = divmod(columns.shape[1] - heads * value_dim, 2 * key_dim)
    check(
        rest == 0 and key_heads > 0 and heads % key_heads == 0,
        f"{name}: {columns.shape[1]} columns are no {parts} of a memory {tuple(memory.shape)}",
    )
    return key_heads, heads


def _check_gate(gate: Tensor, columns: Tensor, heads: int, name: str) -> None:
    _check_state_rows(gate, name)
    expected = columns.shape[0], heads
    check(
        gate.shape == expected and gate.dtype == columns.dtype,
        f"{name} is {gate.dtype} {tuple(gate.shape)}, not {columns.dtype} {expected}",
    )


def _check_state_rows(x: Tensor, name: str) -> None:
    check(
        x.dim() == 2 and x.dtype in TYPE_CODES and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"{name} is {x.dtype} {tuple(x.shape)}, not a float CPU tensor [T, N] with adjacent elements",
    )


def _floats_ok(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    return tensor.dtype == torch.float32 and tensor.shape == shape and tensor.is_cpu and tensor.is_contiguous()


def _sequence_addresses(rows: StateRows, tokens: int, name: str) -> tuple[int, int, int, int, int | None]:
    """The rows as the library takes them. Raises ValueError."""
    sequences = rows.lengths.numel()
    check(
        vector_ok(rows.blocks, torch.int64, sequences)
        and vector_ok(rows.starts, torch.int64, sequences + 1)
        and vector_ok(rows.lengths, torch.int64, sequences),
        f"{name}: blocks, starts and lengths of {sequences} sequences must be int64 [S], [S + 1] and [S], contiguous",
    )
    check(
        rows.snapshots is None or vector_ok(rows.snapshots, torch.int64, tokens),
        f"{name}: kept must be int64 [{tokens}], contiguous",
    )
    snapshots = None if rows.snapshots is None else rows.snapshots.data_ptr()
    return rows.blocks.data_ptr(), rows.starts.data_ptr(), rows.lengths.data_ptr(), sequences, snapshots


def _raise_recurrent_error(code: int, name: str, tokens: int, blocks: int) -> None:
    if code == 2:
        raise IndexError(f"{name}: a sequence's block is not one of {blocks}")
    if code == 3:
        raise ValueError(f"{name}: starts must ascend from 0 to {tokens} tokens")
    if code:
        raise MemoryError(f"{name}: no memory")


class CompiledRecurrences(Recurrences):
    """See `Recurrences`; by the functions of the library that it holds at the time."""

    _library: Library

    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        window: Tensor,
        rows: StateRows,
        activation: Literal["silu"] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        return short_convolution(x, weight, window, rows, activation, bias, library=self._library)

    def gated_delta_rule(
        self,
        qkv: Tensor,
        decay: Tensor,
        strength: Tensor,
        rate: Tensor,
        bias: Tensor,
        memory: Tensor,
        rows: StateRows,
        *,
        tiled_heads: bool = False,
    ) -> Tensor:
        operands = qkv, decay, strength, rate, bias, memory, rows
        return gated_delta_rule(*operands, tiled_heads=tiled_heads, library=self._library)

    def state_space(
        self,
        mixed: Tensor,
        step: Tensor,
        rate: Tensor,
        bias: Tensor,
        skip: Tensor,
        memory: Tensor,
        rows: StateRows,
        *,
        limits: tuple[float, float] = (0.0, math.inf),
    ) -> Tensor:
        operands = mixed, step, rate, bias, skip, memory, rows
        return state_space(*operands, limits=limits, library=self._library)
