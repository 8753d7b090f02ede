"""Attention tile: visible keys, online softmax and normalization, shared by decode and prefill kernels."""

import triton
import triton.language as tl

from windlass.kernels.triton.page_addressing import from_float8, key_offset, scale_offset, value_offset

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_visible(index, window, chunk, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    first = index * 0
    if WINDOW:
        first = tl.maximum(index - (window - 1), 0)
    if CHUNK:
        first = tl.maximum(first, index // chunk * chunk)
    return first


@triton.jit
def end_visible(index, length, window, chunk, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    end = index + 1
    if not CAUSAL:
        end = index * 0 + length
    if WINDOW:
        end = tl.minimum(end, index + window)
    if CHUNK:
        end = tl.minimum(end, index // chunk * chunk + chunk)
    return end


@triton.jit
def rows_of_tile(first_head, kv_head, local, count, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Per row: head, token among the new ones of its sequence, and whether it exists. `count` tokens from `local` on."""
    rows = tl.arange(0, BLOCK_M)
    head = first_head + rows % HEADS
    ok = (rows // HEADS < count) & (head < GROUP)
    return kv_head * GROUP + head, local + rows // HEADS, ok


@triton.jit
def normalized(largest, weight, summed, sinks, head, ok, SINKS: tl.constexpr):
    """Sums of values divided by the total weight, which includes sinks."""
    if SINKS:
        sink = tl.load(sinks + head, mask=ok, other=0.0) * LOG2_E
        larger = tl.maximum(largest, sink)
        kept = tl.exp2(largest - larger)
        weight = weight * kept + tl.exp2(sink - larger)
        summed = summed * kept[:, None]
    return summed / tl.where(weight == 0.0, 1.0, weight)[:, None]


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
    query,
    scale,
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
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CODES: tl.constexpr,
    FLOAT8: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    RANGES: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The softmax state (largest score in powers of two, weight, sum of values) after another tile of keys. WHOLE: all rows
    see all of them. scale: per row, as in `softmax_update`, unless a soft cap or bias is applied before."""
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
    KEY_PAGE: tl.constexpr = KV_HEADS * SIZE * ((DIM + 3) // 4 * 4 if CODES else DIM)
    VALUE_PAGE: tl.constexpr = KV_HEADS * SIZE * VALUE_DIM
    block = block.to(tl.int64)
    in_key = key_offset(0, offset[None, :], kv_head, dims[:, None], KV_HEADS, SIZE, DIM, CODES)
    at_key = keys + (block * KEY_PAGE)[None, :] + in_key
    if not WHOLE:
        tile_keys = tl.load(at_key, mask=(dims < DIM)[:, None] & key_ok[None, :], other=0)
    elif BLOCK_D == DIM:
        tile_keys = tl.load(at_key)
    else:
        tile_keys = tl.load(at_key, mask=(dims < DIM)[:, None], other=0)
    if FLOAT8:
        tile_keys = from_float8(tile_keys)
    scores = tl.dot(query, tile_keys.to(DOT), input_precision=PRECISION)
    if CODES:
        at_scale = scale_offset(block, offset, kv_head, KV_HEADS, SIZE)
        scores = scores * tl.load(key_scales + at_scale, mask=key_ok, other=0.0)[None, :]
    if BLOCK_N % SIZE == 0 and WHOLE:
        scale = scale + missing  # an invalid block makes the entire tile NaN
    else:
        scores = scores + tl.where(is_block, 0.0, float("nan"))[None, :]
    if CAP or SLOPES:
        scores = scores * scale[:, None]
        scale = scale * 0.0 + LOG2_E
    if CAP:
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
    in_value = value_offset(0, offset[:, None], kv_head, value_dims[None, :], KV_HEADS, SIZE, VALUE_DIM, CODES)
    at_value = values + (block * VALUE_PAGE)[:, None] + in_value
    if not WHOLE:
        tile_values = tl.load(at_value, mask=key_ok[:, None] & (value_dims < VALUE_DIM)[None, :], other=0)
    elif BLOCK_V == VALUE_DIM:
        tile_values = tl.load(at_value)
    else:
        tile_values = tl.load(at_value, mask=(value_dims < VALUE_DIM)[None, :], other=0)
    if FLOAT8:
        tile_values = from_float8(tile_values)
    if CODES:
        shares = shares * tl.load(value_scales + at_scale, mask=key_ok, other=0.0)[None, :]
    summed = tl.dot(shares.to(DOT), tile_values.to(DOT), summed * kept[:, None], input_precision=PRECISION)
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
