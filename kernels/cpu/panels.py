"""16-bit weights in panels on the CPU: filling them, and products with them. Knows shapes, types and a measured crossover."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu import gates
from windlass.kernels.cpu.checks import check, check_out
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.layouts.blocks import PANEL
from windlass.kernels.layouts.panels import PanelRows, PanelWeight

# Measured on Zen 4 with two threads, AVX-512 and AVX2, 64 to 2,048 rows: `linear_panels` leads by an eighth throughout. But
# every thread copies the rows for itself, so with many threads and long chunks torch's product is the safer way.
PANEL_MAX_ROWS = 512
# Rows from which `linear_panels_rounded` leads where there is one (measured on a Xeon with AMX: 1.2 to 2 times as quick at 8
# rows, 2 to 4 times at 16, 6 times at 128).
PANEL_TILE_MIN_ROWS = 8
_WIDENED_BYTES = 8 << 20  # float32 weights widened at a time: they stay in the last-level cache for the product


def linear_panels(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    library: Library,
) -> Tensor:
    """x @ weight.T + bias, summed in float32 in an order that does not depend on M: a row's bits are batch-independent.

    x: [M, K] in any float type, float32 and bfloat16 in any row stride without a copy. bias: [N]. out: [M, N] in x's dtype,
    which is not float16, with adjacent elements, to be written. Any M is right; it is quick for few rows. Returns [M, N] in
    x's dtype, out where it is given. Raises ValueError.
    """
    _check_operands(x, weight, bias)
    # A decode step comes here some hundred times: copies are made only where they are needed.
    given = x if x.dtype != torch.float16 else x.float()
    if given.stride(1) != 1 and weight.columns > 1:
        given = given.contiguous()
    if bias is not None:
        bias = (bias if bias.dtype in TYPE_CODES else bias.float()).contiguous()
    rows, columns = x.shape[0], weight.rows
    if out is None:
        out = torch.empty((rows, columns), dtype=given.dtype)
    else:
        check_out(out, rows, columns, given.dtype)
    if weight.columns == 0:
        return (out.zero_() if bias is None else out.copy_(bias)).to(x.dtype)
    if rows and columns:
        code = library.linear_panels(
            given.data_ptr(),
            given.stride(0),
            TYPE_CODES[given.dtype],
            weight.data.data_ptr(),
            TYPE_CODES[weight.dtype],
            None if bias is None else bias.data_ptr(),
            0 if bias is None else TYPE_CODES[bias.dtype],
            out.data_ptr(),
            out.stride(0),
            rows,
            columns,
            weight.columns,
        )
        if code:
            raise MemoryError("linear_panels: no memory for the packed activations")
    return out if out.dtype == x.dtype else out.to(x.dtype)


def linear_panels_rounded(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
    library: Library,
) -> Tensor:
    """x @ weight.T + bias for many rows, both bfloat16, by the processor's matrix unit.

    x: [M, K] with adjacent elements. activation: of gates, as `linear_blocks_rounded` has it. out: bfloat16 [M, N], or
    [M, N / 2] of gates and ups, to be written. Sums are float32, and a row's bits depend on that row only. Returns out, or a new
    one. Raises ValueError; only for a library that has it.
    """
    _check_operands(x, weight, bias)
    multiply = library.linear_panels_rounded
    if multiply is None:
        raise ValueError("linear_panels_rounded: this processor has no matrix unit")
    check(x.dtype == weight.dtype == torch.bfloat16, f"linear_panels_rounded: {x.dtype} times {weight.dtype}")
    check(x.stride(1) == 1 or weight.columns == 1, "linear_panels_rounded: the elements of a row are apart")
    wide_bias = None if bias is None else bias.float().contiguous()
    rows, columns = x.shape[0], weight.rows
    activation_code, width = gates.activation_code_and_width(columns, activation)
    if out is None:
        out = torch.empty((rows, width), dtype=torch.bfloat16)
    else:
        check_out(out, rows, width, torch.bfloat16)
    if rows and columns:
        code = multiply(
            x.data_ptr(),
            x.stride(0),
            weight.data.data_ptr(),
            None if wide_bias is None else wide_bias.data_ptr(),
            activation_code,
            out.data_ptr(),
            out.stride(0),
            rows,
            columns,
            weight.columns,
        )
        if code:
            raise MemoryError("linear_panels_rounded: no memory for the packed activations")
    return out


def linear_panels_widened(x: Tensor, weight: PanelWeight, bias: Tensor | None = None, *, library: Library) -> Tensor:
    """x @ weight.T + bias for many rows: some panels at a time are widened to float32 for torch's product.

    x: [M, K] in any float type. The product is float32; returns [M, N] in x's dtype. Extra memory: 8 MiB of widened weights
    (at least 4 panels), and x and the result in float32 when x is narrower. Raises ValueError.
    """
    _check_operands(x, weight, bias)
    columns, inner = weight.shape
    wide = x.float()
    out = torch.empty((x.shape[0], columns), dtype=torch.float32)
    panels = weight.data.shape[0]
    step = min(panels, max(4, _WIDENED_BYTES // (4 * PANEL * max(inner, 1))))
    memory = torch.empty(inner * step * PANEL, dtype=torch.float32)
    for first in range(0, panels, max(step, 1)):
        count = min(step, panels - first)
        block = memory[: inner * count * PANEL].view(inner, count * PANEL)
        library.widen_panels(weight.data.data_ptr(), TYPE_CODES[weight.dtype], first, count, inner, block.data_ptr())
        begin, end = first * PANEL, min((first + count) * PANEL, columns)
        torch.mm(wide, block[:, : end - begin], out=out[:, begin:end])
    if bias is not None:
        out += bias
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def pack_panels(target: PanelRows, source: Tensor, *, library: Library) -> None:
    """Put source [count, columns], rounded to the weight's type, into rows of a weight in panels. Raises ValueError."""
    weight = target.weight
    check(source.shape == target.shape, f"pack_panels: {tuple(source.shape)} into {tuple(target.shape)}")
    check(source.is_cpu and source.is_floating_point(), f"pack_panels: the source is {source.dtype} on {source.device}")
    source = source.to(weight.dtype)
    if source.shape[1] > 1 and source.stride(1) != 1:
        source = source.contiguous()
    library.pack_panels(
        source.data_ptr(),
        source.stride(0),
        TYPE_CODES[weight.dtype],
        target.first,
        target.count,
        weight.columns,
        weight.data.data_ptr(),
    )


def _check_operands(x: Tensor, weight: PanelWeight, bias: Tensor | None) -> None:
    # Messages are made only when they are needed.
    if x.dim() != 2 or x.shape[1] != weight.columns or not x.is_cpu or x.dtype not in TYPE_CODES:
        raise ValueError(
            f"linear: x is {x.dtype} {tuple(x.shape)} on {x.device}, the weight has {weight.columns} columns"
        )
    check(weight.data.is_contiguous() and weight.data.is_cpu, "linear: the weight is not contiguous on the CPU")
    check(bias is None or bias.shape == (weight.rows,), "linear: the bias does not fit")
