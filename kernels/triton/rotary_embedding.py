"""Rotary embedding in Triton: rotation with append to pages, re-rotation of cached keys, and rotated query copies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.layouts.kv_pages import KVPages, padded_dim
from windlass.kernels.torch.reference import SMALLEST_SCALE
from windlass.kernels.triton.launch import as_bytes, launch, power_of_two, strided, wait_for_predecessor
from windlass.kernels.triton.page_addressing import (
    from_float8,
    key_offset,
    quantized,
    scale_offset,
    to_float8,
    value_offset,
)


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
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    CODES: tl.constexpr,
    FLOAT8: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,
    EACH: tl.constexpr,
):
    """Program (EACH tokens, part): TILE of the Q_HEADS heads of q; after these, one of the KV_HEADS heads of k and v."""
    wait_for_predecessor()
    Q_TILES: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    part = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    pair_ok = pair < HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    rest_ok = rest < DIM
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
            block = slot // SIZE
            offset = slot % SIZE
            if slot >= 0:
                at = k + token * k_stride + head * k_head_stride
                first = tl.load(at + pair, mask=pair_ok, other=0.0).to(tl.float32)
                second = tl.load(at + HALF + pair, mask=pair_ok, other=0.0).to(tl.float32)
                plain = tl.load(at + rest, mask=rest_ok, other=0.0).to(tl.float32)
                first, second = rotate_pairs(first, second, c, s)
                write_key(
                    first,
                    second,
                    plain,
                    block,
                    offset,
                    head,
                    keys,
                    key_scales,
                    KV_HEADS,
                    SIZE,
                    DIM,
                    HALF,
                    CODES,
                    FLOAT8,
                    SMALLEST,
                    BLOCK_HALF,
                    BLOCK_REST,
                )
                dim = tl.arange(0, BLOCK_V)
                dim_ok = dim < VALUE_DIM
                value = tl.load(v + token * v_stride + head * v_head_stride + dim, mask=dim_ok, other=0.0)
                at_value = values + value_offset(block, offset, head, dim, KV_HEADS, SIZE, VALUE_DIM, CODES)
                if CODES:
                    wide = value.to(tl.float32)
                    codes, scale = quantized(wide, max_abs(wide), SMALLEST)
                    tl.store(at_value, codes, mask=dim_ok)
                    tl.store(value_scales + scale_offset(block, offset, head, KV_HEADS, SIZE), scale)
                elif FLOAT8:
                    tl.store(at_value, to_float8(value.to(tl.float32)), mask=dim_ok)
                else:
                    tl.store(at_value, value.to(values.dtype.element_ty), mask=dim_ok)


@triton.jit
def max_abs(x):
    """The largest magnitude of a vector; NaN if it contains NaN."""
    found = tl.max(tl.abs(x), 0)
    return tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), found)


@triton.jit
def write_key(
    first,
    second,
    plain,
    block,
    offset,
    head,
    keys,
    key_scales,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    CODES: tl.constexpr,
    FLOAT8: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    pair = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    pair_ok = pair < HALF
    rest_ok = rest < DIM
    if CODES:
        # NaN must propagate, which neither maximum guarantees.
        largest = tl.maximum(max_abs(first), max_abs(second), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(largest, max_abs(plain), propagate_nan=tl.PropagateNan.ALL)
        first, scale = quantized(first, largest, SMALLEST)
        second, scale = quantized(second, largest, SMALLEST)
        plain, scale = quantized(plain, largest, SMALLEST)
        tl.store(key_scales + scale_offset(block, offset, head, KV_HEADS, SIZE), scale)
        rest_ok = rest < (DIM + 3) // 4 * 4  # padding takes zeros
    if FLOAT8:
        first = to_float8(first)
        second = to_float8(second)
        plain = to_float8(plain)
    kind = keys.dtype.element_ty
    tl.store(keys + key_offset(block, offset, head, pair, KV_HEADS, SIZE, DIM, CODES), first.to(kind), mask=pair_ok)
    at = keys + key_offset(block, offset, head, HALF + pair, KV_HEADS, SIZE, DIM, CODES)
    tl.store(at, second.to(kind), mask=pair_ok)
    tl.store(keys + key_offset(block, offset, head, rest, KV_HEADS, SIZE, DIM, CODES), plain.to(kind), mask=rest_ok)


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
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    CODES: tl.constexpr,
    FLOAT8: tl.constexpr,
    VALUES: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (entry, head). Codes without rotary dims are copied."""
    wait_for_predecessor()
    entry = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = tl.load(sources + entry)
    target = tl.load(targets + entry)
    block = source // SIZE
    offset = source % SIZE
    to_block = target // SIZE
    to_offset = target % SIZE
    pair = tl.arange(0, BLOCK_HALF)
    pair_ok = pair < HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    plain = tl.load(keys + key_offset(block, offset, head, rest, KV_HEADS, SIZE, DIM, CODES), mask=rest < DIM, other=0)
    dim = tl.arange(0, BLOCK_V)
    if VALUES:
        at = values + value_offset(block, offset, head, dim, KV_HEADS, SIZE, VALUE_DIM, CODES)
        value = tl.load(at, mask=dim < VALUE_DIM, other=0)
        if CODES:
            value_scale = tl.load(value_scales + scale_offset(block, offset, head, KV_HEADS, SIZE))
    if CODES:
        key_scale = tl.load(key_scales + scale_offset(block, offset, head, KV_HEADS, SIZE))
    if HALF > 0:
        at = keys + key_offset(block, offset, head, pair, KV_HEADS, SIZE, DIM, CODES)
        first = tl.load(at, mask=pair_ok, other=0)
        at = keys + key_offset(block, offset, head, HALF + pair, KV_HEADS, SIZE, DIM, CODES)
        second = tl.load(at, mask=pair_ok, other=0)
        if FLOAT8:
            first = from_float8(first)
            second = from_float8(second)
            plain = from_float8(plain)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        if CODES:
            first = first * key_scale
            second = second * key_scale
            plain = plain.to(tl.float32) * key_scale
        c = tl.load(cos + entry * HALF + pair, mask=pair_ok, other=0.0)
        s = tl.load(sin + entry * HALF + pair, mask=pair_ok, other=0.0)
        first, second = rotate_pairs(first, second, c, s)
        # A key may be rotated in place: it is read completely before it is written.
        tl.debug_barrier()
        write_key(
            first,
            second,
            plain,
            to_block,
            to_offset,
            head,
            keys,
            key_scales,
            KV_HEADS,
            SIZE,
            DIM,
            HALF,
            CODES,
            FLOAT8,
            SMALLEST,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        rest_ok = rest < DIM
        if CODES:
            plain = tl.where(rest_ok, plain, 0)
            rest_ok = rest < (DIM + 3) // 4 * 4
            tl.store(key_scales + scale_offset(to_block, to_offset, head, KV_HEADS, SIZE), key_scale)
        at = keys + key_offset(to_block, to_offset, head, rest, KV_HEADS, SIZE, DIM, CODES)
        tl.store(at, plain, mask=rest_ok)
    if VALUES:
        at = values + value_offset(to_block, to_offset, head, dim, KV_HEADS, SIZE, VALUE_DIM, CODES)
        tl.store(at, value, mask=dim < VALUE_DIM)
        if CODES:
            tl.store(value_scales + scale_offset(to_block, to_offset, head, KV_HEADS, SIZE), value_scale)


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
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Program (row of the result, head). A row out of range becomes NaN."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    to = out + (row * HEADS + head) * DIM
    pair = tl.arange(0, BLOCK_HALF)
    pair_ok = pair < HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    rest_ok = rest < DIM
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
    """See `Backend.rotate_and_append`."""
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
        as_bytes(pages.key),
        as_bytes(pages.value),
        pages.key_scale,
        pages.value_scale,
        Q_HEADS=q.shape[1],
        KV_HEADS=k.shape[1],
        VALUE_DIM=v.shape[2],
        **_sizes(pages, k.shape[2], half),
        BLOCK_V=power_of_two(v.shape[2]),
        TILE=tile,
        EACH=each,
        num_warps=1,
    )


def rerotate_cached_keys(
    pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True
) -> None:
    """See `Backend.rerotate_cached_keys`."""
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
        as_bytes(pages.key),
        as_bytes(pages.value),
        pages.key_scale,
        pages.value_scale,
        KV_HEADS=pages.num_kv_heads,
        VALUE_DIM=pages.value_dim,
        VALUES=values and pages.value_dim > 0,
        **_sizes(pages, dim, cos.shape[-1]),
        BLOCK_V=power_of_two(pages.value_dim),
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
        BLOCK_HALF=power_of_two(half),
        BLOCK_REST=power_of_two(q.shape[2] - 2 * half),
        num_warps=1,
    )
    return out


def _sizes(pages: KVPages, dim: int, half: int) -> dict[str, object]:
    codes = pages.key_scale is not None
    return {
        "SIZE": pages.block_size,
        "DIM": dim,
        "HALF": half,
        "CODES": codes,
        "FLOAT8": pages.key.dtype == torch.float8_e4m3fn,
        "SMALLEST": SMALLEST_SCALE,
        "BLOCK_HALF": power_of_two(half),
        "BLOCK_REST": power_of_two((padded_dim(dim) if codes else dim) - 2 * half),
    }
