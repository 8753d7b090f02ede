"""The description of experts beside a dense feed-forward: their norms, and their weights with their names. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.model.feed_forward.experts_spec import MoESpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec, norm


@dataclass(frozen=True, slots=True)
class ParallelExpertsSpec:
    """norm(what the dense one makes) + norm(experts(norm(stream))), each norm with its own weights (Gemma 4).

    The router sees the stream by its root mean square, times `router_scale`. expert_scale: of what multiplies the weight of each
    expert. The others are names of norms.
    """

    experts: MoESpec
    dense_norm: str = "post_feedforward_layernorm_1"
    norm: str = "pre_feedforward_layernorm_2"
    output_norm: str = "post_feedforward_layernorm_2"
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """Norms and scales, then those of the experts behind "beside."."""
        count = self.experts.experts
        return (
            norm("beside_dense_norm", self.dense_norm, hidden_size),
            norm("beside_norm", self.norm, hidden_size),
            norm("beside_output_norm", self.output_norm, hidden_size),
            WeightSpec("beside_router_norm", "shift", (hidden_size,), (StoredTensor(self.router_scale, hidden_size),)),
            WeightSpec("beside_scales", "shift", (count,), (StoredTensor(self.expert_scale, count),)),
            *(weight.with_prefix("beside.", "") for weight in self.experts.weights(hidden_size)),
        )
