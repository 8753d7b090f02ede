"""Quantizes rows into blocks, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.layouts.blocks import BlockRows, store


def pack(target: BlockRows, source: Tensor) -> None:
    """Quantize source [count, columns], float32 or narrower, into rows of a weight in blocks.

    Raises ValueError for a form that nothing is quantized into.
    """
    form = target.weight.form
    if form.name != "q8_0":
        raise ValueError(f"nothing is quantized into {form.name}")
    groups = F.pad(source.float(), (0, -source.shape[1] % form.group)).view(source.shape[0], -1, form.group)
    scale = (groups.abs().amax(2) / 127.0).half()
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale.float())
    codes = (groups * inverse[:, :, None]).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    store(target, codes.flatten(1)[:, : source.shape[1]].contiguous(), scale[:, :, None])
