"""Filling weights in blocks on the CPU: from the bytes of GGUF files, and from floats. Knows shapes, types and forms only."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.layouts.blocks import BlockRows, BlockWeight
from windlass.kernels.layouts.forms import FORMS
from windlass.kernels.torch.block_bytes import check_blocks

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
