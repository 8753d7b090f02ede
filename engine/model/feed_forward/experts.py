"""The feed-forward of experts (1701.06538, 2401.04088): what one layer does. Knows its spec, its weights and the backend.

Nothing that it does depends on numbers that a step computes, but for the kernels that read which experts were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from windlass.engine.model.feed_forward.experts_spec import MoESpec, RouterSpec
from windlass.engine.model.feed_forward.gated import GatedMLP
from windlass.engine.model.feed_forward.gated_spec import GatedMLPSpec
from windlass.engine.model.feed_forward.plain import PlainMLP

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, ExpertWeights, Routed

_MAX_CACHED_TOKENS = 256  # tokens of a step


class MoEFeedForward:
    """The weighted sum of what the chosen experts make of a token, and the shared expert's part."""

    def __init__(
        self,
        spec: MoESpec,
        weights: Mapping[str, Any],
        norm_eps: float,
        backend: Backend,
        scales: Tensor | None = None,
    ) -> None:
        """weights: as `MoESpec.weights` lists them. norm_eps: of norms within the shared expert. scales: float32 [E], what
        multiplies the weights of experts."""
        from windlass.kernels import Routing

        self.spec = spec
        self._scales = scales
        self._backend = backend
        self._routing = Routing(**{field.name: getattr(spec.router, field.name) for field in fields(RouterSpec)})
        self._router: Tensor = weights["router"]  # [E, hidden] float32
        self._router_bias: Tensor | None = weights.get("router_bias")  # [E] float32
        choice_bias: Tensor | None = weights.get("choice_bias")
        self._choice_bias = None if choice_bias is None else choice_bias.view(-1)  # [E] float32
        # [2 * intermediate, hidden] each, or [intermediate, hidden] where they have no gates
        self._up = self._experts(weights, "gate_up" if spec.gated else "up")
        self._down = self._experts(weights, "down")  # [hidden, intermediate] each
        self._shared = self._shared_expert(weights, norm_eps)
        self._cached_ones: dict[int, Tensor] = {}  # by the number of tokens
        self._shared_gate: Tensor | None = weights.get("shared_gate")  # [1, hidden] float32

    def _ones(self, tokens: int, chosen: int) -> Tensor:
        """[tokens, chosen]; of few tokens always the same, so that steps of as many can be recorded."""
        found = self._cached_ones.get(tokens)
        if found is None:
            import torch

            found = torch.ones((tokens, chosen), dtype=torch.float32, device=self._backend.device)
            if tokens <= _MAX_CACHED_TOKENS:
                self._cached_ones[tokens] = found
        return found

    def _shared_expert(self, weights: Mapping[str, Any], norm_eps: float) -> GatedMLP | PlainMLP | None:
        spec, prefix = self.spec.shared, "shared."
        if spec is None:
            return None
        own = {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
        if isinstance(spec, GatedMLPSpec):
            return GatedMLP(spec, own, norm_eps, self._backend)
        return PlainMLP(spec, own, self._backend)

    def _experts(self, weights: Mapping[str, Any], name: str) -> ExpertWeights:
        each = [f"experts.{index}.{name}" for index in range(self.spec.experts)]
        biases = [weights[f"{one}_bias"] for one in each] if self.spec.bias else None
        return self._backend.experts([weights[one] for one in each], biases)

    def forward(self, x: Tensor, lora: LayerLoRA | None = None, router_input: Tensor | None = None) -> Tensor:
        """x: [T, hidden], normed. changes: what adapters add to the shared expert. router_input: [T, hidden], what the router
        sees instead of x, by the root of its width. Returns [T, hidden]."""
        backend = self._backend
        wide = (x if router_input is None else router_input).float()
        logits = backend.linear(wide, self._router, self._router_bias)  # [T, E]
        if router_input is not None:
            logits = backend.scaled(logits, float(x.shape[1]) ** -0.5)
        routed = backend.route(logits, self._routing, self._choice_bias, self._scales)
        if self.spec.scaled_inputs or self.spec.clamp is not None or not self.spec.gated:
            out = self._unfused(x, routed)
        else:
            out = backend.feed_forward_of_experts(x, self._up, self._down, routed, self.spec.activation)
        if self._shared is not None:
            shared = self._shared.forward(x, None if lora is None else lora.with_prefix("shared."))
            if self._shared_gate is not None:
                backend.gate_by_sigmoid(shared, backend.linear(wide, self._shared_gate))
            backend.add(out, shared)
        return out

    def _unfused(self, x: Tensor, routed: Routed) -> Tensor:
        """What the experts make of x, with inputs that are scaled, gates and ups that are limited, or without gates."""
        backend = self._backend
        chosen, weights = routed
        up = backend.linear_of_experts(x, self._up, chosen)  # [T * k, 2 * intermediate], or [T * k, intermediate]
        if self.spec.scaled_inputs:  # the product of what is scaled is the scaled product
            backend.scale_rows(up, weights.view(-1))
            weights = self._ones(*weights.shape)
        if self.spec.clamp is not None:
            y = backend.clamped_glu(up, *self.spec.clamp)
        elif self.spec.gated:
            y = backend.gated_activation(up, self.spec.activation)
        else:
            y = backend.activation(up, self.spec.activation)
        return backend.sum_of_experts(backend.linear_of_experts(y, self._down, chosen), weights)
