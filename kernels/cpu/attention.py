"""Attention over paged keys and values on the CPU, through the compiled kernels: one query per sequence, or prompts.

Checks what would make the C code read or write astray, cheaply, and raises with what is wrong. Arithmetic is float32
whatever the storage. Knows nothing of requests, models or other backends.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall
from windlass.kernels.cpu.checks import PageSizes, check, page_sizes, pages_refusal, scales_refusal, vector_ok
from windlass.kernels.cpu.library import PAGE_CODES, PAGES_OF_ROWS, TYPE_CODES, Library
from windlass.kernels.cpu.structs import AttentionArguments, attention_arguments
from windlass.kernels.layouts.pages import KVPages

FEWEST_ROUNDED = 16  # queries of a sequence, as in attention_prefill.h


def call_refusal(call: AttentionCall) -> str | None:
    """What such a call asks for that the functions below do not do, or None."""
    if call.chunk is not None and (call.window is not None or not call.causal):
        return "chunks have a window, or keys behind their queries"
    return None


def attention_refusal(q: Tensor, pages: KVPages, call: AttentionCall) -> str | None:
    """Why the functions below cannot take these operands, or None when they can."""
    key_pages, value_pages, key_scales = pages.key, pages.value, pages.key_scale
    reason = (
        call_refusal(call)
        or pages_refusal(key_pages, value_pages)
        or scales_refusal(key_pages, value_pages, key_scales, pages.value_scale)
    )
    if reason is not None:
        return reason
    if q.dtype not in TYPE_CODES or q.dim() != 3 or (q.shape[2] > 1 and q.stride(2) != 1) or not q.is_cpu:
        return f"q is {q.dtype} {tuple(q.shape)} on {q.device}, not a float tensor [T, Hq, D] with adjacent elements"
    sizes = page_sizes(key_pages, value_pages, key_scales)
    if pages.has_rows_of_codes and value_pages.data_ptr() != key_pages.data_ptr():
        return "rows of codes are keys and values at once"
    fits = sizes.holds_keys(sizes.kv_heads, q.shape[2])
    if not fits or sizes.kv_heads == 0 or q.shape[1] % sizes.kv_heads:
        return f"q {tuple(q.shape)} does not fit key pages {tuple(key_pages.shape)}"
    return None


def paged_attention_decode(q: Tensor, pages: KVPages, call: AttentionCall, *, library: Library) -> Tensor:
    """Attention of one new token per sequence over its cached keys (its own, the last, included).

    q: [B, Hq, D] rotated, any row and head strides; [N, Hq, D] with ranges. Of the call:
    query_start is not looked at; seq_lens may be int32 or int64, 0 gives a row of zeros; rows of one sequence may share a
    table (`table.expand(B, -1)`), then they also share the loads of its keys (without ranges). A row's bits depend on its
    own operands only. Returns [B, Hq, Dv] in q's dtype. Raises ValueError, and IndexError for a visible block that the table
    or the pages lack, or a row that q lacks.
    """
    reason = attention_refusal(q, pages, call)
    check(reason is None, f"paged_attention_decode: {reason}")
    tables, seq_lens, sinks = call.block_tables, call.seq_lens, call.sink_logits
    batch, heads = call.batch_size, q.shape[1]
    sizes = page_sizes(pages.key, pages.value, pages.key_scale)
    wide = seq_lens.dtype == torch.int64
    _check_query_rows(q, call, batch, "paged_attention_decode")
    check(
        tables.dtype == torch.int32 and tables.dim() == 2 and tables.shape[0] == batch and tables.is_cpu,
        f"paged_attention_decode: block_tables must be int32 [{batch}, max_blocks]",
    )
    check(
        vector_ok(seq_lens, torch.int64 if wide else torch.int32, batch)
        and vector_ok(call.score_scale, torch.float32, batch)
        and (sinks is None or vector_ok(sinks, torch.float32, heads)),
        f"paged_attention_decode: seq_lens (int), score_scale [{batch}] and sink_logits [{heads}] (float32), contiguous",
    )
    _check_visibility(call, "paged_attention_decode")
    if tables.shape[1] > 1 and tables.stride(1) != 1:
        tables = tables.contiguous()
    out = torch.empty((batch, heads, sizes.value_dim), dtype=q.dtype)
    arguments = _arguments(q, pages, call, sizes, tables, None, wide, out)
    _raise_attention_error(library.paged_attention_decode(arguments), "paged_attention_decode")
    return out


def _check_visibility(call: AttentionCall, name: str) -> None:
    check(call.window is None or call.window > 0, f"{name}: window must be positive")
    alone = call.chunk is None or (call.chunk > 0 and call.window is None and call.causal)
    check(alone, f"{name}: chunk must be positive, causal, and without a window")


def paged_attention_prefill(
    q: Tensor,
    pages: KVPages,
    call: AttentionCall,
    *,
    out: Tensor | None = None,
    fewest: int = 1,
    rounds: bool = False,
    library: Library,
) -> Tensor:
    """Attention of the last tokens of several sequences over their cached keys, in blocks (2205.14135).

    q: [T, Hq, D] rotated, any row and head strides; [N, Hq, D] with ranges. Sequences with fewer than `fewest` queries are
    passed over: their rows of `out` ([T, Hq, Dv], contiguous, q's dtype) keep what they held. A row's bits depend neither on
    the chunk it came in nor on the rows beside it. rounds: where the processor multiplies bfloat16 natively, keys and values of
    16 bits, what rows of codes mean, queries and weights may be rounded to that; sequences with fewer queries than
    `FEWEST_ROUNDED` are computed as ever. Returns out.
    Raises ValueError, and IndexError for a visible block that the tables or the pages lack, or a row that q lacks.
    """
    name = "paged_attention_prefill"
    reason = attention_refusal(q, pages, call)
    check(reason is None, f"{name}: {reason}")
    tables, query_start, seq_lens, sinks = call.block_tables, call.query_start, call.seq_lens, call.sink_logits
    tokens, heads = call.num_tokens, q.shape[1]
    sizes = page_sizes(pages.key, pages.value, pages.key_scale)
    value_dim = sizes.value_dim
    batch = seq_lens.shape[0]
    _check_query_rows(q, call, tokens, name)
    check(
        tables.dtype == torch.int32 and tables.dim() == 2 and tables.shape[0] == batch and tables.is_cpu,
        f"{name}: block_tables must be int32 [{batch}, max_blocks]",
    )
    check(
        vector_ok(seq_lens, torch.int64, batch) and vector_ok(query_start, torch.int64, batch + 1),
        f"{name}: seq_lens [{batch}] and query_start [{batch + 1}] must be int64, contiguous",
    )
    starts = query_start.tolist()
    check(
        starts[0] >= 0 and starts[-1] <= tokens and all(a <= b for a, b in pairwise(starts)),
        f"{name}: query_start must rise from 0 to at most {tokens}",
    )
    check(
        vector_ok(call.score_scale, torch.float32, tokens)
        and (sinks is None or vector_ok(sinks, torch.float32, heads)),
        f"{name}: score_scale [{tokens}] and sink_logits [{heads}] must be float32, contiguous",
    )
    _check_visibility(call, name)
    if tables.shape[1] > 1 and tables.stride(1) != 1:
        tables = tables.contiguous()
    if out is None:
        out = torch.empty((tokens, heads, value_dim), dtype=q.dtype)
    check(
        out.shape == (tokens, heads, value_dim) and out.dtype == q.dtype and out.is_cpu and out.is_contiguous(),
        f"{name}: out must be {q.dtype} [{tokens}, {heads}, {value_dim}], contiguous",
    )
    rounds = rounds and (pages.key.element_size() == 2 or pages.has_rows_of_codes)
    arguments = _arguments(q, pages, call, sizes, tables, query_start, True, out, rounds)
    _raise_attention_error(library.paged_attention_prefill(arguments, fewest), name)
    return out


def _check_query_rows(q: Tensor, call: AttentionCall, tokens: int, name: str) -> None:
    """ValueError unless q has the rows that a call for so many tokens takes, and its ranges are as the kernels read them."""
    ranges = call.ranges
    if ranges is None:
        check(q.shape[0] == tokens, f"{name}: q has {q.shape[0]} rows for the {tokens} of score_scale")
        return
    slopes = call.alibi_slopes
    fits = slopes is None or vector_ok(slopes, torch.float32, q.shape[1])
    check(fits, f"{name}: alibi_slopes must be float32 [{q.shape[1]}], contiguous")
    for part in (ranges.ends, ranges.rows, ranges.reaches, ranges.gaps):
        if part is None:
            continue
        fits = part.dim() == 2 and part.shape == (call.batch_size, ranges.ends.shape[1]) and part.is_cpu
        check(
            fits and part.dtype == torch.int64 and part.is_contiguous(),
            f"{name}: what ranges are given by must be int64 [{call.batch_size}, R], contiguous",
        )


def _arguments(
    q: Tensor,
    pages: KVPages,
    call: AttentionCall,
    sizes: PageSizes,
    tables: Tensor,
    query_start: Tensor | None,
    wide: bool,
    out: Tensor,
    rounds: bool = False,
) -> AttentionArguments:
    """What has been checked, as the kernels take it. wide: lengths are int64."""
    key_scales, value_scales, sinks, ranges = pages.key_scale, pages.value_scale, call.sink_logits, call.ranges
    return attention_arguments(
        *(q.data_ptr(), pages.key.data_ptr(), pages.value.data_ptr()),
        0 if key_scales is None else key_scales.data_ptr(),
        0 if value_scales is None else value_scales.data_ptr(),
        tables.data_ptr(),
        0 if query_start is None else query_start.data_ptr(),
        *(call.seq_lens.data_ptr(), call.score_scale.data_ptr()),
        0 if sinks is None else sinks.data_ptr(),
        0 if ranges is None else ranges.ends.data_ptr(),
        0 if ranges is None else ranges.rows.data_ptr(),
        0 if ranges is None else ranges.reaches.data_ptr(),
        0 if call.alibi_slopes is None else call.alibi_slopes.data_ptr(),
        0 if ranges is None or ranges.gaps is None else ranges.gaps.data_ptr(),
        out.data_ptr(),
        *(q.shape[0], q.stride(0), q.stride(1)),
        *(sizes.num_blocks, sizes.block_size, sizes.kv_heads, q.shape[-1], sizes.value_dim),
        *(tables.stride(0), tables.shape[1]),
        *(call.seq_lens.shape[0], q.shape[-2], 0 if ranges is None else ranges.ends.shape[1]),
        *(call.window or 0, call.chunk or 0),
        *(call.scale, call.soft_cap or 0.0),
        *(TYPE_CODES[q.dtype], PAGES_OF_ROWS if pages.has_rows_of_codes else PAGE_CODES[pages.key.dtype]),
        *(wide, call.causal, rounds),
    )


def _raise_attention_error(code: int, name: str) -> None:
    """The error that a code of the kernels stands for; see attention_call.h."""
    if code == 1:
        raise MemoryError(f"{name}: no memory for partial results")
    if code == 2:
        raise IndexError(f"{name}: a visible key lies in a block that the tables or the pages lack")
    if code == 4:
        raise IndexError(f"{name}: ranges name a row that q lacks")
    if code == 5:
        raise ValueError(f"{name}: the last range ends before the last key")
    if code:
        raise ValueError(f"{name}: the compiled kernels do not do what the call asks for")
