"""Paged attention in batched torch calls: all single-token rows at once, longer rows in blocks of bounded memory.

It reads pages by whole-block gathers, so its cost per call is a few tensor operations however many sequences decode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.layouts.pages import KVPages

_MAX_SCORE_BYTES = 64 << 20
_QUERY_BLOCK = 256

# (q, pages, tables, seq_lens, score_scale, scale, window, soft_cap) -> [B, Hq, Dv]; see decode_attention.
DecodeAttention = Callable[[Tensor, KVPages, Tensor, Tensor, Tensor, float, int | None, float | None], Tensor]
# (q [Q, Hq, D], pages, table [max_blocks], length, score_scale [Q], scale, window, soft_cap) -> [Q, Hq, Dv]: the last Q
# tokens of one sequence of `length`; see prefill_attention.
PrefillAttention = Callable[[Tensor, KVPages, Tensor, int, Tensor, float, int | None, float | None], Tensor]


def paged_attention(
    q: Tensor,
    pages: KVPages,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    score_scale: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    decode: DecodeAttention | None = None,
    prefill: PrefillAttention | None = None,
) -> Tensor:
    """Same contract as `reference.paged_attention`. Decode rows cost memory in B * max(seq_lens), prefill rows a mask
    of 256 * seq_len bytes, or 64 MiB of scores under a soft cap.

    decode: what runs the single-token rows, `decode_attention` unless a backend has better. prefill: what runs a longer
    run of one sequence, `prefill_attention` unless the caller wants another.
    """
    decode, prefill = decode or decode_attention, prefill or prefill_attention
    if q.shape[0] == seq_lens.shape[0]:  # nothing but single-token rows
        return decode(q, pages, block_tables, seq_lens, score_scale, scale, window, soft_cap)
    out = q.new_empty(q.shape[0], q.shape[1], pages.value_dim)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    singles = [b for b in range(len(lengths)) if starts[b + 1] - starts[b] == 1]
    if singles:
        index = torch.tensor(singles, device=q.device)
        rows = query_start[index]
        out[rows] = decode(
            q[rows], pages, block_tables[index], seq_lens[index], score_scale[rows], scale, window, soft_cap
        )
    for b, length in enumerate(lengths):
        part = slice(starts[b], starts[b + 1])
        if part.stop - part.start > 1:
            out[part] = prefill(q[part], pages, block_tables[b], length, score_scale[part], scale, window, soft_cap)
    return out


def _attend(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, soft_cap: float | None) -> Tensor:
    """query [..., Q, D] already scaled, keys [..., S, D], values [..., S, Dv], hidden bool broadcastable to [..., Q, S]."""
    scores = query @ keys.transpose(-1, -2)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap).mul_(soft_cap)
    return scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1) @ values


def decode_attention(
    q: Tensor,
    pages: KVPages,
    tables: Tensor,
    seq_lens: Tensor,
    score_scale: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """One query per sequence. q: [B, Hq, D]; tables: [B, max_blocks]; score_scale: [B]. Returns [B, Hq, Dv] in q's dtype."""
    query = q.float() * (scale * score_scale)[:, None, None]
    batch, num_heads, _ = query.shape
    num_kv_heads, block_size = pages.num_kv_heads, pages.block_size
    if window is None:
        num_blocks = -(-int(seq_lens.max()) // block_size)
        tables, first_key = tables[:, :num_blocks], torch.zeros_like(seq_lens)
    else:
        first_block = (seq_lens - window).clamp(min=0) // block_size  # the first block the query sees
        num_blocks = int((-(-seq_lens // block_size) - first_block).max())
        columns = first_block[:, None] + torch.arange(num_blocks, device=query.device)
        tables = tables.gather(1, columns.clamp(max=tables.shape[1] - 1).to(torch.int64))
        first_key = first_block * block_size
    flat = tables.clamp(min=0).reshape(-1).long()
    keys = pages.keys_of(flat, q.shape[-1]).view(batch, num_blocks * block_size, num_kv_heads, -1)
    values = pages.values_of(flat).view(batch, num_blocks * block_size, num_kv_heads, -1)
    key_index = first_key[:, None] + torch.arange(num_blocks * block_size, device=query.device)  # [B, S]
    hidden = key_index >= seq_lens[:, None]
    if window is not None:
        hidden |= key_index < (seq_lens - window)[:, None]
    # A hidden slot may hold anything, NaN included, and 0 * NaN is NaN.
    values = values.masked_fill(hidden[:, :, None, None], 0.0)
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, -1)
    result = _attend(grouped, keys.transpose(1, 2), values.transpose(1, 2), hidden[:, None, None], soft_cap)
    return result.reshape(batch, num_heads, -1).to(q.dtype)


def prefill_attention(
    q: Tensor,
    pages: KVPages,
    table: Tensor,
    length: int,
    score_scale: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """The last Q of the `length` tokens of one sequence. q: [Q, Hq, D]; score_scale: [Q]. Returns [Q, Hq, Dv] in q's dtype.

    Queries go in blocks, and a block reads only the keys its last query sees, so about half the work of a long prompt
    is never done. Without a soft cap torch's fused attention takes a block; it never holds all scores.
    """
    query = q.float() * (scale * score_scale)[:, None, None]
    num_queries, num_heads, _ = query.shape
    block_size, first_query = pages.block_size, length - num_queries
    out = q.new_empty(num_queries, num_heads, pages.value_dim)
    step = (
        _QUERY_BLOCK if soft_cap is None else max(16, min(_QUERY_BLOCK, _MAX_SCORE_BYTES // (4 * num_heads * length)))
    )
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        last_key = first_query + end
        first_key = 0 if window is None else max(0, first_query + begin - window + 1) // block_size * block_size
        blocks = table[first_key // block_size : -(-last_key // block_size)].long()
        span = last_key - first_key
        keys = pages.keys_of(blocks, q.shape[-1]).flatten(0, 1)[:span].transpose(0, 1)  # [Hkv, S, D]
        values = pages.values_of(blocks).flatten(0, 1)[:span].transpose(0, 1)
        query_index = torch.arange(first_query + begin, last_key, device=query.device)[:, None]
        key_index = torch.arange(first_key, last_key, device=query.device)[None]
        visible = key_index <= query_index
        if window is not None:
            visible &= key_index > query_index - window
        block = query[begin:end].transpose(0, 1)  # [Hq, Q, D]
        if soft_cap is None:
            result = F.scaled_dot_product_attention(
                block[None], keys[None], values[None], attn_mask=visible, scale=1.0, enable_gqa=True
            )[0]
        else:
            group = num_heads // keys.shape[0]
            grouped = block.view(keys.shape[0], group, end - begin, -1)  # [Hkv, g, Q, D]
            result = _attend(grouped, keys[:, None], values[:, None], ~visible, soft_cap).flatten(0, 1)
        out[begin:end] = result.transpose(0, 1).to(out.dtype)
    return out
