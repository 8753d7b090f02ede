"""The description of a layer of a short convolution between two gates (LFM2, arXiv 2511.23404): shapes, weights, names.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.cache.layout import StateGroupSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, projection


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
