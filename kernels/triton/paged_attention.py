"""Paged attention in Triton: split-KV decode, and tiles of prompt tokens.

A single new token is attended in splits over the context, which a second kernel merges. The number of splits follows from the
table width, and their extent from lengths in device memory, so a captured call is valid at any length. Longer runs use tiles
of tokens, unsplit. Under `deterministic` each token is a single one and splits have a fixed size. The rows of a tile are
(token, head) pairs; heads that share keys read them once.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.attention_call import KEY_SPLIT, AttentionCall
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.triton import prefill_attention
from windlass.kernels.triton.attention_tile import (
    BY_STEP,
    LOG2_E,
    attend_tile,
    end_visible,
    first_visible,
    prepare_query,
    rows_of_tile,
    sequence_at,
    store_rows,
)
from windlass.kernels.triton.launch import (
    SMALL,
    Device,
    launch,
    power_of_two,
    strided,
    wait_for_predecessor,
)
from windlass.kernels.triton.page_addressing import PageLayout, page_tensors

MAX_DISTANCE = tl.constexpr(1 << 30)  # in keys, longer than any sequence


@triton.jit(do_not_specialize=BY_STEP)
def paged_attention_kernel(
    q,
    q_stride,
    q_head_stride,
    q_rows,
    out,
    sums,
    maxima,
    weights,
    keys,
    values,
    key_scales,
    value_scales,
    num_blocks,
    tables,
    table_stride,
    query_start,
    seq_lens,
    num_sequences,
    score_scale,
    scale,
    soft_cap,
    window,
    chunk,
    sinks,
    range_ends,
    range_rows,
    range_reaches,
    range_gaps,
    num_ranges,
    slopes,
    split_keys,
    num_splits,
    PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SINGLES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (place, head tile, split). place: a sequence with a single token (SINGLES), a token (BY_TOKEN), or a tile of
    TOKENS tokens of a sequence with several. HEADS: heads per token. With `sums` there are splits: of `split_keys` keys each,
    from the first key of the sequence on (BY_TOKEN); or they divide the visible keys of the token, with at least
    `split_keys` each."""
    wait_for_predecessor()
    place = tl.program_id(0).to(tl.int64)
    if not (SINGLES or BY_TOKEN):
        place = tl.num_programs(0) - 1 - place  # the last tokens see most keys, so they start first
    split = tl.program_id(2)
    if SINGLES:
        b = place
    elif BY_TOKEN:
        b = sequence_at(query_start, place, num_sequences, 0)
    else:
        b = sequence_at(query_start, place, num_sequences, TOKENS)
    start = tl.load(query_start + b)
    # Positions are below 2^31; 32 bits halve the registers of their tiles.
    new = (tl.load(query_start + b + 1) - start).to(tl.int32)
    length = tl.load(seq_lens + b).to(tl.int32)
    if SINGLES:
        if new != 1:
            return
        local = new * 0
    elif BY_TOKEN:
        local = (place - start).to(tl.int32)
    else:
        local = ((place - (start // TOKENS + b)) * TOKENS).to(tl.int32)
        if new == 1:
            return
    count = tl.minimum(new - local, TOKENS)
    if count <= 0:
        return

    RANGES: tl.constexpr = range_ends is not None
    SLOPES: tl.constexpr = slopes is not None
    kv_head, head, token, row_ok = rows_of_tile(local, count, GROUP, HEADS, TOKENS)
    index = length - new + token
    first_index = length - new + local
    last_index = first_index + count - 1
    BLOCK_M: tl.constexpr = head.shape[0]
    BLOCK_V: tl.constexpr = power_of_two(PAGES.value_dim, 16)
    dims = tl.arange(0, power_of_two(PAGES.dim, 16))
    row_scale = scale * tl.load(score_scale + start + token, mask=row_ok, other=0.0)
    if soft_cap is None and not SLOPES:
        row_scale = row_scale * LOG2_E
    slope = row_scale
    if SLOPES:
        slope = tl.load(slopes + head, mask=row_ok, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    pages = keys, values, key_scales, value_scales, num_blocks, tables + b * table_stride
    first = first_visible(index, window, chunk)
    end = end_visible(index, length, window, chunk, CAUSAL)
    range_begin = first_visible(first_index, window, chunk)
    range_stop = end_visible(last_index, length, window, chunk, CAUSAL)
    split_size = split_keys
    begin_of_split = split * split_keys
    if sums is not None and not BY_TOKEN:  # by lengths in device memory: the grid is the same at every length
        first_tile = range_begin // BLOCK_N * BLOCK_N
        if RANGES:
            first_tile = range_begin * 0
        share = (range_stop - first_tile + num_splits - 1) // num_splits
        share = tl.maximum((share + BLOCK_N - 1) // BLOCK_N * BLOCK_N, split_keys)
        split_size = share
        begin_of_split = first_tile + split * share
    parts = 1
    if RANGES:
        parts = num_ranges
        range_begin = range_begin * 0
    for part in range(parts):
        low = range_begin
        stop = range_stop
        all_from = first_visible(last_index, window, chunk)
        all_until = end_visible(first_index, length, window, chunk, CAUSAL)
        q_row = start + token
        reach = low * 0
        gap = start * 0
        if RANGES:
            at = b * num_ranges + part
            range_end = tl.minimum(tl.load(range_ends + at), length).to(tl.int32)
            reach = tl.minimum(tl.maximum(tl.load(range_reaches + at), -MAX_DISTANCE), MAX_DISTANCE).to(tl.int32)
            version = tl.load(range_rows + at)
            if SLOPES:
                gap = tl.load(range_gaps + at)
            q_row = tl.where(version < 0, -1, version + token)
            stop = tl.minimum(range_end, last_index + 1)
            if reach > 0:
                low = tl.maximum(low, first_index - reach + 1)
                all_from = last_index - reach + 1
            if reach < 0:
                stop = tl.minimum(stop, last_index + 1 + reach)
                all_until = first_index + 1 + reach
            if (reach == 0) | (version == -1):
                stop = low
            range_begin = tl.maximum(range_begin, range_end)
        if sums is not None:
            low = tl.maximum(low, begin_of_split)
            stop = tl.minimum(stop, begin_of_split + split_size)
        if low < stop:
            there = (q_row >= 0) & (q_row < q_rows)
            q_ok = row_ok & there
            at_q = q + q_row[:, None] * q_stride + head[:, None] * q_head_stride + dims[None, :]
            query = tl.load(at_q, mask=q_ok[:, None] & (dims < PAGES.dim)[None, :], other=0.0)
            query, own_scale = prepare_query(query, row_scale)
            own_scale = tl.where(there, own_scale, float("nan"))  # an invalid row of q gives NaN
            rows = query, own_scale, slope, index, first, end
            # Tiles in which all rows see all keys are between tiles with hidden keys.
            begin = low // BLOCK_N * BLOCK_N
            whole = tl.maximum(low, all_from)
            whole = (whole + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            whole_end = tl.minimum(stop, all_until) // BLOCK_N * BLOCK_N
            if whole_end <= whole:
                whole = begin
                whole_end = begin
            for phase in tl.static_range(3):
                if phase == 0:
                    from_tile, to_tile = begin, whole
                elif phase == 1:
                    from_tile, to_tile = whole, whole_end
                else:
                    from_tile, to_tile = whole_end, stop
                if phase > 0 or window is not None or chunk is not None or RANGES:
                    for tile in range(from_tile, to_tile, BLOCK_N):
                        largest, weight, summed = attend_tile(
                            rows,
                            largest,
                            weight,
                            summed,
                            tile,
                            low,
                            stop,
                            pages,
                            kv_head,
                            soft_cap,
                            reach,
                            gap,
                            PAGES,
                            RANGES,
                            SLOPES,
                            phase == 1,
                            BLOCK_N,
                        )

    ALL_HEADS: tl.constexpr = PAGES.heads * GROUP
    if sums is not None:
        at = (place * ALL_HEADS + head) * num_splits + split
        tl.store(maxima + at, largest, mask=row_ok)
        tl.store(weights + at, weight, mask=row_ok)
        value_dims = tl.arange(0, BLOCK_V)
        at_sum = at[:, None] * PAGES.value_dim + value_dims[None, :]
        tl.store(sums + at_sum, summed, mask=row_ok[:, None] & (value_dims < PAGES.value_dim)[None, :])
    else:
        store_rows(out, start + token, head, row_ok, largest, weight, summed, sinks, ALL_HEADS, PAGES.value_dim)


@triton.jit(do_not_specialize=BY_STEP)
def merge_splits_kernel(
    out,
    sums,
    maxima,
    weights,
    query_start,
    sinks,
    num_splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SINGLES: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
):
    """Program (place, head): merges the splits of `paged_attention_kernel`, FEW at a time. MANY: splits whose maximum is found
    first."""
    wait_for_predecessor()
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = place
    if SINGLES:
        row = tl.load(query_start + place)
        if tl.load(query_start + place + 1) - row != 1:
            return
    BLOCK_V: tl.constexpr = power_of_two(VALUE_DIM, 16)
    dims = tl.arange(0, BLOCK_V)
    dims_ok = dims < VALUE_DIM
    at = (place * HEADS + head) * num_splits
    largest = tl.full([], float("-inf"), tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + head) * LOG2_E
    used = 0  # splits up to the last one with visible keys
    for begin in range(0, num_splits, MANY):
        split = begin + tl.arange(0, MANY)
        own = tl.load(maxima + at + split, mask=split < num_splits, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(own, 0))
        seen = tl.load(weights + at + split, mask=split < num_splits, other=0.0) != 0.0  # counts NaN too
        used = tl.maximum(used, tl.max(tl.where(seen, split + 1, 0), 0))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.zeros([], tl.float32)
    if sinks is not None:
        weight = tl.exp2(tl.load(sinks + head) * LOG2_E - base)
    summed = tl.zeros([BLOCK_V], tl.float32)
    # Empty splits add nothing, so bits do not depend on their number.
    for begin in range(0, used, FEW):
        split = begin + tl.arange(0, FEW)
        ok = split < used
        kept = tl.exp2(tl.load(maxima + at + split, mask=ok, other=float("-inf")) - base)
        weight += tl.sum(kept * tl.load(weights + at + split, mask=ok, other=0.0), 0)
        at_sum = sums + (at + split)[:, None] * VALUE_DIM + dims[None, :]
        summed += tl.sum(kept[:, None] * tl.load(at_sum, mask=ok[:, None] & dims_ok[None, :], other=0.0), 0)
    found = summed / tl.where(weight == 0.0, 1.0, weight)
    tl.store(out + (row * HEADS + head) * VALUE_DIM + dims, found.to(out.dtype.element_ty), mask=dims_ok)


_LEAST_SPLIT, _MOST_SPLITS = 256, 128

_MERGED = 32  # splits at a time; under `deterministic` one, so that empty splits in between have no effect

_MOST_SUMS = 256 << 20  # bytes of partial results, unless a single token needs more

_MIN_WAVES = 8  # programs per multiprocessor that splits should give


class _Sizes(NamedTuple):
    """Tile sizes: maximum rows, keys, warps, pipeline stages. A block is first looked up in a table, so 3 stages keep one
    tile in flight and 5 two. As large as registers and shared memory allow; compiler reports are in
    `tests/helpers/compiling.py`."""

    rows: int
    keys: int
    warps: int
    stages: int = 3

    @classmethod
    def of_singles(cls, q: Tensor, pages: KVPages, rows: int) -> "_Sizes":
        """Sizes for single tokens with this number of rows each."""
        widest = max(q.shape[2], pages.value_dim)
        if q.element_size() == 4:  # multiplied without tensor cores
            few = cls(min(rows, 16), 16, 8, _stages_of_numbers(pages, widest))
            return cls(rows, 32, 4 if rows <= 16 else 8) if widest <= 64 else few
        if widest <= 128:
            # 8-bit keys exist twice: stored and converted.
            return cls(rows, 128 if pages.key.element_size() == 2 and rows <= 16 else 64, 4 if rows <= 32 else 8)
        return cls(rows, 32, 4 if rows <= 32 else 8) if widest <= 256 else cls(min(rows, 16), 16, 8)

    @classmethod
    def of_tiles(cls, q: Tensor, pages: KVPages, call: AttentionCall, device: Device) -> "_Sizes":
        """Sizes for tiles of tokens."""
        widest = max(q.shape[2], pages.value_dim)
        if q.element_size() == 4:
            return cls(32, 32, 8) if widest <= 64 else cls(16, 16, 8, _stages_of_numbers(pages, widest))
        if widest <= 128:
            if pages.key.element_size() == 1:
                return cls(64, 64, 8)
            return cls(64, 64, 4, 5 if device.shared_memory >= 163 << 10 or widest <= 64 else 3)
        if widest <= 256:
            return cls(64 if call.soft_cap is None else 32, 32, 8)  # capped scores need registers, too
        return cls(32 if widest <= 512 and pages.key.dtype != torch.float8_e4m3fn else 16, 16, 8)


def _stages_of_numbers(pages: KVPages, widest: int) -> int:
    """Sizes for float32 tiles: with wide 8-bit keys, registers cannot hold the next tile too."""
    return 1 if widest > 256 and pages.key.element_size() == 1 else 3


def paged_attention(
    q: Tensor, pages: KVPages, call: AttentionCall, *, deterministic: bool = False, device: Device = SMALL
) -> Tensor:
    """See `Backend.paged_attention`. A block or row of q out of range gives NaN.

    Raises ValueError if q and the call disagree about tokens.
    """
    if q.shape[0] < call.num_tokens or (q.shape[0] > call.num_tokens and not call.has_ranges):
        raise ValueError(f"q has {q.shape[0]} rows for {call.num_tokens} tokens")
    q = strided(q)
    out = q.new_empty(call.num_tokens, q.shape[1], pages.value_dim)
    if deterministic or call.is_decode:
        _singles(q, pages, call, out, deterministic, device)
    else:
        if call.batch_size > 1:  # a single sequence has more than one token here
            _singles(q, pages, call, out, False, device)
        if prefill_attention.takes_prefill(q, pages, call, device):
            prefill_attention.prefill_attention(q, pages, call, out)
        else:
            _tiles(q, pages, call, out, device)
    return out


def _singles(q: Tensor, pages: KVPages, call: AttentionCall, out: Tensor, by_token: bool, device: Device) -> None:
    places, heads, width = (call.num_tokens if by_token else call.batch_size), q.shape[1], pages.value_dim
    group = heads // pages.num_kv_heads
    sizes = _Sizes.of_singles(q, pages, min(power_of_two(group), 64))
    rows = sizes.rows
    longest = call.block_tables.shape[1] * pages.block_size
    split = KEY_SPLIT if by_token else _LEAST_SPLIT
    splits = max(1, -(-longest // split))
    if not by_token:
        programs = places * pages.num_kv_heads * -(-group // rows)
        splits = min(splits, max(1, -(-_MIN_WAVES * device.processors // max(programs, 1))), _MOST_SPLITS)
    at_once = places
    if by_token:  # independent tokens: for a long prompt over a long context, in several runs
        at_once = max(1, min(places, _MOST_SUMS // (heads * splits * (width + 2) * 4)))
        if 16 < at_once < places:
            at_once -= at_once % 16  # keeps the alignment of addresses
    shape = (at_once, heads, splits)
    sums = torch.empty((*shape, width), dtype=torch.float32, device=q.device)
    maxima, weights = torch.empty((2, *shape), dtype=torch.float32, device=q.device)
    parts = sums, maxima, weights
    for first in range(0, places, max(1, at_once)):
        count = min(at_once, places - first)
        some_q, some, own = (q, call, out) if count == places else _some_tokens(q, call, out, first, count)
        _launch(
            some_q, pages, some, own, parts, (count, splits), split, sizes, 1, singles=not by_token, by_token=by_token
        )
        launch(
            merge_splits_kernel,
            (count, heads),
            q,
            own,
            *parts,
            some.query_start,
            call.sink_logits,
            splits,
            HEADS=heads,
            VALUE_DIM=width,
            SINGLES=not by_token,
            MANY=_MERGED,
            FEW=1 if by_token else _MERGED,
        )


def _some_tokens(
    q: Tensor, call: AttentionCall, out: Tensor, first: int, count: int
) -> tuple[Tensor, AttentionCall, Tensor]:
    """q, call and out for a run of independent tokens, numbered from the first of them on."""
    tokens = slice(first, first + count)
    some = replace(call, query_start=call.query_start - first, score_scale=call.score_scale[tokens])
    return call.queries(q, tokens), some, out[tokens]


def _tiles(q: Tensor, pages: KVPages, call: AttentionCall, out: Tensor, device: Device) -> None:
    sizes = _Sizes.of_tiles(q, pages, call, device)
    rows = min(power_of_two(q.shape[1] // pages.num_kv_heads), sizes.rows)
    tokens = sizes.rows // rows
    sizes = sizes._replace(rows=rows)
    places = call.num_tokens // tokens + call.batch_size
    _launch(q, pages, call, out, (None, None, None), (places, 1), 0, sizes, tokens, singles=False, by_token=False)


def _launch(
    q: Tensor,
    pages: KVPages,
    call: AttentionCall,
    out: Tensor,
    parts: tuple[Tensor | None, Tensor | None, Tensor | None],
    grid: tuple[int, int],
    split: int,
    sizes: _Sizes,
    tokens: int,
    *,
    singles: bool,
    by_token: bool,
) -> None:
    """sizes.rows: rows per token of a tile."""
    ranges, group = call.ranges, q.shape[1] // pages.num_kv_heads
    launch(
        paged_attention_kernel,
        (grid[0], pages.num_kv_heads * -(-group // sizes.rows), grid[1]),
        q,
        q,
        q.stride(0),
        q.stride(1),
        q.shape[0],
        out,
        *parts,
        *page_tensors(pages),
        pages.key.shape[0],
        call.block_tables,
        call.block_tables.stride(0),
        call.query_start,
        call.seq_lens,
        call.batch_size,
        call.score_scale,
        call.scale,
        call.soft_cap,
        call.window,
        call.chunk,
        call.sink_logits,
        *((None,) * 4 if ranges is None else (ranges.ends, ranges.rows, ranges.reaches, ranges.gaps)),
        0 if ranges is None else ranges.ends.shape[1],
        call.alibi_slopes,
        split,
        grid[1],
        PAGES=PageLayout.of(pages, q.shape[2]),
        GROUP=group,
        CAUSAL=call.causal,
        SINGLES=singles,
        BY_TOKEN=by_token,
        TOKENS=tokens,
        HEADS=sizes.rows,
        BLOCK_N=sizes.keys,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
