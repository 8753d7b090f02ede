"""Attention, rotary and recurrent-layer bindings of the compiled kernels.

Functions named like an operation of `Backend` perform it. Arithmetic is float32 whatever the storage: float32, bfloat16 or
float16. Queries, keys, values and columns may have any row and head strides; pages and states are contiguous. Operands that
do not fit raise ValueError before an address is passed to C. Sequence data of recurrent layers is checked by the kernels,
since it may differ when a recorded call is repeated.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall, LatentExpansion
from windlass.kernels.backend import StateRows
from windlass.kernels.cpu.library import (
    LATENT_PAGES,
    PAGE_CODES,
    TYPE_CODES,
    HasLibrary,
    address,
    adjacent,
    check,
    check_matrix,
    check_vectors,
    pages_refusal,
    table_ok,
    tensor2,
    vector_ok,
)
from windlass.kernels.layouts.kv_pages import KVPages

MIN_BF16_QUERIES = 16  # of a sequence, as in attention_prefill.h


def call_refusal(call: AttentionCall) -> str | None:
    """Why the functions below do not support such a call, or None."""
    if call.chunk is not None and (call.window is not None or not call.causal):
        return "chunks with a window, or without causal attention"
    return None


def attention_refusal(q: Tensor, pages: KVPages, call: AttentionCall) -> str | None:
    """Why the functions below do not support these operands, or None."""
    reason = call_refusal(call) or pages_refusal(pages)
    if reason is not None:
        return reason
    if q.dtype not in TYPE_CODES or q.dim() != 3 or (q.shape[2] > 1 and q.stride(2) != 1) or not q.is_cpu:
        return f"q is {q.dtype} {tuple(q.shape)} on {q.device}, not a float tensor [T, Hq, D] with adjacent elements"
    if pages.has_rows_of_codes and pages.value.data_ptr() != pages.key.data_ptr():
        return "rows of codes are keys and values at once"
    kv_heads = pages.num_kv_heads
    if not pages.holds_keys(kv_heads, q.shape[2]) or kv_heads == 0 or q.shape[1] % kv_heads:
        return f"q {tuple(q.shape)} does not fit key pages {tuple(pages.key.shape)}"
    return None


def paged_attention_decode(kernels: HasLibrary, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    """Attention of one new token per sequence over its cached keys, which include its own.

    q: [B, Hq, D] rotated, any row and head strides; [N, Hq, D] with ranges. call: query_start is ignored; seq_lens may be
    int32 or int64, 0 gives a row of zeros. Without ranges, rows with a common table (`table.expand(B, -1)`) share the loads
    of its keys. A row's bits depend on its own operands only. Returns [B, Hq, Dv] in q's dtype. Raises ValueError, and
    IndexError for a visible block that the table or the pages lack, or a row that q lacks.
    """
    name, seq_lens, batch = "paged_attention_decode", call.seq_lens, call.batch_size
    tables = _checked_tables(q, pages, call, batch, name)
    check(
        seq_lens.dtype in (torch.int32, torch.int64) and vector_ok(seq_lens, seq_lens.dtype, batch),
        f"{name}: seq_lens must be int32 or int64, contiguous [{batch}]",
    )
    out = torch.empty((batch, q.shape[1], pages.value_dim), dtype=q.dtype)
    arguments = kernels.library.attention_arguments(_arguments(q, pages, call, tables, None, out))
    _raise_attention_error(kernels.library.paged_attention_decode(arguments), name)
    return out


def paged_attention_prefill(
    kernels: HasLibrary,
    q: Tensor,
    pages: KVPages,
    call: AttentionCall,
    *,
    out: Tensor | None = None,
    fewest: int = 1,
    bf16_products: bool = False,
) -> Tensor:
    """Attention of the last tokens of several sequences over their cached keys, in blocks (2205.14135).

    q: [T, Hq, D] rotated, any row and head strides; [N, Hq, D] with ranges. Sequences with fewer than `fewest` queries are
    skipped: their rows of `out` ([T, Hq, Dv], contiguous, q's dtype) are not written. A row's bits depend neither on its
    chunk nor on other rows. bf16_products: on a processor with native bfloat16 products, 16-bit keys and values, latent rows,
    queries and weights may be rounded to bfloat16, except for sequences with fewer than `MIN_BF16_QUERIES` queries. Returns
    out. Raises ValueError, and IndexError for a visible block that the tables or the pages lack, or a row that q lacks.
    """
    name = "paged_attention_prefill"
    query_start, seq_lens, tokens, batch = call.query_start, call.seq_lens, call.num_tokens, call.batch_size
    tables = _checked_tables(q, pages, call, tokens, name)
    check_vectors(f"{name}: seq_lens", torch.int64, batch, seq_lens)
    check_vectors(f"{name}: query_start", torch.int64, batch + 1, query_start)
    starts = query_start.tolist()
    check(
        starts[0] >= 0 and starts[-1] <= tokens and all(a <= b for a, b in pairwise(starts)),
        f"{name}: query_start must rise from 0 to at most {tokens}",
    )
    shape = (tokens, q.shape[1], pages.value_dim)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype)
    check(
        out.shape == shape and out.dtype == q.dtype and out.is_cpu and out.is_contiguous(),
        f"{name}: out must be {q.dtype} {shape}, contiguous",
    )
    bf16_products = bf16_products and (pages.key.element_size() == 2 or pages.has_rows_of_codes)
    arguments = kernels.library.attention_arguments(_arguments(q, pages, call, tables, query_start, out, bf16_products))
    _raise_attention_error(kernels.library.paged_attention_prefill(arguments, fewest), name)
    return out


def _checked_tables(q: Tensor, pages: KVPages, call: AttentionCall, tokens: int, name: str) -> Tensor:
    """The block tables with adjacent elements in a row. Raises ValueError unless the operands are supported and fit each
    other and a call for this many tokens."""
    reason = attention_refusal(q, pages, call)
    check(reason is None, f"{name}: {reason}")
    _check_query_rows(q, call, tokens, name)
    tables = call.block_tables
    if tables.dtype != torch.int32 or tables.dim() != 2 or tables.shape[0] != call.batch_size or not tables.is_cpu:
        raise ValueError(f"{name}: block_tables must be int32 [{call.batch_size}, max_blocks]")
    check_vectors(f"{name}: score_scale", torch.float32, tokens, call.score_scale)
    check_vectors(f"{name}: sink_logits", torch.float32, q.shape[1], call.sink_logits)
    check(call.window is None or call.window > 0, f"{name}: window must be positive")
    alone = call.chunk is None or (call.chunk > 0 and call.window is None and call.causal)
    check(alone, f"{name}: chunk must be positive, causal, and without a window")
    return adjacent(tables)


def _check_query_rows(q: Tensor, call: AttentionCall, tokens: int, name: str) -> None:
    """Raise ValueError unless q has the rows that a call for this many tokens needs, and its ranges are valid."""
    ranges = call.ranges
    if ranges is None:
        check(q.shape[0] == tokens, f"{name}: q has {q.shape[0]} rows for the {tokens} of score_scale")
        return
    check_vectors(f"{name}: alibi_slopes", torch.float32, q.shape[1], call.alibi_slopes)
    shape = (call.batch_size, ranges.ends.shape[-1])
    for part in (ranges.ends, ranges.rows, ranges.reaches, ranges.gaps):
        if part is not None and not (
            part.dtype == torch.int64 and part.shape == shape and part.is_cpu and part.is_contiguous()
        ):
            raise ValueError(f"{name}: tensors of ranges must be int64 [{call.batch_size}, R], contiguous")


def _arguments(
    q: Tensor,
    pages: KVPages,
    call: AttentionCall,
    tables: Tensor,
    query_start: Tensor | None,
    out: Tensor,
    bf16_products: bool = False,
) -> dict[str, float]:
    """Checked operands as the fields of `AttentionArguments` in src/attention_call.h, which describes them."""
    ranges = call.ranges
    return {
        "q": q.data_ptr(),
        "keys": pages.key.data_ptr(),
        "values": pages.value.data_ptr(),
        "key_scales": address(pages.key_scale) or 0,
        "value_scales": address(pages.value_scale) or 0,
        "tables": tables.data_ptr(),
        "query_start": address(query_start) or 0,
        "lengths": call.seq_lens.data_ptr(),
        "score_scale": call.score_scale.data_ptr(),
        "sinks": address(call.sink_logits) or 0,
        "range_ends": 0 if ranges is None else ranges.ends.data_ptr(),
        "range_rows": 0 if ranges is None else ranges.rows.data_ptr(),
        "range_reaches": 0 if ranges is None else ranges.reaches.data_ptr(),
        "slopes": address(call.alibi_slopes) or 0,
        "range_gaps": 0 if ranges is None else address(ranges.gaps) or 0,
        "out": out.data_ptr(),
        "q_rows": q.shape[0],
        "q_row": q.stride(0),
        "q_head": q.stride(1),
        "num_blocks": pages.num_blocks,
        "block_size": pages.block_size,
        "kv_heads": pages.num_kv_heads,
        "dim": q.shape[-1],
        "value_dim": pages.value_dim,
        "table_row": tables.stride(0),
        "table_columns": tables.shape[1],
        "batch": call.seq_lens.shape[0],
        "heads": q.shape[-2],
        "ranges": 0 if ranges is None else ranges.ends.shape[1],
        "window": call.window or 0,
        "chunk": call.chunk or 0,
        "scale": call.scale,
        "soft_cap": call.soft_cap or 0.0,
        "q_type": TYPE_CODES[q.dtype],
        "page_type": LATENT_PAGES if pages.has_rows_of_codes else PAGE_CODES[pages.key.dtype],
        "int64_lengths": call.seq_lens.dtype == torch.int64,
        "causal": call.causal,
        "bf16_products": bf16_products,
    }


def _raise_attention_error(code: int, name: str) -> None:
    """Raise the error of a code of the kernels; see attention_call.h."""
    if code == 1:
        raise MemoryError(f"{name}: no memory for partial results")
    if code == 2:
        raise IndexError(f"{name}: a visible key is in a block that the tables or the pages lack")
    if code == 4:
        raise IndexError(f"{name}: ranges name a row that q lacks")
    if code == 5:
        raise ValueError(f"{name}: the last range ends before the last key")
    if code:
        raise ValueError(f"{name}: the compiled kernels do not support this call")


_CACHE_SIZE_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # Linux

_DEFAULT_CACHE_BYTES = 32 << 20

_UNITS = {"K": 1 << 10, "M": 1 << 20}


@functools.cache
def _cache_bytes() -> int:
    """Size of the last-level cache, or a default if the system does not report it."""
    try:
        text = _CACHE_SIZE_FILE.read_text().strip()  # "32768K"
        return int(text[:-1]) * _UNITS[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return _DEFAULT_CACHE_BYTES


def _check_rotated(q: Tensor, k: Tensor, v: Tensor, pages: KVPages) -> None:
    """Raise ValueError unless q, k and v fit each other and these (valid) pages."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.dtype not in TYPE_CODES or not tensor.is_cpu:
            raise ValueError(
                f"rotate_and_append: {name} is {tensor.dtype} on {tensor.device}: q, k and v share one float type on the CPU"
            )
        if tensor.dim() != 3 or tensor.shape[0] != q.shape[0] or (tensor.shape[2] > 1 and tensor.stride(2) != 1):
            raise ValueError(f"rotate_and_append: {name} {tuple(tensor.shape)} is not [T, H, D] with adjacent elements")
    fits = pages.holds_keys(k.shape[1] or pages.num_kv_heads, k.shape[2])
    if not fits or v.shape[1:] != (k.shape[1], pages.value_dim):
        raise ValueError(
            f"rotate_and_append: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit the pages"
        )


def _check_pages(pages: KVPages, name: str) -> None:
    reason = pages_refusal(pages)
    if reason is None and pages.has_rows_of_codes and pages.value_dim:
        reason = "rows of codes hold no values"
    check(reason is None, f"{name}: {reason}")


def _check_angles(cos: Tensor, sin: Tensor, count: int, head_dim: int, name: str) -> int:
    """The number of rotated pairs. Raises ValueError unless these are angles of `count` rows for heads of this size."""
    half = cos.shape[-1]
    check(2 * half <= head_dim, f"{name}: {2 * half} rotary dims in heads of {head_dim}")
    check(
        table_ok(cos, (count, half)) and table_ok(sin, (count, half)),
        f"{name}: cos and sin must be float32 [{count}, d/2] with adjacent elements",
    )
    return half


def _outgrows_caches(pages: KVPages, tokens: int) -> bool:
    """Whether the appended tokens exceed the caches, so that non-temporal stores are better."""
    block_size = pages.block_size
    per_token = (pages.key.stride(0) + pages.value.stride(0)) // block_size if block_size else 0
    return tokens * per_token * pages.key.element_size() > _cache_bytes() // 2


def rotate_and_append(
    kernels: HasLibrary,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_scale: Tensor,
    pages: KVPages,
    slots: Tensor,
) -> None:
    """Raises IndexError for a slot past the pages (nothing is written then)."""
    _check_pages(pages, "rotate_and_append")
    _check_rotated(q, k, v, pages)
    tokens, q_heads, dim = *q.shape[:2], k.shape[2]
    half = _check_angles(cos, sin, tokens, min(q.shape[2], dim), "rotate_and_append")
    check_vectors("rotate_and_append: q_scale", torch.float32, tokens, q_scale)
    check_vectors("rotate_and_append: slots", torch.int64, tokens, slots)
    heads = (*_heads(q), *_heads(k))
    angles = cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), q_scale.data_ptr()
    sizes = pages.num_slots, slots.data_ptr(), tokens, q_heads, k.shape[1], dim
    key, value, key_scale, value_scale = pages.key, pages.value, pages.key_scale, pages.value_scale
    if key_scale is not None and pages.has_rows_of_codes:
        code = kernels.library.rotate_and_append_rows(
            *(*heads, TYPE_CODES[q.dtype], *angles, key.data_ptr(), key_scale.data_ptr(), *sizes, half)
        )
    elif key_scale is not None and value_scale is not None:
        code = kernels.library.rotate_and_append_int8(
            *(*heads, *_heads(v), TYPE_CODES[q.dtype], *angles, key.data_ptr(), value.data_ptr()),
            *(key_scale.data_ptr(), value_scale.data_ptr(), pages.block_size, *sizes, v.shape[2], half),
        )
    else:
        code = kernels.library.rotate_and_append(
            *(*heads, *_heads(v), TYPE_CODES[q.dtype], *angles, key.data_ptr(), value.data_ptr()),
            *(TYPE_CODES[key.dtype], *sizes, v.shape[2], half, int(_outgrows_caches(pages, tokens))),
        )
    if code == 1:
        raise MemoryError("rotate_and_append: no memory for a head")
    if code:
        raise IndexError("rotate_and_append: a slot is past the pages")


def _heads(x: Tensor) -> tuple[int, int, int]:
    """Address, row stride and head stride of x [T, H, D]."""
    return x.data_ptr(), x.stride(0), x.stride(1)


def rerotate_cached_keys(
    kernels: HasLibrary,
    pages: KVPages,
    sources: Tensor,
    targets: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    values: bool = True,
) -> None:
    """Dims past d are copied bit by bit. An int8 key is quantized again as a unit, or copied if it has no rotary dims. Of
    latent rows, groups with rotary dims are quantized again and the others copied."""
    _check_pages(pages, "rerotate_cached_keys")
    count, dim = sources.shape[0], pages.key_dim
    half = _check_angles(cos, sin, count, dim, "rerotate_cached_keys")
    check_vectors("rerotate_cached_keys: sources and targets", torch.int64, count, sources, targets)
    entries = (
        *(pages.num_slots, sources.data_ptr(), targets.data_ptr(), count),
        *(cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), pages.num_kv_heads, dim),
    )
    key, value, key_scale, value_scale = pages.key, pages.value, pages.key_scale, pages.value_scale
    value_dim = pages.value_dim if values else 0
    if key_scale is not None and pages.has_rows_of_codes:
        code = kernels.library.rerotate_cached_rows(key.data_ptr(), key_scale.data_ptr(), *entries, half)
    elif key_scale is not None and value_scale is not None:
        scales = key_scale.data_ptr(), value_scale.data_ptr(), pages.block_size
        code = kernels.library.rerotate_cached_keys_int8(
            key.data_ptr(), value.data_ptr(), *scales, *entries, value_dim, half
        )
    else:
        code = kernels.library.rerotate_cached_keys(
            key.data_ptr(), value.data_ptr(), TYPE_CODES[key.dtype], *entries, value_dim, half
        )
    if code == 1:
        raise MemoryError("rerotate_cached_keys: no memory for a head")
    if code:
        raise IndexError("rerotate_cached_keys: a slot is outside the pages")


def rotate_queries(kernels: HasLibrary, q: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Dims past d are copied bit by bit."""
    _check_heads(q, "rotate_queries")
    (tokens, heads, dim), count = q.shape, rows.shape[0]
    half = _check_angles(cos, sin, count, dim, "rotate_queries")
    check_vectors("rotate_queries: rows", torch.int64, count, rows)
    out = torch.empty((tokens + count, heads, dim), dtype=q.dtype)
    code = kernels.library.rotate_queries(
        *(*_heads(q), TYPE_CODES[q.dtype], rows.data_ptr()),
        *(cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0)),
        *(out.data_ptr(), tokens, count, heads, dim, half),
    )
    if code:
        raise IndexError(f"rotate_queries: a row is not one of {tokens}")
    return out


def rotary_angles(kernels: HasLibrary, inv_freq: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Operands are contiguous. Raises IndexError for a row outside the table."""
    check(
        inv_freq.dim() == 3 and inv_freq.dtype == torch.float64 and inv_freq.is_cpu and inv_freq.is_contiguous(),
        f"rotary_angles: inv_freq is {inv_freq.dtype} {tuple(inv_freq.shape)}, not contiguous float64 [G, R, d/2]",
    )
    groups, table_rows, half = inv_freq.shape
    tokens = rows.shape[0]
    check_vectors("rotary_angles: rows and positions", torch.int64, tokens, rows, positions)
    shape = (groups, tokens, half)
    cos, sin = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    code = kernels.library.rotary_angles(
        *(inv_freq.data_ptr(), groups, table_rows, half),
        *(rows.data_ptr(), positions.data_ptr(), tokens, cos.data_ptr(), sin.data_ptr()),
    )
    if code:
        raise IndexError(f"rotary_angles: a row is outside the table of {table_rows}")
    return cos, sin


def latent_expansion_cost(pages: KVPages, *, narrow: bool) -> LatentExpansion:
    """See `Backend.latent_expansion`. narrow: whether attention over 16-bit and latent pages uses AMX. Torch's products use
    it too, the products of single queries do not. Measured: docs/internals/benchmarks.md."""
    if narrow and pages.key.dtype != torch.float32:
        return LatentExpansion(1.25, 10.0, torch.bfloat16)
    return LatentExpansion(1.25, 1.25)


def latent_queries(kernels: HasLibrary, q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
    _check_latent(q, up, "latent_queries")
    tokens, heads, width = q.shape
    plain, dim = width - rotary_dim, up.shape[2]
    check(
        0 <= rotary_dim <= width and plain <= up.shape[1],
        f"latent_queries: q {tuple(q.shape)} with {rotary_dim} rotated dims does not fit matrices {tuple(up.shape)}",
    )
    out = torch.empty((tokens, heads, rotary_dim + dim), dtype=q.dtype)
    kernels.library.latent_queries(
        *(*_heads(q), TYPE_CODES[q.dtype], up.data_ptr(), TYPE_CODES[up.dtype]),
        *(out.data_ptr(), tokens, heads, rotary_dim, plain, up.shape[1] - plain, dim),
    )
    return out


def latent_values(kernels: HasLibrary, attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
    _check_latent(attended, up, "latent_values")
    tokens, heads, dim = attended.shape
    check(
        dim == up.shape[2] and 0 <= value_dim <= up.shape[1],
        f"latent_values: {tuple(attended.shape)} for {value_dim} dims does not fit matrices {tuple(up.shape)}",
    )
    out = torch.empty((tokens, heads * value_dim), dtype=attended.dtype)
    kernels.library.latent_values(
        *(*_heads(attended), TYPE_CODES[attended.dtype], up.data_ptr(), TYPE_CODES[up.dtype], out.data_ptr()),
        *(tokens, heads, up.shape[1] - value_dim, value_dim, dim),
    )
    return out


def _check_heads(x: Tensor, name: str) -> None:
    if x.dim() != 3 or x.dtype not in TYPE_CODES or not x.is_cpu or (x.shape[2] > 1 and x.stride(2) != 1):
        raise ValueError(
            f"{name}: {x.dtype} {tuple(x.shape)} is not a float CPU tensor [T, H, D] with adjacent elements"
        )


def _check_latent(x: Tensor, up: Tensor, name: str) -> None:
    _check_heads(x, name)
    fits = up.dim() == 3 and up.shape[0] == x.shape[1] and up.is_cpu and up.is_contiguous()
    check(fits and up.dtype in TYPE_CODES, f"{name}: matrices {up.dtype} {tuple(up.shape)} for {x.shape[1]} heads")


WIDTHS = range(2, 9)  # of convolutions


def short_convolution(
    kernels: HasLibrary,
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """weight: contiguous; W: one of WIDTHS. Raises IndexError for a block that the window lacks (nothing is written then)."""
    check_matrix(x, "short_convolution: x")
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
    check_vectors("short_convolution: bias", torch.float32, channels, bias)
    check(activation in (None, "silu"), f"short_convolution: activation {activation!r} is not silu")
    out = torch.empty((tokens, channels), dtype=x.dtype)
    code = kernels.library.short_convolution(
        *(*tensor2(x), weight.data_ptr(), width),
        *(address(bias), int(activation is not None), window.data_ptr(), window.shape[0]),
        *_sequence_addresses(rows, tokens, "short_convolution"),
        *(out.data_ptr(), tokens, channels),
    )
    _raise_recurrent_error(code, "short_convolution", tokens, window.shape[0])
    return out


def gated_delta_rule(
    kernels: HasLibrary,
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
    """Raises IndexError for a block that the memory lacks (nothing is written then), and MemoryError."""
    check_matrix(qkv, "gated_delta_rule: qkv")
    key_heads, heads = _head_counts(memory, qkv, "gated_delta_rule", "queries, keys and values")
    tokens, (blocks, _, key_dim, value_dim) = qkv.shape[0], memory.shape
    _check_gate(decay, qkv, heads, "gated_delta_rule: decay")
    _check_gate(strength, qkv, heads, "gated_delta_rule: strength")
    check_vectors("gated_delta_rule: rate and bias", torch.float32, heads, rate, bias)
    out = torch.empty((tokens, heads * value_dim), dtype=qkv.dtype)
    code = kernels.library.gated_delta_rule(
        *(*tensor2(qkv), decay.data_ptr(), decay.stride(0)),
        *(strength.data_ptr(), strength.stride(0), rate.data_ptr(), bias.data_ptr()),
        *(memory.data_ptr(), blocks, key_heads, heads, key_dim, value_dim, int(tiled_heads)),
        *_sequence_addresses(rows, tokens, "gated_delta_rule"),
        *(out.data_ptr(), tokens),
    )
    _raise_recurrent_error(code, "gated_delta_rule", tokens, blocks)
    return out


def state_space(
    kernels: HasLibrary,
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
    """limits: ascending. Raises IndexError for a block that the memory lacks (nothing is written then), and MemoryError."""
    check_matrix(mixed, "state_space: mixed")
    key_heads, heads = _head_counts(memory, mixed, "state_space", "values, keys and queries")
    tokens, (blocks, _, key_dim, value_dim) = mixed.shape[0], memory.shape
    _check_gate(step, mixed, heads, "state_space: step")
    check_vectors("state_space: rate, bias and skip", torch.float32, heads, rate, bias, skip)
    check(limits[0] <= limits[1], f"state_space: limits {limits} do not ascend")
    out = torch.empty((tokens, heads * value_dim), dtype=mixed.dtype)
    code = kernels.library.state_space(
        *(*tensor2(mixed), step.data_ptr(), step.stride(0)),
        *(rate.data_ptr(), bias.data_ptr(), skip.data_ptr()),
        *(memory.data_ptr(), blocks, key_heads, heads, key_dim, value_dim, *limits),
        *_sequence_addresses(rows, tokens, "state_space"),
        *(out.data_ptr(), tokens),
    )
    _raise_recurrent_error(code, "state_space", tokens, blocks)
    return out


def _head_counts(memory: Tensor, columns: Tensor, name: str, parts: str) -> tuple[int, int]:
    """The numbers of key heads and of heads of a memory. Raises ValueError if the columns do not fit."""
    check(
        memory.dim() == 4 and _floats_ok(memory, tuple(memory.shape)) and 0 not in memory.shape[1:],
        f"{name}: memory is {memory.dtype} {tuple(memory.shape)}, not float32 [N, Hv, Dk, Dv], contiguous",
    )
    _, heads, key_dim, value_dim = memory.shape
    key_heads, rest = divmod(columns.shape[1] - heads * value_dim, 2 * key_dim)
    check(
        rest == 0 and key_heads > 0 and heads % key_heads == 0,
        f"{name}: {columns.shape[1]} columns are not {parts} of a memory {tuple(memory.shape)}",
    )
    return key_heads, heads


def _check_gate(gate: Tensor, columns: Tensor, heads: int, name: str) -> None:
    check_matrix(gate, name)
    expected = columns.shape[0], heads
    check(
        gate.shape == expected and gate.dtype == columns.dtype,
        f"{name} is {gate.dtype} {tuple(gate.shape)}, not {columns.dtype} {expected}",
    )


def _floats_ok(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    return tensor.dtype == torch.float32 and tensor.shape == shape and tensor.is_cpu and tensor.is_contiguous()


def _sequence_addresses(rows: StateRows, tokens: int, name: str) -> tuple[int, int, int, int, int | None]:
    """The rows as arguments of the kernels. Raises ValueError."""
    sequences = rows.lengths.numel()
    check(
        vector_ok(rows.blocks, torch.int64, sequences)
        and vector_ok(rows.starts, torch.int64, sequences + 1)
        and vector_ok(rows.lengths, torch.int64, sequences),
        f"{name}: blocks, starts and lengths of {sequences} sequences must be int64 [S], [S + 1] and [S], contiguous",
    )
    check_vectors(f"{name}: snapshots", torch.int64, tokens, rows.snapshots)
    return (
        *(rows.blocks.data_ptr(), rows.starts.data_ptr(), rows.lengths.data_ptr(), sequences),
        address(rows.snapshots),
    )


def _raise_recurrent_error(code: int, name: str, tokens: int, blocks: int) -> None:
    if code == 2:
        raise IndexError(f"{name}: a sequence's block is not one of {blocks}")
    if code == 3:
        raise ValueError(f"{name}: starts must ascend from 0 to {tokens} tokens")
    if code:
        raise MemoryError(f"{name}: no memory")
