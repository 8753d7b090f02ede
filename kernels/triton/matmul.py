"""Matrix products in Triton: quantized blocks, batch-independent plain products, per-head and per-expert products.

Only the compute dtype rounds. A kernel computes one tile, summing over K in a fixed order, so a row's bits follow from the
row, the weight and the tile sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.layouts.weight_layouts import BlockWeight, ExpertWeights, StackedWeight
from windlass.kernels.torch.reference import rounded
from windlass.kernels.triton.elementwise import part_of_row
from windlass.kernels.triton.launch import ELEMENT_TYPES, launch, power_of_two, strided, wait_for_predecessor
from windlass.kernels.triton.moe_routing import by_expert


@triton.jit
def block_numbers(codes, scales, supers, row, column, ok, groups, FORM: tl.constexpr):
    """Dequantized elements of a block weight at rows and columns, which broadcast, float32; see `weight_layouts`. ok: mask of
    valid ones. FORM: a `BlockForm`."""
    BITS: tl.constexpr = FORM.bits
    GROUP: tl.constexpr = FORM.group
    SUPER_GROUPS: tl.constexpr = FORM.super_groups
    PARTS: tl.constexpr = 2 if FORM.minimum else 1
    LINES: tl.constexpr = GROUP * BITS // 32
    panel = row // 16
    lane = row % 16
    group = column // GROUP
    quad = column % GROUP // 4
    at_group = panel.to(tl.int64) * groups + group
    line = codes + (at_group * LINES * 16 + lane) * 4 + column % 4
    if BITS == 8:
        code = tl.load(line + quad * 64, mask=ok, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        packed = tl.load(line + quad // 2 * 64, mask=ok, other=0).to(tl.int32)
        whole = (packed >> (quad % 2 * 4)) & 15
        if BITS > 4:
            WIDTH: tl.constexpr = BITS - 4
            EACH: tl.constexpr = 8 // WIDTH
            upper = tl.load(line + (GROUP // 8 + quad // EACH) * 64, mask=ok, other=0).to(tl.int32)
            whole = whole | (((upper >> (quad % EACH * WIDTH)) & ((1 << WIDTH) - 1)) << 4)
        code = whole.to(tl.float32)
    at_scale = at_group * PARTS * 16 + lane
    scale = tl.load(scales + at_scale, mask=ok, other=0).to(tl.float32)
    if SUPER_GROUPS > 0:
        supers_of_row = (groups + SUPER_GROUPS - 1) // SUPER_GROUPS
        at_super = (panel.to(tl.int64) * supers_of_row + group // SUPER_GROUPS) * PARTS * 16 + lane
        scale = scale * tl.load(supers + at_super, mask=ok, other=0).to(tl.float32)
    numbers = scale * (code - FORM.offset)
    if FORM.minimum:
        least = tl.load(scales + at_scale + 16, mask=ok, other=0).to(tl.float32)
        if SUPER_GROUPS > 0:
            least = -(least * tl.load(supers + at_super + 16, mask=ok, other=0).to(tl.float32))
        numbers = numbers + least
    return numbers


@triton.jit
def part_of_expert(tile, ends, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BY_PLACE: tl.constexpr):
    """The expert of a tile, its first row in sorted order, and the end of the expert's rows (not after the first row of an
    empty tile).

    Every expert begins a new tile: expert e has the tiles from ends[e - 1] // BLOCK_M + e on. BY_PLACE, for few rows: one
    tile per row, non-empty if the rows of an expert, or a tile of them, begin there.
    """
    index = tl.arange(0, power_of_two(EXPERTS))
    there = index < EXPERTS
    last = tl.load(ends + index, mask=there, other=0)
    if not BY_PLACE:
        last = last // BLOCK_M + index + 1
    expert = tl.sum((there & (last <= tile)).to(tl.int32))
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert, mask=expert < EXPERTS, other=0)
    if BY_PLACE:
        first = tl.where((tile - begin) % BLOCK_M == 0, tile, end)
    else:
        first = begin + (tile - (begin // BLOCK_M + expert)) * BLOCK_M
    return expert, first, end


# Rows differ from step to step: Triton would compile variants for 1, multiples of 16 and other values.
@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x,
    x_stride,
    x_batch_stride,
    out,
    out_stride,
    out_batch_stride,
    weight,
    scales,
    supers,
    bias,
    weight_row_stride,
    weight_column_stride,
    weight_batch_stride,
    order,
    row_ends,
    rows,
    columns,
    inner,
    groups,
    BATCHED: tl.constexpr,
    PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    BY_PLACE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS_TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """Program (tile of columns, tile of rows, batch): out[rows, columns] = x @ weight.T + bias.

    FORM: of a block weight, or None. order: None, or the places of the result sorted by expert; then `weight`, `scales`,
    `supers` and `bias` are int64 addresses per expert, and PER_ROW is the number of places per row of x. BY_PLACE: see
    `part_of_expert`. ALIGNED: whether 16 divides the addresses. ROWS_FIRST: program (tile of rows, tile of columns, batch).
    """
    wait_for_predecessor()
    tile = tl.program_id(0 if ROWS_FIRST else 1)
    batch = tl.program_id(2).to(tl.int64)
    if order is not None:
        expert, first, end = part_of_expert(tile, row_ends, EXPERTS, BLOCK_M, BY_PLACE)
        if first >= end:
            return
        place = first + tl.arange(0, BLOCK_M)
        row_ok = place < end
        to_row = tl.load(order + place, mask=row_ok, other=0)
        x_row = to_row // PER_ROW
        at_weight = tl.load(weight + expert).to(tl.pointer_type(WEIGHT))
        if ALIGNED:  # enables vector loads
            at_weight = tl.multiple_of(at_weight, 16)
        if FORM is not None:
            at_scales = tl.load(scales + expert).to(tl.pointer_type(SCALE))
            if ALIGNED:
                at_scales = tl.multiple_of(at_scales, 16)
            at_supers = at_scales.to(tl.pointer_type(tl.float16))
            if supers is not None:
                at_supers = tl.load(supers + expert).to(tl.pointer_type(tl.float16))
        if bias is not None:
            at_bias = tl.load(bias + expert).to(tl.pointer_type(BIAS_TYPE))
    else:
        to_row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_ok = to_row < rows
        x_row = to_row
        at_weight = weight
        at_scales = scales
        at_supers = supers
        at_bias = bias
        if BATCHED:
            at_weight = weight + batch * weight_batch_stride
    column = tl.program_id(1 if ROWS_FIRST else 0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < columns
    at_x = x + batch * x_batch_stride + x_row[:, None] * x_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin_k in range(0, inner, BLOCK_K):
        k = begin_k + tl.arange(0, BLOCK_K)
        k_ok = k < inner
        left = tl.load(at_x + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        ok = k_ok[:, None] & column_ok[None, :]
        if FORM is not None:
            right = block_numbers(at_weight, at_scales, at_supers, column[None, :], k[:, None], ok, groups, FORM)
        else:
            at = column[None, :].to(tl.int64) * weight_row_stride + k[:, None].to(tl.int64) * weight_column_stride
            right = tl.load(at_weight + at, mask=ok, other=0.0)
        total = tl.dot(left, right.to(left.dtype), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(at_bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    at_out = out + batch * out_batch_stride + to_row[:, None] * out_stride + column[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def embed_blocks_kernel(
    ids,
    codes,
    scales,
    supers,
    out,
    columns,
    groups,
    table_rows,
    factor,
    FORM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row of the result, part of the columns): a dequantized row of a block table, NaN for a row out of range.

    SCALED: rounded, then times the factor and rounded again.
    """
    wait_for_predecessor()
    to, column, ok = part_of_row(columns, BLOCK)
    row = tl.load(ids + to)
    there = (row >= 0) & (row < table_rows)
    numbers = block_numbers(codes, scales, supers, row, column, ok & there, groups, FORM)
    kind = out.dtype.element_ty
    found = tl.where(there, numbers, float("nan")).to(kind)
    if SCALED:
        found = (found.to(tl.float32) * factor).to(kind)
    tl.store(out + to * columns + column, found, mask=ok)


_MOST_BEHIND = 65535  # limit of a grid in all dimensions but the first

_MANY_ROWS = 256  # from which on dequantized blocks are used for twice as many rows


class Tile(NamedTuple):
    """Tile sizes: rows and columns of the result, elements of K at a time, warps, and pipeline stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    @property
    def shared_memory(self) -> int:
        """Sizes for 16-bit types."""
        return (self.rows + self.columns) * self.inner * 2 * self.stages


def linear(x: Tensor, weight: Tensor | BlockWeight, bias: Tensor | None = None, *, fixed: bool = False) -> Tensor:
    """x @ weight.T + bias. x: [T, K]; returns [T, N] in x's dtype. fixed: one tile size for any number of rows."""
    x = strided(x)
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, out, _Operands.of(weight), bias, fixed=fixed)
    return out


def by_head(x: Tensor, matrices: Tensor, *, fixed: bool = False) -> Tensor:
    """x: [T, H, K], matrices: [H, K, N] with any strides. Returns [T, H, N] in x's dtype."""
    x, strides = strided(x), (matrices.stride(2), matrices.stride(1), matrices.stride(0))
    out = x.new_empty(*x.shape[:2], matrices.shape[2])
    _launch(x, out, _Operands(matrices, None, None, strides, None), None, fixed=fixed)
    return out


@dataclass(frozen=True, slots=True)
class _Operands:
    """A weight as kernel arguments: tensors or their addresses; strides of rows, columns and batches."""

    weight: Tensor
    scales: Tensor | None
    supers: Tensor | None
    strides: tuple[int, int, int]
    example: BlockWeight | None
    weight_type: torch.dtype | None = None  # if the weight is given by addresses
    aligned: bool = True  # whether 16 divides addresses

    @classmethod
    def of(cls, weight: Tensor | BlockWeight) -> "_Operands":
        if isinstance(weight, BlockWeight):
            return cls(weight.codes, weight.scales, weight.supers, (0, 0, 0), weight)
        return cls(weight, None, None, (weight.stride(0), weight.stride(1), 0), None)

    @classmethod
    def of_experts(cls, weights: Sequence[Any]) -> "_Operands":
        first = weights[0]
        if isinstance(first, BlockWeight):
            supers = None if first.supers is None else _addresses([weight.supers for weight in weights])
            scales = _addresses([weight.scales for weight in weights])
            aligned = _are_aligned([part for w in weights for part in (w.codes, w.scales)])
            return cls(_addresses([w.codes for w in weights]), scales, supers, (0, 0, 0), first, torch.uint8, aligned)
        strides = first.stride(0), first.stride(1), 0
        return cls(_addresses(weights), None, None, strides, None, first.dtype, _are_aligned(weights))


@dataclass(frozen=True, slots=True)
class _ExpertPart:
    """Rows first .. first + columns of every expert's weight, as tables of addresses; biases: the same for biases."""

    first: int
    columns: int
    operands: _Operands
    biases: Tensor | None


class PointerTableExperts(ExpertWeights):
    """Experts with tables of addresses. parts: empty if their weights differ in kind."""

    def __init__(self, weights: Sequence[Any], biases: Sequence[Tensor] | None = None) -> None:
        super().__init__(weights, biases)
        self.parts: tuple[_ExpertPart, ...] = ()
        spans = [
            weight.spans() if isinstance(weight, StackedWeight) else [(weight, 0, self.columns)] for weight in weights
        ]
        one_type = self.biases is None or len({bias.dtype for bias in self.biases}) == 1
        if one_type and len({tuple(span[1:] for span in own) for own in spans}) == 1:
            parts = [self._part([own[place] for own in spans]) for place in range(len(spans[0]))]
            self.parts = tuple([part for part in parts if part is not None])
            if len(self.parts) < len(parts):
                self.parts = ()

    def _part(self, spans: Sequence[tuple[Any, int, int]]) -> _ExpertPart | None:
        """The same rows of every expert; None if they differ in kind."""
        weights, (_, first, end) = [weight for weight, _, _ in spans], spans[0]
        if len({_kind_of(weight) for weight in weights}) > 1 or _kind_of(weights[0]) is None:
            return None
        biases = None if self.biases is None else _addresses([bias[first:end] for bias in self.biases])
        return _ExpertPart(first, end - first, _Operands.of_experts(weights), biases)


def _kind_of(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return weight.dtype, weight.stride()
    return weight.form if isinstance(weight, BlockWeight) else None


def linear_of_experts(x: Tensor, experts: PointerTableExperts, chosen: Tensor, *, fixed: bool = False) -> Tensor:
    """See `Backend.linear_of_experts`, for experts with tables."""
    if not experts.parts:
        raise ValueError("experts of several kinds have no tables")
    x = strided(x)
    whole = x.new_empty(chosen.numel(), experts.columns)
    order, ends = by_expert(chosen, len(experts))
    for part in experts.parts:
        out = whole[:, part.first : part.first + part.columns]
        _launch(x, out, part.operands, part.biases, fixed=fixed, experts=experts, order=order, ends=ends)
    return whole


def embed(table: BlockWeight, ids: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """See `Backend.embed`; an id out of range gives NaN."""
    out = torch.empty(ids.shape[0], table.columns, dtype=dtype, device=table.device)
    block = min(1024, power_of_two(table.columns))
    launch(
        embed_blocks_kernel,
        (ids.shape[0], -(-table.columns // block)),
        out,
        ids.contiguous(),
        table.codes,
        table.scales,
        table.supers,
        out,
        table.columns,
        table.codes.shape[1],
        table.rows,
        rounded(scale, dtype),
        FORM=table.form,
        SCALED=scale != 1,
        BLOCK=block,
    )
    return out


def _addresses(tensors: Sequence[Any]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=tensors[0].device)


def _are_aligned(tensors: Sequence[Any]) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _launch(
    x: Tensor,
    out: Tensor,
    operands: _Operands,
    bias: Tensor | None,
    *,
    fixed: bool,
    experts: PointerTableExperts | None = None,
    order: Tensor | None = None,
    ends: Tensor | None = None,
) -> None:
    """x: [T, K], or [T, H, K] for a product per head; out alike. fixed: see `linear`. order, ends: see `by_expert`."""
    blocks, count = operands.example, 0 if experts is None else len(experts)
    biases = None if experts is None else experts.biases
    rows, columns, batches = out.shape[0], out.shape[-1], out.shape[1] if out.ndim == 3 else 1
    tile = _tile(1 if fixed else -(-rows // max(count, 1)), x, blocks, experts=count > 0)
    tiles = -(-rows // tile.rows) if not count else rows // tile.rows + count
    by_place = count > 0 and rows < tiles
    row_tiles, column_tiles = rows if by_place else tiles, -(-columns // tile.columns)
    rows_first = row_tiles > _MOST_BEHIND  # otherwise adjacent programs read the same rows
    launch(
        matmul_kernel,
        (row_tiles, column_tiles, batches) if rows_first else (column_tiles, row_tiles, batches),
        x,
        x,
        x.stride(0),
        x.stride(1) if batches > 1 else 0,
        out,
        out.stride(0),
        out.stride(1) if batches > 1 else 0,
        operands.weight,
        operands.scales,
        operands.supers,
        bias,
        *operands.strides,
        order,
        ends,
        rows,
        columns,
        x.shape[-1],
        0 if blocks is None else blocks.codes.shape[1],
        BATCHED=batches > 1,
        PER_ROW=rows // max(x.shape[0], 1),
        EXPERTS=count,
        BY_PLACE=by_place,
        ALIGNED=operands.aligned,
        FORM=None if blocks is None else blocks.form,
        WEIGHT=ELEMENT_TYPES[operands.weight_type or operands.weight.dtype],
        SCALE=None if blocks is None else ELEMENT_TYPES[blocks.scales.dtype],
        BIAS_TYPE=None if biases is None else ELEMENT_TYPES[biases[0].dtype],
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        ROWS_FIRST=rows_first,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _tile(rows: int, x: Tensor, blocks: BlockWeight | None, *, experts: bool) -> Tile:
    """rows: per weight."""
    if x.element_size() == 4:  # multiplied without tensor cores
        return Tile(16 if rows <= 16 else 32, 64, 32, 4, 3)
    if rows <= 16:
        return Tile(16, 64, 128 if experts and blocks is None else 64, 4, 3)
    return Tile(64, 64, 64, 4, 3) if blocks is None or rows < _MANY_ROWS else Tile(128, 64, 64, 8, 3)
