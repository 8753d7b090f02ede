"""The gated feed-forward (SwiGLU and its kin, 2002.05202): what one layer does. Knows its spec, its weights and the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.feed_forward.gated_spec import GatedMLPSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, Weight


@dataclass(slots=True)
class GatedMLPWeights:
    """As `GatedMLPSpec.weights` lists them."""

    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    inner_norm: Tensor | None = None  # [intermediate] float32


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: GatedMLPSpec, weights: Mapping[str, Any], norm_eps: float, backend: Backend) -> None:
        """weights: the fields of `GatedMLPWeights`. norm_eps: of the inner norm."""
        self.spec = spec
        self.weights = GatedMLPWeights(**weights)
        self._backend, self._eps = backend, norm_eps
        self._factors: tuple[Tensor, Tensor, Tensor] | None = None  # [2 * intermediate], ones, [1]
        if spec.factors is not None:
            import torch

            of_gate, of_down = spec.factors
            ones = torch.ones(2 * spec.intermediate_size, dtype=torch.float32, device=backend.device)
            columns = ones.clone()
            columns[: spec.intermediate_size] = of_gate
            self._factors = columns, ones, ones.new_full((1,), of_down)

    def forward(self, x: Tensor, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. changes: what adapters add. Returns [T, hidden]."""
        w, backend = self.weights, self._backend
        if lora is None and self._factors is None:
            y = backend.gated_linear(x, w.gate_up, w.gate_up_bias, self.spec.activation)
        else:
            gate_up = backend.linear(x, w.gate_up, w.gate_up_bias)
            if lora is not None:
                lora.add("gate_up", gate_up, x)
            if self._factors is not None:
                backend.scale_columns(gate_up, *self._factors[:2])
            y = backend.gated_activation(gate_up, self.spec.activation)
        if w.inner_norm is not None:
            y = backend.rms_norm(y, w.inner_norm, self._eps)
        out = backend.linear(y, w.down, w.down_bias)
        if lora is not None:
            lora.add("down", out, y)
        if self._factors is not None:
            backend.multiply(out, self._factors[2])
        return out
