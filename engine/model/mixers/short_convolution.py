"""Short convolution between two gates (LFM2, 2511.23404): specification and layer. Its recurrent state is the last inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.cache.kv_cache_spec import StateGroupSpec
from windlass.engine.model.adapted_linear import adapted_linear
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, depthwise_convolution, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows, Weight


@dataclass(frozen=True, slots=True)
class ShortConvolutionNames:
    """Checkpoint tensor names within the layer."""

    projections: str = "conv.in_proj"
    convolution: str = "conv.conv"
    out: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class ShortConvolutionSpec:
    """One layer."""

    channels: int
    width: int  # of the convolution, in tokens
    bias: bool = False  # of both projections and the convolution
    names: ShortConvolutionNames = ShortConvolutionNames()
    in_gguf: bool = False  # shape of the stored convolution, see `depthwise_convolution`

    def state_group(self, layers: tuple[int, ...]) -> StateGroupSpec:
        """State group of these layers, which all have this specification: inputs of convolutions only."""
        return StateGroupSpec(layers, self.channels, self.width, heads=0, key_dim=0, value_dim=0)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `ShortConvolutionWeights`."""
        names, channels = self.names, self.channels

        stored = StoredTensor(names.projections, 3 * channels, role="q k v")
        return (
            *projection("projections", [stored], hidden_size, bias=self.bias),
            *depthwise_convolution(names.convolution, channels, self.width, bias=self.bias, in_gguf=self.in_gguf),
            *projection("out", [StoredTensor(names.out, hidden_size, role="out")], channels, bias=self.bias),
        )


@dataclass(slots=True)
class ShortConvolutionWeights:
    """Weights listed by `ShortConvolutionSpec.weights`. C channels."""

    projections: Weight  # [3 C, hidden]: input gate, output gate, input
    convolution: Tensor  # [C, width] float32
    out: Weight  # [hidden, C]
    projections_bias: Tensor | None = None  # [3 C]
    convolution_bias: Tensor | None = None  # [C] float32
    out_bias: Tensor | None = None  # [hidden]


class ShortConvolution:
    """out(c * convolution(b * x)), where b, c and x are projections of the same input.

    weights: the fields of `ShortConvolutionWeights`.
    """

    def __init__(self, spec: ShortConvolutionSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        self.spec = spec
        self.weights = ShortConvolutionWeights(**weights)
        self._backend = backend

    def forward(self, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. states: of this layer, changed in place. Returns [T, hidden]."""
        w, backend = self.weights, self._backend
        projected = adapted_linear(backend, "projections", x, w.projections, w.projections_bias, lora)
        gated, gate, values = projected.split_with_sizes([self.spec.channels] * 3, 1)
        backend.multiply(gated, values)
        mixed = backend.short_convolution(gated, w.convolution, states.window, rows, None, w.convolution_bias)
        backend.multiply(mixed, gate)
        return adapted_linear(backend, "out", mixed, w.out, w.out_bias, lora)
