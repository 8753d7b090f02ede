"""Row-independent operations in plain torch: each row is computed alone, so its bits do not depend on the batch.

Torch's results differ by shape: products by row count, sums by how they are split, elementary functions between a vector's
body and its tail. Here each row is computed from a fresh buffer (constant alignment) with shapes that depend on its own
sequence only. Additions, products and casts round correctly in any shape and may take all rows at once. Functions perform
the operation of the same name of `Backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall
from windlass.kernels.backend import Routed, Routing
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.torch import batched_attention, reference
from windlass.kernels.torch.reference import head_products, key_matrices

_PANEL_BYTES = 8 << 20


def _row(x: Tensor, t: int) -> Tensor:
    """A copy of row t, [1, ...] in a buffer of its own."""
    return x[t : t + 1].clone(memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> list[Tensor]:
    return [_row(x, t) for t in range(x.shape[0])]


_Operation = TypeVar("_Operation", bound=Callable[..., Tensor])


def by_row(operation: _Operation) -> _Operation:
    """The operation applied to each row of its first operand alone, the results concatenated."""

    @functools.wraps(operation)
    def alone(x: Tensor, *others: Any) -> Tensor:
        return torch.cat([operation(row, *others) for row in _rows(x) or [x]])

    return cast(_Operation, alone)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """On a CPU the product is float32; a narrower weight is converted in panels of 8 MiB."""
    columns, inner = weight.shape
    compute = torch.float32 if x.is_cpu else x.dtype
    rows = _rows(x.to(compute))
    out = torch.empty(len(rows), columns, dtype=compute, device=x.device)
    step = columns if weight.dtype == compute else max(64, _PANEL_BYTES // (4 * max(inner, 1)))
    for begin in range(0, columns, max(step, 1)):
        panel = weight[begin : begin + step].to(compute)
        for t, row in enumerate(rows):
            out[t, begin : begin + step] = F.linear(row, panel)[0]
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = _rows(x.reshape(-1, x.shape[-1]))
    return torch.cat([reference.rms_norm(row, weight, eps) for row in rows]).view(x.shape) if rows else x.clone()


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None) -> Routed:
    found = [reference.route(row, routing, bias, scales) for row in _rows(logits) or [logits]]
    return Routed(torch.cat([one.chosen for one in found]), torch.cat([one.weights for one in found]))


def paged_attention(q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    if call.has_ranges:
        return _attend_ranges(q, pages, call)
    out = q.new_empty(q.shape[0], q.shape[1], pages.value_dim)
    query = _rows(call.scaled(q))
    for rows, length, own in call.sequences():
        index = torch.arange(length - own.num_tokens, length, device=q.device)
        first, end = call.visible(index, length)
        for i, t in enumerate(range(rows.start, rows.stop)):
            out[t] = batched_attention.attend_rows(query[t], pages, own, first[i : i + 1], end[i : i + 1])[0]
    return out


def _attend_ranges(q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    """Token by token, with the query copies of a token gathered in a fresh buffer."""
    out = q.new_empty(call.num_tokens, q.shape[1], pages.value_dim)
    for rows, length, own in call.sequences():
        for i, t in enumerate(range(rows.start, rows.stop)):
            one = own.slice_tokens(i, i + 1)
            assert one.ranges is not None
            named = one.ranges.rows
            if int(named.max()) >= q.shape[0]:
                raise IndexError(
                    f"ranges of a sequence of {length} keys name a row that q lacks, which has {q.shape[0]} rows"
                )
            copies = q[named[0].clamp(min=0)]  # [R, Hq, D]
            places = torch.where(named < 0, named, torch.arange(len(copies), device=q.device))
            one = replace(one, ranges=replace(one.ranges, rows=places))
            out[t] = reference.paged_attention(copies, pages, one)[0]
    return out


def rotary_angles(inv_freq: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The same as the reference to rounding, from operations that round correctly and nothing else.

    Cody and Waite's reduction by pi/2 in three parts, whose products with a count below 2^31 are exact, and the
    polynomials of FreeBSD's k_cos.c and k_sin.c.
    """
    angles = inv_freq.index_select(1, rows)  # [G, T, d/2], a fresh tensor
    angles.mul_(positions.unsqueeze(-1))
    turns = (angles * _TWO_OVER_PI).round_()
    for part in _HALF_PI:
        angles.sub_(turns * part)
    square = angles * angles
    sine, cosine = torch.full_like(angles, _SINE[0]), torch.full_like(angles, _COSINE[0])
    for s, c in zip(_SINE[1:], _COSINE[1:], strict=True):
        sine.mul_(square).add_(s)
        cosine.mul_(square).add_(c)
    sine.mul_(square).mul_(angles).add_(angles)
    cosine.mul_(square).mul_(square).add_(1.0 - square * 0.5)
    quarter = turns.remainder_(4.0)
    swapped = (quarter == 1.0) | (quarter == 3.0)
    cos = torch.where(swapped, sine, cosine)
    sin = torch.where(swapped, cosine, sine)
    cos = torch.where((quarter == 1.0) | (quarter == 2.0), -cos, cos)
    sin = torch.where(quarter >= 2.0, -sin, sin)
    return cos.float(), sin.float()


_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")

_HALF_PI = tuple(float.fromhex(part) for part in ("0x1.921fbp+0", "0x1.5110bp-22", "0x1.18469898cc517p-44"))

_SINE = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)

_COSINE = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)


def rms_norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    for t in range(x.shape[0]):
        row = _row(x, t)
        reference.rms_norm_in_place(row, weight, eps)
        x[t] = row[0]


def latent_queries(q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
    rotated, plain = q[..., :rotary_dim], q[..., rotary_dim:]
    return torch.cat((rotated, _head_products(plain, key_matrices(up, q, rotary_dim))), dim=-1)


def latent_values(attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
    return _head_products(attended, up[:, up.shape[1] - value_dim :].transpose(1, 2)).flatten(1)


def _head_products(x: Tensor, matrices: Tensor) -> Tensor:
    wide = matrices.to(torch.float32 if x.is_cpu else x.dtype)
    out = x.new_empty(x.shape[0], x.shape[1], matrices.shape[2])
    for t in range(x.shape[0]):
        out[t] = head_products(_row(x, t), wide)[0]
    return out
