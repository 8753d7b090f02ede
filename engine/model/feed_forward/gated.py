"""The gated feed-forward (SwiGLU and its kin, 2002.05202): what one layer does. Knows its spec, its weights and the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.feed_forward.gated_spec import GatedSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerChanges
    from windlass.kernels import Backend, Weight


@dataclass(slots=True)
class GatedWeights:
    """As `GatedSpec.weights` lists them."""

    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    inner_norm: Tensor | None = None  # [intermediate] float32


class GatedFeedForward:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: GatedSpec, weights: Mapping[str, Any], norm_eps: float, backend: Backend) -> None:
        """weights: the fields of `GatedWeights`. norm_eps: of the inner norm."""
        self.spec = spec
        self.weights = GatedWeights(**weights)
        self._backend, self._eps = backend, norm_eps
        self._factors: tuple[Tensor, Tensor, Tensor] | None = None  # [2 * intermediate], ones, [1]
        if spec.factors is not None:
            import torch

            of_gate, of_down = spec.factors
            ones = torch.ones(2 * spec.intermediate_size, dtype=torch.float32, device=backend.device)
            columns = ones.clone()
            columns[: spec.intermediate_size] = of_gate
            self._factors = columns, ones, ones.new_full((1,), of_down)

    def forward(self, x: Tensor, changes: LayerChanges | None = None) -> Tensor:
        """x: [T, hidden], normed. changes: what adapters add. Returns [T, hidden]."""
        w, backend = self.weights, self._backend
        if changes is None and self._factors is None:
            y = backend.gated_linear(x, w.gate_up, w.gate_up_bias, self.spec.activation)
        else:
            gate_up = backend.linear(x, w.gate_up, w.gate_up_bias)
            if changes is not None:
                changes.add("gate_up", gate_up, x)
            if self._factors is not None:
                backend.scale_columns(gate_up, *self._factors[:2])
            y = backend.gated_activation(gate_up, self.spec.activation)
        if w.inner_norm is not None:
            y = backend.rms_norm(y, w.inner_norm, self._eps)
        out = backend.linear(y, w.down, w.down_bias)
        if changes is not None:
            changes.add("down", out, y)
        if self._factors is not None:
            backend.multiply(out, self._factors[2])
        return out
