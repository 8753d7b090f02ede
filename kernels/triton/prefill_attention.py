"""Prefill attention in Triton over keys gathered into contiguous memory (Hopper).

Gathering costs one more write and read of each key and pays off for sequences with many new tokens. Products of one tile
overlap with the softmax of the next (arXiv 2407.08608, section 3.2).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from windlass.kernels.attention_call import AttentionCall, PrefillTotals
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.triton.attention_tile import (
    BY_STEP,
    LOG2_E,
    end_visible,
    first_visible,
    prepare_query,
    rows_of_tile,
    sequence_at,
    softmax_update,
    store_rows,
)
from windlass.kernels.triton.launch import Device, launch, power_of_two, wait_for_predecessor
from windlass.kernels.triton.page_addressing import (
    PageLayout,
    from_float8,
    key_offset,
    page_tensors,
    scale_offset,
    value_offset,
)

_AT_ONCE = tl.constexpr(64)  # sequences


@triton.jit
def tiles_before(query_start, seq_lens, end, tile, MULTIPLE: tl.constexpr):
    """The number of tiles of MULTIPLE places of the sequences before `end` (0 for those with one new token), and the number of
    sequences that end no later than a tile."""
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


@triton.jit(do_not_specialize=BY_STEP)
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
    PAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (tile of places, head of keys): gathers keys and values. Sequences with more than one new token have tiles for
    all of their keys, sequence after sequence.

    Keys that no new token sees are skipped. Keys of an invalid block are NaN. Missing values are 0, since a weight of 0 times
    NaN would be NaN.
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
    first_key = first_visible(length - new, window, chunk)
    first_place = (tile - before) * BLOCK_N
    if first_place + BLOCK_N <= first_key // BLOCK_N * BLOCK_N:
        return
    key = first_place + tl.arange(0, BLOCK_N)
    ok = (key >= first_key) & (key < length)
    block = tl.load(tables + b * table_stride + key // PAGES.size, mask=ok, other=-1)
    there = (block >= 0) & (block < num_blocks)
    block = tl.where(there, block, 0).to(tl.int64)
    offset = key % PAGES.size
    BLOCK_D: tl.constexpr = power_of_two(PAGES.dim, 16)
    BLOCK_V: tl.constexpr = power_of_two(PAGES.value_dim, 16)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    kind = ordered_keys.dtype.element_ty
    at_key = key_offset(block[:, None], offset[:, None], kv_head, dims[None, :], PAGES)
    tile_keys = tl.load(keys + at_key, mask=there[:, None] & (dims < PAGES.dim)[None, :], other=0)
    at_value = value_offset(block[:, None], offset[:, None], kv_head, value_dims[None, :], PAGES)
    tile_values = tl.load(values + at_value, mask=there[:, None] & (value_dims < PAGES.value_dim)[None, :], other=0)
    if PAGES.float8:
        tile_keys = from_float8(tile_keys)
        tile_values = from_float8(tile_values)
    if PAGES.codes:
        at_scale = scale_offset(block, offset, kv_head, PAGES)
        tile_keys = tile_keys.to(tl.float32) * tl.load(key_scales + at_scale, mask=there, other=0.0)[:, None]
        tile_values = tile_values.to(tl.float32) * tl.load(value_scales + at_scale, mask=there, other=0.0)[:, None]
    row = (tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * PAGES.heads + kv_head
    missing = tl.where(ok & ~there, float("nan"), 0.0)
    tl.store(ordered_keys + row * BLOCK_D + dims[None, :], (tile_keys.to(tl.float32) + missing[:, None]).to(kind))
    tl.store(ordered_values + row * BLOCK_V + value_dims[None, :], tile_values.to(kind))


@triton.jit
def masked(scores, key, first, end, EARLY: tl.constexpr):
    """-inf for hidden keys. EARLY: whether there are keys before the first visible one."""
    seen = key[None, :] < end[:, None]
    if EARLY:
        seen = seen & (key[None, :] >= first[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=BY_STEP)
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
    PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    MULTIPLE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (tile of TOKENS tokens of a sequence with more than one, head tile). keys, values: descriptors of the tiles of
    MULTIPLE places of one head that `gather_kv_kernel` wrote. The rows of a tile are (token, head) pairs, heads innermost."""
    wait_for_predecessor()
    place = tl.num_programs(0) - 1 - tl.program_id(0).to(tl.int64)  # the last tokens see most keys, so they start first
    b = sequence_at(query_start, place, num_sequences, TOKENS)
    start = tl.load(query_start + b)
    new = (tl.load(query_start + b + 1) - start).to(tl.int32)
    length = tl.load(seq_lens + b).to(tl.int32)
    local = ((place - (start // TOKENS + b)) * TOKENS).to(tl.int32)
    count = tl.minimum(new - local, TOKENS)
    if (new < 2) | (count <= 0):
        return

    kv_head, head, token, row_ok = rows_of_tile(local, count, GROUP, HEADS, TOKENS)
    index = length - new + token
    first_index = length - new + local
    last_index = first_index + count - 1
    BLOCK_M: tl.constexpr = head.shape[0]
    BLOCK_D: tl.constexpr = power_of_two(PAGES.dim, 16)
    BLOCK_V: tl.constexpr = power_of_two(PAGES.value_dim, 16)
    dims = tl.arange(0, BLOCK_D)
    own_scale = scale * LOG2_E * tl.load(score_scale + start + token, mask=row_ok, other=0.0)
    at_q = q + (start + token)[:, None] * q_stride + head[:, None] * q_head_stride + dims[None, :]
    query = tl.load(at_q, mask=row_ok[:, None] & (dims < PAGES.dim)[None, :], other=0.0)
    query, own_scale = prepare_query(query, own_scale)

    first = first_visible(index, window, chunk)
    end = end_visible(index, length, window, chunk, CAUSAL)
    low = first_visible(first_index, window, chunk)
    stop = tl.minimum(end_visible(last_index, length, window, chunk, CAUSAL), length)
    end = tl.minimum(end, length)
    # Tiles in which all rows see all keys are between tiles with hidden keys.
    begin = low // BLOCK_N * BLOCK_N
    all_from = first_visible(last_index, window, chunk)
    all_until = tl.minimum(end_visible(first_index, length, window, chunk, CAUSAL), length)
    whole = (all_from + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    whole_end = all_until // BLOCK_N * BLOCK_N

    LIMITED: tl.constexpr = window is not None or chunk is not None
    tiles, _ = tiles_before(query_start, seq_lens, b.to(tl.int32), 0, MULTIPLE)
    first_row = tiles * MULTIPLE
    at_head = kv_head * BLOCK_D
    at_value_head = kv_head * BLOCK_V
    places_of_tile = tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    scores = tl.dot(query, keys.load([first_row + begin, at_head]).T, input_precision="ieee")
    scores = masked(scores, begin + places_of_tile, first, end, LIMITED)
    largest, weight, kept, shares = softmax_update(scores, own_scale, largest, weight, False)
    for phase in tl.static_range(3):
        if phase == 0:
            from_tile, to_tile = begin, tl.minimum(whole, stop)
        elif phase == 1:
            from_tile, to_tile = whole, whole_end
        else:
            from_tile, to_tile = tl.maximum(whole, whole_end), stop
        if phase > 0 or LIMITED:
            from_tile = tl.maximum(from_tile, begin + BLOCK_N)
            for tile in range(from_tile // BLOCK_N * BLOCK_N, to_tile, BLOCK_N):
                tile_keys = keys.load([first_row + tile, at_head])
                values_before = values.load([first_row + tile - BLOCK_N, at_value_head])
                scores = tl.dot(query, tile_keys.T, input_precision="ieee")
                summed = tl.dot(shares.to(query.dtype), values_before, summed * kept[:, None], input_precision="ieee")
                if phase != 1:
                    scores = masked(scores, tile + places_of_tile, first, end, LIMITED)
                largest, weight, kept, shares = softmax_update(scores, own_scale, largest, weight, phase == 1)
    tile_values = values.load([first_row + (stop - 1) // BLOCK_N * BLOCK_N, at_value_head])
    summed = tl.dot(shares.to(query.dtype), tile_values, summed * kept[:, None], input_precision="ieee")

    ALL_HEADS: tl.constexpr = PAGES.heads * GROUP
    store_rows(out, start + token, head, row_ok, largest, weight, summed, sinks, ALL_HEADS, PAGES.value_dim)


CAPABILITY = (9, 0)  # products and copies are asynchronous; older GPUs spill registers

_LEAST_TOKENS = 128  # per sequence, on average

MOST_BYTES = 512 << 20  # of gathered keys and values of a call

_WIDEST = 128

_MULTIPLE = 128  # granularity of the places of a sequence and of the keys of a tile


class PrefillTile(NamedTuple):
    """Tile sizes: rows, keys, warps, and tiles of keys in flight or in use."""

    rows: int
    keys: int
    warps: int
    stages: int


_TILES = PrefillTile(64, 64, 4, 3)


def takes_prefill(q: Tensor, pages: KVPages, call: AttentionCall, device: Device) -> bool:
    """Whether a call can use these kernels: device capability, dtypes and sizes, no soft cap or bias, enough tokens per
    sequence."""
    widest, prompts = max(q.shape[2], pages.value_dim), _prompts(pages, call)
    return (
        device.capability == CAPABILITY
        and q.element_size() == 2
        and widest <= _WIDEST
        and call.soft_cap is None
        and not call.has_ranges
        and prompts.tokens >= _LEAST_TOKENS * prompts.sequences
        and _padded_keys(prompts) * pages.num_kv_heads * 4 * power_of_two(widest, 16) <= MOST_BYTES
    )


def _prompts(pages: KVPages, call: AttentionCall) -> PrefillTotals:
    if call.prompts is not None:
        return call.prompts
    return PrefillTotals(call.batch_size, call.num_tokens, call.block_tables.numel() * pages.block_size)


def _padded_keys(prompts: PrefillTotals) -> int:
    """The largest total, when each sequence is padded to a multiple."""
    return (prompts.keys // _MULTIPLE + prompts.sequences) * _MULTIPLE


def prefill_attention(q: Tensor, pages: KVPages, call: AttentionCall, out: Tensor, sizes: PrefillTile = _TILES) -> None:
    """Fills the rows of out [T, Hq, Dv] of sequences with more than one new token. q: [T, Hq, D], its last dim contiguous."""
    kv_heads, layout = pages.num_kv_heads, PageLayout.of(pages, q.shape[2])
    block_d, block_v = power_of_two(layout.dim, 16), power_of_two(layout.value_dim, 16)
    places = _padded_keys(_prompts(pages, call))
    keys, values = (q.new_empty(places, kv_heads * block) for block in (block_d, block_v))
    launch(
        gather_kv_kernel,
        (places // _MULTIPLE, kv_heads),
        q,
        *page_tensors(pages),
        pages.key.shape[0],
        call.block_tables,
        call.block_tables.stride(0),
        call.query_start,
        call.seq_lens,
        keys,
        values,
        call.batch_size,
        call.window,
        call.chunk,
        PAGES=layout,
        BLOCK_N=_MULTIPLE,
        num_warps=8,
    )
    group = q.shape[1] // kv_heads
    heads = min(power_of_two(group), sizes.rows)
    tokens = sizes.rows // heads
    launch(
        prefill_attention_kernel,
        (call.num_tokens // tokens + call.batch_size, kv_heads * -(-group // heads)),
        q,
        q,
        q.stride(0),
        q.stride(1),
        out,
        _tiles_of(keys, sizes.keys, block_d),
        _tiles_of(values, sizes.keys, block_v),
        call.query_start,
        call.seq_lens,
        call.batch_size,
        call.score_scale,
        call.scale,
        call.window,
        call.chunk,
        call.sink_logits,
        PAGES=layout,
        GROUP=group,
        CAUSAL=call.causal,
        MULTIPLE=_MULTIPLE,
        TOKENS=tokens,
        HEADS=heads,
        BLOCK_N=sizes.keys,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )


def _tiles_of(rows: Tensor, keys: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [keys, width])
