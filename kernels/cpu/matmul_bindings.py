"""Matrix product bindings of the compiled kernels: plain weights, 16-bit panels, quantized blocks, experts and low-rank
updates.

Functions named like an operation of `Backend` perform it. Operands that do not fit raise ValueError before an address is
passed to C. Row limits are measured crossovers with torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from windlass.kernels.backend import BackendOptions, Routed, Routing
from windlass.kernels.cpu.elementwise_bindings import activation_code
from windlass.kernels.cpu.library import (
    TYPE_CODES,
    ExpertPartFields,
    ExpertProductsFields,
    HasLibrary,
    Library,
    LowRankFields,
    LowRankPartFields,
    address,
    adjacent,
    check,
    check_vectors,
    result_matrix,
    tensor2,
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

_NO_ACTIVATION = -1


def fills_panels(rows: int) -> bool:
    """Whether the gates and the ups of a weight with this many rows fill entire panels."""
    return rows % (2 * PANEL) == 0


def activation_code_and_width(rows: int, activation: str | None) -> tuple[int, int]:
    """The library's code of an activation (or None), and the width of the result of a weight with this many rows. Raises
    ValueError."""
    if activation is None:
        return _NO_ACTIVATION, rows
    code = activation_code(activation)
    check(fills_panels(rows), f"{rows} rows of gates and ups do not fill panels of {PANEL}")
    return code, rows // 2


# Measured on AVX2 with two threads on entire prefill chunks of a 1B Llama: this kernel is faster up to 192 rows, torch's
# product is equal at 256 and faster at 512.
LINEAR_MAX_ROWS = 192

ACTIVATION_TYPES = (torch.float32, torch.bfloat16)


def linear_refusal(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Why `linear_small` does not support these operands, or None."""
    if (
        # The usual call, accepted by few checks: a step makes dozens of them.
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
    kernels: HasLibrary, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias, summed in float32 in an order that does not depend on M: a row's bits are batch-independent.

    x: [M, K] float32 or bfloat16, any row stride. weight: [N, K] float32, bfloat16 or float16, any row stride. bias: [N]
    of any of these. out: optional [M, N] in x's dtype with adjacent elements. Correct for any M, fast for few rows. Returns
    [M, N] in x's dtype (out if given). Raises ValueError.
    """
    if (reason := linear_refusal(x, weight, bias)) is not None:
        raise ValueError(f"linear_small: {reason}")
    rows, inner = x.shape
    columns = weight.shape[0]
    out = result_matrix(out, rows, columns, x.dtype)
    if inner == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    if rows and columns:
        code = kernels.library.linear(
            *(*tensor2(x), *tensor2(weight), address(bias), 0 if bias is None else TYPE_CODES[bias.dtype]),
            *(out.data_ptr(), out.stride(0), rows, columns, inner),
        )
        if code:
            raise MemoryError("linear_small: no memory for the packed activations")
    return out


# Measured on Zen 4 with two threads, AVX-512 and AVX2, 64 to 2,048 rows: `linear_panels` is an eighth faster throughout. But
# every thread copies the rows for itself, so torch's product is safer with many threads and long chunks.
PANEL_MAX_ROWS = 512

# Rows from which `linear_panels_amx` is faster, if available (measured on a Xeon with AMX: 1.2 to 2 times at 8 rows, 2 to 4
# times at 16, 6 times at 128).
PANEL_TILE_MIN_ROWS = 8

_WIDENED_BYTES = 8 << 20  # float32 weights converted at a time; they stay in the last-level cache for the product


def linear_panels(
    kernels: HasLibrary, x: Tensor, weight: PanelWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias, summed in float32 in an order that does not depend on M: a row's bits are batch-independent.

    x: [M, K] in any float type; float32 and bfloat16 in any row stride need no copy. bias: [N]. out: optional [M, N] in x's
    dtype (not float16) with adjacent elements. Correct for any M, fast for few rows. Returns [M, N] in x's dtype (out if
    given). Raises ValueError.
    """
    _check_operands(x, weight, bias)
    # Called about a hundred times per decode step: copies are made only if needed.
    given = adjacent(x if x.dtype != torch.float16 else x.float())
    if bias is not None:
        bias = (bias if bias.dtype in TYPE_CODES else bias.float()).contiguous()
    rows, columns = x.shape[0], weight.rows
    out = result_matrix(out, rows, columns, given.dtype)
    if weight.columns == 0:
        return (out.zero_() if bias is None else out.copy_(bias)).to(x.dtype)
    if rows and columns:
        code = kernels.library.linear_panels(
            *(*tensor2(given), weight.data.data_ptr(), TYPE_CODES[weight.dtype]),
            *(address(bias), 0 if bias is None else TYPE_CODES[bias.dtype]),
            *(out.data_ptr(), out.stride(0), rows, columns, weight.columns),
        )
        if code:
            raise MemoryError("linear_panels: no memory for the packed activations")
    return out if out.dtype == x.dtype else out.to(x.dtype)


def linear_panels_amx(
    kernels: HasLibrary,
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias for many rows, both bfloat16, by AMX.

    x: [M, K] with adjacent elements. activation: of gates, see `linear_blocks`. out: optional bfloat16 [M, N], or [M, N / 2]
    for gates and ups. Sums are float32, and a row's bits depend on that row only. Returns out or a new tensor. Raises
    ValueError, also on a processor without AMX.
    """
    _check_operands(x, weight, bias)
    multiply = kernels.library.linear_panels_amx
    if multiply is None:
        raise ValueError("linear_panels_amx: this processor has no matrix unit")
    check(x.dtype == weight.dtype == torch.bfloat16, f"linear_panels_amx: {x.dtype} times {weight.dtype}")
    check(x.stride(1) == 1 or weight.columns == 1, "linear_panels_amx: the elements of a row are apart")
    wide_bias = None if bias is None else bias.float().contiguous()
    rows, columns = x.shape[0], weight.rows
    activation_code, width = activation_code_and_width(columns, activation)
    out = result_matrix(out, rows, width, torch.bfloat16)
    if rows and columns:
        code = multiply(
            *(x.data_ptr(), x.stride(0), weight.data.data_ptr(), address(wide_bias), activation_code),
            *(out.data_ptr(), out.stride(0), rows, columns, weight.columns),
        )
        if code:
            raise MemoryError("linear_panels_amx: no memory for the packed activations")
    return out


def linear_panels_widened(kernels: HasLibrary, x: Tensor, weight: PanelWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for many rows: some panels at a time are converted to float32 for torch's product.

    x: [M, K] in any float type. The product is float32; returns [M, N] in x's dtype. Extra memory: 8 MiB of converted weights
    (at least 4 panels), and x and the result in float32 if x is narrower. Raises ValueError.
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
        kernels.library.widen_panels(
            weight.data.data_ptr(), TYPE_CODES[weight.dtype], first, count, inner, block.data_ptr()
        )
        begin, end = first * PANEL, min((first + count) * PANEL, columns)
        torch.mm(wide, block[:, : end - begin], out=out[:, begin:end])
    if bias is not None:
        out += bias
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def pack_panels(kernels: HasLibrary, target: PanelRows, source: Tensor) -> None:
    """Store source [count, columns], rounded to the weight's type, in rows of a panel weight. Raises ValueError."""
    weight = target.weight
    check(source.shape == target.shape, f"pack_panels: {tuple(source.shape)} into {tuple(target.shape)}")
    check(source.is_cpu and source.is_floating_point(), f"pack_panels: the source is {source.dtype} on {source.device}")
    source = adjacent(source.to(weight.dtype))
    kernels.library.pack_panels(*tensor2(source), target.first, target.count, weight.columns, weight.data.data_ptr())


def _check_operands(x: Tensor, weight: PanelWeight, bias: Tensor | None) -> None:
    # Messages are formatted only if needed.
    if x.dim() != 2 or x.shape[1] != weight.columns or not x.is_cpu or x.dtype not in TYPE_CODES:
        raise ValueError(
            f"linear: x is {x.dtype} {tuple(x.shape)} on {x.device}, the weight has {weight.columns} columns"
        )
    check(weight.data.is_contiguous() and weight.data.is_cpu, "linear: the weight is not contiguous on the CPU")
    check(bias is None or bias.shape == (weight.rows,), "linear: the bias does not fit")


_KINDS = {name: place for place, name in enumerate(FORMS)}  # index of the form in repack_blocks

_QUANTIZED = ("q8_0", "q4_k", "q5_k", "q6_k")

MAX_SUPER_GROUPS = 64


def repack_blocks(kernels: HasLibrary, target: BlockRows, source: Tensor) -> None:
    """`Backend.repack`. Raises ValueError."""
    check_blocks(target, source)
    _check_block_weight(target.weight)
    check(source.is_cpu, f"repack_blocks: the blocks are on {source.device}")
    source = adjacent(source)
    kernels.library.repack_blocks(
        *(source.data_ptr(), source.stride(0), _KINDS[target.weight.form.name]),
        *(target.first, target.count, target.weight.columns, *_block_addresses(target.weight)),
    )


def pack_blocks(kernels: HasLibrary, target: BlockRows, source: Tensor, weights: Tensor | None = None) -> None:
    """Quantize source [count, columns] into rows of a weight: the bytes of `block_quantization`. Raises ValueError.

    weights: float32 weights of the squared errors of elements, broadcast to the source's shape.
    """
    weight, form = target.weight, target.weight.form
    check(form.name in _QUANTIZED, f"floats are quantized into {', '.join(_QUANTIZED)}, not into {form.name}")
    check(form.super_groups <= MAX_SUPER_GROUPS, f"pack_blocks: super groups of {form.super_groups} groups")
    check(source.shape == target.shape, f"pack_blocks: {tuple(source.shape)} into rows {tuple(target.shape)}")
    check(source.is_cpu and source.dtype in TYPE_CODES, f"pack_blocks: the source is {source.dtype} on {source.device}")
    _check_block_weight(weight)
    source = adjacent(source)
    if weights is not None:
        check(weights.dtype == torch.float32 and weights.is_cpu, f"pack_blocks: weights of {weights.dtype}")
        weights = adjacent(weights.expand(source.shape))
    kernels.library.pack_blocks(
        *(*tensor2(source), address(weights), 0 if weights is None else weights.stride(0)),
        *(form.bits, form.group, form.super_groups, form.parts, form.offset),
        *(target.first, target.count, weight.columns, *_block_addresses(weight)),
    )


def _check_block_weight(weight: BlockWeight) -> None:
    parts = weight.tensors().values()
    check(all(part.is_cpu and part.is_contiguous() for part in parts), "the weight is not contiguous on the CPU")


def _block_addresses(weight: BlockWeight) -> tuple[int, int, int | None]:
    return weight.codes.data_ptr(), weight.scales.data_ptr(), address(weight.supers)


_WIDENED = 1 << 21  # elements of a weight converted at a time, 8 MiB; they stay in the last-level cache for the product

# Rows from which `linear_blocks_amx` is faster, if available (measured on a Xeon with AMX, shapes of Qwen2.5-Coder 1.5B: 0.7 of
# the speed at 16 rows, 1.16 times at 32, 1.6 times at 64, 2.6 times at 512). Byte products of the unit, whose sums must be scaled
# group by group, were slower: equal to `linear_blocks` at 24 rows, 1.1 times at 32, 1.3 times at 64.
BLOCK_TILE_MIN_ROWS = 32

# Rows from which `linear_blocks` applies gates itself. Fewer rows are bound by reading, which is faster as one stream than as
# two (measured on Zen 4: a single row 4 % slower, 4 equal, 8 of 1B shape 5 % faster, 512 12 %).
GATED_MIN_ROWS = 4

_BlockArguments: TypeAlias = tuple[int, int, int | None, int, int, int, int, int]


def fuses_gates(x: Tensor, weight: BlockWeight) -> bool:
    """Whether `linear_blocks` with an activation supports these operands (with the bits of two calls) and is faster."""
    return x.dtype == torch.float32 and x.shape[0] >= GATED_MIN_ROWS and fills_panels(weight.rows)


def linear_blocks(
    kernels: HasLibrary,
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias with x rounded to 8 bits, with a float32 scale for each group of the weight's form.

    x: [M, K] in any float type; float32 in any row stride needs no copy. bias: [N]. out: optional float32 [M, N] with adjacent
    elements. With an activation, the first half of the weight's rows are gates, and the result is activation(gate) * up,
    [M, N / 2] (see `fills_panels`), with the bits of `gated_activation` in float32. Returns out, or a new tensor in x's dtype.
    Sums of a group are exact integers and a row's bits depend on that row only. A row with NaN or infinity gives NaN. Raises
    ValueError.
    """
    # Called about a hundred times per decode step: messages are formatted only if needed.
    columns, inner = weight.rows, weight.columns
    _check_block_operands(x, weight, bias)
    activation_code, width = activation_code_and_width(columns, activation)
    block_arguments = _block_arguments(weight)
    wide = x if x.dtype == torch.float32 and (x.stride(1) == 1 or inner == 1) else x.float().contiguous()
    wide_bias = None if bias is None else bias.float().contiguous()
    rows = x.shape[0]
    made = result_matrix(out, rows, width, torch.float32)
    if rows and columns:
        code = kernels.library.linear_blocks(
            *(wide.data_ptr(), wide.stride(0), *block_arguments, address(wide_bias), activation_code),
            *(made.data_ptr(), made.stride(0), rows, columns, inner),
        )
        _raise_block_error(code, "linear_blocks", weight)
    return made if out is not None or x.dtype == torch.float32 else made.to(x.dtype)


def linear_blocks_amx(
    kernels: HasLibrary,
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias with x and the dequantized weight rounded to bfloat16, for many rows, by AMX.

    Arguments and result as in `linear_blocks`, but x and out may be bfloat16 without a copy. Sums are float32; a row's bits
    depend on that row only. Raises ValueError, also on a processor without AMX.
    """
    rows, columns = x.shape[0], weight.rows
    activation_code, width = activation_code_and_width(columns, activation)
    _check_block_operands(x, weight, bias)
    block_arguments, multiply = _block_arguments(weight), kernels.library.linear_blocks_amx
    if multiply is None:
        raise ValueError("linear_blocks_amx: this processor has no matrix unit")
    given = adjacent(x.float() if x.dtype == torch.float16 else x)
    wide_bias = None if bias is None else bias.float().contiguous()
    made = result_matrix(out, rows, width, given.dtype)
    if rows and columns:
        code = multiply(
            *(*tensor2(given), *block_arguments, address(wide_bias), activation_code),
            *(made.data_ptr(), made.stride(0), rows, columns, weight.columns),
        )
        _raise_block_error(code, "linear_blocks_amx", weight)
    return made if made.dtype == x.dtype else made.to(x.dtype)


def _raise_block_error(code: int, name: str, weight: BlockWeight) -> None:
    """Raise the error of a code of the library."""
    if code == 2:
        raise ValueError(f"{name}: there is no product for the form {weight.form}")
    if code:
        raise MemoryError(f"{name}: no memory for the rounded activations")


def linear_blocks_widened(
    kernels: HasLibrary,
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    *,
    most_rows: int,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias without rounding x: some rows of the weight at a time are converted to float32.

    x: [M, K] in any float type. most_rows: the largest M for which `linear_small` is used, with bits that do not depend on M;
    torch's product otherwise. out: as in `linear_blocks`. Returns [M, N] in x's dtype, or out. Extra memory: 8 MiB, or one
    row of the weight. Raises ValueError.
    """
    _check_block_operands(x, weight, bias)
    wide, inner = x.float(), weight.columns
    made = result_matrix(out, x.shape[0], weight.rows, torch.float32)
    step = max(1, min(weight.rows, _WIDENED // inner))
    memory = torch.empty((step, inner), dtype=torch.float32)
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        block, into = memory[:count], made[:, first : first + count]
        _widen(weight, None, first, 1.0, block, kernels)
        if x.shape[0] <= most_rows:
            own_bias = None if bias is None else bias[first : first + count]
            linear_small(kernels, wide, block, own_bias, out=into)
        else:
            torch.mm(wide, block.t(), out=into)
    if bias is not None and x.shape[0] > most_rows:
        made += bias
    return made if out is not None or x.dtype == torch.float32 else made.to(x.dtype)


def embed_blocks(kernels: HasLibrary, table: BlockWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
    """table[ids] * scale in float32. ids: [T] int64, contiguous. Returns [T, columns]; with a scale of 1, the bits of
    `BlockWeight.dequantize`. Raises ValueError, and IndexError for an id out of range.
    """
    check_vectors("embed_blocks: ids", torch.int64, ids.shape[0], ids)
    out = torch.empty((ids.shape[0], table.columns), dtype=torch.float32)
    _widen(table, ids, 0, scale, out, kernels)
    return out


def _widen(
    weight: BlockWeight, ids: Tensor | None, first: int, factor: float, out: Tensor, kernels: HasLibrary
) -> None:
    code = kernels.library.dequantize_blocks(
        *(*_block_arguments(weight), address(ids), first, factor),
        *(out.data_ptr(), out.shape[0], weight.rows, weight.columns),
    )
    if code:
        raise IndexError(f"embed_blocks: an id is not a row of a table of {weight.rows}")


def _block_arguments(weight: BlockWeight) -> _BlockArguments:
    """A weight as arguments of the library. Raises ValueError."""
    form, codes, scales, supers = weight.form, weight.codes, weight.scales, weight.supers
    if not (codes.is_contiguous() and scales.is_contiguous() and (supers is None or supers.is_contiguous())):
        raise ValueError("linear_blocks: the weight is not contiguous")
    numbers = (form.bits, form.group, form.super_groups, int(form.minimum), form.offset)
    return codes.data_ptr(), scales.data_ptr(), address(supers), *numbers


def _check_block_operands(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> None:
    if x.dim() != 2 or x.shape[1] != weight.columns or not x.is_cpu or x.dtype not in TYPE_CODES:
        raise ValueError(
            f"linear_blocks: x is {x.dtype} {tuple(x.shape)} on {x.device}, the weight has {weight.columns} columns"
        )
    check(bias is None or bias.shape == (weight.rows,), "linear_blocks: the bias does not fit")


class AmxProducts:
    """Products of many rows by AMX, if they may be rounded to bfloat16 and a row's bits may differ from those in a small
    step."""

    def __init__(self, library: Library, options: BackendOptions) -> None:
        """On a processor without AMX, `takes` is always False."""
        available = library.linear_blocks_amx is not None and not options.deterministic
        self.takes_prompts = available and options.bf16_prefill
        self.takes_blocks = self.takes_prompts and options.activations == "int8"
        self.takes_panels = available

    def takes(self, x: Tensor, weight: object, activation: str | None = None) -> bool:
        """Whether to use `linear` for this product. activation: of gates, which precede ups in the weight's rows."""
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
        kernels: HasLibrary,
        x: Tensor,
        weight: BlockWeight | PanelWeight,
        bias: Tensor | None,
        *,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x @ weight.T + bias, or activation(gate) * up of it. library: with AMX, or one that records calls to it. out: where
        the result may be written."""
        if isinstance(weight, PanelWeight):
            return linear_panels_amx(kernels, x, weight, bias, activation=activation, out=out)
        out = None if x.dtype == torch.float16 else out
        return linear_blocks_amx(kernels, x, weight, bias, activation=activation, out=out)


_SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}

MAX_EXPERTS = 4096  # limit of experts.h

_ROWS, _PANELS, _BLOCKS = range(3)


class CompiledExperts(ExpertWeights):
    """Experts with their description for C. has_blocks: rows must be float32.

    amx_blocks, amx_panels: whether experts with many rows may use AMX, if available. Raises ValueError for weights that the
    kernels do not support, or whose parts differ between experts.
    """

    def __init__(
        self,
        weights: Sequence[ExpertWeight],
        biases: Sequence[Tensor] | None,
        library: Library,
        *,
        amx_blocks: bool = False,
        amx_panels: bool = False,
    ) -> None:
        super().__init__(weights, biases)
        parts = [_expert_parts(weight) for weight in self.weights]
        self.parts = len(parts[0])
        check(all(len(own) == self.parts for own in parts), "experts: their parts differ")
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
            found.get("linear_blocks_amx") if amx_blocks else None,
            found.get("linear_panels_amx") if amx_panels else None,
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
        check(part.shape[1] < 2 or part.stride(1) == 1, "experts: the elements of a row are not adjacent")
        fields.kind, fields.stride = _ROWS, part.stride(0)
    return fields


def route(
    kernels: HasLibrary, logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> Routed:
    rows, count = logits.shape
    check(
        logits.dtype == torch.float32
        and logits.is_cpu
        and (count < 2 or logits.stride(1) == 1)
        and all(one is None or vector_ok(one, torch.float32, count) for one in (bias, scales))
        and 1 <= routing.top_k <= count <= MAX_EXPERTS
        and count % routing.groups == 0
        and routing.top_k <= routing.top_groups * (count // routing.groups) <= count,
        f"route: logits are {logits.dtype} {tuple(logits.shape)} for {routing}",
    )
    chosen = torch.empty((rows, routing.top_k), dtype=torch.int64)
    weights = torch.empty((rows, routing.top_k), dtype=torch.float32)
    kernels.library.route_experts(
        *(logits.data_ptr(), logits.stride(0), address(bias), address(scales), count),
        *(routing.top_k, routing.groups, routing.top_groups),
        *(_SCORES[routing.scores], int(routing.group_score == "two largest"), int(routing.normalized)),
        *(routing.scale, routing.least_sum, routing.sum_eps, routing.jitter),
        *(chosen.data_ptr(), weights.data_ptr(), rows),
    )
    return Routed(chosen, weights)


def linear_of_experts(kernels: HasLibrary, x: Tensor, experts: CompiledExperts, chosen: Tensor) -> Tensor:
    """float32 and bfloat16 rows need no copy. Raises MemoryError, and IndexError for an expert out of range."""
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
    wide = adjacent(wide)
    out = torch.empty((rows, experts.columns), dtype=wide.dtype)
    if rows:
        code = kernels.library.linear_of_experts(
            *(*tensor2(wide), experts.address, len(experts), experts.parts, experts.products),
            *(chosen.data_ptr(), rows, rows // x.shape[0], out.data_ptr(), experts.columns, experts.inner),
        )
        if code == 2:
            raise IndexError(f"linear_of_experts: a row's expert is not one of {len(experts)}")
        if code:
            raise MemoryError("linear_of_experts: no memory")
    return out if out.dtype == x.dtype else out.to(x.dtype)


def sum_of_experts(kernels: HasLibrary, x: Tensor, weights: Tensor) -> Tensor:
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
    kernels.library.sum_of_experts(
        x.data_ptr(), TYPE_CODES[x.dtype], weights.data_ptr(), top_k, out.data_ptr(), rows, x.shape[1]
    )
    return out


class CompiledLowRankTable(LowRankTable):
    """A table with its description for C. columns, inner: of the matrix."""

    def __init__(self, slots: int, columns: int, inner: int) -> None:
        super().__init__(slots)
        self.columns, self.inner = columns, inner
        self._entries = (LowRankFields * slots)()
        self._parts: list[ctypes.Array[LowRankPartFields] | None] = [None] * slots
        self.address = ctypes.addressof(self._entries)

    def put(self, slot: int, update: LowRankUpdate | None) -> None:
        """Raises ValueError for an update of another matrix."""
        if update is None:
            self._entries[slot] = LowRankFields()
            self._parts[slot] = None
        else:
            self._check(update)
            parts = (LowRankPartFields * len(update.parts))(*map(_low_rank_fields, update.parts))
            down = update.down
            sizes = TYPE_CODES[down.dtype], update.rank, len(parts)
            self._entries[slot] = LowRankFields(down.data_ptr(), *sizes, ctypes.addressof(parts))
            self._parts[slot] = parts
        super().put(slot, update)

    def _check(self, update: LowRankUpdate) -> None:
        down = update.down
        wanted = (-(-update.rank // PANEL_ROWS), -(-self.inner // STRIP), PANEL_ROWS, STRIP)
        check(
            down.dtype in TYPE_CODES
            and down.is_cpu
            and down.is_contiguous()
            and down.shape == wanted
            and update.inner == self.inner,
            f"low rank: A [R, {update.inner}] is {down.dtype} {tuple(down.shape)}, not contiguous floats {wanted} for "
            f"[R, {self.inner}]",
        )
        for part in update.parts:
            shape = (-(-part.columns // PANEL_COLUMNS), part.rank, PANEL_COLUMNS)
            check(
                part.up.dtype in TYPE_CODES and part.up.is_cpu and part.up.is_contiguous() and part.up.shape == shape,
                f"low rank: B is {part.up.dtype} {tuple(part.up.shape)}, not contiguous floats {shape}",
            )
            check(
                0 <= part.first <= part.first + part.columns <= self.columns
                and 0 <= part.rank_first <= part.rank_first + part.rank <= update.rank,
                f"low rank: a part is outside [{self.columns}, {update.rank}]",
            )


def _low_rank_fields(part: LowRankPart) -> LowRankPartFields:
    sizes = TYPE_CODES[part.up.dtype], part.first, part.columns, part.rank_first, part.rank
    return LowRankPartFields(part.up.data_ptr(), *sizes, part.scale)


def add_low_rank(kernels: HasLibrary, out: Tensor, x: Tensor, table: CompiledLowRankTable, slots: Tensor) -> None:
    """out, x: with adjacent elements in a row. Raises IndexError for a slot that the table lacks, and MemoryError."""
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
    check_vectors("add_low_rank: slots", torch.int64, rows, slots)
    code = kernels.library.add_low_rank(
        *(x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), TYPE_CODES[x.dtype], slots.data_ptr()),
        *(rows, inner, table.address, len(table.changes)),
    )
    if code == 2:
        raise IndexError(f"add_low_rank: a row's slot is not one of {len(table.changes)}")
    if code:
        raise MemoryError("add_low_rank: no memory")
