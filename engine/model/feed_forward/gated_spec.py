"""The description of a gated feed-forward: its width and activation, and its weights with their names in checkpoints.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, norm, projection

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "xielu"]


@dataclass(frozen=True, slots=True)
class GatedMLPNames:
    """Of a checkpoint's tensors, within their layer. gate_up: where the two are stored as one.

    inner_norm: of an RMS norm over what meets the down projection.
    """

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    down: str = "mlp.down_proj"
    inner_norm: str | None = None


@dataclass(frozen=True, slots=True)
class GatedMLPSpec:
    """down(activation(gate(x)) * up(x)); bias: on all three. factors: what gate and down give is multiplied by."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    names: GatedMLPNames = GatedMLPNames()
    factors: tuple[float, float] | None = None

    @property
    def unfused(self) -> GatedMLPSpec:
        """The same with the two stored as two."""
        return replace(self, names=replace(self.names, gate_up=None))

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `GatedMLPWeights`: gate and up fused, so that the input is read once."""
        names, size = self.names, self.intermediate_size
        if names.gate_up is not None:
            gate_up = [StoredTensor(names.gate_up, 2 * size, role="gate up")]
        else:
            gate_up = [StoredTensor(names.gate, size, role="gate"), StoredTensor(names.up, size, role="up")]
        inner = () if names.inner_norm is None else (norm("inner_norm", names.inner_norm, size),)
        return (
            *projection("gate_up", gate_up, hidden_size, bias=self.bias),
            *inner,
            *projection("down", [StoredTensor(names.down, hidden_size, role="down")], size, bias=self.bias),
        )
