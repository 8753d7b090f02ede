"""Per-layer embeddings (Gemma 3n and 4): a further, narrow embedding of each token for every layer.

The embeddings of all layers are computed at once; each layer gates, projects and adds its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.adapted_linear import adapted_linear
from windlass.engine.model.feed_forward.mlp import Activation
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, norm_weight, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, BlockWeight, Weight


@dataclass(frozen=True, slots=True)
class PerLayerEmbeddingsSpec:
    """Embeddings for all layers: the token's row of the table plus a normed projection of its embedding, `size` numbers
    per layer.

    rows: of the table. Tensor names are relative to those of the embedding.
    """

    size: int
    rows: int
    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"

    def weights(self, hidden_size: int, layers: int, embedding: str) -> tuple[WeightSpec, ...]:
        """Weights outside the layers. embedding: the embedding's tensor name."""
        width, prefix = layers * self.size, embedding[: embedding.rfind(".") + 1]
        table = StoredTensor(f"{prefix}{self.table}.weight", self.rows)
        return (
            WeightSpec("layer_inputs_table", "wide table", (self.rows, width), (table,)),
            *projection("layer_inputs", [StoredTensor(prefix + self.projection, width)], hidden_size, bias=False),
            norm_weight("layer_inputs_norm", prefix + self.norm, self.size),
        )


@dataclass(frozen=True, slots=True)
class PerLayerProjectionSpec:
    """Input of one layer: x + norm(out(activation(gate(x)) * embedding)), after its other parts. size: of the
    embedding."""

    size: int
    activation: Activation
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        return (
            *projection("input_gate", [StoredTensor(self.gate, self.size)], hidden_size, bias=False),
            *projection("input_out", [StoredTensor(self.out, hidden_size)], self.size, bias=False),
            norm_weight("input_norm", self.norm, hidden_size),
        )


class PerLayerEmbeddings:
    """Sum of table row and projection. It is not scaled, since only a norm follows."""

    def __init__(
        self, spec: PerLayerEmbeddingsSpec, weights: Mapping[str, Any], hidden_size: int, eps: float, backend: Backend
    ) -> None:
        """weights: those that the spec lists. eps: of the norms."""
        self.spec, self._backend = spec, backend
        self.table: Tensor | BlockWeight = weights["layer_inputs_table"]  # [rows, layers * size]
        self._projection: Weight = weights["layer_inputs"]  # [layers * size, hidden]
        self._norm: Tensor = weights["layer_inputs_norm"]  # [size] float32
        self._eps = eps * hidden_size  # a model divides the projection by sqrt(hidden_size), which the norm undoes

    def lookup(self, input_ids: Tensor) -> Tensor:
        """Table rows of the tokens, [T, layers * size]."""
        return self._backend.embed(self.table, input_ids, float(self.spec.size) ** 0.5)

    def for_layers(self, x: Tensor, lookup: Tensor, lora: LayerLoRA | None = None) -> tuple[Tensor, ...]:
        """Per-layer embeddings, [T, size] for each layer, as views. x: [T, hidden], the embedding. lookup: from
        `lookup`."""
        backend, size = self._backend, self.spec.size
        projected = adapted_linear(backend, "layer_inputs", x, self._projection, lora=lora)
        embeddings = backend.rms_norm(projected.view(x.shape[0], -1, size), self._norm, self._eps).view(projected.shape)
        backend.add(embeddings, lookup)
        return tuple(embeddings.split_with_sizes([size] * (embeddings.shape[1] // size), 1))


class PerLayerProjection:
    """What a layer makes of its input."""

    def __init__(self, spec: PerLayerProjectionSpec, weights: Mapping[str, Any], eps: float, backend: Backend) -> None:
        self.spec, self._backend = spec, backend
        self._gate: Weight = weights["input_gate"]  # [size, hidden]
        self._out: Weight = weights["input_out"]  # [hidden, size]
        self._norm: Tensor = weights["input_norm"]  # [hidden] float32
        self._eps = 2 * eps  # a model multiplies the sum by sqrt(1/2), which the norm undoes

    def forward(self, x: Tensor, embedding: Tensor, lora: LayerLoRA | None = None) -> Tensor:
        """Term [T, hidden] to add to the hidden state x [T, hidden]. embedding: [T, size], the layer's per-layer embedding."""
        backend = self._backend
        gate = adapted_linear(backend, "input_gate", x, self._gate, lora=lora)
        gated = backend.activation(gate, self.spec.activation)
        backend.multiply(gated, embedding)
        out = adapted_linear(backend, "input_out", gated, self._out, lora=lora)
        return backend.rms_norm(out, self._norm, self._eps)
