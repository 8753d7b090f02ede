"""Dense feed-forward (MLP): with a gate (SwiGLU and its variants, 2002.05202) or without. Specifications and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from windlass.engine.model.adapted_linear import adapted_linear
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, norm_weight, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, Weight


Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "xielu"]


@dataclass(frozen=True, slots=True)
class GatedMLPNames:
    """Checkpoint tensor names within the layer."""

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None  # both in one tensor
    down: str = "mlp.down_proj"
    inner_norm: str | None = None  # RMS norm before the down projection

    @classmethod
    def under(cls, prefix: str) -> GatedMLPNames:
        """The usual names under another prefix than "mlp"."""
        return cls(f"{prefix}.gate_proj", f"{prefix}.up_proj", down=f"{prefix}.down_proj")


@dataclass(frozen=True, slots=True)
class GatedMLPSpec:
    """down(activation(gate(x)) * up(x)); bias: of all three. factors: multiply the outputs of gate and down."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    names: GatedMLPNames = GatedMLPNames()
    factors: tuple[float, float] | None = None

    @property
    def unfused(self) -> GatedMLPSpec:
        """The same with gate and up stored separately."""
        return replace(self, names=replace(self.names, gate_up=None))

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `GatedMLPWeights`. Gate and up are fused, so that the input is read once."""
        names, size = self.names, self.intermediate_size
        if names.gate_up is not None:
            gate_up = [StoredTensor(names.gate_up, 2 * size, role="gate up")]
        else:
            gate_up = [StoredTensor(names.gate, size, role="gate"), StoredTensor(names.up, size, role="up")]
        inner = () if names.inner_norm is None else (norm_weight("inner_norm", names.inner_norm, size),)
        return (
            *projection("gate_up", gate_up, hidden_size, bias=self.bias),
            *inner,
            *projection("down", [StoredTensor(names.down, hidden_size, role="down")], size, bias=self.bias),
        )


@dataclass(frozen=True, slots=True)
class PlainMLPNames:
    """Checkpoint tensor names within the layer."""

    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    numbers: str = "mlp.act_fn"  # learned numbers of xIELU
    transposed: bool = False  # matrices are stored as [columns, rows] (GPT-2)


@dataclass(frozen=True, slots=True)
class PlainMLPSpec:
    """down(activation(up(x))); bias: of both."""

    intermediate_size: int
    activation: Activation
    bias: bool = False
    names: PlainMLPNames = PlainMLPNames()

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `PlainMLPWeights`."""
        names, size = self.names, self.intermediate_size
        up = StoredTensor(names.up, size, role="up", transposed=names.transposed)
        down = StoredTensor(names.down, hidden_size, role="down", transposed=names.transposed)
        numbers = ("alpha_p", "alpha_n", "beta", "eps") if self.activation == "xielu" else ()
        return (
            *projection("up", [up], hidden_size, bias=self.bias),
            *(WeightSpec(one, "number", (1,), (StoredTensor(f"{names.numbers}.{one}", 1),)) for one in numbers),
            *projection("down", [down], size, bias=self.bias),
        )


MLPSpec: TypeAlias = GatedMLPSpec | PlainMLPSpec


def mlp_spec(size: int, activation: Activation, bias: bool, names: GatedMLPNames | PlainMLPNames) -> MLPSpec:
    """size: intermediate. bias: of all projections. The kind follows from the names."""
    if isinstance(names, GatedMLPNames):
        return GatedMLPSpec(size, activation, bias, names)
    return PlainMLPSpec(size, activation, bias, names)


@dataclass(slots=True)
class GatedMLPWeights:
    """Weights listed by `GatedMLPSpec.weights`."""

    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    inner_norm: Tensor | None = None  # [intermediate] float32


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: GatedMLPSpec, weights: Mapping[str, Any], norm_eps: float, backend: Backend) -> None:
        """weights: the fields of `GatedMLPWeights`. norm_eps: of the inner norm."""
        self.spec = spec
        self.weights = GatedMLPWeights(**weights)
        self._backend, self._eps = backend, norm_eps
        self._factors: tuple[Tensor, Tensor, Tensor] | None = None  # [2 * intermediate], ones, [1]
        if spec.factors is not None:
            import torch

            of_gate, of_down = spec.factors
            ones = torch.ones(2 * spec.intermediate_size, dtype=torch.float32, device=backend.device)
            columns = ones.clone()
            columns[: spec.intermediate_size] = of_gate
            self._factors = columns, ones, ones.new_full((1,), of_down)

    def forward(self, x: Tensor, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. Returns [T, hidden]."""
        w, backend = self.weights, self._backend
        if lora is None and self._factors is None:
            y = backend.gated_linear(x, w.gate_up, w.gate_up_bias, self.spec.activation)
        else:
            gate_up = adapted_linear(backend, "gate_up", x, w.gate_up, w.gate_up_bias, lora)
            if self._factors is not None:
                backend.scale_columns(gate_up, *self._factors[:2])
            y = backend.gated_activation(gate_up, self.spec.activation)
        if w.inner_norm is not None:
            y = backend.rms_norm(y, w.inner_norm, self._eps)
        out = adapted_linear(backend, "down", y, w.down, w.down_bias, lora)
        if self._factors is not None:
            backend.multiply(out, self._factors[2])
        return out


@dataclass(slots=True)
class PlainMLPWeights:
    """Weights listed by `PlainMLPSpec.weights`."""

    up: Weight  # [intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha_p: Tensor | None = None  # [1] float32 each, of xIELU
    alpha_n: Tensor | None = None
    beta: Tensor | None = None
    eps: Tensor | None = None


class PlainMLP:
    """down(activation(up(x)))."""

    def __init__(self, spec: PlainMLPSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        """weights: the fields of `PlainMLPWeights`."""
        self.spec = spec
        self.weights = PlainMLPWeights(**weights)
        self._backend = backend

    def forward(self, x: Tensor, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. Returns [T, hidden]."""
        w, backend = self.weights, self._backend
        up = adapted_linear(backend, "up", x, w.up, w.up_bias, lora)
        if w.alpha_p is None or w.alpha_n is None or w.beta is None or w.eps is None:
            y = backend.activation(up, self.spec.activation)
        else:
            y = backend.xielu(up, w.alpha_p, w.alpha_n, w.beta, w.eps)
        return adapted_linear(backend, "down", y, w.down, w.down_bias, lora)


def build_mlp(spec: MLPSpec, weights: Mapping[str, Any], norm_eps: float, backend: Backend) -> GatedMLP | PlainMLP:
    """The layer of this specification. norm_eps: of the inner norm, if there is one."""
    if isinstance(spec, GatedMLPSpec):
        return GatedMLP(spec, weights, norm_eps, backend)
    return PlainMLP(spec, weights, backend)
