"""Attention tile: visible keys, online softmax and normalization, shared by decode and prefill kernels."""

import triton
import triton.language as tl

from windlass.kernels.triton.launch import power_of_two
from windlass.kernels.triton.page_addressing import from_float8, key_offset, scale_offset, value_offset

LOG2_E = tl.constexpr(1.4426950408889634)

# Arguments that differ from step to step. Triton would compile variants (1, multiples of 16, others; aligned addresses or
# not) while requests are served.
BY_STEP = [
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
def first_visible(index, window, chunk):
    """window, chunk: None without such a limit."""
    first = index * 0
    if window is not None:
        first = tl.maximum(index - (window - 1), 0)
    if chunk is not None:
        first = tl.maximum(first, index // chunk * chunk)
    return first


@triton.jit
def end_visible(index, length, window, chunk, CAUSAL: tl.constexpr):
    end = index + 1
    if not CAUSAL:
        end = index * 0 + length
    if window is not None:
        end = tl.minimum(end, index + window)
    if chunk is not None:
        end = tl.minimum(end, index // chunk * chunk + chunk)
    return end


@triton.jit
def rows_of_tile(local, count, GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """The head of keys of this program (place, head tile). Per row: head, token among the new ones of its sequence, and
    whether it exists. `count` tokens from `local` on. HEADS, TOKENS: of a tile; their product, or 16, is the number of rows."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    rows = tl.arange(0, power_of_two(HEADS * TOKENS, 16))
    head = tl.program_id(1) % HEAD_TILES * HEADS + rows % HEADS
    ok = (rows // HEADS < count) & (head < GROUP)
    return kv_head, kv_head * GROUP + head, local + rows // HEADS, ok


@triton.jit
def store_rows(out, row, head, ok, largest, weight, summed, sinks, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Store sums of values divided by the total weight, which includes sinks. out: [rows, HEADS, VALUE_DIM]."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=ok, other=0.0) * LOG2_E
        larger = tl.maximum(largest, sink)
        kept = tl.exp2(largest - larger)
        weight = weight * kept + tl.exp2(sink - larger)
        summed = summed * kept[:, None]
    found = summed / tl.where(weight == 0.0, 1.0, weight)[:, None]
    dims = tl.arange(0, summed.shape[1])
    at = (row * HEADS + head)[:, None] * VALUE_DIM + dims[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=ok[:, None] & (dims < VALUE_DIM)[None, :])


@triton.jit
def prepare_query(query, row_scale):
    """Rows and scales for `softmax_update`. Scales below 1e-30 weigh all visible keys equally, as 0 does."""
    size = tl.abs(row_scale)
    return tl.where((row_scale < 0)[:, None], -query, query), tl.where(size < 1e-30, 1e-30, size)  # NaN stays


@triton.jit
def softmax_update(scores, scale, largest, weight, WHOLE: tl.constexpr):
    """The softmax state after these scores, the factor for previous sums, and weights. scale: per row, in powers of two,
    positive, since the maximum is taken before scaling. Scores of hidden keys are -inf; WHOLE: no key is hidden. Bits do not
    depend on WHOLE: scaling and subtraction are rounded once."""
    larger = tl.maximum(largest, tl.max(scores, 1) * scale)
    base = larger
    if not WHOLE:
        base = tl.where(larger == float("-inf"), 0.0, larger)
    shares = tl.exp2(tl.fma(scores, scale[:, None], -base[:, None]))
    kept = tl.exp2(largest - base)
    return larger, weight * kept + tl.sum(shares, 1), kept, shares


@triton.jit
def attend_tile(
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
    PAGES: tl.constexpr,
    RANGES: tl.constexpr,
    SLOPES: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The softmax state (largest score in powers of two, weight, sum of values) after another tile of keys. WHOLE: all rows
    see all of them.

    rows: query, scale (as in `softmax_update`, unless a soft cap or bias is applied before), slope (if SLOPES), index,
    first and end of visible keys. pages: their tensors, the number of blocks and the sequence's table. reach, gap: of the
    key range (if RANGES).
    """
    query, scale, slope, index, first, end = rows
    keys, values, key_scales, value_scales, num_blocks, table = pages
    SIZE: tl.constexpr = PAGES.size
    DIM: tl.constexpr = PAGES.dim
    VALUE_DIM: tl.constexpr = PAGES.value_dim
    CODES: tl.constexpr = PAGES.codes
    BLOCK_D: tl.constexpr = query.shape[1]
    BLOCK_V: tl.constexpr = summed.shape[1]
    place = tl.arange(0, BLOCK_N)
    key = tile + place
    key_ok = (key >= low) & (key < stop)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    offset = place % SIZE  # tiles begin at block boundaries, or are parts of blocks
    if BLOCK_N % SIZE == 0:
        # Block by block, as scalars of the program: no table lookup per key.
        block = place * 0
        is_block = place >= 0
        missing = 0.0
        for part in tl.static_range(BLOCK_N // SIZE):
            begin = tile + part * SIZE
            if WHOLE:
                own = tl.load(table + tile // SIZE + part)
            else:
                own = tl.load(table + tile // SIZE + part, mask=(begin + SIZE > low) & (begin < stop), other=0)
            there = (own >= 0) & (own < num_blocks)
            block = tl.where(place // SIZE == part, tl.where(there, own, 0), block)
            is_block = is_block & (there | (place // SIZE != part))
            missing = tl.where(there, missing, float("nan"))
    else:
        offset = key % SIZE
        block = tl.load(table + key // SIZE, mask=key_ok, other=0)
        is_block = (block >= 0) & (block < num_blocks)
        block = tl.where(is_block, block, 0)
    KEY_PAGE: tl.constexpr = PAGES.heads * SIZE * ((DIM + 3) // 4 * 4 if CODES else DIM)
    VALUE_PAGE: tl.constexpr = PAGES.heads * SIZE * VALUE_DIM
    block = block.to(tl.int64)
    in_key = key_offset(0, offset[None, :], kv_head, dims[:, None], PAGES)
    at_key = keys + (block * KEY_PAGE)[None, :] + in_key
    if not WHOLE:
        tile_keys = tl.load(at_key, mask=(dims < DIM)[:, None] & key_ok[None, :], other=0)
    elif BLOCK_D == DIM:
        tile_keys = tl.load(at_key)
    else:
        tile_keys = tl.load(at_key, mask=(dims < DIM)[:, None], other=0)
    if PAGES.float8:
        tile_keys = from_float8(tile_keys)
    scores = tl.dot(query, tile_keys.to(query.dtype), input_precision="ieee")
    if CODES:
        at_scale = scale_offset(block, offset, kv_head, PAGES)
        scores = scores * tl.load(key_scales + at_scale, mask=key_ok, other=0.0)[None, :]
    if BLOCK_N % SIZE == 0 and WHOLE:
        scale = scale + missing  # an invalid block makes the entire tile NaN
    else:
        scores = scores + tl.where(is_block, 0.0, float("nan"))[None, :]
    if soft_cap is not None or SLOPES:
        scores = scores * scale[:, None]
        scale = scale * 0.0 + LOG2_E
    if soft_cap is not None:
        grown = tl.exp2(tl.abs(scores) / soft_cap * (-2.0 * LOG2_E))
        bent = soft_cap * (1.0 - grown) / (1.0 + grown)
        scores = tl.where(scores < 0, -bent, bent)
    if SLOPES:
        distance = (index[:, None] - key[None, :] + gap).to(tl.float32)
        scores = scores - slope[:, None] * distance
    if not WHOLE:
        if RANGES:
            back = index[:, None] - key[None, :]
            seen = (back >= 0) & (((reach > 0) & (back < reach)) | ((reach < 0) & (back >= -reach)))
        else:
            seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
        scores = tl.where(seen & key_ok[None, :], scores, float("-inf"))
    largest, weight, kept, shares = softmax_update(scores, scale, largest, weight, WHOLE)
    in_value = value_offset(0, offset[:, None], kv_head, value_dims[None, :], PAGES)
    at_value = values + (block * VALUE_PAGE)[:, None] + in_value
    if not WHOLE:
        tile_values = tl.load(at_value, mask=key_ok[:, None] & (value_dims < VALUE_DIM)[None, :], other=0)
    elif BLOCK_V == VALUE_DIM:
        tile_values = tl.load(at_value)
    else:
        tile_values = tl.load(at_value, mask=(value_dims < VALUE_DIM)[None, :], other=0)
    if PAGES.float8:
        tile_values = from_float8(tile_values)
    if CODES:
        shares = shares * tl.load(value_scales + at_scale, mask=key_ok, other=0.0)[None, :]
    shares, tile_values = shares.to(query.dtype), tile_values.to(query.dtype)
    summed = tl.dot(shares, tile_values, summed * kept[:, None], input_precision="ieee")
    return largest, weight, summed


@triton.jit
def sequence_at(starts, place, count, TOKENS: tl.constexpr):
    """The last b with starts[b] // TOKENS + b <= place, or, if TOKENS is 0, with starts[b] <= place. starts[0] is 0."""
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
