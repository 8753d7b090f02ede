"""Row permutations between checkpoint tensors and weights: interleaved RoPE pairs, fused QKV, rank slices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from windlass.engine.model.tensor_parallel import RowRange, WeightSlice
from windlass.engine.model.weight_spec import RotaryLast, StoredTensor


def half_split_order(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Rows that make interleaved pairs (2j, 2j+1) half-split ones (j, j + d/2), head by head: [num_heads * head_dim].

    With x' = x[order], half-split rotation of x' is interleaved rotation of x in that order, bit for bit. Rows past the
    first rotary_dim of a head stay.
    """
    head = torch.arange(head_dim)
    head[:rotary_dim] = torch.cat((torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2)))
    return (torch.arange(num_heads)[:, None] * head_dim + head).flatten()


def swapped_order(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Rows that exchange the two of every half-split pair, head by head: [num_heads * head_dim].

    With x' = x[order], rotating x' by an angle is rotating x by minus the angle, in that order, bit for bit.
    """
    head = torch.arange(head_dim)
    head[:rotary_dim] = head[:rotary_dim].roll(rotary_dim // 2)
    return (torch.arange(num_heads)[:, None] * head_dim + head).flatten()


def rotary_first_order(heads: RotaryLast) -> Tensor:
    """Rows that put the rotated dims of each head first, as half-split pairs: [heads * head_dim]."""
    rotated, plain = heads.rotary_dim, heads.head_dim - heads.rotary_dim
    pairs = half_split_order(1, rotated, rotated) if heads.interleaved else torch.arange(rotated)
    head = torch.cat((plain + pairs, torch.arange(plain)))
    return (torch.arange(heads.heads)[:, None] * heads.head_dim + head).flatten()


def row_order(tensor: StoredTensor) -> Tensor | None:
    """The row of the checkpoint tensor for each row of the weight; None: in order."""
    if tensor.rotary_last is not None:
        return rotary_first_order(tensor.rotary_last)
    by_part = None
    if tensor.alternating:
        by_part = torch.cat((torch.arange(0, tensor.rows, 2), torch.arange(1, tensor.rows, 2)))
    if (fused := tensor.fused) is not None:
        rows = torch.arange(tensor.rows).view(fused.blocks, -1, fused.head_dim)
        q, k, v = rows.split_with_sizes(
            (fused.queries, fused.keys, fused.keys), 1
        )  # each [blocks, heads of a block, D]
        by_part = torch.cat([part.flatten() for part in ((q, v, k) if fused.values_first else (q, k, v))])
    if (repeats := tensor.interleaved_parts) is not None:
        parts = torch.arange(tensor.rows).view(repeats.repeats, -1).split_with_sizes(repeats.sizes, 1)
        by_part = torch.cat([part.flatten() for part in parts])
    heads = tensor.interleaved
    if heads is None:
        return by_part
    order = (swapped_order if heads.swapped else half_split_order)(heads.heads, heads.head_dim, heads.rotary_dim)
    order = torch.cat((order, torch.arange(len(order), tensor.rows)))
    return order if by_part is None else by_part[order]


@dataclass(frozen=True, slots=True)
class RowSelection:
    """What a decoder holds of a checkpoint tensor. runs: ranges of rows that are read; None: all.

    rows: the row read for each row of the weight; None: in order. columns: first and count of those used; None: all.
    """

    runs: tuple[tuple[int, int], ...] | None = None
    rows: Tensor | None = None
    columns: RowRange | None = None


def select_rows(tensor: StoredTensor, part: WeightSlice, first: int) -> RowSelection:
    """What is read of this tensor, which has the weight's rows from `first` on, if only `part` of the weight is needed."""
    order = row_order(tensor)
    if part.rows is None and part.columns is None:
        return RowSelection(rows=order)
    runs = tuple(part.within(first, tensor.rows))
    if tensor.transposed or tensor.reshape_rows is not None:  # its rows are not those of the weight: it is read whole
        rows = order
        if part.rows is not None:
            wanted = torch.cat([torch.arange(*run) for run in runs])
            rows = wanted if order is None else order[wanted]
        return RowSelection(rows=rows, columns=part.columns)
    if order is None:
        return RowSelection(runs)
    wanted = order[torch.cat([torch.arange(*run) for run in runs])]
    ascending = wanted.sort().values
    breaks = torch.nonzero(ascending.diff() != 1)[:, 0] + 1
    edges = [0, *breaks.tolist(), len(ascending)]
    runs = tuple((int(ascending[begin]), int(ascending[end - 1]) + 1) for begin, end in pairwise(edges))
    return RowSelection(runs, torch.searchsorted(ascending, wanted))
