"""Attention over pages by itself: decode against the bandwidth of a copy, prompts against the rate of a product."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from harness.attention_calls import decode_call
from harness.gpu_figures import Bounds, Figure, fastest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from windlass.kernels import AttentionCall, KVPages, select_backend

_BLOCK, _HEADS, _KV_HEADS, _DIM = 16, 32, 8, 128  # of an 8B Llama


def attention_figures(bounds: Bounds, *, tiny: bool) -> Iterator[Figure]:
    """One layer's. Keys and values of decode are larger than any cache of a GPU."""
    cases = ((2, 64), (1, 256)) if tiny else ((64, 8192), (1, 131_072), (8, 32_768))
    for streams, length in cases:
        yield _decode(bounds, streams, length)
    for length in (128,) if tiny else (2048, 8192, 32_768):
        yield _prompt(bounds, length)
        yield _prompt_of_torch(bounds, length)


def _pages(bounds: Bounds, streams: int, length: int) -> tuple[KVPages, torch.Tensor]:
    """Pages in an order that a run of an engine leaves, and the tables of these streams."""
    blocks = -(-length // _BLOCK)
    shape = streams * blocks, _BLOCK, _KV_HEADS, _DIM
    planes = [torch.randn(shape, device=bounds.device).to(bounds.dtype) for _ in range(2)]
    order = torch.randperm(streams * blocks, device=bounds.device).int().view(streams, blocks)
    return KVPages(*planes), order


def _decode(bounds: Bounds, streams: int, length: int) -> Figure:
    backend = select_backend(bounds.device, bounds.dtype)
    pages, tables = _pages(bounds, streams, length)
    lengths = torch.full((streams,), length, device=bounds.device)
    call = decode_call(tables, lengths, torch.ones(streams, device=bounds.device), _DIM**-0.5)
    q = torch.randn(streams, _HEADS, _DIM, device=bounds.device).to(bounds.dtype)
    seconds = fastest(lambda: backend.paged_attention(q, pages, call), bounds.device, 10)
    read = pages.key.nbytes + pages.value.nbytes
    return Figure(f"attention of decode, {streams} x {length:,} tokens", seconds, read / bounds.bandwidth, 0.85)


def _prompt(bounds: Bounds, length: int) -> Figure:
    backend = select_backend(bounds.device, bounds.dtype)
    pages, tables = _pages(bounds, 1, length)
    start, lengths = (torch.tensor(x, device=bounds.device) for x in ([0, length], [length]))
    call = AttentionCall(tables, start, lengths, torch.ones(length, device=bounds.device), _DIM**-0.5)
    q = torch.randn(length, _HEADS, _DIM, device=bounds.device).to(bounds.dtype)
    seconds = fastest(lambda: backend.paged_attention(q, pages, call), bounds.device, 5)
    return Figure(f"attention of a prompt of {length:,} tokens", seconds, _operations(length) / bounds.matrix, 0.6)


def _prompt_of_torch(bounds: Bounds, length: int) -> Figure:
    """The fastest that torch has, of queries, keys and values that lie as it likes them."""
    q, k, v = (
        torch.randn(1, heads, length, _DIM, device=bounds.device).to(bounds.dtype)
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    )
    found: dict[str, float] = {}
    for way in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with contextlib.suppress(RuntimeError), sdpa_kernel(way):  # not every device has each
            attend = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            found[way.name] = fastest(attend, bounds.device, 5)
    name = f"attention of a prompt of {length:,} tokens by torch"
    if not found:
        return Figure(name, None, note="torch has none for this device")
    way = min(found, key=found.__getitem__)
    return Figure(f"{name} ({way})", found[way], _operations(length) / bounds.matrix)


def _operations(length: int) -> float:
    return 4 * _HEADS * _DIM * length * (length + 1) / 2
