"""What the first layer of a prediction layer is given. Knows its spec, its weights and the backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windlass.engine.model.norm import Norm
from windlass.engine.model.norm_spec import NormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.kernels import Backend, Weight


class MTPInput:
    """See `MTPInputSpec`."""

    def __init__(
        self, form: NormSpec, weights: Mapping[str, Any], hidden_size: int, eps: float, backend: Backend
    ) -> None:
        """form: of the norms. weights: those that the spec lists. eps: of the norms."""
        self._backend = backend
        self._embedding_norm = Norm.of(form, weights, "joined_embedding_norm", hidden_size, eps, backend)
        self._state_norm = Norm.of(form, weights, "joined_state_norm", hidden_size, eps, backend)
        self._matrix: Weight = weights["joined"]  # [hidden, 2 * hidden]

    def forward(self, embedding: Tensor, states: Tensor) -> Tensor:
        """embedding: [T, hidden]. states: [T, hidden], of any type. Returns [T, hidden] in memory of its own."""
        import torch

        normed = self._embedding_norm(embedding), self._state_norm(states.to(embedding.dtype))
        return self._backend.linear(torch.cat(normed, dim=1), self._matrix)
