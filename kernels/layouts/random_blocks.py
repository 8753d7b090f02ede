"""Random weights in blocks, for models without a checkpoint: written straight into the layout. Knows no backend."""

from __future__ import annotations

import math

import torch

from windlass.kernels.layouts.blocks import PANEL, BlockWeight


def randomize(weight: BlockWeight, generator: torch.Generator | None = None) -> None:
    """Fill a weight: every code is equally likely, and numbers have the mean 0 and the variance 1 / columns."""
    form, groups = weight.form, weight.scales.shape[1]
    # Eight bytes at a time, of all the bits there are.
    weight.codes.view(-1).view(torch.int64).random_(-(1 << 63), None, generator=generator)
    # Codes without a minimum have the mean -1/2, which scales of both signs turn to zero.
    spread = (4**form.bits - 1) / 12 + (0.0 if form.minimum else 0.25)
    scale = 1.0 / math.sqrt(weight.columns * spread)
    centre = ((1 << form.bits) - 1) / 2
    # As bytes: the largest for which the minimum's byte is one, too.
    byte = int(255 / centre) if form.minimum else 64
    if weight.supers is not None:
        weight.supers.fill_(scale / byte)
    unit = float(byte) if form.super_groups else scale
    if form.minimum:
        weight.scales[:, :, 0] = unit
        weight.scales[:, :, 1] = unit * centre * (1.0 if form.super_groups else -1.0)
    else:
        signs = torch.randint(
            0, 2, (len(weight.scales), groups, 1, PANEL), generator=generator, device=weight.scales.device
        )
        weight.scales.copy_((signs * 2 - 1) * unit)
    if weight.rows % PANEL:  # padding
        for tensor in (weight.codes.transpose(3, 4), weight.scales, weight.supers):
            if tensor is not None:
                tensor[-1, ..., weight.rows % PANEL :] = 0
