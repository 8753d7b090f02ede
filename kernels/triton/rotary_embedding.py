"""Rotary embedding in Triton: rotation with append to pages, re-rotation of cached keys, and rotated query copies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.triton.launch import launch, power_of_two, strided, wait_for_predecessor
from windlass.kernels.triton.page_addressing import (
    PageLayout,
    from_float8,
    key_offset,
    page_tensors,
    quantized,
    scale_offset,
    to_float8,
    value_offset,
)


@triton.jit
def rotary_dims(HALF: tl.constexpr, DIM: tl.constexpr):
    """First dims of rotated pairs, and dims that are not rotated, each with a mask of valid ones. The
    padding of codes is included."""
    pair = tl.arange(0, power_of_two(HALF))
    rest = 2 * HALF + tl.arange(0, power_of_two((DIM + 3) // 4 * 4 - 2 * HALF))
    return pair, pair < HALF, rest, rest < DIM


@triton.jit
def rotate_pairs(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["q_scale", "slots", "tokens"])  # the alignment of addresses differs from step to step
def rotate_and_append_kernel(
    q,
    q_stride,
    q_head_stride,
    k,
    k_stride,
    k_head_stride,
    v,
    v_stride,
    v_head_stride,
    cos,
    sin,
    q_scale,
    slots,
    tokens,
    keys,
    values,
    key_scales,
    value_scales,
    Q_HEADS: tl.constexpr,
    PAGES: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    EACH: tl.constexpr,
):
    """Program (EACH tokens, part): TILE of the Q_HEADS heads of q; after these, one of the heads of k and v."""
    wait_for_predecessor()
    Q_TILES: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    part = tl.program_id(1)
    pair, pair_ok, rest, rest_ok = rotary_dims(HALF, PAGES.dim)
    begin = tl.program_id(0).to(tl.int64) * EACH
    for token in range(begin, tl.minimum(begin + EACH, tokens)):
        c = tl.load(cos + token * HALF + pair, mask=pair_ok, other=0.0)
        s = tl.load(sin + token * HALF + pair, mask=pair_ok, other=0.0)
        if part < Q_TILES:
            heads = part * TILE + tl.arange(0, TILE)
            ok = (heads < Q_HEADS)[:, None] & pair_ok[None, :]
            at = q + token * q_stride + heads[:, None] * q_head_stride + pair[None, :]
            first = tl.load(at, mask=ok, other=0.0).to(tl.float32)
            second = tl.load(at + HALF, mask=ok, other=0.0).to(tl.float32)
            factor = tl.load(q_scale + token)
            first, second = rotate_pairs(first, second, c[None, :], s[None, :])
            tl.store(at, (first * factor).to(q.dtype.element_ty), mask=ok)
            tl.store(at + HALF, (second * factor).to(q.dtype.element_ty), mask=ok)
        else:
            head = part - Q_TILES
            slot = tl.load(slots + token)
            block = slot // PAGES.size
            offset = slot % PAGES.size
            if slot >= 0:
                at = k + token * k_stride + head * k_head_stride
                first = tl.load(at + pair, mask=pair_ok, other=0.0).to(tl.float32)
                second = tl.load(at + HALF + pair, mask=pair_ok, other=0.0).to(tl.float32)
                plain = tl.load(at + rest, mask=rest_ok, other=0.0).to(tl.float32)
                first, second = rotate_pairs(first, second, c, s)
                write_key(first, second, plain, block, offset, head, keys, key_scales, PAGES, HALF)
                dim = tl.arange(0, power_of_two(PAGES.value_dim))
                dim_ok = dim < PAGES.value_dim
                value = tl.load(v + token * v_stride + head * v_head_stride + dim, mask=dim_ok, other=0.0)
                at_value = values + value_offset(block, offset, head, dim, PAGES)
                if PAGES.codes:
                    wide = value.to(tl.float32)
                    codes, scale = quantized(wide, max_abs(wide))
                    tl.store(at_value, codes, mask=dim_ok)
                    tl.store(value_scales + scale_offset(block, offset, head, PAGES), scale)
                elif PAGES.float8:
                    tl.store(at_value, to_float8(value.to(tl.float32)), mask=dim_ok)
                else:
                    tl.store(at_value, value.to(values.dtype.element_ty), mask=dim_ok)


@triton.jit
def max_abs(x):
    """The largest magnitude of a vector; NaN if it contains NaN."""
    found = tl.max(tl.abs(x), 0)
    return tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), found)


@triton.jit
def write_key(first, second, plain, block, offset, head, keys, key_scales, PAGES: tl.constexpr, HALF: tl.constexpr):
    """Store a key given as halves of rotated pairs and further dims, float32."""
    pair, pair_ok, rest, rest_ok = rotary_dims(HALF, PAGES.dim)
    if PAGES.codes:
        # NaN must propagate, which neither maximum guarantees.
        largest = tl.maximum(max_abs(first), max_abs(second), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(largest, max_abs(plain), propagate_nan=tl.PropagateNan.ALL)
        first, scale = quantized(first, largest)
        second, scale = quantized(second, largest)
        plain, scale = quantized(plain, largest)
        tl.store(key_scales + scale_offset(block, offset, head, PAGES), scale)
        rest_ok = rest < (PAGES.dim + 3) // 4 * 4  # padding takes zeros
    if PAGES.float8:
        first = to_float8(first)
        second = to_float8(second)
        plain = to_float8(plain)
    kind = keys.dtype.element_ty
    tl.store(keys + key_offset(block, offset, head, pair, PAGES), first.to(kind), mask=pair_ok)
    tl.store(keys + key_offset(block, offset, head, HALF + pair, PAGES), second.to(kind), mask=pair_ok)
    tl.store(keys + key_offset(block, offset, head, rest, PAGES), plain.to(kind), mask=rest_ok)


@triton.jit
def rerotate_keys_kernel(
    sources,
    targets,
    cos,
    sin,
    keys,
    values,
    key_scales,
    value_scales,
    PAGES: tl.constexpr,
    HALF: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Program (entry, head). Codes without rotary dims are copied."""
    wait_for_predecessor()
    entry = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = tl.load(sources + entry)
    target = tl.load(targets + entry)
    block = source // PAGES.size
    offset = source % PAGES.size
    to_block = target // PAGES.size
    to_offset = target % PAGES.size
    pair, pair_ok, rest, rest_ok = rotary_dims(HALF, PAGES.dim)
    plain = tl.load(keys + key_offset(block, offset, head, rest, PAGES), mask=rest_ok, other=0)
    dim = tl.arange(0, power_of_two(PAGES.value_dim))
    dim_ok = dim < PAGES.value_dim
    if VALUES:
        value = tl.load(values + value_offset(block, offset, head, dim, PAGES), mask=dim_ok, other=0)
    if PAGES.codes:
        at_scale = scale_offset(block, offset, head, PAGES)
        to_scale = scale_offset(to_block, to_offset, head, PAGES)
        key_scale = tl.load(key_scales + at_scale)
        if VALUES:
            value_scale = tl.load(value_scales + at_scale)
    if HALF > 0:
        first = tl.load(keys + key_offset(block, offset, head, pair, PAGES), mask=pair_ok, other=0)
        second = tl.load(keys + key_offset(block, offset, head, HALF + pair, PAGES), mask=pair_ok, other=0)
        if PAGES.float8:
            first = from_float8(first)
            second = from_float8(second)
            plain = from_float8(plain)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        if PAGES.codes:
            first = first * key_scale
            second = second * key_scale
            plain = plain.to(tl.float32) * key_scale
        c = tl.load(cos + entry * HALF + pair, mask=pair_ok, other=0.0)
        s = tl.load(sin + entry * HALF + pair, mask=pair_ok, other=0.0)
        first, second = rotate_pairs(first, second, c, s)
        # A key may be rotated in place: it is read completely before it is written.
        tl.debug_barrier()
        write_key(first, second, plain, to_block, to_offset, head, keys, key_scales, PAGES, HALF)
    else:
        if PAGES.codes:
            plain = tl.where(rest_ok, plain, 0)
            rest_ok = rest < (PAGES.dim + 3) // 4 * 4
            tl.store(key_scales + to_scale, key_scale)
        tl.store(keys + key_offset(to_block, to_offset, head, rest, PAGES), plain, mask=rest_ok)
    if VALUES:
        tl.store(values + value_offset(to_block, to_offset, head, dim, PAGES), value, mask=dim_ok)
        if PAGES.codes:
            tl.store(value_scales + to_scale, value_scale)


@triton.jit(do_not_specialize=["q_rows"])  # differs from step to step
def rotate_queries_kernel(
    q,
    q_stride,
    q_head_stride,
    q_rows,
    rows,
    cos,
    sin,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (row of the result, head). A row out of range becomes NaN."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    to = out + (row * HEADS + head) * DIM
    pair, pair_ok, rest, rest_ok = rotary_dims(HALF, DIM)
    source = row
    version = row - q_rows
    if version >= 0:
        source = tl.load(rows + version)
    there = (source >= 0) & (source < q_rows)
    at = q + source * q_stride + head * q_head_stride
    first = tl.load(at + pair, mask=pair_ok & there, other=float("nan"))
    second = tl.load(at + HALF + pair, mask=pair_ok & there, other=float("nan"))
    if version >= 0:
        c = tl.load(cos + version * HALF + pair, mask=pair_ok, other=0.0)
        s = tl.load(sin + version * HALF + pair, mask=pair_ok, other=0.0)
        a, b = rotate_pairs(first.to(tl.float32), second.to(tl.float32), c, s)
        first = a.to(q.dtype.element_ty)
        second = b.to(q.dtype.element_ty)
    tl.store(to + pair, first, mask=pair_ok)
    tl.store(to + HALF + pair, second, mask=pair_ok)
    tl.store(to + rest, tl.load(at + rest, mask=rest_ok & there, other=float("nan")), mask=rest_ok)


_PAIRS = 512  # of heads of q that a program rotates

_FEW, _EACH = 1024, 8  # tokens up to which each has separate programs; tokens per program beyond


def rotate_and_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, pages: KVPages, slots: Tensor
) -> None:
    k, v, half = strided(k), strided(v), cos.shape[-1]
    tile = max(1, min(power_of_two(q.shape[1]), _PAIRS // power_of_two(half)))
    each = 1 if q.shape[0] <= _FEW else _EACH
    launch(
        rotate_and_append_kernel,
        (-(-q.shape[0] // each), -(-q.shape[1] // tile) + k.shape[1]),
        q,
        q,
        q.stride(0),
        q.stride(1),
        k,
        k.stride(0),
        k.stride(1),
        v,
        v.stride(0),
        v.stride(1),
        cos.contiguous(),
        sin.contiguous(),
        q_scale.contiguous(),
        slots.contiguous(),
        q.shape[0],
        *page_tensors(pages),
        Q_HEADS=q.shape[1],
        PAGES=PageLayout.of(pages, k.shape[2]),
        HALF=half,
        TILE=tile,
        EACH=each,
        num_warps=1,
    )


def rerotate_cached_keys(
    pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True
) -> None:
    slots = torch.stack((sources, targets))
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < pages.num_slots:
        raise IndexError("rerotate_cached_keys: a slot is outside the pages")
    dim = pages.key.shape[3] if pages.key_scale is None else pages.key.shape[3] * 4  # padding rotates to zeros
    launch(
        rerotate_keys_kernel,
        (sources.shape[0], pages.num_kv_heads),
        pages.key,
        sources.contiguous(),
        targets.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        *page_tensors(pages),
        PAGES=PageLayout.of(pages, dim),
        HALF=cos.shape[-1],
        VALUES=values and pages.value_dim > 0,
        num_warps=1,
    )


def rotate_queries(q: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Backend.rotate_queries`; a row out of range gives NaN."""
    half = cos.shape[-1]
    if rows.ndim != 1 or cos.shape != (len(rows), half) or sin.shape != cos.shape or 2 * half > q.shape[2]:
        raise ValueError(f"rotate_queries: {tuple(rows.shape)} rows, {tuple(cos.shape)} cosines, q {tuple(q.shape)}")
    q = strided(q)
    out = q.new_empty(q.shape[0] + len(rows), *q.shape[1:])
    launch(
        rotate_queries_kernel,
        (out.shape[0], q.shape[1]),
        q,
        q,
        q.stride(0),
        q.stride(1),
        q.shape[0],
        rows.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        out,
        HEADS=q.shape[1],
        DIM=q.shape[2],
        HALF=half,
        num_warps=1,
    )
    return out
