"""Recurrent layers in plain torch, on any device: token by token, the oracle of the other forms."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.recurrence import StateRows

_LENGTH_EPS = 1e-6


def short_convolution(x: Tensor, weight: Tensor, window: Tensor, rows: StateRows) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    for block, first, end, fresh in _spans(rows):
        before = torch.zeros_like(window[block]) if fresh else window[block]
        inputs = torch.cat((before, x[first:end].float()))  # [W - 1 + n, C]
        sums = torch.zeros(end - first, x.shape[1], device=x.device)
        for i in range(width):
            sums += inputs[i : i + end - first] * weight[:, i]
        out[first:end] = torch.nn.functional.silu(sums)
        window[block] = inputs[end - first :]
    return out


def gated_delta_rule(
    qkv: Tensor, decay: Tensor, strength: Tensor, rate: Tensor, bias: Tensor, memory: Tensor, rows: StateRows
) -> Tensor:
    _, heads, key_dim, value_dim = memory.shape
    tokens, key_width = qkv.shape[0], (qkv.shape[1] - heads * value_dim) // 2
    q, k, v = qkv.float().split_with_sizes([key_width, key_width, heads * value_dim], 1)
    q, k = (_unit(part.reshape(tokens, -1, key_dim)) for part in (q, k))
    q, k = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (q * key_dim**-0.5, k))  # [T, Hv, Dk]
    v = v.reshape(tokens, heads, value_dim)
    kept = torch.exp(-rate * torch.nn.functional.softplus(decay.float() + bias))  # [T, Hv]
    share = torch.sigmoid(strength.float())
    out = torch.empty_like(v)
    for block, first, end, fresh in _spans(rows):
        m = torch.zeros_like(memory[block]) if fresh else memory[block].clone()  # [Hv, Dk, Dv]
        for t in range(first, end):
            m *= kept[t, :, None, None]
            known = (m * k[t, :, :, None]).sum(1)  # [Hv, Dv]
            m += k[t, :, :, None] * (share[t, :, None] * (v[t] - known))[:, None]
            out[t] = (m * q[t, :, :, None]).sum(1)
        memory[block] = m
    return out.reshape(tokens, -1).to(qkv.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _LENGTH_EPS)


def _spans(rows: StateRows) -> list[tuple[int, int, int, bool]]:
    """Of each sequence its block, its first token, the one behind its last, and whether it begins."""
    starts = rows.starts.tolist()
    spans = zip(rows.blocks.tolist(), starts[:-1], starts[1:], rows.lengths.tolist(), strict=True)
    return [(block, first, end, length == end - first) for block, first, end, length in spans if end > first]
