"""Input of an MTP layer: a token's embedding and a hidden state, normed and projected to one vector.

Multi-token prediction as in DeepSeek-V3 (2412.19437, section 2.2): the layer predicts the token after the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.norm import Norm, NormSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.kernels import Backend, Weight


@dataclass(frozen=True, slots=True)
class MTPInputSpec:
    """matrix @ [norm(embedding of the next token), norm(hidden state of a token)], both [hidden].

    The hidden state is the model's after its final norm. Names are full tensor names without ".weight".
    """

    embedding_norm: str
    state_norm: str
    matrix: str

    def weights(self, hidden_size: int, form: NormSpec) -> tuple[WeightSpec, ...]:
        """The two norms and the matrix [hidden, 2 * hidden]."""
        return (
            *form.weights("joined_embedding_norm", self.embedding_norm, hidden_size),
            *form.weights("joined_state_norm", self.state_norm, hidden_size),
            *projection("joined", [StoredTensor(self.matrix, hidden_size)], 2 * hidden_size, bias=False),
        )


class MTPInput:
    """See `MTPInputSpec`."""

    def __init__(
        self, form: NormSpec, weights: Mapping[str, Any], hidden_size: int, eps: float, backend: Backend
    ) -> None:
        """form, eps: of the norms. weights: those that the spec lists."""
        self._backend = backend
        self._embedding_norm = Norm.from_weights(form, weights, "joined_embedding_norm", hidden_size, eps, backend)
        self._state_norm = Norm.from_weights(form, weights, "joined_state_norm", hidden_size, eps, backend)
        self._matrix: Weight = weights["joined"]  # [hidden, 2 * hidden]

    def forward(self, embedding: Tensor, states: Tensor) -> Tensor:
        """embedding: [T, hidden]. states: [T, hidden] of any dtype. Returns [T, hidden] in new memory."""
        import torch

        normed = self._embedding_norm(embedding), self._state_norm(states.to(embedding.dtype))
        return self._backend.linear(torch.cat(normed, dim=1), self._matrix)
