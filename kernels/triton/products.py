"""Products with weights in blocks, with plain ones whose rows are to be independent, by head, and of experts.

Nothing is rounded but what the compute dtype rounds: rows meet the numbers that blocks mean. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from windlass.kernels.layouts.blocks import BlockWeight
from windlass.kernels.layouts.experts import ExpertWeights
from windlass.kernels.layouts.stacked import StackedWeight
from windlass.kernels.torch.reference import rounded
from windlass.kernels.triton.launch import dot_type, launch, power_of_two, strided
from windlass.kernels.triton.programs.product import embed_blocks_kernel, matmul_kernel
from windlass.kernels.triton.routing import by_expert

_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}
_MOST_BEHIND = 65535  # programs that a device counts in any but the first direction
_MANY_ROWS = 256  # from which on numbers made of blocks are for twice as many of them


class Tile(NamedTuple):
    """Sizes of a program: its part of the result, what it takes of rows at once, its warps, and parts on their way."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    @property
    def shared_memory(self) -> int:
        """Of numbers of 16 bits."""
        return (self.rows + self.columns) * self.inner * 2 * self.stages


def linear(x: Tensor, weight: Tensor | BlockWeight, bias: Tensor | None = None, *, fixed: bool = False) -> Tensor:
    """x @ weight.T + bias. x: [T, K]; returns [T, N] in x's dtype. fixed: tiles of one size, however many rows there are."""
    x = strided(x)
    out = x.new_empty(x.shape[0], weight.shape[0])
    operands = _Operands.of(weight)
    _launch(x, (x.stride(0), 0), out, (out.stride(0), 0), operands, bias, x.shape[0], *weight.shape, fixed=fixed)
    return out


def by_head(x: Tensor, matrices: Tensor, *, fixed: bool = False) -> Tensor:
    """x: [T, H, K], matrices: [H, K, N] with any strides. Returns [T, H, N] in x's dtype."""
    x = strided(x)
    heads, inner, columns = matrices.shape
    out = x.new_empty(x.shape[0], heads, columns)
    operands = _Operands(matrices, None, None, (matrices.stride(2), matrices.stride(1), matrices.stride(0)), None)
    _launch(
        x,
        (x.stride(0), x.stride(1)),
        out,
        (out.stride(0), out.stride(1)),
        operands,
        None,
        x.shape[0],
        columns,
        inner,
        fixed=fixed,
        batches=heads,
    )
    return out


@dataclass(frozen=True, slots=True)
class _ExpertPart:
    """Rows first .. first + columns of every expert's weight, with a table of where each lies. biases: the same of these."""

    first: int
    columns: int
    operands: _Operands
    biases: Tensor | None


class PointerTableExperts(ExpertWeights):
    """Experts with tables of where each lies. parts: none where their weights are not of one kind."""

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
        """Of the same rows of every expert; None where they are of several kinds."""
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
    """See `Backend.linear_of_experts`, for experts that have tables."""
    if not experts.parts:
        raise ValueError("experts of several kinds have no tables")
    x = strided(x)
    places = chosen.numel()
    whole = x.new_empty(places, experts.columns)
    order, ends = by_expert(chosen, len(experts))
    for part in experts.parts:
        out = whole[:, part.first : part.first + part.columns]
        _launch(
            x,
            (x.stride(0), 0),
            out,
            (out.stride(0), 0),
            part.operands,
            part.biases,
            places,
            part.columns,
            experts.inner,
            fixed=fixed,
            experts=len(experts),
            order=order,
            ends=ends,
            per_row=places // max(x.shape[0], 1),
            bias_type=None if experts.biases is None else experts.biases[0].dtype,
        )
    return whole


def embed(table: BlockWeight, ids: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """See `Backend.embed`; an id that the table lacks gives NaN."""
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
        **_form_sizes(table),
        SCALED=scale != 1,
        BLOCK=block,
    )
    return out


def _form_sizes(weight: BlockWeight | None) -> dict[str, Any]:
    form = None if weight is None else weight.form
    return {
        "BITS": form.bits if form else 0,
        "GROUP": form.group if form else 32,
        "SUPER_GROUPS": form.super_groups if form else 0,
        "MINIMUM": bool(form and form.minimum),
        "OFFSET": float(form.offset) if form else 0.0,
    }


@dataclass(frozen=True, slots=True)
class _Operands:
    """A weight as its program takes it: tensors, or addresses of them; strides of a row, a column and a batch."""

    weight: Tensor
    scales: Tensor | None
    supers: Tensor | None
    strides: tuple[int, int, int]
    example: BlockWeight | None
    weight_type: torch.dtype | None = None  # where addresses do not tell
    aligned: bool = True  # whether 16 divides addresses

    @classmethod
    def of(cls, weight: Tensor | BlockWeight) -> _Operands:
        if isinstance(weight, BlockWeight):
            return cls(weight.codes, weight.scales, weight.supers, (0, 0, 0), weight)
        return cls(weight, None, None, (weight.stride(0), weight.stride(1), 0), None)

    @classmethod
    def of_experts(cls, weights: Sequence[Any]) -> _Operands:
        first = weights[0]
        if isinstance(first, BlockWeight):
            supers = None if first.supers is None else _addresses([weight.supers for weight in weights])
            scales = _addresses([weight.scales for weight in weights])
            aligned = _are_aligned([part for w in weights for part in (w.codes, w.scales)])
            return cls(_addresses([w.codes for w in weights]), scales, supers, (0, 0, 0), first, torch.uint8, aligned)
        strides = first.stride(0), first.stride(1), 0
        return cls(_addresses(weights), None, None, strides, None, first.dtype, _are_aligned(weights))


def _addresses(tensors: Sequence[Any]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=tensors[0].device)


def _are_aligned(tensors: Sequence[Any]) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _launch(
    x: Tensor,
    x_strides: tuple[int, int],
    out: Tensor,
    out_strides: tuple[int, int],
    operands: _Operands,
    bias: Tensor | None,
    rows: int,
    columns: int,
    inner: int,
    *,
    fixed: bool,
    batches: int = 1,
    experts: int = 0,
    order: Tensor | None = None,
    ends: Tensor | None = None,
    per_row: int = 1,
    bias_type: torch.dtype | None = None,
) -> None:
    """fixed: see `linear`. batches: heads. experts: how many there are, 0 for a product that has none."""
    blocks = operands.example
    dot, precision = dot_type(x.dtype)
    tile = _tile(1 if fixed else -(-rows // max(experts, 1)), x, blocks, experts=experts > 0)
    tiles = -(-rows // tile.rows) if not experts else rows // tile.rows + experts
    by_place = experts > 0 and rows < tiles
    row_tiles, column_tiles = rows if by_place else tiles, -(-columns // tile.columns)
    rows_first = row_tiles > _MOST_BEHIND  # else programs side by side read the same rows
    launch(
        matmul_kernel,
        (row_tiles, column_tiles, batches) if rows_first else (column_tiles, row_tiles, batches),
        x,
        x,
        *x_strides,
        out,
        *out_strides,
        operands.weight,
        operands.scales,
        operands.supers,
        bias,
        *operands.strides,
        order,
        ends,
        rows,
        columns,
        inner,
        0 if blocks is None else blocks.codes.shape[1],
        BATCHED=batches > 1,
        GROUPED=experts > 0,
        PER_ROW=per_row,
        EXPERTS=experts,
        BLOCK_E=power_of_two(experts),
        BY_PLACE=by_place,
        ALIGNED=operands.aligned,
        BLOCKS=blocks is not None,
        **_form_sizes(blocks),
        BIAS=bias is not None,
        WEIGHT=_TYPES[operands.weight_type or operands.weight.dtype],
        SCALE=tl.float32 if blocks is None else _TYPES[blocks.scales.dtype],
        BIAS_TYPE=_TYPES[bias_type or torch.float32],
        DOT=dot,
        PRECISION=precision,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        ROWS_FIRST=rows_first,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _tile(rows: int, x: Tensor, blocks: BlockWeight | None, *, experts: bool) -> Tile:
    """rows: that meet a weight."""
    if x.element_size() == 4:  # multiplied number by number, out of registers
        return Tile(16 if rows <= 16 else 32, 64, 32, 4, 3)
    if rows <= 16:
        return Tile(16, 64, 128 if experts and blocks is None else 64, 4, 3)
    return Tile(64, 64, 64, 4, 3) if blocks is None or rows < _MANY_ROWS else Tile(128, 64, 64, 8, 3)
