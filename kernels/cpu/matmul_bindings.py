"""Matrix product bindings of the compiled kernels: plain weights, 16-bit panels, quantized blocks, experts and low-rank updates.

Each function checks operands before it passes addresses to C, and raises on bad ones. Row limits are measured crossovers with torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from windlass.kernels.backend import BackendOptions, Routed, Routing
from windlass.kernels.cpu.elementwise_bindings import ACTIVATIONS
from windlass.kernels.cpu.library import (
    TYPE_CODES,
    ExpertPartFields,
    ExpertProductsFields,
    Library,
    LowRankFields,
    LowRankPartFields,
    check,
    check_out,
    vector_ok,
)
from windlass.kernels.layouts.low_rank_weights import (
    PANEL_COLUMNS,
    PANEL_ROWS,
    STRIP,
    LowRankPart,
    LowRankTable,
    LowRankUpdate,
)
from windlass.kernels.layouts.weight_layouts import (
    FORMS,
    PANEL,
    BlockRows,
    BlockWeight,
    ExpertWeight,
    ExpertWeights,
    PanelRows,
    PanelWeight,
    Part,
    StackedWeight,
)
from windlass.kernels.torch.block_quantization import check_blocks

_NO_ACTIVATION = -1  # leaves a product as it is


def fills_panels(rows: int) -> bool:
    """Whether a weight of so many rows, gates before ups, has a whole number of panels of each."""
    return rows % (2 * PANEL) == 0


def activation_code_and_width(rows: int, activation: str | None) -> tuple[int, int]:
    """How the library numbers an activation, or the lack of one, and the width of the result of a weight of so many rows.
    Raises ValueError."""
    if activation is None:
        return _NO_ACTIVATION, rows
    check(activation in ACTIVATIONS, f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
    check(fills_panels(rows), f"{rows} rows of gates and ups do not fill panels of {PANEL}")
    return ACTIVATIONS[activation], rows // 2


# Measured on AVX2 with two threads on whole prefill chunks of a 1B Llama: ours leads up to 192 rows, from 256 on torch's
# product is as quick, at 512 quicker.
LINEAR_MAX_ROWS = 192

ACTIVATION_TYPES = (torch.float32, torch.bfloat16)


def linear_refusal(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Why `linear_small` cannot take these operands, or None when it can."""
    if (
        # What a model's own calls look like, accepted with few looks: a step makes dozens of them.
        bias is None
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.dim() == 2 == weight.dim()
        and x.shape[1] == weight.shape[1]
        and x.dtype in ACTIVATION_TYPES
        and weight.dtype in TYPE_CODES
        and x.is_cpu
        and weight.is_cpu
    ):
        return None
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return f"shapes {tuple(x.shape)} and {tuple(weight.shape)} are not [M, K] and [N, K]"
    if x.dtype not in ACTIVATION_TYPES:
        return f"activations are {x.dtype}, not float32 or bfloat16"
    if weight.dtype not in TYPE_CODES:
        return f"weights are {weight.dtype}, not float32, bfloat16 or float16"
    if not (x.is_cpu and weight.is_cpu):
        return "an operand is not on the CPU"
    if (x.shape[1] > 1 and (x.stride(1) != 1 or weight.stride(1) != 1)) or weight.stride(0) < 0:
        return "the last dimension is not contiguous"
    if bias is not None and (
        bias.shape != weight.shape[:1] or bias.dtype not in TYPE_CODES or not bias.is_contiguous()
    ):
        return f"the bias is {bias.dtype} {tuple(bias.shape)}, not a contiguous vector of {weight.shape[0]} floats"
    return None


def linear_small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    library: Library,
) -> Tensor:
    """x @ weight.T + bias, summed in float32 in an order that does not depend on M: a row's bits are batch-independent.

    x: [M, K] float32 or bfloat16, any row stride. weight: [N, K] float32, bfloat16 or float16, any row stride. bias: [N]
    of any of these. out: [M, N] in x's dtype with adjacent elements, to be written. Any M is right; it is quick for few rows.
    Returns [M, N] in x's dtype, out where it is given. Raises ValueError.
    """
    if (reason := linear_refusal(x, weight, bias)) is not None:
        raise ValueError(f"linear_small: {reason}")
    rows, inner = x.shape
    columns = weight.shape[0]
    if out is None:
        out = torch.empty((rows, columns), dtype=x.dtype)
    else:
        check_out(out, rows, columns, x.dtype)
    if inner == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    if rows and columns:
        code = library.linear(
            x.data_ptr(),
            x.stride(0),
            TYPE_CODES[x.dtype],
            weight.data_ptr(),
            weight.stride(0),
            TYPE_CODES[weight.dtype],
            None if bias is None else bias.data_ptr(),
            0 if bias is None else TYPE_CODES[bias.dtype],
            out.data_ptr(),
            out.stride(0),
            rows,
            columns,
            inner,
        )
        if code:
            raise MemoryError("linear_small: no memory for the packed activations")
    return out


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
    activation_code, width = activation_code_and_width(columns, activation)
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


_KINDS = {name: place for place, name in enumerate(FORMS)}  # as `repack_blocks` counts them

_QUANTIZED = ("q8_0", "q4_k", "q5_k", "q6_k")

MOST_SUPER_GROUPS = 64


def repack_blocks(target: BlockRows, blocks: Tensor, *, library: Library) -> None:
    """Put rows of blocks, uint8 [count, row bytes] as a file has them, into rows of a weight. Raises ValueError."""
    check_blocks(target, blocks)
    _check_block_weight(target.weight)
    check(blocks.is_cpu, f"repack_blocks: the blocks are on {blocks.device}")
    if blocks.shape[1] > 1 and blocks.stride(1) != 1:
        blocks = blocks.contiguous()
    library.repack_blocks(
        blocks.data_ptr(),
        blocks.stride(0),
        _KINDS[target.weight.form.name],
        target.first,
        target.count,
        target.weight.columns,
        *_block_addresses(target.weight),
    )


def pack_blocks(target: BlockRows, source: Tensor, weights: Tensor | None = None, *, library: Library) -> None:
    """Quantize source [count, columns] into rows of a weight: the bytes of `block_quantizers`. Raises ValueError.

    weights: float32, how much the squared error of an element counts, broadcast to the source's shape.
    """
    weight, form = target.weight, target.weight.form
    check(form.name in _QUANTIZED, f"floats are quantized into {', '.join(_QUANTIZED)}, not into {form.name}")
    check(form.super_groups <= MOST_SUPER_GROUPS, f"pack_blocks: super groups of {form.super_groups} groups")
    check(source.shape == target.shape, f"pack_blocks: {tuple(source.shape)} into rows {tuple(target.shape)}")
    check(source.is_cpu and source.dtype in TYPE_CODES, f"pack_blocks: the source is {source.dtype} on {source.device}")
    _check_block_weight(weight)
    if source.shape[1] > 1 and source.stride(1) != 1:
        source = source.contiguous()
    if weights is not None:
        check(weights.dtype == torch.float32 and weights.is_cpu, f"pack_blocks: weights of {weights.dtype}")
        weights = weights.expand(source.shape)
        if source.shape[1] > 1 and weights.stride(1) != 1:
            weights = weights.contiguous()
    library.pack_blocks(
        source.data_ptr(),
        source.stride(0),
        TYPE_CODES[source.dtype],
        None if weights is None else weights.data_ptr(),
        0 if weights is None else weights.stride(0),
        form.bits,
        form.group,
        form.super_groups,
        form.parts,
        form.offset,
        target.first,
        target.count,
        weight.columns,
        *_block_addresses(weight),
    )


def _check_block_weight(weight: BlockWeight) -> None:
    parts = weight.tensors().values()
    check(all(part.is_cpu and part.is_contiguous() for part in parts), "the weight is not contiguous on the CPU")


def _block_addresses(weight: BlockWeight) -> tuple[int, int, int | None]:
    supers = None if weight.supers is None else weight.supers.data_ptr()
    return weight.codes.data_ptr(), weight.scales.data_ptr(), supers


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
    return x.dtype == torch.float32 and x.shape[0] >= GATED_MIN_ROWS and fills_panels(weight.rows)


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
    activation_code, width = activation_code_and_width(columns, activation)
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
    activation_code, width = activation_code_and_width(columns, activation)
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


class MatrixUnit:
    """What a backend leaves to the unit: products of many rows, where they may be rounded as it does and a row's bits may differ
    from those it has in a small step."""

    def __init__(self, library: Library, options: BackendOptions) -> None:
        """There need not be such a unit: it then takes nothing."""
        there = library.linear_blocks_rounded is not None and not options.deterministic
        self.takes_prompts = there and options.bf16_prefill
        self.takes_blocks = self.takes_prompts and options.activations == "int8"
        self.takes_panels = there

    def takes(self, x: Tensor, weight: object, activation: str | None = None) -> bool:
        """Whether `linear` makes this product. activation: of gates, before ups in the weight's rows."""
        rows = x.shape[0]
        if isinstance(weight, BlockWeight):
            fits = self.takes_blocks and rows >= BLOCK_TILE_MIN_ROWS
        elif isinstance(weight, PanelWeight):
            adjacent = x.stride(1) == 1 or x.shape[1] == 1
            narrow = x.dtype == weight.dtype == torch.bfloat16
            fits = self.takes_panels and rows >= PANEL_TILE_MIN_ROWS and narrow and adjacent
        else:
            return False
        return fits and (activation is None or fills_panels(weight.rows))

    def linear(
        self,
        x: Tensor,
        weight: BlockWeight | PanelWeight,
        bias: Tensor | None,
        *,
        library: Library,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x @ weight.T + bias, or activation(gate) * up of it. library: of the unit, or one that records what is asked. out:
        where the result may be written; it does not have to be."""
        if isinstance(weight, PanelWeight):
            return linear_panels_rounded(x, weight, bias, activation=activation, out=out, library=library)
        out = None if x.dtype == torch.float16 else out
        return linear_blocks_rounded(x, weight, bias, activation=activation, out=out, library=library)


_SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}

MOST_EXPERTS = 4096  # that a router of experts.h chooses from

_ROWS, _PANELS, _BLOCKS = range(3)


class CompiledExperts(ExpertWeights):
    """The same as C reads it. has_blocks: rows that meet it have to be float32.

    rounds_blocks, rounds_panels: whether experts with many rows may go by the processor's matrix unit, if it has one. Raises
    ValueError for weights that C does not read, or whose parts differ from expert to expert.
    """

    def __init__(
        self,
        weights: Sequence[ExpertWeight],
        biases: Sequence[Tensor] | None,
        library: Library,
        *,
        rounds_blocks: bool = False,
        rounds_panels: bool = False,
    ) -> None:
        super().__init__(weights, biases)
        parts = [_expert_parts(weight) for weight in self.weights]
        self.parts = len(parts[0])
        check(all(len(own) == self.parts for own in parts), "experts: one has other parts than the next")
        self.has_blocks = any(isinstance(part, BlockWeight) for own in parts for part, _ in own)
        bias_types = {bias.dtype for bias in self.biases or ()}
        check(
            bias_types <= ({torch.float32} if self.has_blocks else TYPE_CODES.keys())
            and all(bias.is_cpu and bias.is_contiguous() for bias in self.biases or ()),
            f"experts: biases are {bias_types}",
        )
        self._table = (ExpertPartFields * (len(self.weights) * self.parts))()
        for expert, own in enumerate(parts):
            for place, (part, first) in enumerate(own):
                self._table[expert * self.parts + place] = _expert_fields(part, first, self.bias(expert))
        found = library.addresses
        self._products = ExpertProductsFields(
            *(found["linear"], found["linear_panels"], found["linear_blocks"]),
            found.get("linear_blocks_rounded") if rounds_blocks else None,
            found.get("linear_panels_rounded") if rounds_panels else None,
            *(BLOCK_TILE_MIN_ROWS, PANEL_TILE_MIN_ROWS),
        )
        self.address, self.products = ctypes.addressof(self._table), ctypes.addressof(self._products)


def _expert_parts(weight: ExpertWeight) -> list[tuple[Part, int]]:
    """Each part with its first row."""
    if isinstance(weight, StackedWeight):
        return [(part, first) for part, first, _ in weight.spans()]
    return [(weight, 0)]


def _expert_fields(part: Part, first: int, bias: Tensor | None) -> ExpertPartFields:
    fields = ExpertPartFields(first=first, columns=part.shape[0])
    if bias is not None:
        fields.bias, fields.bias_type = bias.data_ptr() + first * bias.element_size(), TYPE_CODES[bias.dtype]
    if isinstance(part, BlockWeight):
        tensors, form = part.tensors(), part.form
        check(all(one.is_contiguous() for one in tensors.values()), "experts: a weight is not contiguous")
        fields.kind, fields.data, fields.scales = _BLOCKS, part.codes.data_ptr(), part.scales.data_ptr()
        fields.supers = None if part.supers is None else part.supers.data_ptr()
        fields.bits, fields.group, fields.super_groups = form.bits, form.group, form.super_groups
        fields.minimum, fields.offset = int(form.minimum), form.offset
        return fields
    rows = part.data if isinstance(part, PanelWeight) else part
    check(
        rows.is_cpu and rows.dtype in TYPE_CODES and (isinstance(part, Tensor) or rows.is_contiguous()),
        f"experts: a weight is {rows.dtype} on {rows.device}",
    )
    fields.data, fields.type = rows.data_ptr(), TYPE_CODES[rows.dtype]
    if isinstance(part, PanelWeight):
        fields.kind = _PANELS
    else:
        check(part.shape[1] < 2 or part.stride(1) == 1, "experts: a weight has no adjacent elements")
        fields.kind, fields.stride = _ROWS, part.stride(0)
    return fields


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None, *, library: Library
) -> Routed:
    """See `Backend.route`. logits: float32, adjacent in a row. Raises ValueError."""
    rows, count = logits.shape
    check(
        logits.dtype == torch.float32
        and logits.is_cpu
        and (count < 2 or logits.stride(1) == 1)
        and all(one is None or vector_ok(one, torch.float32, count) for one in (bias, scales))
        and 1 <= routing.top_k <= count <= MOST_EXPERTS
        and count % routing.groups == 0
        and routing.top_k <= routing.top_groups * (count // routing.groups) <= count,
        f"route: logits are {logits.dtype} {tuple(logits.shape)} for {routing}",
    )
    chosen = torch.empty((rows, routing.top_k), dtype=torch.int64)
    weights = torch.empty((rows, routing.top_k), dtype=torch.float32)
    library.route_experts(
        logits.data_ptr(),
        logits.stride(0),
        *(None if one is None else one.data_ptr() for one in (bias, scales)),
        count,
        routing.top_k,
        routing.groups,
        routing.top_groups,
        _SCORES[routing.scores],
        int(routing.group_score == "two largest"),
        int(routing.normalized),
        routing.scale,
        routing.least_sum,
        routing.sum_eps,
        routing.jitter,
        chosen.data_ptr(),
        weights.data_ptr(),
        rows,
    )
    return Routed(chosen, weights)


def linear_of_experts(x: Tensor, experts: CompiledExperts, chosen: Tensor, *, library: Library) -> Tensor:
    """See `Backend.linear_of_experts`: any number of rows is right. x: in any float type, float32 and bfloat16 without a copy.

    Raises ValueError, MemoryError, and IndexError for an expert that is none.
    """
    rows = chosen.numel()
    check(
        x.dim() == 2
        and x.is_cpu
        and x.dtype in TYPE_CODES
        and x.shape[1] == experts.inner
        and chosen.dtype == torch.int64
        and chosen.is_contiguous()
        and x.shape[0] in (chosen.shape[0], rows),
        f"linear_of_experts: x is {x.dtype} {tuple(x.shape)}, experts of {experts.inner} columns, chosen {tuple(chosen.shape)}",
    )
    wide = x if x.dtype in ACTIVATION_TYPES and not (experts.has_blocks and x.dtype != torch.float32) else x.float()
    if experts.inner > 1 and wide.stride(1) != 1:
        wide = wide.contiguous()
    out = torch.empty((rows, experts.columns), dtype=wide.dtype)
    if rows:
        code = library.linear_of_experts(
            wide.data_ptr(),
            wide.stride(0),
            TYPE_CODES[wide.dtype],
            experts.address,
            len(experts),
            experts.parts,
            experts.products,
            chosen.data_ptr(),
            rows,
            rows // x.shape[0],
            out.data_ptr(),
            experts.columns,
            experts.inner,
        )
        if code == 2:
            raise IndexError(f"linear_of_experts: a row's expert is none of {len(experts)}")
        if code:
            raise MemoryError("linear_of_experts: no memory")
    return out if out.dtype == x.dtype else out.to(x.dtype)


def sum_of_experts(x: Tensor, weights: Tensor, *, library: Library) -> Tensor:
    """See `Backend.sum_of_experts`. x: contiguous. Raises ValueError."""
    rows, top_k = weights.shape
    check(
        x.dim() == 2
        and x.dtype in TYPE_CODES
        and x.is_cpu
        and x.is_contiguous()
        and x.shape[0] == rows * top_k
        and weights.dtype == torch.float32
        and weights.is_contiguous(),
        f"sum_of_experts: x is {x.dtype} {tuple(x.shape)}, weights {weights.dtype} {tuple(weights.shape)}",
    )
    out = torch.empty((rows, x.shape[1]), dtype=x.dtype)
    library.sum_of_experts(
        x.data_ptr(), TYPE_CODES[x.dtype], weights.data_ptr(), top_k, out.data_ptr(), rows, x.shape[1]
    )
    return out


class CompiledLowRankTable(LowRankTable):
    """The same as C reads it. columns, inner: of the matrix."""

    def __init__(self, slots: int, columns: int, inner: int) -> None:
        super().__init__(slots)
        self.columns, self.inner = columns, inner
        self._entries = (LowRankFields * slots)()
        self._parts: list[ctypes.Array[LowRankPartFields] | None] = [None] * slots
        self.address = ctypes.addressof(self._entries)

    def put(self, slot: int, change: LowRankUpdate | None) -> None:
        """Raises ValueError for a change of another matrix."""
        if change is None:
            self._entries[slot] = LowRankFields()
            self._parts[slot] = None
        else:
            self._check(change)
            parts = (LowRankPartFields * len(change.parts))(*map(_low_rank_fields, change.parts))
            down = change.down
            sizes = TYPE_CODES[down.dtype], change.rank, len(parts)
            self._entries[slot] = LowRankFields(down.data_ptr(), *sizes, ctypes.addressof(parts))
            self._parts[slot] = parts
        super().put(slot, change)

    def _check(self, change: LowRankUpdate) -> None:
        down = change.down
        wanted = (-(-change.rank // PANEL_ROWS), -(-self.inner // STRIP), PANEL_ROWS, STRIP)
        check(
            down.dtype in TYPE_CODES
            and down.is_cpu
            and down.is_contiguous()
            and down.shape == wanted
            and change.inner == self.inner,
            f"low rank: A [R, {change.inner}] is {down.dtype} {tuple(down.shape)}, not contiguous floats {wanted} for "
            f"[R, {self.inner}]",
        )
        for part in change.parts:
            shape = (-(-part.columns // PANEL_COLUMNS), part.rank, PANEL_COLUMNS)
            check(
                part.up.dtype in TYPE_CODES and part.up.is_cpu and part.up.is_contiguous() and part.up.shape == shape,
                f"low rank: B is {part.up.dtype} {tuple(part.up.shape)}, not contiguous floats {shape}",
            )
            check(
                0 <= part.first <= part.first + part.columns <= self.columns
                and 0 <= part.rank_first <= part.rank_first + part.rank <= change.rank,
                f"low rank: a part lies outside [{self.columns}, {change.rank}]",
            )


def _low_rank_fields(part: LowRankPart) -> LowRankPartFields:
    sizes = TYPE_CODES[part.up.dtype], part.first, part.columns, part.rank_first, part.rank
    return LowRankPartFields(part.up.data_ptr(), *sizes, part.scale)


def add_low_rank(out: Tensor, x: Tensor, table: CompiledLowRankTable, slots: Tensor, *, library: Library) -> None:
    """See `Backend.add_low_rank`. out, x: float32, bfloat16 or float16, of one type, with adjacent elements in a row.

    Raises ValueError, IndexError for a slot that the table lacks, and MemoryError.
    """
    rows, inner = x.shape
    check(
        x.dtype == out.dtype
        and x.dtype in TYPE_CODES
        and x.is_cpu
        and out.is_cpu
        and out.shape == (rows, table.columns)
        and inner == table.inner
        and (inner < 2 or x.stride(1) == 1)
        and (table.columns < 2 or out.stride(1) == 1),
        f"add_low_rank: {out.dtype} {tuple(out.shape)} and {x.dtype} {tuple(x.shape)} are not [T, {table.columns}] and "
        f"[T, {table.inner}] of one type with adjacent elements",
    )
    check(vector_ok(slots, torch.int64, rows), f"add_low_rank: slots are {slots.dtype} {tuple(slots.shape)}")
    code = library.add_low_rank(
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        TYPE_CODES[x.dtype],
        slots.data_ptr(),
        rows,
        inner,
        table.address,
        len(table.changes),
    )
    if code == 2:
        raise IndexError(f"add_low_rank: a row's slot is not one of {len(table.changes)}")
    if code:
        raise MemoryError("add_low_rank: no memory")
