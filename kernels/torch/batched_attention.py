"""Batched paged attention in plain torch: single-token rows at once, longer rows in blocks of bounded memory.

Pages are read by gathers of whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall
from windlass.kernels.layouts.kv_pages import KVPages

_MAX_SCORE_BYTES = 64 << 20

_QUERY_BLOCK = 256

# (q, pages, call) -> [T, Hq, Dv] for single-token rows, or for the last tokens of one sequence.
Attention = Callable[[Tensor, KVPages, AttentionCall], Tensor]


def paged_attention(
    q: Tensor,
    pages: KVPages,
    call: AttentionCall,
    *,
    decode: Attention | None = None,
    prefill: Attention | None = None,
) -> Tensor:
    """See `Backend.paged_attention`. Raises ValueError for keys in ranges, unless both `decode` and `prefill` are given.

    Decode rows take memory in proportion to B * max(seq_lens); prefill rows a mask of 256 * seq_len bytes, or 64 MiB of scores
    with a soft cap or sinks. decode, prefill: functions for single-token rows and for longer runs of one sequence, by default
    `decode_attention` and `prefill_attention`.
    """
    if call.has_ranges and (decode is None or prefill is None):
        raise ValueError("paged_attention: keys in ranges")
    decode, prefill = decode or decode_attention, prefill or prefill_attention
    if call.is_decode:
        return decode(q, pages, call)
    out = q.new_empty(call.num_tokens, q.shape[1], pages.value_dim)
    singles = call.decode_part()
    if singles is not None:
        rows, own = singles
        out[rows] = decode(own.queries(q, rows), pages, own)
    for part, _, own in call.sequences(fewest=2):
        out[part] = prefill(own.queries(q, part), pages, own)
    return out


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """query [..., Q, D] already scaled, keys [..., S, D], values [..., S, Dv], hidden bool broadcastable to [..., Q, S],
    sinks to [..., Q, 1]."""
    scores = query @ keys.transpose(-1, -2)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap).mul_(soft_cap)
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1) @ values
    return torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1).softmax(dim=-1)[..., :-1] @ values


def decode_attention(q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    """One query per sequence, all at once. q: [B, Hq, D]. Returns [B, Hq, Dv] in q's dtype."""
    first, end = call.visible(call.seq_lens - 1, call.seq_lens)
    return attend_rows(call.scaled(q), pages, call, first, end).to(q.dtype)


def attend_rows(query: Tensor, pages: KVPages, call: AttentionCall, first: Tensor, end: Tensor) -> Tensor:
    """One query of each sequence over its keys [first, end). query: [B, Hq, D] float32, scaled; first, end: [B] int64.
    Returns [B, Hq, Dv] float32."""
    batch, num_heads, dim = query.shape
    num_kv_heads, block_size = pages.num_kv_heads, pages.block_size
    tables = call.block_tables
    if not call.skips_early_keys:
        num_blocks = -(-int(end.max()) // block_size)
        tables, first_key = tables[:, :num_blocks], first
    else:
        first_block = first // block_size  # the first block the query sees
        num_blocks = int((-(-end // block_size) - first_block).max())
        columns = first_block[:, None] + torch.arange(num_blocks, device=query.device)
        tables = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
        first_key = first_block * block_size
    flat = tables.clamp(min=0).reshape(-1).long()
    keys = pages.keys_of(flat, dim).view(batch, num_blocks * block_size, num_kv_heads, -1)
    values = pages.values_of(flat).view(batch, num_blocks * block_size, num_kv_heads, -1)
    key_index = first_key[:, None] + torch.arange(num_blocks * block_size, device=query.device)  # [B, S]
    hidden = key_index >= end[:, None]
    if call.skips_early_keys:
        hidden |= key_index < first[:, None]
    # A hidden slot may hold anything, NaN included, and 0 * NaN is NaN.
    values = values.masked_fill(hidden[:, :, None, None], 0.0)
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, -1)
    sinks = None if call.sink_logits is None else call.sink_logits.view(num_kv_heads, -1, 1)
    result = _attend(grouped, keys.transpose(1, 2), values.transpose(1, 2), hidden[:, None, None], call.soft_cap, sinks)
    return result.reshape(batch, num_heads, -1)


def prefill_attention(q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    """The last Q tokens of one sequence. q: [Q, Hq, D]. Returns [Q, Hq, Dv] in q's dtype.

    Queries are processed in blocks, and a block reads only the keys that its queries see, which saves about half the work of a
    long prompt. Without a soft cap or sinks, torch's fused attention computes a block without holding all scores.
    """
    query, length = call.scaled(q), int(call.seq_lens)
    num_queries, num_heads, _ = query.shape
    block_size, first_query = pages.block_size, length - num_queries
    out = q.new_empty(num_queries, num_heads, pages.value_dim)
    fused = call.soft_cap is None and call.sink_logits is None
    step = _QUERY_BLOCK if fused else max(16, min(_QUERY_BLOCK, _MAX_SCORE_BYTES // (4 * num_heads * length)))
    for begin in range(0, num_queries, step):
        stop = min(begin + step, num_queries)
        first, end = call.visible(torch.arange(first_query + begin, first_query + stop), length)  # [Q], on the host
        first_key, end_key = int(first[0]) // block_size * block_size, int(end[-1])
        blocks = call.block_tables[0, first_key // block_size : -(-end_key // block_size)].long()
        span = end_key - first_key
        keys = pages.keys_of(blocks, q.shape[-1]).flatten(0, 1)[:span].transpose(0, 1)  # [Hkv, S, D]
        values = pages.values_of(blocks).flatten(0, 1)[:span].transpose(0, 1)
        key_index = torch.arange(first_key, end_key)
        visible = (key_index >= first[:, None]) & (key_index < end[:, None])
        visible = visible.to(query.device)
        block = query[begin:stop].transpose(0, 1)  # [Hq, Q, D]
        if fused:
            result = F.scaled_dot_product_attention(
                block[None], keys[None], values[None], attn_mask=visible, scale=1.0, enable_gqa=True
            )[0]
        else:
            kv_heads = keys.shape[0]
            grouped = block.view(kv_heads, num_heads // kv_heads, stop - begin, -1)  # [Hkv, g, Q, D]
            sinks = None if call.sink_logits is None else call.sink_logits.view(kv_heads, -1, 1, 1)
            result = _attend(grouped, keys[:, None], values[:, None], ~visible, call.soft_cap, sinks).flatten(0, 1)
        out[begin:stop] = result.transpose(0, 1).to(out.dtype)
    return out
