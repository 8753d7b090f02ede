"""Which products the processor's matrix unit makes for a backend, and those products. Knows types and rows, no models."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.backend import BackendOptions
from windlass.kernels.cpu import blocks, gates, panels
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts.blocks import BlockWeight
from windlass.kernels.layouts.panels import PanelWeight


class MatrixUnit:
    """What a backend leaves to the unit: products of many rows, where they may be rounded as it does and a row's bits may differ
    from those it has in a small step."""

    def __init__(self, library: Library, options: BackendOptions) -> None:
        """There need not be such a unit: it then takes nothing."""
        there = library.linear_blocks_rounded is not None and not options.deterministic
        self.takes_prompts = there and options.bf16_prefill
        self.takes_blocks = self.takes_prompts and options.activations == "int8"
        self.takes_panels = there

    def takes(self, x: Tensor, weight: object, activation: str | None = None) -> bool:
        """Whether `linear` makes this product. activation: of gates, before ups in the weight's rows."""
        rows = x.shape[0]
        if isinstance(weight, BlockWeight):
            fits = self.takes_blocks and rows >= blocks.BLOCK_TILE_MIN_ROWS
        elif isinstance(weight, PanelWeight):
            adjacent = x.stride(1) == 1 or x.shape[1] == 1
            narrow = x.dtype == weight.dtype == torch.bfloat16
            fits = self.takes_panels and rows >= panels.PANEL_TILE_MIN_ROWS and narrow and adjacent
        else:
            return False
        return fits and (activation is None or gates.fills_panels(weight.rows))

    def linear(
        self,
        x: Tensor,
        weight: BlockWeight | PanelWeight,
        bias: Tensor | None,
        *,
        library: Library,
        activation: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x @ weight.T + bias, or activation(gate) * up of it. library: of the unit, or one that records what is asked. out:
        where the result may be written; it does not have to be."""
        if isinstance(weight, PanelWeight):
            return panels.linear_panels_rounded(x, weight, bias, activation=activation, out=out, library=library)
        out = None if x.dtype == torch.float16 else out
        return blocks.linear_blocks_rounded(x, weight, bias, activation=activation, out=out, library=library)
