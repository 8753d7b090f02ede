"""Rotary position embedding on the CPU, through the compiled kernels: angles, rotation with append, re-rotation, turned queries.

Checks what would make the C code read or write astray, and raises with what is wrong. Knows nothing of requests or models.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check, page_sizes, pages_refusal, scales_refusal, table_ok, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library

_CACHE_SIZE_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # Linux
_USUAL_CACHE_BYTES = 32 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20}


def rotate_refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> str | None:
    """Why `rotate_and_append` cannot take these operands, or None when it can."""
    reason = rerotate_refusal(key_pages, value_pages, key_scales, value_scales)
    if reason is not None:
        return reason
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.dtype not in TYPE_CODES or not tensor.is_cpu:
            return f"{name} is {tensor.dtype} on {tensor.device}: q, k and v share one float type on the CPU"
        if tensor.dim() != 3 or tensor.shape[0] != q.shape[0] or (tensor.shape[2] > 1 and tensor.stride(2) != 1):
            return f"{name} {tuple(tensor.shape)} is not [T, H, D] with adjacent elements"
    sizes = page_sizes(key_pages, value_pages, key_scales)
    fits = sizes.holds_keys(k.shape[1] or sizes.kv_heads, k.shape[2])
    if not fits or v.shape[1:] != (k.shape[1], sizes.value_dim):
        return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit the pages"
    return None


@functools.cache
def _cache_bytes() -> int:
    """Size of the last-level cache, or a usual one where the system does not tell."""
    try:
        text = _CACHE_SIZE_FILE.read_text().strip()  # "32768K"
        return int(text[:-1]) * _UNITS[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return _USUAL_CACHE_BYTES


def _outgrows_caches(key_pages: Tensor, value_pages: Tensor, tokens: int) -> bool:
    """Whether what `tokens` append is too large for attention to find it in a cache: then it had better pass them by."""
    per_token = (key_pages.stride(0) + value_pages.stride(0)) // key_pages.shape[1] if key_pages.shape[1] else 0
    return tokens * per_token * key_pages.element_size() > _cache_bytes() // 2


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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    library: Library,
) -> None:
    """Rotate q in place, and write k rotated and v as it is to the pages; half-split pairs, float32 arithmetic.

    q: [T, Hq, Dq], scaled by q_scale on its rotary dims. k: [T, Hkv, D], v: [T, Hkv, Dv]: left unchanged. The three share
    a dtype (float32, bfloat16, float16) and may be views with any token and head strides. cos, sin: [T, d/2] float32,
    d <= D and Dq. q_scale: [T] float32. key_pages: [num_blocks, P, Hkv, D], value_pages: [num_blocks, P, Hkv, Dv], one float
    dtype, contiguous; or int8 codes in the order of `int8_layout`, and key_scales, value_scales [num_blocks, Hkv, P]
    float32 (see `reference.quantize`); or rows of int8 codes as `KVPages` has them, with Dv 0.
    slots: [T] int64, block * P + offset, distinct; negative ones are padding and write nothing. k and v without heads: q alone is
    rotated.
    Raises ValueError, and IndexError for a slot past the pages (nothing is written then).
    """
    reason = rotate_refusal(q, k, v, key_pages, value_pages, key_scales, value_scales)
    check(reason is None, f"rotate_and_append: {reason}")
    tokens, q_heads, dim, half = *q.shape[:2], k.shape[2], cos.shape[-1]
    narrowest = min(q.shape[2], dim)
    check(2 * half <= narrowest, f"rotate_and_append: {2 * half} rotary dims in heads of {narrowest}")
    check(
        table_ok(cos, (tokens, half)) and table_ok(sin, (tokens, half)),
        f"rotate_and_append: cos and sin must be float32 [{tokens}, d/2] with adjacent elements",
    )
    check(
        vector_ok(q_scale, torch.float32, tokens) and vector_ok(slots, torch.int64, tokens),
        f"rotate_and_append: q_scale must be float32 and slots int64, contiguous [{tokens}]",
    )
    pages = page_sizes(key_pages, value_pages, key_scales)
    # fmt: off
    rows = (
        q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0),
        v.stride(1), TYPE_CODES[q.dtype], cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0),
        q_scale.data_ptr(), key_pages.data_ptr(), value_pages.data_ptr(),
    )
    sizes = (
        pages.num_blocks * pages.block_size, slots.data_ptr(), tokens, q_heads, k.shape[1], dim, v.shape[2], half,
    )
    # fmt: on
    if key_scales is not None and value_scales is not None and not pages.in_panels:
        code = library.rotate_and_append_rows(
            *(*rows[:6], *rows[9:15], key_pages.data_ptr(), key_scales.data_ptr()), *sizes[:6], half
        )
    elif key_scales is not None and value_scales is not None:
        scales = key_scales.data_ptr(), value_scales.data_ptr(), pages.block_size
        code = library.rotate_and_append_int8(*rows, *scales, *sizes)
    else:
        past_caches = _outgrows_caches(key_pages, value_pages, tokens)
        code = library.rotate_and_append(*rows, TYPE_CODES[key_pages.dtype], *sizes, int(past_caches))
    if code == 1:
        raise MemoryError("rotate_and_append: no memory for a head")
    if code:
        raise IndexError("rotate_and_append: a slot lies past the pages")


def rerotate_refusal(
    key_pages: Tensor, value_pages: Tensor, key_scales: Tensor | None = None, value_scales: Tensor | None = None
) -> str | None:
    """Why `rerotate_cached_keys` cannot take these pages, or None when it can."""
    reason = pages_refusal(key_pages, value_pages) or scales_refusal(key_pages, value_pages, key_scales, value_scales)
    if reason is None and key_pages.dtype == torch.int8 and key_pages.dim() == 4 and value_pages.shape[3]:
        return "rows of codes hold no values"
    return reason


def rerotate_cached_keys(
    key_pages: Tensor,
    value_pages: Tensor,
    sources: Tensor,
    targets: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    values: bool = True,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    library: Library,
) -> None:
    """Rotate cached keys by one more rotation each, from source to target slots, and take their values along if asked.

    key_pages: [num_blocks, P, Hkv, D], value_pages: [num_blocks, P, Hkv, Dv], one float dtype, contiguous. sources,
    targets: [N] int64 slots; an entry may name one slot twice, to rotate in place, but no slot may be the source of one
    entry and the target of another. cos, sin: [N, d/2] float32, d <= D. Arithmetic is float32; dims past d and values
    are copied bit by bit. int8 pages, in the order of `int8_layout`, come with key_scales and value_scales [num_blocks, Hkv,
    P] float32; a rotated key is rounded once, as a whole; without pairs it is copied. Of rows of int8 codes the groups with
    rotated dims are rounded anew, the others are copied. Raises ValueError, and IndexError for a
    slot outside the pages (nothing is written then).
    """
    reason = rerotate_refusal(key_pages, value_pages, key_scales, value_scales)
    check(reason is None, f"rerotate_cached_keys: {reason}")
    count, half = sources.shape[0], cos.shape[-1]
    num_blocks, block_size, kv_heads, dim, value_dim, in_panels = page_sizes(key_pages, value_pages, key_scales)
    check(2 * half <= dim, f"rerotate_cached_keys: {2 * half} rotary dims in heads of {dim}")
    check(
        table_ok(cos, (count, half)) and table_ok(sin, (count, half)),
        f"rerotate_cached_keys: cos and sin must be float32 [{count}, d/2] with adjacent elements",
    )
    check(
        vector_ok(sources, torch.int64, count) and vector_ok(targets, torch.int64, count),
        f"rerotate_cached_keys: sources and targets must be int64, contiguous [{count}]",
    )
    # fmt: off
    entries = (
        num_blocks * block_size, sources.data_ptr(), targets.data_ptr(), count, cos.data_ptr(), cos.stride(0),
        sin.data_ptr(), sin.stride(0), kv_heads, dim, value_dim if values else 0, half,
    )
    # fmt: on
    addresses = key_pages.data_ptr(), value_pages.data_ptr()
    if key_scales is not None and value_scales is not None and not in_panels:
        code = library.rerotate_cached_rows(
            key_pages.data_ptr(), key_scales.data_ptr(), *entries[:8], *(kv_heads, dim, half)
        )
    elif key_scales is not None and value_scales is not None:
        scales = key_scales.data_ptr(), value_scales.data_ptr(), block_size
        code = library.rerotate_cached_keys_int8(*addresses, *scales, *entries)
    else:
        code = library.rerotate_cached_keys(*addresses, TYPE_CODES[key_pages.dtype], *entries)
    if code == 1:
        raise MemoryError("rerotate_cached_keys: no memory for a head")
    if code:
        raise IndexError("rerotate_cached_keys: a slot lies outside the pages")


def rotate_queries(q: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, *, library: Library) -> Tensor:
    """q as it is, and under it versions of some of its rows, each rotated by one more angle.

    q: [T, H, D] float32, bfloat16 or float16, any row and head strides. rows: [M] int64, contiguous. cos, sin: [M, d/2]
    float32, d <= D. Returns [T + M, H, D], contiguous: row T + m is q[rows[m]] with its half-split pairs rotated in float32;
    what is not rotated is copied bit by bit. Raises ValueError, and IndexError for a row that q lacks.
    """
    check(
        q.dim() == 3 and q.dtype in TYPE_CODES and q.is_cpu and (q.shape[2] < 2 or q.stride(2) == 1),
        f"turn_queries: q is {q.dtype} {tuple(q.shape)}, not a float CPU tensor [T, H, D] with adjacent elements",
    )
    (tokens, heads, dim), count, half = q.shape, rows.shape[0], cos.shape[-1]
    check(2 * half <= dim, f"turn_queries: {2 * half} rotary dims in heads of {dim}")
    check(vector_ok(rows, torch.int64, count), f"turn_queries: rows must be int64, contiguous [{count}]")
    check(
        table_ok(cos, (count, half)) and table_ok(sin, (count, half)),
        f"turn_queries: cos and sin must be float32 [{count}, d/2] with adjacent elements",
    )
    out = torch.empty((tokens + count, heads, dim), dtype=q.dtype)
    code = library.rotate_queries(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        TYPE_CODES[q.dtype],
        rows.data_ptr(),
        cos.data_ptr(),
        cos.stride(0),
        sin.data_ptr(),
        sin.stride(0),
        out.data_ptr(),
        tokens,
        count,
        heads,
        dim,
        half,
    )
    if code:
        raise IndexError(f"turn_queries: a row is none of {tokens}")
    return out


def rotary_angles(inv_freq: Tensor, rows: Tensor, positions: Tensor, *, library: Library) -> tuple[Tensor, Tensor]:
    """Cosines and sines of inv_freq[:, rows] * positions, formed and reduced in float64.

    inv_freq: [G, R, d/2] float64, contiguous. rows, positions: [T] int64, contiguous. Returns two float32 [G, T, d/2].
    An element's bits depend on its frequency and position only. Raises ValueError, and IndexError for a row outside the table.
    """
    check(
        inv_freq.dim() == 3 and inv_freq.dtype == torch.float64 and inv_freq.is_cpu and inv_freq.is_contiguous(),
        f"rotary_angles: inv_freq is {inv_freq.dtype} {tuple(inv_freq.shape)}, not contiguous float64 [G, R, d/2]",
    )
    groups, table_rows, half = inv_freq.shape
    tokens = rows.shape[0]
    check(
        vector_ok(rows, torch.int64, tokens) and vector_ok(positions, torch.int64, tokens),
        f"rotary_angles: rows and positions must be int64, contiguous [{tokens}]",
    )
    shape = (groups, tokens, half)
    cos, sin = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    code = library.rotary_angles(
        inv_freq.data_ptr(),
        groups,
        table_rows,
        half,
        rows.data_ptr(),
        positions.data_ptr(),
        tokens,
        cos.data_ptr(),
        sin.data_ptr(),
    )
    if code:
        raise IndexError(f"rotary_angles: a row lies outside the table of {table_rows}")
    return cos, sin
