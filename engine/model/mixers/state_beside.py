"""A memory that fades beside the attention of a layer (Falcon H1, arXiv 2507.22448).

Knows its spec, its weights and the backend. It knows no other layer, no checkpoint and no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windlass.engine.model.mixers.state_beside_spec import STATE_SPACE_PREFIX, ParallelStateSpaceSpec
from windlass.engine.model.mixers.state_space import StateSpace

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows


class ParallelStateSpace:
    """Adds to what the attention made. weights: of `ParallelStateSpaceSpec.weights`, by those names."""

    def __init__(self, spec: ParallelStateSpaceSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        import torch

        own = {name.removeprefix(STATE_SPACE_PREFIX): weight for name, weight in weights.items()}
        self._state = StateSpace(spec.state, own, backend)
        self._backend = backend
        self._attention_factor, self._state_factor = (
            torch.full((1,), factor, dtype=torch.float32, device=backend.device)
            for factor in (spec.attention_factor, spec.state_factor)
        )

    def combine(
        self, y: Tensor, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None
    ) -> Tensor:
        """y: [T, hidden], what the attention made of x, the layer's normed input; it is changed in place. states: of this layer,
        changed in place. changes: what adapters add. Returns [T, hidden]."""
        backend = self._backend
        z = self._state.forward(x, rows, states, None if lora is None else lora.with_prefix(STATE_SPACE_PREFIX))
        backend.multiply(y, self._attention_factor)
        backend.multiply(z, self._state_factor)
        backend.add(y, z)
        return y
