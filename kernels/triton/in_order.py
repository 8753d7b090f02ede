"""Attention of prompts over keys brought in order out of their pages; see `programs.in_order`. Nothing here waits for the device.

Bringing them there is one more write and read of each key, in the type that is multiplied, where attending to them out of pages
means finding each block for each tile of queries. So it is for sequences of many new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from windlass.kernels.attention_call import AttentionCall, PrefillTotals
from windlass.kernels.layouts.pages import KVPages
from windlass.kernels.triton.launch import Device, as_bytes, dot_type, launch, power_of_two
from windlass.kernels.triton.programs.in_order import gather_kv_kernel, prefill_attention_kernel

CAPABILITY = (9, 0)  # products and copies run beside the threads that ask for them; older ones spill registers
_LEAST_TOKENS = 128  # of a sequence, on average
MOST_BYTES = 512 << 20  # of keys and values in order, of a call
_WIDEST = 128
_MULTIPLE = 128  # of the places of a sequence, and of the keys of a tile


class PrefillTile(NamedTuple):
    """Of tiles: rows, keys, warps of a program, and tiles of keys that are on their way or at work."""

    rows: int
    keys: int
    warps: int
    stages: int


_TILES = PrefillTile(64, 64, 4, 3)


def takes_prefill(q: Tensor, pages: KVPages, call: AttentionCall, device: Device) -> bool:
    """Whether it is for a call: by what the device does by itself, by type and sizes, by what bends scores, and by tokens per
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
    """At most, where each sequence has a multiple of them."""
    return (prompts.keys // _MULTIPLE + prompts.sequences) * _MULTIPLE


def prefill_attention(q: Tensor, pages: KVPages, call: AttentionCall, out: Tensor, sizes: PrefillTile = _TILES) -> None:
    """Fills the rows of out [T, Hq, Dv] of sequences with more than one new token. q: [T, Hq, D], its last dim contiguous."""
    kv_heads, dim, width = pages.num_kv_heads, q.shape[2], pages.value_dim
    block_d, block_v = power_of_two(dim, 16), power_of_two(width, 16)
    places = _padded_keys(_prompts(pages, call))
    keys, values = (q.new_empty(places, kv_heads * block) for block in (block_d, block_v))
    limits = {"WINDOW": call.window is not None, "CHUNK": call.chunk is not None}
    launch(
        gather_kv_kernel,
        (places // _MULTIPLE, kv_heads),
        q,
        as_bytes(pages.key),
        as_bytes(pages.value),
        pages.key_scale,
        pages.value_scale,
        pages.key.shape[0],
        call.block_tables,
        call.block_tables.stride(0),
        call.query_start,
        call.seq_lens,
        keys,
        values,
        call.batch_size,
        call.window or 0,
        call.chunk or 0,
        KV_HEADS=kv_heads,
        SIZE=pages.block_size,
        DIM=dim,
        VALUE_DIM=width,
        CODES=pages.key_scale is not None,
        FLOAT8=pages.key.dtype == torch.float8_e4m3fn,
        BLOCK_N=_MULTIPLE,
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        num_warps=8,
        **limits,
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
        call.window or 0,
        call.chunk or 0,
        call.sink_logits,
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        VALUE_DIM=width,
        PRECISION=dot_type(q.dtype)[1],
        CAUSAL=call.causal,
        SINKS=call.sink_logits is not None,
        MULTIPLE=_MULTIPLE,
        TOKENS=tokens,
        HEADS=heads,
        BLOCK_M=sizes.rows,
        BLOCK_N=sizes.keys,
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **limits,
    )


def _tiles_of(rows: Tensor, keys: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [keys, width])
