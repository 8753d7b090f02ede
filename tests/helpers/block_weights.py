"""Block weights with random codes, for tests without a quantizer."""

from __future__ import annotations

import torch

from windlass.kernels import BlockForm, BlockWeight
from windlass.kernels.layouts.weight_layouts import store_block_rows


def random_blocks(rows: int, columns: int, form: BlockForm) -> BlockWeight:
    """Return random codes with scales of both signs; values are of order one. The padding of K has nonzero codes."""
    weight = BlockWeight.empty(rows, columns, form)
    groups = weight.scales.shape[1]
    low, high, kind = (-127, 128, torch.int8) if form.bits == 8 else (0, 1 << form.bits, torch.uint8)
    weight.codes.fill_(0x5A)
    codes = torch.randint(low, high, (rows, columns), dtype=kind)
    if form.super_groups:
        scales = torch.randint(0 if form.minimum else -64, 64, (rows, groups, form.parts)).to(weight.scales.dtype)
        supers = torch.randn(rows, -(-groups // form.super_groups), form.parts).half() / (1 << form.bits + 5)
    else:
        scales, supers = torch.randn(rows, groups, form.parts).half() / (1 << form.bits - 1), None
    if form.minimum:  # about the largest code times the scale
        (scales if supers is None else supers)[..., 1] *= 1 << form.bits - 1
    store_block_rows(weight.narrow(0, rows), codes, scales, supers)
    return weight
