"""Experts on the CPU: routing, products of rows with experts of their own, and their sums. Knows shapes and types only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.kernels.cpu import blocks, panels
from windlass.kernels.cpu.checks import check, vector_ok
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.cpu.linear import ACTIVATION_TYPES
from windlass.kernels.cpu.structs import ExpertPartFields, ExpertProductsFields
from windlass.kernels.layouts.blocks import BlockWeight
from windlass.kernels.layouts.experts import ExpertWeight, ExpertWeights
from windlass.kernels.layouts.panels import PanelWeight
from windlass.kernels.layouts.stacked import Part, StackedWeight
from windlass.kernels.operations.routing import Routed, Routing

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
            *(blocks.BLOCK_TILE_MIN_ROWS, panels.PANEL_TILE_MIN_ROWS),
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
