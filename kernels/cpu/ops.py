"""Attention, rotation, norm and activation on the CPU, through the compiled kernels.

Checks what would make the C code read or write astray, cheaply, and raises ValueError with what is wrong. Arithmetic is
float32 whatever the storage. Knows nothing of requests, models or other backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu.library import TYPE_CODES, Library, load, unavailable_reason

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _pages_refusal(key_pages: Tensor, value_pages: Tensor) -> str | None:
    if key_pages.dtype not in TYPE_CODES or key_pages.dtype != value_pages.dtype:
        return f"pages are {key_pages.dtype} and {value_pages.dtype}, not one of float32, bfloat16, float16"
    if key_pages.dim() != 4 or key_pages.shape[:3] != value_pages.shape[:3]:
        return f"pages {tuple(key_pages.shape)} and {tuple(value_pages.shape)} differ before their last dimension"
    if not (key_pages.is_cpu and key_pages.is_contiguous() and value_pages.is_cpu and value_pages.is_contiguous()):
        return "the pages are not contiguous CPU tensors"
    return None


def attention_refusal(q: Tensor, key_pages: Tensor, value_pages: Tensor) -> str | None:
    """Why `paged_attention_decode` cannot take these operands, or None when it can."""
    reason = unavailable_reason() or _pages_refusal(key_pages, value_pages)
    if reason is not None:
        return reason
    if q.dtype not in TYPE_CODES or q.dim() != 3 or (q.shape[2] > 1 and q.stride(2) != 1) or not q.is_cpu:
        return f"q is {q.dtype} {tuple(q.shape)} on {q.device}, not a float tensor [B, Hq, D] with adjacent elements"
    if q.shape[2] != key_pages.shape[3] or key_pages.shape[2] == 0 or q.shape[1] % key_pages.shape[2]:
        return f"q {tuple(q.shape)} does not fit key pages {tuple(key_pages.shape)}"
    return None


def rotate_refusal(q: Tensor, k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor) -> str | None:
    """Why `rotate_and_append` cannot take these operands, or None when it can."""
    reason = unavailable_reason() or _pages_refusal(key_pages, value_pages)
    if reason is not None:
        return reason
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.dtype not in TYPE_CODES or not tensor.is_cpu:
            return f"{name} is {tensor.dtype} on {tensor.device}: q, k and v share one float type on the CPU"
        if tensor.dim() != 3 or tensor.shape[0] != q.shape[0] or (tensor.shape[2] > 1 and tensor.stride(2) != 1):
            return f"{name} {tuple(tensor.shape)} is not [T, H, D] with adjacent elements"
    if k.shape[1:] != key_pages.shape[2:] or v.shape[1:] != value_pages.shape[2:] or q.shape[2] != k.shape[2]:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit the pages"
    return None


def _table_ok(table: Tensor, shape: tuple[int, int]) -> bool:
    return (
        table.dtype == torch.float32
        and table.shape == shape
        and table.is_cpu
        and (shape[1] < 2 or table.stride(1) == 1)
    )


def _vector_ok(vector: Tensor, dtype: torch.dtype, length: int) -> bool:
    return vector.dtype == dtype and vector.shape == (length,) and vector.is_cpu and vector.is_contiguous()


def rotate_and_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_scale: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    *,
    library: Library | None = None,
) -> None:
    """Rotate q in place, and write k rotated and v as it is to the pages; half-split pairs, float32 arithmetic.

    q: [T, Hq, D], scaled by q_scale on its rotary dims. k: [T, Hkv, D], v: [T, Hkv, Dv]: left unchanged. The three share
    a dtype (float32, bfloat16, float16) and may be views with any token and head strides. cos, sin: [T, d/2] float32,
    d <= D. q_scale: [T] float32. key_pages: [num_blocks, P, Hkv, D], value_pages: [num_blocks, P, Hkv, Dv], one float
    dtype, contiguous. slots: [T] int64, block * P + offset, distinct; negative ones are padding and write nothing.
    Raises ValueError, and IndexError for a slot past the pages (nothing is written then).
    """
    if library is None:
        reason = rotate_refusal(q, k, v, key_pages, value_pages)
        _check(reason is None, f"rotate_and_append: {reason}")
    tokens, q_heads, dim = q.shape
    half = cos.shape[-1]
    _check(2 * half <= dim, f"rotate_and_append: {2 * half} rotary dims in heads of {dim}")
    _check(
        _table_ok(cos, (tokens, half)) and _table_ok(sin, (tokens, half)),
        f"rotate_and_append: cos and sin must be float32 [{tokens}, d/2] with adjacent elements",
    )
    _check(
        _vector_ok(q_scale, torch.float32, tokens) and _vector_ok(slots, torch.int64, tokens),
        f"rotate_and_append: q_scale must be float32 and slots int64, contiguous [{tokens}]",
    )
    code = (library or load()).rotate_and_append(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        k.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.data_ptr(),
        v.stride(0),
        v.stride(1),
        TYPE_CODES[q.dtype],
        cos.data_ptr(),
        cos.stride(0),
        sin.data_ptr(),
        sin.stride(0),
        q_scale.data_ptr(),
        key_pages.data_ptr(),
        value_pages.data_ptr(),
        TYPE_CODES[key_pages.dtype],
        key_pages.shape[0] * key_pages.shape[1],
        slots.data_ptr(),
        tokens,
        q_heads,
        k.shape[1],
        dim,
        v.shape[2],
        half,
    )
    if code:
        raise IndexError("rotate_and_append: a slot lies past the pages")


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
    """Attention of one new token per sequence over its cached keys (its own, the last, included).

    q: [B, Hq, D] rotated, any row and head strides. key_pages: [num_blocks, P, Hkv, D], value_pages: [num_blocks, P, Hkv,
    Dv]. block_table: [B, max_blocks] int32; entries that no visible key needs are never looked at. seq_lens: [B] int32
    or int64; 0 gives a row of zeros. Scores are q.k * scale * score_scale[b], then soft_cap * tanh(score / soft_cap);
    window: keys seen, the last ones; sink_logits: [Hq] float32, each an extra logit in the softmax's denominator only.
    A row's bits depend on its own operands only. Returns [B, Hq, Dv] in q's dtype. Raises ValueError, and IndexError
    for a visible block that the table or the pages lack.
    """
    if library is None:
        reason = attention_refusal(q, key_pages, value_pages)
        _check(reason is None, f"paged_attention_decode: {reason}")
    batch, heads, dim = q.shape
    num_blocks, block_size, kv_heads, value_dim = value_pages.shape
    wide = seq_lens.dtype == torch.int64
    _check(
        block_table.dtype == torch.int32
        and block_table.dim() == 2
        and block_table.shape[0] == batch
        and block_table.is_cpu,
        f"paged_attention_decode: block_table must be int32 [{batch}, max_blocks]",
    )
    _check(
        _vector_ok(seq_lens, torch.int64 if wide else torch.int32, batch)
        and _vector_ok(score_scale, torch.float32, batch)
        and (sink_logits is None or _vector_ok(sink_logits, torch.float32, heads)),
        f"paged_attention_decode: seq_lens (int), score_scale [{batch}] and sink_logits [{heads}] (float32), contiguous",
    )
    _check(window is None or window > 0, "paged_attention_decode: window must be positive")
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
    _check(
        x.dim() == 2 and x.dtype in TYPE_CODES and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"rms_norm: x is {x.dtype} {tuple(x.shape)}, not a float CPU tensor [T, D] with adjacent elements",
    )
    rows, dim = x.shape
    _check(_vector_ok(weight, torch.float32, dim), f"rms_norm: weight must be float32 [{dim}], contiguous")
    if residual is not None:
        _check(
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
    _check(
        gate_up.dim() == 2 and gate_up.dtype in TYPE_CODES and gate_up.is_cpu and gate_up.shape[1] % 2 == 0,
        f"gated_activation: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, not a float CPU tensor [T, 2F]",
    )
    _check(gate_up.shape[1] < 2 or gate_up.stride(1) == 1, "gated_activation: the last dimension is not contiguous")
    _check(activation in _ACTIVATIONS, f"unknown activation {activation!r}; known are {', '.join(_ACTIVATIONS)}")
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
