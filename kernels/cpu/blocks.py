"""Weights in blocks on the CPU: products with them, and rows of them as float32. Knows shapes and types only."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from windlass.kernels.cpu import gates
from windlass.kernels.cpu.checks import check, check_out, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.cpu.linear import linear_small
from windlass.kernels.layouts.blocks import BlockWeight

_WIDENED = 1 << 21  # numbers of a weight widened at a time, 8 MiB: they stay in the last-level cache for the product

# Rows from which `linear_blocks_rounded` leads where there is one (measured on a Xeon with AMX: as quick at 32 rows, 1.4 times
# at 64, twice at 512).
BLOCK_TILE_MIN_ROWS = 48

# Rows from which `linear_blocks` opens gates itself: fewer are bound by reading, which is quicker in one run than in two
# (measured on Zen 4: a single row 4 % slower, 4 as quick, 8 of 1B shape 5 % quicker, 512 12 %).
GATED_MIN_ROWS = 4

_Described: TypeAlias = tuple[int, int, int | None, int, int, int, int, int]


def fuses_gates(x: Tensor, weight: BlockWeight) -> bool:
    """Whether `linear_blocks` takes an activation with these operands, to the bits of two calls, and gains by it."""
    return x.dtype == torch.float32 and x.shape[0] >= GATED_MIN_ROWS and gates.fills_panels(weight.rows)


def linear_blocks(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
    library: Library,
) -> Tensor:
    """x @ weight.T + bias with x rounded to 8 bits, a float32 scale for each group of elements that the weight's form has.

    x: [M, K] in any float type, float32 in any row stride without a copy. bias: [N]. out: float32 [M, N] with adjacent
    elements, to be written. With an activation the first half of the weight's rows are gates, and the result is
    activation(gate) * up, [M, N / 2] (`gates.in_panels`), to the bits that `ops.gated_activation` has in float32. Returns out, or
    a new one in x's dtype. Sums of a group are exact integers and a row's bits depend on that row only. A row with NaN or
    infinity gives NaN. Raises ValueError.
    """
    # A decode step comes here some hundred times: messages are made only when they are needed.
    columns, inner = weight.rows, weight.columns
    _check_block_operands(x, weight, bias)
    activation_code, width = gates.activation_code_and_width(columns, activation)
    described = _block_arguments(weight)
    wide = x if x.dtype == torch.float32 and (x.stride(1) == 1 or inner == 1) else x.float().contiguous()
    wide_bias = None if bias is None else bias.float().contiguous()
    rows = x.shape[0]
    if out is None:
        made = torch.empty((rows, width), dtype=torch.float32)
    else:
        check_out(made := out, rows, width, torch.float32)
    if rows and columns:
        code = library.linear_blocks(
            wide.data_ptr(),
            wide.stride(0),
            *described,
            None if wide_bias is None else wide_bias.data_ptr(),
            activation_code,
            made.data_ptr(),
            made.stride(0),
            rows,
            columns,
            inner,
        )
        _raise_block_error(code, "linear_blocks", weight)
    return made if out is not None or x.dtype == torch.float32 else made.to(x.dtype)


def linear_blocks_rounded(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
    library: Library,
) -> Tensor:
    """x @ weight.T + bias with x and the weight's numbers rounded to bfloat16, for many rows, by the processor's matrix unit.

    Arguments and result as of `linear_blocks`, but rows of bfloat16 are taken, and out is written, without a copy. Sums are
    float32; their order, and so a row's bits, depends on that row only. Raises ValueError; only for a library that has it.
    """
    rows, columns = x.shape[0], weight.rows
    activation_code, width = gates.activation_code_and_width(columns, activation)
    _check_block_operands(x, weight, bias)
    described, multiply = _block_arguments(weight), library.linear_blocks_rounded
    if multiply is None:
        raise ValueError("linear_blocks_rounded: this processor has no matrix unit")
    given = x.float() if x.dtype == torch.float16 else x
    if given.stride(1) != 1 and weight.columns > 1:
        given = given.contiguous()
    wide_bias = None if bias is None else bias.float().contiguous()
    if out is None:
        made = torch.empty((rows, width), dtype=given.dtype)
    else:
        check_out(made := out, rows, width, given.dtype)
    if rows and columns:
        code = multiply(
            given.data_ptr(),
            given.stride(0),
            TYPE_CODES[given.dtype],
            *described,
            None if wide_bias is None else wide_bias.data_ptr(),
            activation_code,
            made.data_ptr(),
            made.stride(0),
            rows,
            columns,
            weight.columns,
        )
        _raise_block_error(code, "linear_blocks_rounded", weight)
    return made if made.dtype == x.dtype else made.to(x.dtype)


def _raise_block_error(code: int, name: str, weight: BlockWeight) -> None:
    """Raise what a code of the library means."""
    if code == 2:
        raise ValueError(f"{name}: there is no product for the form {weight.form}")
    if code:
        raise MemoryError(f"{name}: no memory for the rounded activations")


def linear_blocks_widened(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    most_rows: int,
    out: Tensor | None = None,
    library: Library,
) -> Tensor:
    """x @ weight.T + bias with nothing rounded: some rows of the weight at a time become float32.

    x: [M, K] in any float type. most_rows: up to which M the product is `linear_small`'s, whose rows' bits do not depend on M;
    torch's from there on. out: as `linear_blocks` has it. Returns [M, N] in x's dtype, or out. Extra memory: 8 MiB, or one row
    of the weight. Raises ValueError.
    """
    _check_block_operands(x, weight, bias)
    wide, inner = x.float(), weight.columns
    if out is None:
        made = torch.empty((x.shape[0], weight.rows), dtype=torch.float32)
    else:
        check_out(made := out, x.shape[0], weight.rows, torch.float32)
    step = max(1, min(weight.rows, _WIDENED // inner))
    memory = torch.empty((step, inner), dtype=torch.float32)
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        block, into = memory[:count], made[:, first : first + count]
        _widen(weight, None, first, 1.0, block, library)
        if x.shape[0] <= most_rows:
            own_bias = None if bias is None else bias[first : first + count]
            linear_small(wide, block, own_bias, out=into, library=library)
        else:
            torch.mm(wide, block.t(), out=into)
    if bias is not None and x.shape[0] > most_rows:
        made += bias
    return made if out is not None or x.dtype == torch.float32 else made.to(x.dtype)


def embed_blocks(table: BlockWeight, ids: Tensor, scale: float = 1.0, *, library: Library) -> Tensor:
    """table[ids] * scale in float32. ids: [T] int64, contiguous. Returns [T, columns]; without the scale, these are the bits of
    the table's `dequantize`. Raises ValueError, and IndexError for an id that is no row.
    """
    check(vector_ok(ids, torch.int64, ids.shape[0]), "embed_blocks: ids must be int64, contiguous [T]")
    out = torch.empty((ids.shape[0], table.columns), dtype=torch.float32)
    _widen(table, ids, 0, scale, out, library)
    return out


def _widen(weight: BlockWeight, ids: Tensor | None, first: int, factor: float, out: Tensor, library: Library) -> None:
    code = library.widen_blocks(
        *_block_arguments(weight),
        None if ids is None else ids.data_ptr(),
        first,
        factor,
        out.data_ptr(),
        out.shape[0],
        weight.rows,
        weight.columns,
    )
    if code:
        raise IndexError(f"embed_blocks: an id is no row of a table of {weight.rows}")


def _block_arguments(weight: BlockWeight) -> _Described:
    """A weight as the library takes it. Raises ValueError."""
    form, codes, scales, supers = weight.form, weight.codes, weight.scales, weight.supers
    if not (codes.is_contiguous() and scales.is_contiguous() and (supers is None or supers.is_contiguous())):
        raise ValueError("linear_blocks: the weight is not contiguous")
    super_address = None if supers is None else supers.data_ptr()
    numbers = (form.bits, form.group, form.super_groups, int(form.minimum), form.offset)
    return codes.data_ptr(), scales.data_ptr(), super_address, *numbers


def _check_block_operands(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> None:
    if x.dim() != 2 or x.shape[1] != weight.columns or not x.is_cpu or x.dtype not in TYPE_CODES:
        raise ValueError(
            f"linear_blocks: x is {x.dtype} {tuple(x.shape)} on {x.device}, the weight has {weight.columns} columns"
        )
    check(bias is None or bias.shape == (weight.rows,), "linear_blocks: the bias does not fit")
