"""Attention over pages by itself: decode against the bandwidth of a copy, prompts against the rate of a product."""

from __future__ import annotations

import torch
from harness.gpu_figures import Bounds, Figure, fastest

from windlass.kernels import AttentionCall, KVPages, bind

_BLOCK, _HEADS, _KV_HEADS, _DIM = 16, 32, 8, 128  # of an 8B Llama


def attention_figures(bounds: Bounds, *, tiny: bool) -> list[Figure]:
    """One layer's. Keys and values of decode are larger than any cache of a GPU."""
    cases = ((2, 64), (1, 256)) if tiny else ((64, 8192), (1, 131_072), (8, 32_768))
    found = [_decode(bounds, streams, length) for streams, length in cases]
    return [*found, *(_prompt(bounds, length) for length in ((128,) if tiny else (2048, 8192, 32_768)))]


def _pages(bounds: Bounds, streams: int, length: int) -> tuple[KVPages, torch.Tensor]:
    """Pages in an order that a run of an engine leaves, and the tables of these streams."""
    blocks = -(-length // _BLOCK)
    shape = streams * blocks, _BLOCK, _KV_HEADS, _DIM
    planes = [torch.randn(shape, device=bounds.device).to(bounds.dtype) for _ in range(2)]
    order = torch.randperm(streams * blocks, device=bounds.device).int().view(streams, blocks)
    return KVPages(*planes), order


def _decode(bounds: Bounds, streams: int, length: int) -> Figure:
    backend = bind(bounds.device, bounds.dtype)
    pages, tables = _pages(bounds, streams, length)
    lengths = torch.full((streams,), length, device=bounds.device)
    call = AttentionCall.of_single_tokens(tables, lengths, torch.ones(streams, device=bounds.device), _DIM**-0.5)
    q = torch.randn(streams, _HEADS, _DIM, device=bounds.device).to(bounds.dtype)
    seconds = fastest(lambda: backend.paged_attention(q, pages, call), bounds.device, 10)
    read = pages.key.nbytes + pages.value.nbytes
    return Figure(f"attention of decode, {streams} x {length:,} tokens", seconds, read / bounds.bandwidth, 0.85)


def _prompt(bounds: Bounds, length: int) -> Figure:
    backend = bind(bounds.device, bounds.dtype)
    pages, tables = _pages(bounds, 1, length)
    start, lengths = (torch.tensor(x, device=bounds.device) for x in ([0, length], [length]))
    call = AttentionCall(tables, start, lengths, torch.ones(length, device=bounds.device), _DIM**-0.5)
    q = torch.randn(length, _HEADS, _DIM, device=bounds.device).to(bounds.dtype)
    seconds = fastest(lambda: backend.paged_attention(q, pages, call), bounds.device, 5)
    operations = 4 * _HEADS * _DIM * length * (length + 1) / 2
    return Figure(f"attention of a prompt of {length:,} tokens", seconds, operations / bounds.matrix, 0.6)
