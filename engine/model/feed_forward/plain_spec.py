"""The description of a feed-forward without a gate: its width and activation, and its weights with their names in checkpoints.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.model.feed_forward.gated_spec import Activation
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, projection


@dataclass(frozen=True, slots=True)
class PlainMLPNames:
    """Of a checkpoint's tensors, within their layer. numbers: those of xIELU, which is learned.

    transposed: matrices have columns where others have rows (GPT-2).
    """

    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    numbers: str = "mlp.act_fn"
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class PlainMLPSpec:
    """down(activation(up(x))); bias: on both."""

    intermediate_size: int
    activation: Activation
    bias: bool = False
    names: PlainMLPNames = PlainMLPNames()

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `PlainMLPWeights`."""
        names, size = self.names, self.intermediate_size
        up = StoredTensor(names.up, size, role="up", transposed=names.transposed)
        down = StoredTensor(names.down, hidden_size, role="down", transposed=names.transposed)
        return (
            *projection("up", [up], hidden_size, bias=self.bias),
            *self._numbers(),
            *projection("down", [down], size, bias=self.bias),
        )

    def _numbers(self) -> tuple[WeightSpec, ...]:
        if self.activation != "xielu":
            return ()
        prefix = self.names.numbers
        return tuple(
            WeightSpec(name, "number", (1,), (StoredTensor(f"{prefix}.{name}", 1),))
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
