"""Products of many rows with experts of plain weights of 16 bits, as prompts have them; see `programs.grouped`. Knows which tiles
they take.

Nothing here waits for the device.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from windlass.kernels.operations.routing import Routed
from windlass.kernels.triton.launch import Device, launch, power_of_two, strided
from windlass.kernels.triton.pointwise import check_activation, sum_of_experts
from windlass.kernels.triton.products import PointerTableExperts, Tile
from windlass.kernels.triton.programs.grouped import grouped_gemm_kernel
from windlass.kernels.triton.routing import by_expert

_BIAS_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# From so many rows of an expert on, the first that a GPU has the memory for.
_TILES = (
    (96, Tile(128, 256, 64, 8, 4)),
    (96, Tile(128, 256, 64, 8, 3)),
    (96, Tile(128, 128, 64, 8, 3)),
    (32, Tile(64, 128, 64, 4, 3)),
)
_FEWEST_ROWS = min(least for least, _ in _TILES)


def tile_for(rows: int, device: Device) -> Tile:
    """rows: of an expert, on average; not fewer than `takes_grouped` wants."""
    fitting = (tile for least, tile in _TILES if rows >= least and tile.shared_memory <= device.shared_memory)
    return next(fitting)


def takes_grouped(x: Tensor, places: int, *several: PointerTableExperts) -> bool:
    """Whether experts have many rows each, and weights of x's type that are read in whole pieces."""
    return x.element_size() == 2 and all(
        places >= _FEWEST_ROWS * len(experts) and _has_whole_pieces(experts, x.dtype) for experts in several
    )


def _has_whole_pieces(experts: PointerTableExperts, dtype: torch.dtype) -> bool:
    if len(experts.parts) != 1:
        return False
    operands = experts.parts[0].operands
    row, column, _ = operands.strides
    return (
        operands.example is None and operands.weight_type == dtype and operands.aligned and column == 1 and row % 8 == 0
    )


def linear_of_experts(x: Tensor, experts: PointerTableExperts, chosen: Tensor, device: Device) -> Tensor:
    """See `Backend.linear_of_experts`; of what it `takes_grouped`."""
    order, ends = by_expert(chosen, len(experts))
    tile = tile_for(chosen.numel() // len(experts), device)
    per_row = chosen.numel() // x.shape[0]
    return multiply_grouped(x, experts, order, ends, tile, gathered=True, scattered=True, per_row=per_row)


def feed_forward_of_experts(
    x: Tensor,
    gate_up: PointerTableExperts,
    down: PointerTableExperts,
    routed: Routed,
    activation: str,
    device: Device,
) -> Tensor:
    """See `Backend.feed_forward_of_experts`; of what it `takes_grouped`. Between the products rows lie in the order of experts."""
    check_activation(activation)
    chosen, weights = routed
    order, ends = by_expert(chosen, len(gate_up))
    tile = tile_for(chosen.numel() // len(gate_up), device)
    y = multiply_grouped(x, gate_up, order, ends, tile, gathered=True, per_row=chosen.shape[1], activation=activation)
    return sum_of_experts(multiply_grouped(y, down, order, ends, tile, scattered=True), weights)


def multiply_grouped(
    x: Tensor,
    experts: PointerTableExperts,
    order: Tensor,
    ends: Tensor,
    tile: Tile,
    *,
    gathered: bool = False,
    scattered: bool = False,
    per_row: int = 1,
    activation: str | None = None,
) -> Tensor:
    """gathered, scattered: whether rows of x, and of the result, lie by place; else they lie in the order of experts.

    order, ends: see `by_expert`. per_row: places of a row that is gathered. activation: what opens the gates, see
    `Backend.gated_linear`."""
    x, places = strided(x), order.shape[0]
    part = experts.parts[0]
    out = x.new_empty(places, experts.columns if activation is None else experts.columns // 2)
    launch(
        grouped_gemm_kernel,
        (-(-experts.columns // tile.columns), places // tile.rows + len(experts)),
        x,
        x,
        x.stride(0),
        out,
        out.stride(0),
        part.operands.weight,
        part.operands.strides[0],
        part.biases,
        order,
        ends,
        experts.columns,
        experts.inner,
        PER_ROW=per_row,
        EXPERTS=len(experts),
        BLOCK_E=power_of_two(len(experts)),
        GATHERED=gathered,
        SCATTERED=scattered,
        KIND=activation,
        BIAS=part.biases is not None,
        BIAS_TYPE=_BIAS_TYPES[torch.float32 if experts.biases is None else experts.biases[0].dtype],
        WHOLE=experts.inner % tile.inner == 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
