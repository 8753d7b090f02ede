"""What each layer is given of a token beside the stream (Gemma 4): made for all layers at once, added by each of them.

Knows its specs, its weights and the backend, and no other part of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windlass.engine.model.layer_inputs_spec import LayerInputSpec, LayerInputsSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerChanges
    from windlass.kernels import Backend, BlockWeight, Weight


class LayerInputs:
    """What is looked up and what is projected, added up; their sum is left unscaled, as only a norm comes behind it."""

    def __init__(
        self, spec: LayerInputsSpec, weights: Mapping[str, Any], hidden_size: int, eps: float, backend: Backend
    ) -> None:
        """weights: those that the spec lists. eps: of norms."""
        self.spec, self._backend = spec, backend
        self.table: Tensor | BlockWeight = weights["layer_inputs_table"]  # [rows, layers * size]
        self._projection: Weight = weights["layer_inputs"]  # [layers * size, hidden]
        self._norm: Tensor = weights["layer_inputs_norm"]  # [size] float32
        self._eps = (
            eps * hidden_size
        )  # a model divides what is projected by the root of hidden_size, which the norm undoes

    def looked_up(self, input_ids: Tensor) -> Tensor:
        """What the table has of each token, [T, layers * size]."""
        return self._backend.embed(self.table, input_ids, float(self.spec.size) ** 0.5)

    def of_layers(self, x: Tensor, looked_up: Tensor, changes: LayerChanges | None = None) -> tuple[Tensor, ...]:
        """Of each layer [T, size], views. x: [T, hidden], the embedding. changes: what adapters add."""
        backend, size = self._backend, self.spec.size
        projected = backend.linear(x, self._projection)
        if changes is not None:
            changes.add("layer_inputs", projected, x)
        made = backend.rms_norm(projected.view(x.shape[0], -1, size), self._norm, self._eps).view(projected.shape)
        backend.add(made, looked_up)
        return tuple(made.split_with_sizes([size] * (made.shape[1] // size), 1))


class LayerInput:
    """What a layer makes of its input."""

    def __init__(self, spec: LayerInputSpec, weights: Mapping[str, Any], eps: float, backend: Backend) -> None:
        self.spec, self._backend = spec, backend
        self._gate: Weight = weights["input_gate"]  # [size, hidden]
        self._out: Weight = weights["input_out"]  # [hidden, size]
        self._norm: Tensor = weights["input_norm"]  # [hidden] float32
        self._eps = 2 * eps  # a model multiplies inputs by the root of a half, which the norm undoes

    def forward(self, x: Tensor, given: Tensor, changes: LayerChanges | None = None) -> Tensor:
        """What is added to the stream, [T, hidden]. x: [T, hidden], the stream. given: [T, size]. changes: what adapters add."""
        backend = self._backend
        gate = backend.linear(x, self._gate)
        if changes is not None:
            changes.add("input_gate", gate, x)
        gated = backend.activation(gate, self.spec.activation)
        backend.multiply(gated, given)
        out = backend.linear(gated, self._out)
        if changes is not None:
            changes.add("input_out", out, gated)
        return backend.rms_norm(out, self._norm, self._eps)
