"""The feed-forward without a gate: what one layer does. Knows its spec, its weights and the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.feed_forward.plain_spec import PlainSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerChanges
    from windlass.kernels import Backend, Weight


@dataclass(slots=True)
class PlainWeights:
    """As `PlainSpec.weights` lists them."""

    up: Weight  # [intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha_p: Tensor | None = None  # [1] float32 each, of xIELU
    alpha_n: Tensor | None = None
    beta: Tensor | None = None
    eps: Tensor | None = None


class PlainFeedForward:
    """down(activation(up(x)))."""

    def __init__(self, spec: PlainSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        """weights: the fields of `PlainWeights`."""
        self.spec = spec
        self.weights = PlainWeights(**weights)
        self._backend = backend

    def forward(self, x: Tensor, changes: LayerChanges | None = None) -> Tensor:
        """x: [T, hidden], normed. changes: what adapters add. Returns [T, hidden]."""
        w, backend = self.weights, self._backend
        up = backend.linear(x, w.up, w.up_bias)
        if changes is not None:
            changes.add("up", up, x)
        if w.alpha_p is None or w.alpha_n is None or w.beta is None or w.eps is None:
            y = backend.activation(up, self.spec.activation)
        else:
            y = backend.xielu(up, w.alpha_p, w.alpha_n, w.beta, w.eps)
        out = backend.linear(y, w.down, w.down_bias)
        if changes is not None:
            changes.add("down", out, y)
        return out
