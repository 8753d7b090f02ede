"""What stands around attention over latent vectors, through the compiled kernels: products by head, and a norm in place.

Checks what would make the C code read or write astray, cheaply, and raises ValueError with what is wrong. Sums are float32
whatever the storage, and a token's bits depend on that token alone. Knows nothing of requests, models or other backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.attention_call import LatentExpansion
from windlass.kernels.cpu.checks import check, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.layouts.pages import KVPages


def latent_expansion_cost(pages: KVPages, *, narrow: bool) -> LatentExpansion:
    """See `Backend.latent_expansion`. narrow: whether pages that attention may round (see `paged_attention_prefill`) go by a
    matrix unit: torch's products have it too, those that a query takes by itself do not. Measured: docs/benchmarks-history.md."""
    if narrow and pages.key.dtype != torch.float32:
        return LatentExpansion(1.25, 10.0, torch.bfloat16)
    return LatentExpansion(1.25, 1.25)


def latent_queries(q: Tensor, up: Tensor, rotary_dim: int, *, library: Library) -> Tensor:
    """See `Backend.latent_queries`. q: [T, H, R + N], any token and head strides. Raises ValueError."""
    _check_latent(q, up, "latent_queries")
    tokens, heads, width = q.shape
    plain, dim = width - rotary_dim, up.shape[2]
    check(
        0 <= rotary_dim <= width and plain <= up.shape[1],
        f"latent_queries: q {tuple(q.shape)} with {rotary_dim} rotated dims does not fit matrices {tuple(up.shape)}",
    )
    out = torch.empty((tokens, heads, rotary_dim + dim), dtype=q.dtype)
    library.latent_queries(
        *(q.data_ptr(), q.stride(0), q.stride(1), TYPE_CODES[q.dtype], up.data_ptr(), TYPE_CODES[up.dtype]),
        *(out.data_ptr(), tokens, heads, rotary_dim, plain, up.shape[1] - plain, dim),
    )
    return out


def latent_values(attended: Tensor, up: Tensor, value_dim: int, *, library: Library) -> Tensor:
    """See `Backend.latent_values`. attended: [T, H, C], any token and head strides. Raises ValueError."""
    _check_latent(attended, up, "latent_values")
    tokens, heads, dim = attended.shape
    check(
        dim == up.shape[2] and 0 <= value_dim <= up.shape[1],
        f"latent_values: {tuple(attended.shape)} for {value_dim} dims does not fit matrices {tuple(up.shape)}",
    )
    out = torch.empty((tokens, heads * value_dim), dtype=attended.dtype)
    library.latent_values(
        *(attended.data_ptr(), attended.stride(0), attended.stride(1), TYPE_CODES[attended.dtype]),
        *(up.data_ptr(), TYPE_CODES[up.dtype], out.data_ptr()),
        *(tokens, heads, up.shape[1] - value_dim, value_dim, dim),
    )
    return out


def rms_norm_in_place(x: Tensor, weight: Tensor, eps: float, *, library: Library) -> None:
    """See `Backend.rms_norm_in_place`. x: [T, D], any row stride. Raises ValueError."""
    check(
        x.dim() == 2 and x.dtype in TYPE_CODES and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"rms_norm_in_place: x is {x.dtype} {tuple(x.shape)}, not a float CPU tensor [T, D] with adjacent elements",
    )
    rows, dim = x.shape
    check(vector_ok(weight, torch.float32, dim), f"rms_norm_in_place: weight must be float32 [{dim}], contiguous")
    library.rms_norm_in_place(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], weight.data_ptr(), eps, rows, dim)


def _check_latent(x: Tensor, up: Tensor, name: str) -> None:
    check(
        x.dim() == 3 and x.dtype in TYPE_CODES and x.is_cpu and (x.shape[2] < 2 or x.stride(2) == 1),
        f"{name}: {x.dtype} {tuple(x.shape)} is not a float CPU tensor [T, H, D] with adjacent elements",
    )
    fits = up.dim() == 3 and up.shape[0] == x.shape[1] and up.is_cpu and up.is_contiguous()
    check(fits and up.dtype in TYPE_CODES, f"{name}: matrices {up.dtype} {tuple(up.shape)} for {x.shape[1]} heads")
