"""The weights of one product of every expert of a layer. Knows the weights by their shapes only."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from windlass.kernels.layouts.blocks import BlockWeight
from windlass.kernels.layouts.panels import PanelWeight
from windlass.kernels.layouts.stacked import StackedWeight

ExpertWeight = Tensor | PanelWeight | BlockWeight | StackedWeight


class ExpertWeights:
    """weights: [columns, inner] of each expert, all of one shape. biases: [columns] of each, or None.

    Raises ValueError for experts of different shapes.
    """

    def __init__(self, weights: Sequence[ExpertWeight], biases: Sequence[Tensor] | None = None) -> None:
        self.weights, self.biases = tuple(weights), None if biases is None else tuple(biases)
        shapes = {tuple(weight.shape) for weight in self.weights}
        if len(shapes) != 1:
            raise ValueError(f"experts are of one shape, not of {sorted(shapes)}")
        self.columns, self.inner = shapes.pop()
        if self.biases is not None and {tuple(bias.shape) for bias in self.biases} != {(self.columns,)}:
            raise ValueError("experts have a bias each, as long as they have rows")
        if self.biases is not None and len(self.biases) != len(self.weights):
            raise ValueError(f"{len(self.weights)} experts and {len(self.biases)} biases")

    def __len__(self) -> int:
        return len(self.weights)

    def bias(self, expert: int) -> Tensor | None:
        return None if self.biases is None else self.biases[expert]
