"""Recurrent layers in plain torch, on any device: token by token, the oracle of the other forms.

Elementary functions and sums have the shape of one token: torch's own bits may depend on where in a tensor a number lies.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from windlass.kernels.operations.recurrence import StateRows

_LENGTH_EPS = 1e-6


def short_convolution(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    for block, first, end, fresh in _spans(rows):
        before = torch.zeros_like(window[block]) if fresh else window[block]
        inputs = torch.cat((before, x[first:end].float()))  # [W - 1 + n, C]
        for t in range(end - first):
            total = torch.zeros_like(inputs[0]) if bias is None else bias.clone()
            for i in range(width):
                total += inputs[t + i] * weight[:, i]
            out[first + t] = total if activation is None else torch.nn.functional.silu(total)
            _store_snapshot(inputs[t + 1 : t + width], window, rows, first + t)
        window[block] = inputs[end - first :]
    return out


def gated_delta_rule(
    qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
    rate: Tensor,
    bias: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    tiled_heads: bool = False,
) -> Tensor:
    _, heads, key_dim, value_dim = memory.shape
    key_width = (qkv.shape[1] - heads * value_dim) // 2
    key_heads = key_width // key_dim
    head = torch.arange(heads, device=qkv.device)
    of_head = head % key_heads if tiled_heads else head // (heads // key_heads)
    out = torch.zeros((qkv.shape[0], heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    for block, first, end, fresh in _spans(rows):
        m = torch.zeros_like(memory[block]) if fresh else memory[block].clone()  # [Hv, Dk, Dv]
        for t in range(first, end):
            q, k, v = qkv[t].float().split_with_sizes([key_width, key_width, heads * value_dim])
            q, k = (_unit(part.reshape(-1, key_dim))[of_head] for part in (q, k))  # [Hv, Dk]
            m *= torch.exp(-rate * torch.nn.functional.softplus(decay[t].float() + bias))[:, None, None]
            known = (m * k[:, :, None]).sum(1)  # [Hv, Dv]
            share = torch.sigmoid(strength[t].float())
            m += k[:, :, None] * (share[:, None] * (v.view(heads, value_dim) - known))[:, None]
            out[t] = (m * (q * key_dim**-0.5)[:, :, None]).sum(1)
            _store_snapshot(m, memory, rows, t)
        memory[block] = m
    return out.flatten(1)


def state_space(
    mixed: Tensor,
    step: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    _, heads, key_dim, value_dim = memory.shape
    key_width = (mixed.shape[1] - heads * value_dim) // 2
    of_head = torch.arange(heads, device=mixed.device) // (heads * key_dim // key_width)
    out = torch.zeros((mixed.shape[0], heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    for block, first, end, fresh in _spans(rows):
        m = torch.zeros_like(memory[block]) if fresh else memory[block].clone()  # [Hv, Dk, Dv]
        for t in range(first, end):
            v, k, q = mixed[t].float().split_with_sizes([heads * value_dim, key_width, key_width])
            k, q = (part.reshape(-1, key_dim)[of_head] for part in (k, q))  # [Hv, Dk]
            v = v.view(heads, value_dim)
            d = torch.nn.functional.softplus(step[t].float() + bias).clamp(*limits)
            m *= torch.exp(-rate * d)[:, None, None]
            m += k[:, :, None] * (d[:, None] * v)[:, None]
            out[t] = (m * q[:, :, None]).sum(1) + skip[:, None] * v
            _store_snapshot(m, memory, rows, t)
        memory[block] = m
    return out.flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _LENGTH_EPS)


def _store_snapshot(state: Tensor, states: Tensor, rows: StateRows, token: int) -> None:
    if rows.snapshots is not None and (block := int(rows.snapshots[token])) >= 0:
        states[block] = state


def _spans(rows: StateRows) -> list[tuple[int, int, int, bool]]:
    """Of each sequence of tokens its block, its first token, the one behind its last, and whether it begins."""
    starts = rows.starts.tolist()
    spans = zip(rows.blocks.tolist(), starts[:-1], starts[1:], rows.lengths.tolist(), strict=True)
    return [
        (block, first, end, length == end - first) for block, first, end, length in spans if end > first and block != -1
    ]
