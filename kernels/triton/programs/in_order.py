"""Attention of prompts over keys that lie in order: one program brings a sequence's keys and values there out of its pages,
another attends to them tile by tile, as whole pieces of memory that the device's copy engine fetches.

A tile's values are multiplied while the next tile's scores are weighed: products and softmax take different units of a processor,
and neither waits for the other (arXiv 2407.08608, section 3.2).
"""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.attention import sequence_at
from windlass.kernels.triton.programs.attention_tile import (
    LOG2_E,
    end_visible,
    first_visible,
    normalized,
    prepare_query,
    rows_of_tile,
    softmax_update,
)
from windlass.kernels.triton.programs.order import wait_for_predecessor
from windlass.kernels.triton.programs.pages import from_float8, key_offset, scale_offset, value_offset

_BY_STEP = [
    "num_blocks",
    "tables",
    "table_stride",
    "query_start",
    "seq_lens",
    "num_sequences",
    "score_scale",
    "key_scales",
    "value_scales",
]
_AT_ONCE = tl.constexpr(64)  # sequences


@triton.jit
def tiles_before(query_start, seq_lens, end, tile, MULTIPLE: tl.constexpr):
    """Of the sequences before `end`: how many tiles of MULTIPLE places they have, 0 those with one new token, and how many
    sequences end no later than a tile."""
    tiles = 0
    sequences = 0
    for begin in range(0, end, _AT_ONCE):
        b = begin + tl.arange(0, _AT_ONCE)
        ok = b < end
        new = tl.load(query_start + b + 1, mask=ok, other=0) - tl.load(query_start + b, mask=ok, other=0)
        length = tl.load(seq_lens + b, mask=ok, other=0)
        own = tl.where(new > 1, (length + MULTIPLE - 1) // MULTIPLE, 0).to(tl.int32)
        sequences += tl.sum((ok & (tiles + tl.cumsum(own, 0) <= tile)).to(tl.int32), 0)
        tiles += tl.sum(own, 0)
    return tiles, sequences


@triton.jit(do_not_specialize=_BY_STEP)
def gather_kv_kernel(
    keys,
    values,
    key_scales,
    value_scales,
    num_blocks,
    tables,
    table_stride,
    query_start,
    seq_lens,
    ordered_keys,
    ordered_values,
    num_sequences,
    window,
    chunk,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CODES: tl.constexpr,
    FLOAT8: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (tile of places, head of keys). Sequences with more than one new token have as many tiles of places as their keys
    need, one sequence after the other.

    What none of their new tokens sees is not brought. Keys of a block that is none are NaN. Values of what is not there are 0:
    nothing multiplied by a weight of 0 may be NaN.
    """
    wait_for_predecessor()
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    _, sequence = tiles_before(query_start, seq_lens, num_sequences, tile, BLOCK_N)
    if sequence >= num_sequences:
        return
    before, _ = tiles_before(query_start, seq_lens, sequence, tile, BLOCK_N)
    b = sequence.to(tl.int64)
    new = (tl.load(query_start + b + 1) - tl.load(query_start + b)).to(tl.int32)
    length = tl.load(seq_lens + b).to(tl.int32)
    first_key = first_visible(length - new, window, chunk, WINDOW, CHUNK)
    first_place = (tile - before) * BLOCK_N
    if first_place + BLOCK_N <= first_key // BLOCK_N * BLOCK_N:
        return
    key = first_place + tl.arange(0, BLOCK_N)
    ok = (key >= first_key) & (key < length)
    block = tl.load(tables + b * table_stride + key // SIZE, mask=ok, other=-1)
    there = (block >= 0) & (block < num_blocks)
    block = tl.where(there, block, 0).to(tl.int64)
    offset = key % SIZE
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    kind = ordered_keys.dtype.element_ty
    at_key = key_offset(block[:, None], offset[:, None], kv_head, dims[None, :], KV_HEADS, SIZE, DIM, CODES)
    tile_keys = tl.load(keys + at_key, mask=there[:, None] & (dims < DIM)[None, :], other=0)
    at_value = value_offset(
        block[:, None], offset[:, None], kv_head, value_dims[None, :], KV_HEADS, SIZE, VALUE_DIM, CODES
    )
    tile_values = tl.load(values + at_value, mask=there[:, None] & (value_dims < VALUE_DIM)[None, :], other=0)
    if FLOAT8:
        tile_keys = from_float8(tile_keys)
        tile_values = from_float8(tile_values)
    if CODES:
        at_scale = scale_offset(block, offset, kv_head, KV_HEADS, SIZE)
        tile_keys = tile_keys.to(tl.float32) * tl.load(key_scales + at_scale, mask=there, other=0.0)[:, None]
        tile_values = tile_values.to(tl.float32) * tl.load(value_scales + at_scale, mask=there, other=0.0)[:, None]
    row = (tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * KV_HEADS + kv_head
    missing = tl.where(ok & ~there, float("nan"), 0.0)
    tl.store(ordered_keys + row * BLOCK_D + dims[None, :], (tile_keys.to(tl.float32) + missing[:, None]).to(kind))
    tl.store(ordered_values + row * BLOCK_V + value_dims[None, :], tile_values.to(kind))


@triton.jit
def masked(scores, key, first, end, EARLY: tl.constexpr):
    """-inf where a row does not see a key. EARLY: whether there are keys before the first that a row sees."""
    seen = key[None, :] < end[:, None]
    if EARLY:
        seen = seen & (key[None, :] >= first[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=_BY_STEP)
def prefill_attention_kernel(
    q,
    q_stride,
    q_head_stride,
    out,
    keys,
    values,
    query_start,
    seq_lens,
    num_sequences,
    score_scale,
    scale,
    window,
    chunk,
    sinks,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    MULTIPLE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (tile of TOKENS tokens of a sequence that has more than one, head tile). keys, values: descriptors of what
    `gather_kv_kernel` made in tiles of MULTIPLE, a tile of one head each. The rows of a tile are (token, head) pairs, heads side
    by side."""
    wait_for_predecessor()
    place = tl.num_programs(0) - 1 - tl.program_id(0).to(tl.int64)  # the last tokens see most, and begin first
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = tl.program_id(1) % HEAD_TILES * HEADS
    b = sequence_at(query_start, place, num_sequences, TOKENS)
    start = tl.load(query_start + b)
    new = (tl.load(query_start + b + 1) - start).to(tl.int32)
    length = tl.load(seq_lens + b).to(tl.int32)
    local = ((place - (start // TOKENS + b)) * TOKENS).to(tl.int32)
    count = tl.minimum(new - local, TOKENS)
    if (new < 2) | (count <= 0):
        return

    head, token, row_ok = rows_of_tile(first_head, kv_head, local, count, GROUP, HEADS, BLOCK_M)
    index = length - new + token
    first_index = length - new + local
    last_index = first_index + count - 1
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    own_scale = scale * LOG2_E * tl.load(score_scale + start + token, mask=row_ok, other=0.0)
    at_q = q + (start + token)[:, None] * q_stride + head[:, None] * q_head_stride + dims[None, :]
    query = tl.load(at_q, mask=row_ok[:, None] & (dims < DIM)[None, :], other=0.0)
    query, own_scale = prepare_query(query, own_scale)

    first = first_visible(index, window, chunk, WINDOW, CHUNK)
    end = end_visible(index, length, window, chunk, CAUSAL, WINDOW, CHUNK)
    low = first_visible(first_index, window, chunk, WINDOW, CHUNK)
    stop = tl.minimum(end_visible(last_index, length, window, chunk, CAUSAL, WINDOW, CHUNK), length)
    end = tl.minimum(end, length)
    # Tiles of which all rows see all keys stand between others.
    begin = low // BLOCK_N * BLOCK_N
    all_from = first_visible(last_index, window, chunk, WINDOW, CHUNK)
    all_until = tl.minimum(end_visible(first_index, length, window, chunk, CAUSAL, WINDOW, CHUNK), length)
    whole = (all_from + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    whole_end = all_until // BLOCK_N * BLOCK_N

    tiles, _ = tiles_before(query_start, seq_lens, b.to(tl.int32), 0, MULTIPLE)
    first_row = tiles * MULTIPLE
    at_head = kv_head * BLOCK_D
    at_value_head = kv_head * BLOCK_V
    places_of_tile = tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    scores = tl.dot(query, keys.load([first_row + begin, at_head]).T, input_precision=PRECISION)
    scores = masked(scores, begin + places_of_tile, first, end, WINDOW or CHUNK)
    largest, weight, kept, shares = softmax_update(scores, own_scale, largest, weight, False)
    for phase in tl.static_range(3):
        if phase == 0:
            from_tile, to_tile = begin, tl.minimum(whole, stop)
        elif phase == 1:
            from_tile, to_tile = whole, whole_end
        else:
            from_tile, to_tile = tl.maximum(whole, whole_end), stop
        if phase > 0 or WINDOW or CHUNK:
            from_tile = tl.maximum(from_tile, begin + BLOCK_N)
            for tile in range(from_tile // BLOCK_N * BLOCK_N, to_tile, BLOCK_N):
                tile_keys = keys.load([first_row + tile, at_head])
                values_before = values.load([first_row + tile - BLOCK_N, at_value_head])
                scores = tl.dot(query, tile_keys.T, input_precision=PRECISION)
                summed = tl.dot(
                    shares.to(query.dtype), values_before, summed * kept[:, None], input_precision=PRECISION
                )
                if phase != 1:
                    scores = masked(scores, tile + places_of_tile, first, end, WINDOW or CHUNK)
                largest, weight, kept, shares = softmax_update(scores, own_scale, largest, weight, phase == 1)
    tile_values = values.load([first_row + (stop - 1) // BLOCK_N * BLOCK_N, at_value_head])
    summed = tl.dot(shares.to(query.dtype), tile_values, summed * kept[:, None], input_precision=PRECISION)

    found = normalized(largest, weight, summed, sinks, head, row_ok, SINKS)
    at_out = ((start + token) * (KV_HEADS * GROUP) + head)[:, None] * VALUE_DIM + value_dims[None, :]
    out_ok = row_ok[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(out + at_out, found.to(out.dtype.element_ty), mask=out_ok)
