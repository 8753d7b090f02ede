"""Fills a Decoder's tensors with random numbers, for benchmarks: no file is read."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.weights import Progress
from windlass.kernels import Backend, BlockWeight, PanelWeight, StackedWeight, Weight
from windlass.kernels.layouts import random_blocks
from windlass.kernels.layouts.blocks import PANEL

_RANDOM_BYTES = 4 << 20  # drawn at a time for a weight in panels: they are still in a cache when they are packed


def randomize_weights(decoder: Decoder, seed: int, progress: Progress | None = None) -> None:
    """Distinct random weights everywhere, scaled so that activations stay of order one."""
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    tensors = decoder.tensors()
    for i, tensor in enumerate(tensors):
        _randomize(decoder.backend, tensor, generator)
        if progress:
            progress("making random weights", i + 1, len(tensors))


def _randomize(backend: Backend, weight: Weight, generator: torch.Generator) -> None:
    if isinstance(weight, StackedWeight):
        for part in weight.parts:
            _randomize(backend, part, generator)
    elif isinstance(weight, BlockWeight):
        random_blocks.randomize(weight, generator)
    elif isinstance(weight, PanelWeight):
        _randomize_panels(backend, weight, generator)
    elif weight.dim() == 1:
        weight.copy_(1 + 0.1 * torch.randn(weight.shape, generator=generator, device=weight.device))
    else:
        _randomize_rows(weight, generator)


def _randomize_rows(rows: Tensor, generator: torch.Generator) -> None:
    """Uniform, several times quicker to draw than normal; the variance is that of 1 / fan-in."""
    bound = (3.0 / rows.shape[1]) ** 0.5
    rows.uniform_(-bound, bound, generator=generator)


def _randomize_panels(backend: Backend, weight: PanelWeight, generator: torch.Generator) -> None:
    """The same numbers that the weight would get as rows."""
    step = max(1, _RANDOM_BYTES // (PANEL * max(weight.columns, 1) * weight.dtype.itemsize)) * PANEL
    for first in range(0, weight.rows, step):
        rows = torch.empty((min(step, weight.rows - first), weight.columns), dtype=weight.dtype)
        _randomize_rows(rows, generator)
        backend.pack(weight.narrow(first, len(rows)), rows)
