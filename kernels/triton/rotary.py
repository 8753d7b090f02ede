"""Rotation into pages and of queries: the arguments of its programs. Nothing here waits for the device, checks of `rerotate`
aside, which runs only where frequencies change."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.layouts.int8 import padded_dim
from windlass.kernels.layouts.pages import KVPages
from windlass.kernels.torch.reference import SMALLEST_SCALE
from windlass.kernels.triton.launch import as_bytes, launch, power_of_two, strided
from windlass.kernels.triton.programs import rotary as programs

_PAIRS = 512  # of heads of q that a program turns
_FEW, _EACH = 1024, 8  # tokens each of which has programs of its own; of more a program takes so many


def rotate_and_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, pages: KVPages, slots: Tensor
) -> None:
    """See `Backend.rotate_and_append`."""
    k, v, half = strided(k), strided(v), cos.shape[-1]
    tile = max(1, min(power_of_two(q.shape[1]), _PAIRS // power_of_two(half)))
    each = 1 if q.shape[0] <= _FEW else _EACH
    launch(
        programs.rotate_and_append_kernel,
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
        raise IndexError("rerotate_cached_keys: a slot lies outside the pages")
    dim = pages.key.shape[3] if pages.key_scale is None else pages.key.shape[3] * 4  # padding rotates to zeros
    launch(
        programs.rerotate_keys_kernel,
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
    """See `Backend.rotate_queries`; a row that q lacks gives NaN."""
    half = cos.shape[-1]
    if rows.ndim != 1 or cos.shape != (len(rows), half) or sin.shape != cos.shape or 2 * half > q.shape[2]:
        raise ValueError(f"turn_queries: {tuple(rows.shape)} rows, {tuple(cos.shape)} cosines, q {tuple(q.shape)}")
    q = strided(q)
    out = q.new_empty(q.shape[0] + len(rows), *q.shape[1:])
    launch(
        programs.rotate_queries_kernel,
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
