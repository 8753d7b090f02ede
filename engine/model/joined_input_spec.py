"""The description of what the first layer of a prediction layer is given: a token's embedding joined with a hidden state.

A prediction layer tells a token further ahead than its model does (DeepSeek-V3, 2412.19437, section 2.2: multi-token
prediction). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.model.norm_spec import NormSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, projection


@dataclass(frozen=True, slots=True)
class MTPInputSpec:
    """matrix @ [norm(embedding of the next token), norm(hidden state of a token)], both [hidden].

    The state is the model's behind its final norm. Names are those of the tensors, whole, without their ".weight".
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
