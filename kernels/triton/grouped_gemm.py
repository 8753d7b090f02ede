"""Grouped GEMM in Triton: many rows times plain 16-bit expert weights, with gathered inputs and fused gated activation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.backend import Routed
from windlass.kernels.triton.elementwise import activated, check_activation, sum_of_experts
from windlass.kernels.triton.launch import ELEMENT_TYPES, Device, launch, strided, wait_for_predecessor
from windlass.kernels.triton.matmul import PointerTableExperts, Tile, part_of_expert
from windlass.kernels.triton.moe_routing import by_expert


@triton.jit
def grouped_gemm_kernel(
    x,
    x_stride,
    out,
    out_stride,
    weights,
    weight_stride,
    biases,
    order,
    ends,
    columns,
    inner,
    PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATHERED: tl.constexpr,
    SCATTERED: tl.constexpr,
    KIND: tl.constexpr,
    BIAS_TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of columns, tile of rows): x @ weight.T + bias, where `weights` and `biases` are addresses by expert.

    order, ends: see `by_expert`. GATHERED, SCATTERED: whether rows of x, or of the result, are in the order of places; else
    they are in the order of experts. PER_ROW: places per row of x, if gathered. KIND: an activation or None; with one, the
    first half of the columns are gates, the second half ups. WHOLE: whether BLOCK_K divides `inner`.
    """
    wait_for_predecessor()
    expert, first, end = part_of_expert(tl.program_id(1), ends, EXPERTS, BLOCK_M, BY_PLACE=False)
    if first >= end:
        return
    weight = tl.multiple_of(tl.load(weights + expert).to(tl.pointer_type(x.dtype.element_ty)), 16)
    place = first + tl.arange(0, BLOCK_M)
    row_ok = place < end
    place = tl.minimum(place, end - 1)
    x_row = place
    to_row = place
    if GATHERED:
        x_row = tl.load(order + place) // PER_ROW
    if SCATTERED:
        to_row = tl.load(order + place)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(column, columns - 1)
    if KIND is not None:  # gates and ups alternate, so that a thread has both
        weight_row = weight_row // 2 + weight_row % 2 * (columns // 2)
    k = tl.arange(0, BLOCK_K)
    at_x = x + x_row[:, None] * x_stride + k[None, :]
    at_weight = weight + weight_row[None, :].to(tl.int64) * weight_stride + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin_k in range(0, inner, BLOCK_K):
        if WHOLE:
            left = tl.load(at_x, mask=row_ok[:, None], other=0.0)
            right = tl.load(at_weight)
        else:
            k_ok = k < inner - begin_k
            left = tl.load(at_x, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
            right = tl.load(at_weight, mask=k_ok[:, None], other=0.0)
        total = tl.dot(left, right, total)
        at_x += BLOCK_K
        at_weight += BLOCK_K
    if biases is not None:
        bias = tl.load(biases + expert).to(tl.pointer_type(BIAS_TYPE))
        total += tl.load(bias + weight_row).to(tl.float32)[None, :]
    if KIND is not None:
        gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
        total = activated(gate, KIND, QUICK=True) * up
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        columns = columns // 2
    at_out = out + to_row[:, None] * out_stride + column[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=row_ok[:, None] & (column < columns)[None, :])


# Sizes by minimum number of rows per expert; the first that fits into shared memory is used.
_TILES = (
    (96, Tile(128, 256, 64, 8, 4)),
    (96, Tile(128, 256, 64, 8, 3)),
    (96, Tile(128, 128, 64, 8, 3)),
    (32, Tile(64, 128, 64, 4, 3)),
)

_FEWEST_ROWS = min(least for least, _ in _TILES)


def tile_for(rows: int, device: Device) -> Tile:
    """rows: per expert, on average; at least the minimum of `takes_grouped`."""
    fitting = (tile for least, tile in _TILES if rows >= least and tile.shared_memory <= device.shared_memory)
    return next(fitting)


def takes_grouped(x: Tensor, places: int, *several: PointerTableExperts) -> bool:
    """Whether experts have many rows each, and aligned weights of x's type."""
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
    """See `Backend.linear_of_experts`; requires `takes_grouped`."""
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
    """See `Backend.feed_forward_of_experts`; requires `takes_grouped`. Between the products, rows are in the order of
    experts."""
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
    """gathered, scattered: whether rows of x, and of the result, are in the order of places; else in the order of experts.

    order, ends: see `by_expert`. per_row: places per gathered row. activation: of gates, see `Backend.gated_linear`."""
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
        GATHERED=gathered,
        SCATTERED=scattered,
        KIND=activation,
        BIAS_TYPE=None if experts.biases is None else ELEMENT_TYPES[experts.biases[0].dtype],
        WHOLE=experts.inner % tile.inner == 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
