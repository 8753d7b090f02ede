"""Attention over pages: one program takes some tokens of one sequence, some of the heads that share a head of keys, and the
keys of one split; another merges splits.

The rows of a tile are (token, head) pairs, heads side by side, so that heads which share keys read them once. Softmax runs
along tiles of keys whose bounds are multiples of their size, whatever a program begins with: a row's bits follow from its own
sequence and the sizes of tiles and splits alone.
"""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.attention_tile import (
    LOG2_E,
    attend_tile,
    end_visible,
    first_visible,
    normalized,
    prepare_query,
    rows_of_tile,
)
from windlass.kernels.triton.programs.order import wait_for_predecessor

MAX_DISTANCE = tl.constexpr(1 << 30)  # keys, more than any sequence has
# What differs from step to step. Triton would compile a program for each of 1, a multiple of 16 and anything else, and for
# addresses that 16 divides and others, in the middle of serving.
_BY_STEP = [
    "q_rows",
    "num_blocks",
    "table_stride",
    "num_sequences",
    "num_ranges",
    "split_keys",
    "num_splits",
    "maxima",
    "weights",
    "tables",
    "query_start",
    "seq_lens",
    "score_scale",
    "range_ends",
    "range_rows",
    "range_reaches",
    "range_gaps",
]


@triton.jit
def sequence_at(starts, place, count, TOKENS: tl.constexpr):
    """The last b for which starts[b] // TOKENS + b <= place, or with TOKENS 0 starts[b] <= place. starts[0] is 0."""
    low = 1
    high = count
    while low < high:
        middle = (low + high) // 2
        begin = tl.load(starts + middle)
        if TOKENS > 0:
            begin = begin // TOKENS + middle
        if begin <= place:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=_BY_STEP)
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
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CODES: tl.constexpr,
    FLOAT8: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    RANGES: tl.constexpr,
    SLOPES: tl.constexpr,
    SINGLES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    SPLITS: tl.constexpr,
    SPREAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (place, head tile, split). place: a sequence of which only a single token is taken (SINGLES), a token (BY_TOKEN),
    or else a tile of TOKENS tokens of a sequence that has more than one. HEADS: of the rows of one token. Splits have
    `split_keys` keys each from the first of the sequence on; or (SPREAD) they share out what this token sees, none with fewer."""
    wait_for_predecessor()
    place = tl.program_id(0).to(tl.int64)
    if not (SINGLES or BY_TOKEN):
        place = tl.num_programs(0) - 1 - place  # the last tokens see most, and begin first
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = tl.program_id(1) % HEAD_TILES * HEADS
    split = tl.program_id(2)
    if SINGLES:
        b = place
    elif BY_TOKEN:
        b = sequence_at(query_start, place, num_sequences, 0)
    else:
        b = sequence_at(query_start, place, num_sequences, TOKENS)
    start = tl.load(query_start + b)
    # Places in a sequence are below 2^31, and tiles of them half as wide in 32 bits.
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

    head, token, row_ok = rows_of_tile(first_head, kv_head, local, count, GROUP, HEADS, BLOCK_M)
    index = length - new + token
    first_index = length - new + local
    last_index = first_index + count - 1
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    row_scale = scale * tl.load(score_scale + start + token, mask=row_ok, other=0.0)
    if not (CAP or SLOPES):
        row_scale = row_scale * LOG2_E
    slope = row_scale
    if SLOPES:
        slope = tl.load(slopes + head, mask=row_ok, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    table = tables + b * table_stride
    first = first_visible(index, window, chunk, WINDOW, CHUNK)
    end = end_visible(index, length, window, chunk, CAUSAL, WINDOW, CHUNK)
    range_begin = first_visible(first_index, window, chunk, WINDOW, CHUNK)
    range_stop = end_visible(last_index, length, window, chunk, CAUSAL, WINDOW, CHUNK)
    split_size = split_keys
    begin_of_split = split * split_keys
    if SPREAD:  # by what stands in the device's memory: the grid is the same at every length
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
        all_from = first_visible(last_index, window, chunk, WINDOW, CHUNK)
        all_until = end_visible(first_index, length, window, chunk, CAUSAL, WINDOW, CHUNK)
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
        if SPLITS:
            low = tl.maximum(low, begin_of_split)
            stop = tl.minimum(stop, begin_of_split + split_size)
        if low < stop:
            there = (q_row >= 0) & (q_row < q_rows)
            q_ok = row_ok & there
            at_q = q + q_row[:, None] * q_stride + head[:, None] * q_head_stride + dims[None, :]
            query = tl.load(at_q, mask=q_ok[:, None] & (dims < DIM)[None, :], other=0.0).to(DOT)
            query, own_scale = prepare_query(query, row_scale)
            own_scale = tl.where(there, own_scale, float("nan"))  # a row of q that is none shows
            # Tiles of which all rows see all keys stand between others.
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
                if phase > 0 or WINDOW or CHUNK or RANGES:
                    for tile in range(from_tile, to_tile, BLOCK_N):
                        largest, weight, summed = attend_tile(
                            query,
                            own_scale,
                            slope,
                            index,
                            first,
                            end,
                            largest,
                            weight,
                            summed,
                            tile,
                            low,
                            stop,
                            keys,
                            values,
                            key_scales,
                            value_scales,
                            num_blocks,
                            table,
                            kv_head,
                            soft_cap,
                            reach,
                            gap,
                            KV_HEADS,
                            SIZE,
                            DIM,
                            VALUE_DIM,
                            CODES,
                            FLOAT8,
                            DOT,
                            PRECISION,
                            CAP,
                            SLOPES,
                            RANGES,
                            phase == 1,
                            BLOCK_N,
                            BLOCK_D,
                            BLOCK_V,
                        )

    if SPLITS:
        at = (place * (KV_HEADS * GROUP) + head) * num_splits + split
        tl.store(maxima + at, largest, mask=row_ok)
        tl.store(weights + at, weight, mask=row_ok)
        at_sum = at[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(sums + at_sum, summed, mask=row_ok[:, None] & (value_dims < VALUE_DIM)[None, :])
    else:
        found = normalized(largest, weight, summed, sinks, head, row_ok, SINKS)
        at_out = ((start + token) * (KV_HEADS * GROUP) + head)[:, None] * VALUE_DIM + value_dims[None, :]
        out_ok = row_ok[:, None] & (value_dims < VALUE_DIM)[None, :]
        tl.store(out + at_out, found.to(out.dtype.element_ty), mask=out_ok)
