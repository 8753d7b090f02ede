"""Paged attention: which programs a call takes, and in what sizes. Nothing here waits for the device.

A sequence's single new token is attended in splits over the context, which another program merges; how many there are follows
from the width of the tables, and what each takes from the lengths in the device's memory, so a captured call is right at any
length. Longer runs go in tiles of tokens, unsplit, the longest over keys that are brought in order first. Under `deterministic`
every token is a single one and splits have one size, so its bits follow from its own sequence and no chunking.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.kernels.attention_call import KEY_SPLIT, AttentionCall, KeyRanges
from windlass.kernels.layouts.pages import KVPages
from windlass.kernels.triton import in_order
from windlass.kernels.triton.launch import SMALL, Device, as_bytes, dot_type, launch, power_of_two, strided
from windlass.kernels.triton.programs.attention import paged_attention_kernel
from windlass.kernels.triton.programs.merge import merge_splits_kernel

_LEAST_SPLIT, _MOST_SPLITS = 256, 128
_MERGED = 32  # splits at a time; under `deterministic` one, as those between that hold nothing shall not count
_MOST_SUMS = 256 << 20  # bytes of what is to be merged, where a token by itself does not take more
_MIN_WAVES = 8  # of programs for each processor that splits are to make


class _Sizes(NamedTuple):
    """Of tiles: rows at most, keys, warps of a program, and how far ahead tiles are begun: a block is found in a table first, so
    3 keep one of them on its way and 5 two. As large as registers and shared memory let them be: what the compiler says of each
    is in `tests/helpers/compiling.py`."""

    rows: int
    keys: int
    warps: int
    stages: int = 3

    @classmethod
    def of_singles(cls, q: Tensor, pages: KVPages, rows: int) -> _Sizes:
        """Of single tokens, each of which has so many rows."""
        widest = max(q.shape[2], pages.value_dim)
        if q.element_size() == 4:  # multiplied number by number, without tensor cores
            few = cls(min(rows, 16), 16, 8, _stages_of_numbers(pages, widest))
            return cls(rows, 32, 4 if rows <= 16 else 8) if widest <= 64 else few
        if widest <= 128:
            # Keys of 8 bits are there twice, as they are and as they are multiplied.
            return cls(rows, 128 if pages.key.element_size() == 2 and rows <= 16 else 64, 4 if rows <= 32 else 8)
        return cls(rows, 32, 4 if rows <= 32 else 8) if widest <= 256 else cls(min(rows, 16), 16, 8)

    @classmethod
    def of_tiles(cls, q: Tensor, pages: KVPages, device: Device) -> _Sizes:
        """Of tiles of tokens."""
        widest = max(q.shape[2], pages.value_dim)
        if q.element_size() == 4:
            return cls(32, 32, 8) if widest <= 64 else cls(16, 16, 8, _stages_of_numbers(pages, widest))
        if widest <= 128:
            if pages.key.element_size() == 1:
                return cls(64, 64, 8)
            return cls(64, 64, 4, 5 if device.shared_memory >= 163 << 10 or widest <= 64 else 3)
        if widest <= 256:
            return cls(64, 32, 8)
        return cls(32 if widest <= 512 and pages.key.dtype != torch.float8_e4m3fn else 16, 16, 8)


def _stages_of_numbers(pages: KVPages, widest: int) -> int:
    """Of tiles in float32: where wide keys of 8 bits become that, registers do not have the next tile of them as well."""
    return 1 if widest > 256 and pages.key.element_size() == 1 else 3


def paged_attention(
    q: Tensor, pages: KVPages, call: AttentionCall, *, deterministic: bool = False, device: Device = SMALL
) -> Tensor:
    """See `Backend.paged_attention`. A block or row of q that is none gives NaN.

    Raises ValueError where q and the call disagree about tokens.
    """
    if q.shape[0] < call.num_tokens or (q.shape[0] > call.num_tokens and not call.has_ranges):
        raise ValueError(f"q has {q.shape[0]} rows for {call.num_tokens} tokens")
    q = strided(q)
    out = q.new_empty(call.num_tokens, q.shape[1], pages.value_dim)
    if deterministic or call.is_decode:
        _singles(q, pages, call, out, deterministic, device)
    else:
        if call.batch_size > 1:  # a sequence by itself has more than one token here
            _singles(q, pages, call, out, False, device)
        if in_order.takes_prefill(q, pages, call, device):
            in_order.prefill_attention(q, pages, call, out)
        else:
            _tiles(q, pages, call, out, device)
    return out


def _singles(q: Tensor, pages: KVPages, call: AttentionCall, out: Tensor, by_token: bool, device: Device) -> None:
    places, heads, width = (call.num_tokens if by_token else call.batch_size), q.shape[1], pages.value_dim
    group = heads // pages.num_kv_heads
    sizes = _Sizes.of_singles(q, pages, min(power_of_two(group), 64))
    rows = sizes.rows
    longest = call.block_tables.shape[1] * pages.block_size
    split = KEY_SPLIT if by_token else _LEAST_SPLIT
    splits = max(1, -(-longest // split))
    if not by_token:
        programs = places * pages.num_kv_heads * -(-group // rows)
        splits = min(splits, max(1, -(-_MIN_WAVES * device.processors // max(programs, 1))), _MOST_SPLITS)
    at_once = places
    if by_token:  # each for itself, so those of a long prompt over a long context need not be there all at once
        at_once = max(1, min(places, _MOST_SUMS // (heads * splits * (width + 2) * 4)))
        if 16 < at_once < places:
            at_once -= at_once % 16  # so that addresses are as aligned as the first
    shape = (at_once, heads, splits)
    sums = torch.empty((*shape, width), dtype=torch.float32, device=q.device)
    maxima, weights = torch.empty((2, *shape), dtype=torch.float32, device=q.device)
    parts = sums, maxima, weights
    for first in range(0, places, max(1, at_once)):
        count = min(at_once, places - first)
        some_q, some, own = (q, call, out) if count == places else _some_tokens(q, call, out, first, count)
        _launch(
            some_q, pages, some, own, parts, (count, splits), split, sizes, 1, singles=not by_token, by_token=by_token
        )
        launch(
            merge_splits_kernel,
            (count, heads),
            q,
            own,
            *parts,
            some.query_start,
            call.sink_logits,
            splits,
            HEADS=heads,
            VALUE_DIM=width,
            SINKS=call.sink_logits is not None,
            SINGLES=not by_token,
            MANY=_MERGED,
            FEW=1 if by_token else _MERGED,
            BLOCK_V=power_of_two(width, 16),
        )


def _some_tokens(
    q: Tensor, call: AttentionCall, out: Tensor, first: int, count: int
) -> tuple[Tensor, AttentionCall, Tensor]:
    """q, call and out as programs for so many tokens by themselves take them, which count from the first of them on."""
    tokens = slice(first, first + count)
    some = replace(call, query_start=call.query_start - first, score_scale=call.score_scale[tokens])
    return call.queries(q, tokens), some, out[tokens]


def _tiles(q: Tensor, pages: KVPages, call: AttentionCall, out: Tensor, device: Device) -> None:
    sizes = _Sizes.of_tiles(q, pages, device)
    rows = min(power_of_two(q.shape[1] // pages.num_kv_heads), sizes.rows)
    tokens = sizes.rows // rows
    sizes = sizes._replace(rows=rows)
    places = call.num_tokens // tokens + call.batch_size
    _launch(q, pages, call, out, (None, None, None), (places, 1), 0, sizes, tokens, singles=False, by_token=False)


def _launch(
    q: Tensor,
    pages: KVPages,
    call: AttentionCall,
    out: Tensor,
    parts: tuple[Tensor | None, Tensor | None, Tensor | None],
    grid: tuple[int, int],
    split: int,
    sizes: _Sizes,
    tokens: int,
    *,
    singles: bool,
    by_token: bool,
) -> None:
    """sizes.rows: of a tile for each of its tokens."""
    rows, kv_heads, dim, width = sizes.rows, pages.num_kv_heads, q.shape[2], pages.value_dim
    group = q.shape[1] // kv_heads
    dot, precision = dot_type(q.dtype)
    launch(
        paged_attention_kernel,
        (grid[0], kv_heads * -(-group // rows), grid[1]),
        q,
        q,
        q.stride(0),
        q.stride(1),
        q.shape[0],
        out,
        *parts,
        as_bytes(pages.key),
        as_bytes(pages.value),
        pages.key_scale,
        pages.value_scale,
        pages.key.shape[0],
        call.block_tables,
        call.block_tables.stride(0),
        call.query_start,
        call.seq_lens,
        call.batch_size,
        call.score_scale,
        call.scale,
        call.soft_cap or 0.0,
        call.window or 0,
        call.chunk or 0,
        call.sink_logits,
        *((None, None, None, None, 0) if call.ranges is None else _parts_of(call.ranges)),
        call.alibi_slopes,
        split,
        grid[1],
        GROUP=group,
        KV_HEADS=kv_heads,
        SIZE=pages.block_size,
        DIM=dim,
        VALUE_DIM=width,
        CODES=pages.key_scale is not None,
        FLOAT8=pages.key.dtype == torch.float8_e4m3fn,
        DOT=dot,
        PRECISION=precision,
        CAUSAL=call.causal,
        WINDOW=call.window is not None,
        CHUNK=call.chunk is not None,
        CAP=call.soft_cap is not None,
        SINKS=call.sink_logits is not None,
        RANGES=call.has_ranges,
        SLOPES=call.alibi_slopes is not None,
        SINGLES=singles,
        BY_TOKEN=by_token,
        SPLITS=parts[0] is not None,
        SPREAD=parts[0] is not None and not by_token,
        TOKENS=tokens,
        HEADS=rows,
        BLOCK_M=max(16, rows * tokens),
        BLOCK_N=sizes.keys,
        BLOCK_D=power_of_two(dim, 16),
        BLOCK_V=power_of_two(width, 16),
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )


def _parts_of(ranges: KeyRanges) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    """As the programs take them, and how many there are of a sequence."""
    return ranges.ends, ranges.rows, ranges.reaches, ranges.gaps, ranges.ends.shape[1]
