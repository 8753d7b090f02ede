"""The description of what each layer is given of a token beside the stream: its weights with their names in checkpoints.

Such models have a further, narrow embedding of each token for every layer (Gemma 3n and 4). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.model.feed_forward.gated_spec import Activation
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, norm, projection


@dataclass(frozen=True, slots=True)
class PerLayerEmbeddingsSpec:
    """Of all layers: the table's row of a token and what is projected from its embedding, normed, are added, `size` numbers for
    each layer. rows: of the table. Names are those of tensors beside the embedding."""

    size: int
    rows: int
    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"

    def weights(self, hidden_size: int, layers: int, embedding: str) -> tuple[WeightSpec, ...]:
        """Those around the layers. embedding: the name of its tensor."""
        width, place = layers * self.size, embedding.rpartition(".")
        prefix = place[0] + place[1]
        table = StoredTensor(f"{prefix}{self.table}.weight", self.rows)
        return (
            WeightSpec("layer_inputs_table", "wide table", (self.rows, width), (table,)),
            *projection("layer_inputs", [StoredTensor(prefix + self.projection, width)], hidden_size, bias=False),
            norm("layer_inputs_norm", prefix + self.norm, self.size),
        )


@dataclass(frozen=True, slots=True)
class PerLayerProjectionSpec:
    """Of one layer: x + norm(out(activation(gate(x)) * input)), behind its other parts. size: of the input."""

    size: int
    activation: Activation
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `LayerInputWeights` behind "input_"."""
        return (
            *projection("input_gate", [StoredTensor(self.gate, self.size)], hidden_size, bias=False),
            *projection("input_out", [StoredTensor(self.out, hidden_size)], self.size, bias=False),
            norm("input_norm", self.norm, hidden_size),
        )
