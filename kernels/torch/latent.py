"""What stands around attention over latent vectors, in plain torch: products by head, and a norm in place.

The forms whose rows are independent compute them one by one, each from a fresh buffer; see `rowwise`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """See `Backend.rms_norm_in_place`."""
    wide = x.float()
    x.copy_(wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight)


def latent_queries(q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
    """See `Backend.latent_queries`."""
    return torch.cat((q[..., :rotary_dim], head_products(q[..., rotary_dim:], key_matrices(up, q, rotary_dim))), dim=-1)


def latent_values(attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
    """See `Backend.latent_values`."""
    return head_products(attended, up[:, up.shape[1] - value_dim :].transpose(1, 2)).flatten(1)


def key_matrices(up: Tensor, q: Tensor, rotary_dim: int) -> Tensor:
    return up[:, : q.shape[2] - rotary_dim]  # [H, N, C]


def head_products(x: Tensor, matrices: Tensor) -> Tensor:
    """x: [T, H, K], matrices: [H, K, N]. Returns [T, H, N] in x's dtype; sums are float32 on a CPU."""
    compute = torch.float32 if x.is_cpu else x.dtype
    return torch.bmm(x.transpose(0, 1).to(compute), matrices.to(compute)).transpose(0, 1).to(x.dtype)


def rms_norm_in_place_by_row(x: Tensor, weight: Tensor, eps: float) -> None:
    """The same, its rows independent."""
    for t in range(x.shape[0]):
        row = x[t : t + 1].clone(memory_format=torch.contiguous_format)
        rms_norm_in_place(row, weight, eps)
        x[t] = row[0]


def latent_queries_by_row(q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
    """The same, its rows independent."""
    rotated, plain = q[..., :rotary_dim], q[..., rotary_dim:]
    return torch.cat((rotated, _head_products_by_row(plain, key_matrices(up, q, rotary_dim))), dim=-1)


def latent_values_by_row(attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
    """The same, its rows independent."""
    return _head_products_by_row(attended, up[:, up.shape[1] - value_dim :].transpose(1, 2)).flatten(1)


def _head_products_by_row(x: Tensor, matrices: Tensor) -> Tensor:
    """See `head_products`."""
    wide = matrices.to(torch.float32 if x.is_cpu else x.dtype)
    out = x.new_empty(x.shape[0], x.shape[1], matrices.shape[2])
    for t in range(x.shape[0]):
        out[t] = head_products(x[t : t + 1].clone(memory_format=torch.contiguous_format), wide)[0]
    return out
