"""Attention, norm and activation on the CPU, through the compiled kernels.

Checks what would make the C code read or write astray, cheaply, and raises ValueError with what is wrong. Arithmetic is
float32 whatever the storage. Knows nothing of requests, models or other backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check, pages_refusal, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library, load, unavailable_reason

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def attention_refusal(q: Tensor, key_pages: Tensor, value_pages: Tensor) -> str | None:
    """Why `paged_attention_decode` cannot take these operands, or None when it can."""
    reason = unavailable_reason() or pages_refusal(key_pages, value_pages)
    if reason is not None:
        return reason
    if q.dtype not in TYPE_CODES or q.dim() != 3 or (q.shape[2] > 1 and q.stride(2) != 1) or not q.is_cpu:
        return f"q is {q.dtype} {tuple(q.shape)} on {q.device}, not a float tensor [B, Hq, D] with adjacent elements"
    if q.shape[2] != key_pages.shape[3] or key_pages.shape[2] == 0 or q.shape[1] % key_pages.shape[2]:
        return f"q {tuple(q.shape)} does not fit key pages {tuple(key_pages.shape)}"
    return None


def paged_attention_decode(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    score_scale: Tensor,
    window: int | None = None,
    sink_logits: Tensor | None = None,
    soft_cap: float | None = None,
    *,
    library: Library | None = None,
) -> Tensor:
    """Attention of one new token per row over its cached keys (its own, the last, included).

    q: [B, Hq, D] rotated, any row and head strides. key_pages: [num_blocks, P, Hkv, D], value_pages: [num_blocks, P, Hkv,
    Dv]. block_table: [B, max_blocks] int32; entries that no visible key needs are never looked at. seq_lens: [B] int32
    or int64; 0 gives a row of zeros. Scores are q.k * scale * score_scale[b], then soft_cap * tanh(score / soft_cap);
    window: keys seen, the last ones; sink_logits: [Hq] float32, each an extra logit in the softmax's denominator only.
    Rows of one sequence may share a table (`table.expand(B, -1)`); then they also share the loads of its keys.
    A row's bits depend on its own operands only. Returns [B, Hq, Dv] in q's dtype. Raises ValueError, and IndexError
    for a visible block that the table or the pages lack.
    """
    if library is None:
        reason = attention_refusal(q, key_pages, value_pages)
        check(reason is None, f"paged_attention_decode: {reason}")
    batch, heads, dim = q.shape
    num_blocks, block_size, kv_heads, value_dim = value_pages.shape
    wide = seq_lens.dtype == torch.int64
    check(
        block_table.dtype == torch.int32
        and block_table.dim() == 2
        and block_table.shape[0] == batch
        and block_table.is_cpu,
        f"paged_attention_decode: block_table must be int32 [{batch}, max_blocks]",
    )
    check(
        vector_ok(seq_lens, torch.int64 if wide else torch.int32, batch)
        and vector_ok(score_scale, torch.float32, batch)
        and (sink_logits is None or vector_ok(sink_logits, torch.float32, heads)),
        f"paged_attention_decode: seq_lens (int), score_scale [{batch}] and sink_logits [{heads}] (float32), contiguous",
    )
    check(window is None or window > 0, "paged_attention_decode: window must be positive")
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    out = torch.empty((batch, heads, value_dim), dtype=q.dtype)
    code = (library or load()).paged_attention_decode(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        TYPE_CODES[q.dtype],
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        TYPE_CODES[key_pages.dtype],
        num_blocks,
        block_size,
        kv_heads,
        dim,
        value_dim,
        block_table.data_ptr(),
        block_table.stride(0),
        block_table.shape[1],
        seq_lens.data_ptr(),
        int(wide),
        window or 0,
        scale,
        soft_cap or 0.0,
        score_scale.data_ptr(),
        None if sink_logits is None else sink_logits.data_ptr(),
        out.data_ptr(),
        batch,
        heads,
    )
    if code == 1:
        raise MemoryError("paged_attention_decode: no memory for partial results")
    if code:
        raise IndexError("paged_attention_decode: a visible key lies in a block that the table or the pages lack")
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, library: Library | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (1910.07467).

    x: [T, D] float32, bfloat16 or float16, any row stride. weight: [D] float32. With `residual` ([T, D], x's dtype) the
    input is residual + x, which is stored back into `residual`. Returns [T, D], contiguous, x's dtype. Raises ValueError.
    """
    check(
        x.dim() == 2 and x.dtype in TYPE_CODES and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"rms_norm: x is {x.dtype} {tuple(x.shape)}, not a float CPU tensor [T, D] with adjacent elements",
    )
    rows, dim = x.shape
    check(vector_ok(weight, torch.float32, dim), f"rms_norm: weight must be float32 [{dim}], contiguous")
    if residual is not None:
        check(
            residual.shape == x.shape
            and residual.dtype == x.dtype
            and residual.is_cpu
            and (dim < 2 or residual.stride(1) == 1),
            "rms_norm: residual must have x's shape and dtype",
        )
    out = torch.empty((rows, dim), dtype=x.dtype)
    (library or load()).rms_norm(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        TYPE_CODES[x.dtype],
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        rows,
        dim,
    )
    return out


def gated_activation(gate_up: Tensor, activation: str, *, library: Library | None = None) -> Tensor:
    """activation(gate) * up of [T, 2F] holding (gate, up), any row stride. activation: "silu" or "gelu_tanh".

    Returns [T, F], contiguous, rounded once to gate_up's dtype. Raises ValueError.
    """
    check(
        gate_up.dim() == 2 and gate_up.dtype in TYPE_CODES and gate_up.is_cpu and gate_up.shape[1] % 2 == 0,
        f"gated_activation: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, not a float CPU tensor [T, 2F]",
    )
    check(gate_up.shape[1] < 2 or gate_up.stride(1) == 1, "gated_activation: the last dimension is not contiguous")
    check(activation in _ACTIVATIONS, f"unknown activation {activation!r}; known are {', '.join(_ACTIVATIONS)}")
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, dim), dtype=gate_up.dtype)
    (library or load()).gated_activation(
        gate_up.data_ptr(),
        gate_up.stride(0),
        TYPE_CODES[gate_up.dtype],
        _ACTIVATIONS[activation],
        out.data_ptr(),
        rows,
        dim,
    )
    return out


def silu_and_mul(gate_up: Tensor, *, library: Library | None = None) -> Tensor:
    """silu(gate) * up of [T, 2F] holding (gate, up). Returns [T, F]. Raises ValueError."""
    return gated_activation(gate_up, "silu", library=library)


def soft_cap(x: Tensor, cap: float, *, library: Library | None = None) -> Tensor:
    """cap * tanh(x / cap) of [T, N] float32, any row stride. Returns [T, N], contiguous. Raises ValueError."""
    check(
        x.dim() == 2 and x.dtype == torch.float32 and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"soft_cap: x is {x.dtype} {tuple(x.shape)}, not a float32 CPU tensor [T, N] with adjacent elements",
    )
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    (library or load()).soft_cap(x.data_ptr(), x.stride(0), cap, out.data_ptr(), x.shape[0], x.shape[1])
    return out
