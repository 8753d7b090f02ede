"""The description of a memory that fades beside the attention of a layer (Falcon H1, arXiv 2507.22448). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.model.mixers.state_space_spec import StateSpaceSpec
from windlass.engine.model.weight_spec import WeightSpec

STATE_SPACE_PREFIX = "state."


@dataclass(frozen=True, slots=True)
class ParallelStateSpaceSpec:
    """Both read the layer's normed input, and what they make is added: `attention_factor` times the attention's, `state_factor` times the
    memory's."""

    state: StateSpaceSpec
    attention_factor: float = 1.0
    state_factor: float = 1.0

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """Those of the memory, behind `STATE_SPACE_PREFIX`."""
        return tuple(weight.with_prefix(STATE_SPACE_PREFIX, "") for weight in self.state.weights(hidden_size))
