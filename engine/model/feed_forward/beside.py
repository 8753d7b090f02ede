"""Experts beside a dense feed-forward, which take the stream itself: what one layer does. Knows its spec, weights and backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windlass.engine.model.feed_forward.beside_spec import ParallelExpertsSpec
from windlass.engine.model.feed_forward.experts import MoEFeedForward

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.kernels import Backend

_PREFIX = "beside."


class ParallelExperts:
    """See `ParallelExpertsSpec`. Norm weights are float32 [hidden], without an offset."""

    def __init__(self, spec: ParallelExpertsSpec, weights: Mapping[str, Any], eps: float, backend: Backend) -> None:
        """weights: those that the spec lists. eps: of norms."""
        self.spec, self._backend, self._eps = spec, backend, eps
        self._dense_norm: Tensor = weights["beside_dense_norm"]
        self._norm: Tensor = weights["beside_norm"]
        self._output_norm: Tensor = weights["beside_output_norm"]
        self._router_norm: Tensor = weights["beside_router_norm"]
        scales: Tensor = weights["beside_scales"]
        own = {name.removeprefix(_PREFIX): one for name, one in weights.items() if name.startswith(_PREFIX)}
        self._experts = MoEFeedForward(spec.experts, own, eps, backend, scales)

    def forward(self, stream: Tensor) -> Tensor:
        """What the experts make of the stream [T, hidden], not yet normed. Returns [T, hidden]."""
        backend = self._backend
        seen = backend.rms_norm(stream, self._router_norm, self._eps)
        return self._experts.forward(backend.rms_norm(stream, self._norm, self._eps), router_input=seen)

    def combine(self, dense: Tensor, experts: Tensor) -> Tensor:
        """What both made, [T, hidden] each, as one."""
        found = self._backend.rms_norm(dense, self._dense_norm, self._eps)
        self._backend.add(found, self._backend.rms_norm(experts, self._output_norm, self._eps))
        return found
