"""What each layer is given of a token beside the stream (Gemma 4): made for all layers at once, added by each of them.

Knows its specs, its weights and the backend, and no other part of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windlass.engine.model.layer_inputs_spec import PerLayerEmbeddingsSpec, PerLayerProjectionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, BlockWeight, Weight


class PerLayerEmbeddings:
    """What is looked up and what is projected, added up; their sum is left unscaled, as only a norm comes behind it."""

    def __init__(
        self, spec: PerLayerEmbeddingsSpec, weights: Mapping[str, Any], hidden_size: int, eps: float, backend: Backend
    ) -> None:
        """weights: those that the spec lists. eps: of norms."""
        self.spec, self._backend = spec, backend
        self.table: Tensor | BlockWeight = weights["layer_inputs_table"]  # [rows, layers * size]
        self._projection: Weight = weights["layer_inputs"]  # [layers * size, hidden]
        self._norm: Tensor = weights["layer_inputs_norm"]  # [size] float32
        self._eps = (
            eps * hidden_size
        )  # a model divides what is projected by the root of hidden_size, which the norm undoes

    def lookup(self, input_ids: Tensor) -> Tensor:
        """What the table has of each token, [T, layers * size]."""
        return self._backend.embed(self.table, input_ids, float(self.spec.size) ** 0.5)

    def for_layers(self, x: Tensor, lookup: Tensor, lora: LayerLoRA | None = None) -> tuple[Tensor, ...]:
        """Of each layer [T, size], views. x: [T, hidden], the embedding. changes: what adapters add."""
        backend, size = self._backend, self.spec.size
        projected = backend.linear(x, self._projection)
        if lora is not None:
            lora.add("layer_inputs", projected, x)
        made = backend.rms_norm(projected.view(x.shape[0], -1, size), self._norm, self._eps).view(projected.shape)
        backend.add(made, lookup)
        return tuple(made.split_with_sizes([size] * (made.shape[1] // size), 1))


class PerLayerProjection:
    """What a layer makes of its input."""

    def __init__(self, spec: PerLayerProjectionSpec, weights: Mapping[str, Any], eps: float, backend: Backend) -> None:
        self.spec, self._backend = spec, backend
        self._gate: Weight = weights["input_gate"]  # [size, hidden]
        self._out: Weight = weights["input_out"]  # [hidden, size]
        self._norm: Tensor = weights["input_norm"]  # [hidden] float32
        self._eps = 2 * eps  # a model multiplies inputs by the root of a half, which the norm undoes

    def forward(self, x: Tensor, given: Tensor, lora: LayerLoRA | None = None) -> Tensor:
        """What is added to the stream, [T, hidden]. x: [T, hidden], the stream. given: [T, size]. changes: what adapters add."""
        backend = self._backend
        gate = backend.linear(x, self._gate)
        if lora is not None:
            lora.add("input_gate", gate, x)
        gated = backend.activation(gate, self.spec.activation)
        backend.multiply(gated, given)
        out = backend.linear(gated, self._out)
        if lora is not None:
            lora.add("input_out", out, gated)
        return backend.rms_norm(out, self._norm, self._eps)
