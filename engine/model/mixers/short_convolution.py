"""A layer of a short convolution between two gates, which its input makes itself (LFM2, arXiv 2511.23404).

Knows its spec, its weights and the backend. It knows no other layer, no checkpoint and no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.mixers.short_convolution_spec import ShortConvolutionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows, Weight


@dataclass(slots=True)
class ShortConvolutionWeights:
    """As `ShortConvolutionSpec.weights` lists them. C channels."""

    projections: Weight  # [3 C, hidden]: what gates the input, what gates the output, the input
    convolution: Tensor  # [C, width] float32
    out: Weight  # [hidden, C]
    projections_bias: Tensor | None = None  # [3 C]
    convolution_bias: Tensor | None = None  # [C] float32
    out_bias: Tensor | None = None  # [hidden]


class ShortConvolution:
    """out(c * convolution(b * x)), where b, c and x are projected from the same.

    weights: the fields of `ShortConvolutionWeights`.
    """

    def __init__(self, spec: ShortConvolutionSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        self.spec = spec
        self.weights = ShortConvolutionWeights(**weights)
        self._backend = backend

    def forward(self, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. states: of this layer, changed in place. changes: what adapters add. Returns [T, hidden]."""
        w, backend = self.weights, self._backend
        projected = backend.linear(x, w.projections, w.projections_bias)
        if lora is not None:
            lora.add("projections", projected, x)
        given, gate, values = projected.split_with_sizes([self.spec.channels] * 3, 1)
        backend.multiply(given, values)
        mixed = backend.short_convolution(given, w.convolution, states.window, rows, None, w.convolution_bias)
        backend.multiply(mixed, gate)
        out = backend.linear(mixed, w.out, w.out_bias)
        if lora is not None:
            lora.add("out", out, mixed)
        return out
