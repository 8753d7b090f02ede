"""Packed weights on the CPU: quantizing rows into panels, and the product with them. Knows shapes and types only."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check
from windlass.kernels.cpu.library import TYPE_CODES, Library, load
from windlass.kernels.layouts.packed import PackedRows, PackedWeight


def linear_packed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, library: Library | None = None
) -> Tensor:
    """x @ weight.T + bias with x rounded to 8 bits, a scale per row (8-bit weights) or per 32 elements (4-bit).

    x: [M, K] in any float type, float32 in any row stride without a copy. bias: [N]. Returns [M, N] in x's dtype. Integer
    sums are exact and a row's bits depend on that row only. A row with NaN or infinity gives NaN. Raises ValueError.
    """
    # A decode step comes here some hundred times: messages are made only when they are needed.
    columns, data, scales = weight.columns, weight.data, weight.scales
    if x.dim() != 2 or x.shape[1] != columns or not x.is_cpu or x.dtype not in TYPE_CODES:
        raise ValueError(
            f"linear_packed: x is {x.dtype} {tuple(x.shape)} on {x.device}, the weight has {columns} columns"
        )
    check(data.is_contiguous() and scales.is_contiguous(), "linear_packed: the weight is not contiguous")
    check(bias is None or bias.shape == (weight.rows,), "linear_packed: the bias does not fit")
    wide = x if x.dtype == torch.float32 and (x.stride(1) == 1 or columns == 1) else x.float().contiguous()
    wide_bias = None if bias is None else bias.float().contiguous()
    rows = x.shape[0]
    out = torch.empty((rows, weight.rows), dtype=torch.float32)
    if rows and weight.rows:
        code = (library or load()).linear_packed(
            wide.data_ptr(),
            wide.stride(0),
            data.data_ptr(),
            scales.data_ptr(),
            weight.bits,
            None if wide_bias is None else wide_bias.data_ptr(),
            out.data_ptr(),
            weight.rows,
            rows,
            weight.rows,
            columns,
        )
        if code:
            raise MemoryError("linear_packed: no memory for the rounded activations")
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def pack_rows(target: PackedRows, source: Tensor, *, library: Library | None = None) -> None:
    """Quantize source [count, columns] into rows of a packed weight. Raises ValueError."""
    weight = target.weight
    check(source.shape == target.shape, f"pack_rows: {tuple(source.shape)} into {tuple(target.shape)}")
    check(source.is_cpu and source.dtype in TYPE_CODES, f"pack_rows: the source is {source.dtype} on {source.device}")
    if source.shape[1] > 1 and source.stride(1) != 1:
        source = source.contiguous()
    (library or load()).pack_weight(
        source.data_ptr(),
        source.stride(0),
        TYPE_CODES[source.dtype],
        target.first,
        target.count,
        weight.columns,
        weight.bits,
        weight.data.data_ptr(),
        weight.scales.data_ptr(),
    )
