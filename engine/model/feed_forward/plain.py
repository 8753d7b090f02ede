"""The feed-forward without a gate: what one layer does. Knows its spec, its weights and the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.feed_forward.plain_spec import PlainMLPSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, Weight


@dataclass(slots=True)
class PlainMLPWeights:
    """As `PlainMLPSpec.weights` lists them."""

    up: Weight  # [intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha_p: Tensor | None = None  # [1] float32 each, of xIELU
    alpha_n: Tensor | None = None
    beta: Tensor | None = None
    eps: Tensor | None = None


class PlainMLP:
    """down(activation(up(x)))."""

    def __init__(self, spec: PlainMLPSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        """weights: the fields of `PlainMLPWeights`."""
        self.spec = spec
        self.weights = PlainMLPWeights(**weights)
        self._backend = backend

    def forward(self, x: Tensor, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. changes: what adapters add. Returns [T, hidden]."""
        w, backend = self.weights, self._backend
        up = backend.linear(x, w.up, w.up_bias)
        if lora is not None:
            lora.add("up", up, x)
        if w.alpha_p is None or w.alpha_n is None or w.beta is None or w.eps is None:
            y = backend.activation(up, self.spec.activation)
        else:
            y = backend.xielu(up, w.alpha_p, w.alpha_n, w.beta, w.eps)
        out = backend.linear(y, w.down, w.down_bias)
        if lora is not None:
            lora.add("down", out, y)
        return out
