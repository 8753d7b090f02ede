"""Picks a backend for each operation by the operands alone: compiled CPU kernels where they take them, else plain torch.

A backend answers with the reason it refuses (`cpu.linear_refusal`, …), so `explain` can tell a person what runs here.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels import batched, cpu, reference
from windlass.kernels.pages import KVPages


def explain() -> str:
    """One line on which kernels this process uses on a CPU, and why."""
    reason = cpu.unavailable_reason()
    return f"compiled CPU kernels ({cpu.load().isa})" if reason is None else f"plain torch kernels: {reason}"


def reads_narrow_weights() -> bool:
    """Whether `linear` multiplies float32 rows by bfloat16 or float16 weights at the cost of reading them narrow."""
    return cpu.unavailable_reason() is None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [T, K], weight: [N, K] in x's dtype or a narrower one, bias: [N]. Returns [T, N] in x's dtype.

    Sums are float32 on a CPU whatever the storage.
    """
    if x.is_cpu:
        if cpu.prefers(x, weight):
            return cpu.linear_small(x, weight, bias)
        if weight.dtype != torch.float32 and not (x.dtype == weight.dtype and _has_narrow_matrix_units()):
            return cpu.linear_widened(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), bias)


@functools.cache
def _has_narrow_matrix_units() -> bool:
    """Whether this processor multiplies bfloat16 natively; elsewhere library products emulate it, several times slower."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    if x.is_cpu and cpu.unavailable_reason() is None:
        return cpu.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    return reference.rms_norm(x, weight, eps)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """See `reference.gated_activation`."""
    if gate_up.is_cpu and cpu.unavailable_reason() is None:
        return cpu.gated_activation(gate_up, activation)
    return reference.gated_activation(gate_up, activation)


def rotate_and_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, pages: KVPages, slots: Tensor
) -> None:
    """See `reference.rotate_and_append`."""
    if q.is_cpu and cpu.rotate_refusal(q, k, v, pages.key, pages.value) is None:
        cpu.rotate_and_append(q, k, v, cos, sin, q_scale, pages.key, pages.value, slots)
    else:
        reference.rotate_and_append(q, k, v, cos, sin, q_scale, pages, slots)


def paged_attention(
    q: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    score_scale: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `reference.paged_attention`."""
    compiled = q.is_cpu and cpu.attention_refusal(q, pages.key, pages.value) is None
    return batched.paged_attention(
        q,
        pages,
        block_tables,
        query_start,
        seq_lens,
        score_scale,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        decode=_compiled_decode if compiled else None,
    )


def _compiled_decode(
    q: Tensor,
    pages: KVPages,
    tables: Tensor,
    seq_lens: Tensor,
    score_scale: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    return cpu.paged_attention_decode(
        q, pages.key, pages.value, tables, seq_lens, scale, score_scale, window=window, soft_cap=soft_cap
    )
