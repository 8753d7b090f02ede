"""The description of a layer whose memory each token lets fade and adds to (Mamba 2, arXiv 2405.21060): shapes, weights, names.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from windlass.engine.cache.layout import StateGroupSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, projection


@dataclass(frozen=True, slots=True)
class StateSpaceNames:
    """Of a checkpoint's tensors, within their layer."""

    projections: str = "mamba.in_proj"
    convolution: str = "mamba.conv1d"
    rate: str = "mamba.A_log"
    step_bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    norm: str = "mamba.norm"
    out: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class StateSpaceSpec:
    """One layer. heads: of its memory, each with values of head_dim; they share `groups` heads of keys and queries of state_dim.

    width: of the convolution, in tokens. norm_eps: of the norm in front of the output, which norms each group for itself. limits:
    of the steps that tokens take. bias: on both projections; convolution_bias: on the convolution. in_gguf: a file has rates and
    not their logarithms, negative, and vectors as columns or with a row for each group. normed: when that norm is, None where
    there is none. factors: what projected gates, values, keys, queries and steps are multiplied by.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int
    norm_eps: float
    limits: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    convolution_bias: bool = True
    names: StateSpaceNames = StateSpaceNames()
    in_gguf: bool = False
    normed: Literal["gated", "before the gate"] | None = "gated"
    factors: tuple[float, float, float, float, float] | None = None

    @property
    def values(self) -> int:
        """Of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: values, keys and queries."""
        return self.values + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> tuple[int, int, int]:
        """How many numbers of each kind are projected: gates; values, keys and queries; steps."""
        return self.values, self.channels, self.heads

    def state_group(self, layers: tuple[int, ...]) -> StateGroupSpec:
        """The states of these layers, all of this kind."""
        return StateGroupSpec(layers, self.channels, self.width, self.heads, self.state_dim, self.head_dim)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `StateSpaceWeights`."""
        names, channels, heads = self.names, self.channels, self.heads
        columns, rows = (heads, self.groups) if self.in_gguf else (None, None)
        taps = StoredTensor(f"{names.convolution}.weight", channels, channels=not self.in_gguf)
        shift = WeightSpec(
            "convolution_bias", "shift", (channels,), (StoredTensor(f"{names.convolution}.bias", channels),)
        )
        rate = StoredTensor(names.rate, heads, by_head=columns, made="negative" if self.in_gguf else "exp")
        norm = StoredTensor(f"{names.norm}.weight", self.values, by_head=rows)
        projected = [StoredTensor(names.projections, sum(self.projected), role="q k v")]
        return (
            *projection("projections", projected, hidden_size, bias=self.bias),
            WeightSpec("convolution", "score", (channels, self.width), (taps,)),
            *((shift,) if self.convolution_bias else ()),
            WeightSpec("rate", "shift", (heads,), (rate,)),
            WeightSpec("step_bias", "shift", (heads,), (StoredTensor(names.step_bias, heads),)),
            WeightSpec("skip", "shift", (heads,), (StoredTensor(names.skip, heads, by_head=columns),)),
            *((WeightSpec("norm", "shift", (self.values,), (norm,)),) if self.normed is not None else ()),
            *projection("out", [StoredTensor(names.out, hidden_size, role="out")], self.values, bias=self.bias),
        )
