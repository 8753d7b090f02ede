"""State-space layer (Mamba 2, 2405.21060): specification and layer, alone or in parallel with attention (Falcon H1, 2507.22448).

The recurrent state decays with each token and is updated by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from windlass.engine.cache.kv_cache_spec import StateGroupSpec
from windlass.engine.model.adapted_linear import adapted_linear
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, depthwise_convolution, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows, Weight


@dataclass(frozen=True, slots=True)
class StateSpaceNames:
    """Checkpoint tensor names within the layer."""

    projections: str = "mamba.in_proj"
    convolution: str = "mamba.conv1d"
    rate: str = "mamba.A_log"
    step_bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    norm: str = "mamba.norm"
    out: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class StateSpaceSpec:
    """One layer with `heads` heads of state, each with values of head_dim; they share `groups` heads of keys and
    queries of state_dim."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int  # of the convolution, in tokens
    norm_eps: float
    limits: tuple[float, float] = (0.0, math.inf)  # of a token's step size
    bias: bool = False  # of both projections
    convolution_bias: bool = True
    names: StateSpaceNames = StateSpaceNames()
    in_gguf: bool = False  # rates are stored as negative numbers, not as logarithms; vectors as columns or by group
    normed: Literal["gated", "before the gate"] | None = "gated"  # place of the norm of each group before the output
    factors: tuple[float, float, float, float, float] | None = None  # of projected gates, values, keys, queries, steps

    @property
    def values(self) -> int:
        """Number of values of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.values + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> tuple[int, int, int]:
        """Projected columns: gates; values, keys and queries; steps."""
        return self.values, self.channels, self.heads

    def state_group(self, layers: tuple[int, ...]) -> StateGroupSpec:
        """State group of these layers, which all have this specification."""
        return StateGroupSpec(layers, self.channels, self.width, self.heads, self.state_dim, self.head_dim)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `StateSpaceWeights`."""
        names, heads = self.names, self.heads
        columns, rows = (heads, self.groups) if self.in_gguf else (None, None)

        rate = StoredTensor(names.rate, heads, reshape_rows=columns, transform="negative" if self.in_gguf else "exp")
        norm = StoredTensor(f"{names.norm}.weight", self.values, reshape_rows=rows)
        projected = [StoredTensor(names.projections, sum(self.projected), role="q k v")]
        return (
            *projection("projections", projected, hidden_size, bias=self.bias),
            *depthwise_convolution(
                names.convolution, self.channels, self.width, bias=self.convolution_bias, in_gguf=self.in_gguf
            ),
            WeightSpec("rate", "shift", (heads,), (rate,)),
            WeightSpec("step_bias", "shift", (heads,), (StoredTensor(names.step_bias, heads),)),
            WeightSpec("skip", "shift", (heads,), (StoredTensor(names.skip, heads, reshape_rows=columns),)),
            *((WeightSpec("norm", "shift", (self.values,), (norm,)),) if self.normed is not None else ()),
            *projection("out", [StoredTensor(names.out, hidden_size, role="out")], self.values, bias=self.bias),
        )


STATE_SPACE_PREFIX = "state."


@dataclass(frozen=True, slots=True)
class ParallelStateSpaceSpec:
    """A state-space layer in parallel with attention: attention_factor * attention(x) + state_factor * state_space(x)."""

    state_space: StateSpaceSpec
    attention_factor: float = 1.0
    state_factor: float = 1.0

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """Weights of the state-space layer, prefixed with `STATE_SPACE_PREFIX`."""
        return tuple(weight.with_prefix(STATE_SPACE_PREFIX, "") for weight in self.state_space.weights(hidden_size))


@dataclass(slots=True)
class StateSpaceWeights:
    """Weights listed by `StateSpaceSpec.weights`. H heads of D values; C channels: H D values, keys and queries."""

    projections: Weight  # [H D + C + H, hidden]: gates; values, keys and queries; steps
    convolution: Tensor  # [C, width] float32
    rate: Tensor  # [H] float32
    step_bias: Tensor  # [H] float32
    skip: Tensor  # [H] float32
    out: Weight  # [hidden, H D]
    norm: Tensor | None = None  # [H D] float32
    projections_bias: Tensor | None = None  # [H D + C + H]
    convolution_bias: Tensor | None = None  # [C] float32
    out_bias: Tensor | None = None  # [hidden]


class StateSpace:
    """Project, convolve, read and update the state, gate what was read, norm it by groups, project back.

    weights: the fields of `StateSpaceWeights`.
    """

    def __init__(self, spec: StateSpaceSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        import torch

        self.spec = spec
        self.weights = StateSpaceWeights(**weights)
        self._backend = backend
        self._ones = torch.ones(sum(spec.projected), dtype=torch.float32, device=backend.device)
        self._factors: Tensor | None = None  # of projected columns
        if spec.factors is not None:
            keys = spec.groups * spec.state_dim
            counts = torch.tensor((spec.values, spec.values, keys, keys, spec.heads))
            self._factors = torch.tensor(spec.factors, dtype=torch.float32).repeat_interleave(counts).to(backend.device)

    def forward(self, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. states: of this layer, changed in place. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        projected = adapted_linear(backend, "projections", x, w.projections, w.projections_bias, lora)
        if self._factors is not None:
            backend.scale_columns(projected, self._factors, self._ones)
        gate, mixed, step = projected.split_with_sizes(spec.projected, 1)
        mixed = backend.short_convolution(mixed, w.convolution, states.window, rows, "silu", w.convolution_bias)
        parts = mixed, step, w.rate, w.step_bias, w.skip
        read = backend.state_space(*parts, states.memory, rows, limits=spec.limits)  # [T, H D]
        if spec.normed == "before the gate":
            read = self._normed(read)
        backend.multiply(read, backend.activation(gate, "silu"))
        if spec.normed == "gated":
            read = self._normed(read)
        return adapted_linear(backend, "out", read, w.out, w.out_bias, lora)

    def _normed(self, read: Tensor) -> Tensor:
        """Norm of each group of heads. read: [T, H D]."""
        spec, weight, backend = self.spec, self.weights.norm, self._backend
        assert weight is not None
        if spec.groups == 1:
            return backend.rms_norm(read, weight, spec.norm_eps)
        size = spec.values // spec.groups
        normed = backend.rms_norm(read.view(-1, spec.groups, size), self._ones[:size], spec.norm_eps).view(read.shape)
        backend.scale_columns(normed, weight, self._ones[: spec.values])
        return normed


class ParallelStateSpace:
    """See `ParallelStateSpaceSpec`. weights: those that the spec lists, by name."""

    def __init__(self, spec: ParallelStateSpaceSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        import torch

        own = {name.removeprefix(STATE_SPACE_PREFIX): weight for name, weight in weights.items()}
        self._state_space = StateSpace(spec.state_space, own, backend)
        self._backend = backend
        self._attention_factor, self._state_factor = (
            torch.full((1,), factor, dtype=torch.float32, device=backend.device)
            for factor in (spec.attention_factor, spec.state_factor)
        )

    def combine(
        self, y: Tensor, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None
    ) -> Tensor:
        """Add the state-space output for x to the attention output y, which is changed in place. x: the layer's normed
        input. states: of this layer, changed in place. All [T, hidden]."""
        backend = self._backend
        z = self._state_space.forward(x, rows, states, None if lora is None else lora.with_prefix(STATE_SPACE_PREFIX))
        backend.multiply(y, self._attention_factor)
        backend.multiply(z, self._state_factor)
        backend.add(y, z)
        return y
