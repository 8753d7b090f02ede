"""Short convolution between two gates (LFM2, 2511.23404): specification and layer. Its recurrent state is the last inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.cache.kv_cache_spec import StateGroupSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows, Weight


@dataclass(frozen=True, slots=True)
class ShortConvolutionNames:
    """Of a checkpoint's tensors, within their layer."""

    projections: str = "conv.in_proj"
    convolution: str = "conv.conv"
    out: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class ShortConvolutionSpec:
    """One layer. width: of the convolution, in tokens. bias: on both projections and the convolution.

    in_gguf: the tensor of its weights is [channels, width], as GGUF files have it.
    """

    channels: int
    width: int
    bias: bool = False
    names: ShortConvolutionNames = ShortConvolutionNames()
    in_gguf: bool = False

    def state_group(self, layers: tuple[int, ...]) -> StateGroupSpec:
        """The states of these layers, all of this kind: inputs of convolutions alone."""
        return StateGroupSpec(layers, self.channels, self.width, heads=0, key_dim=0, value_dim=0)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `ShortConvolutionWeights`."""
        names, channels = self.names, self.channels
        taps = StoredTensor(f"{names.convolution}.weight", channels, channels=not self.in_gguf)
        shift = WeightSpec(
            "convolution_bias", "shift", (channels,), (StoredTensor(f"{names.convolution}.bias", channels),)
        )
        stored = StoredTensor(names.projections, 3 * channels, role="q k v")
        return (
            *projection("projections", [stored], hidden_size, bias=self.bias),
            WeightSpec("convolution", "score", (channels, self.width), (taps,)),
            *((shift,) if self.bias else ()),
            *projection("out", [StoredTensor(names.out, hidden_size, role="out")], channels, bias=self.bias),
        )


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
