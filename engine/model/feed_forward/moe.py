"""Mixture of experts (1701.06538, 2401.04088): router, experts and shared expert; also in parallel with a dense MLP
(Gemma 4).

Only the kernels read which experts a step has chosen. Nothing else depends on computed numbers, so that steps can be
recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from windlass.engine.model.feed_forward.mlp import (
    Activation,
    GatedMLP,
    GatedMLPNames,
    MLPSpec,
    PlainMLP,
    PlainMLPNames,
    build_mlp,
    mlp_spec,
)
from windlass.engine.model.weight_spec import InterleavedParts, StoredTensor, WeightSpec, norm_weight

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, ExpertWeights, Routed


_MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Choice and weights of a token's experts: the fields of `kernels.Routing`, which explains them but needs torch."""

    top_k: int = 1
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    least_sum: float = 0.0
    sum_eps: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["largest", "two largest"] = "two largest"
    jitter: float = 0.0

    def refusal(self, experts: int) -> str | None:
        """Why a router cannot choose among this many experts; None if it can."""
        if not 1 <= experts <= _MAX_EXPERTS:
            return f"there are {experts} experts, not 1 to {_MAX_EXPERTS}"
        if experts % self.groups or not 1 <= self.top_groups <= self.groups:
            return f"{experts} experts do not make {self.groups} groups of which {self.top_groups} are chosen"
        choices = experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= choices:
            return f"a token goes to {self.top_k} experts, but there are {choices} to choose from"
        if self.scores == "sparsemixer" and self.top_k != 2:
            return f"this router chooses two experts, not {self.top_k}"
        if self.groups > 1 and self.group_score == "two largest" and experts == self.groups:
            return "groups of one expert have no two largest scores"
        return None


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """Full names within the layer of tensors that hold all experts, [E, rows, columns]."""

    gate_up: str
    down: str
    gate_up_bias: str = ""  # [E, rows]
    down_bias: str = ""  # [E, rows]
    transposed: bool = False  # stored as [E, columns, rows]
    alternating: bool = False  # rows of gate and up alternate


@dataclass(frozen=True, slots=True)
class MoENames:
    """Checkpoint tensor names within the layer."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    # Names of an expert are "<experts>.<index>.<name>"; plain names: experts have no gate.
    expert: GatedMLPNames | PlainMLPNames = field(
        default_factory=lambda: GatedMLPNames("gate_proj", "up_proj", down="down_proj")
    )
    router_bias: bool = False  # of the router's product
    choice_bias: str | None = None  # selection bias: added to scores for the choice only
    choice_bias_is_row: bool = False  # stored as [1, experts]
    shared: GatedMLPNames | PlainMLPNames | None = None
    shared_gate: str | None = None
    stacks: ExpertStacks | None = None  # all experts in one tensor


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Weighted sum of the chosen experts' outputs, plus the shared expert's.

    An expert is down(activation(gate(x)) * up(x)), or down(activation(up(x))) without gates.
    """

    experts: int
    intermediate_size: int
    router: RouterSpec
    activation: Activation = "silu"
    bias: bool = False
    shared_size: int | None = None  # width of the shared expert, whose output is multiplied by sigmoid(shared_gate(x))
    shared_bias: bool = False
    clamp: tuple[float, float] | None = None  # (alpha, limit) of gpt-oss's activation, which replaces `activation`
    scaled_inputs: bool = False  # weights multiply the experts' inputs instead of their outputs
    names: MoENames = field(default_factory=MoENames)

    @property
    def unfused(self) -> MoESpec:
        """The same for a checkpoint with separate gate and up tensors of experts, under their usual names."""
        names, shared = self.names, self.names.shared
        if isinstance(shared, GatedMLPNames) and shared.gate_up is not None:
            shared = replace(shared, gate="mlp.shared_expert.gate_proj", up="mlp.shared_expert.up_proj", gate_up=None)
        return replace(self, names=replace(names, stacks=None, shared=shared))

    @property
    def gated(self) -> bool:
        """Whether experts have gates."""
        return isinstance(self.names.expert, GatedMLPNames)

    @property
    def shared(self) -> MLPSpec | None:
        """Specification of the shared expert."""
        if self.shared_size is None or self.names.shared is None:
            return None
        return mlp_spec(self.shared_size, self.activation, self.shared_bias, self.names.shared)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """Router weights, then each expert's under "experts.<index>.", then the shared expert's under "shared."."""
        names, count = self.names, self.experts
        result = [WeightSpec("router", "score", (count, hidden_size), (StoredTensor(f"{names.router}.weight", count),))]
        if names.router_bias:
            result.append(WeightSpec("router_bias", "shift", (count,), (StoredTensor(f"{names.router}.bias", count),)))
        if names.choice_bias is not None:
            row = names.choice_bias_is_row
            stored = (StoredTensor(names.choice_bias, 1 if row else count),)
            result.append(
                WeightSpec("choice_bias", "score" if row else "shift", (1, count) if row else (count,), stored)
            )
        for index in range(count):
            result += self._expert(index, hidden_size)
        if (shared := self.shared) is not None:
            result += [weight.with_prefix("shared.", "") for weight in shared.weights(hidden_size)]
            if names.shared_gate is not None:
                gate = (StoredTensor(f"{names.shared_gate}.weight", 1),)
                result.append(WeightSpec("shared_gate", "score", (1, hidden_size), gate))
        return tuple(result)

    def _expert(self, index: int, hidden_size: int) -> list[WeightSpec]:
        """Weights of one expert."""
        names, prefix = self.names, f"experts.{index}."
        if names.stacks is not None:
            return [weight.with_prefix(prefix, "") for weight in self._of_stacks(names.stacks, index, hidden_size)]
        spec = mlp_spec(self.intermediate_size, self.activation, self.bias, names.expert)
        weights = [weight.with_prefix(prefix, f"{names.experts}.{index}.") for weight in spec.weights(hidden_size)]
        return [replace(one, kind="expert") if one.kind == "matrix" else one for one in weights]

    def _of_stacks(self, names: ExpertStacks, index: int, hidden_size: int) -> list[WeightSpec]:
        rows, inner = 2 * self.intermediate_size, self.intermediate_size
        transposed, turns = names.transposed, InterleavedParts(inner, (1, 1)) if names.alternating else None
        gate_up = StoredTensor(f"{names.gate_up}[{index}]", rows, None, turns, "gate up", transposed=transposed)
        down = StoredTensor(f"{names.down}[{index}]", hidden_size, role="down", transposed=transposed)
        result = [
            WeightSpec("gate_up", "expert", (rows, hidden_size), (gate_up,)),
            WeightSpec("down", "expert", (hidden_size, inner), (down,)),
        ]
        if self.bias:
            gate_up = StoredTensor(f"{names.gate_up_bias}[{index}]", rows, interleaved_parts=turns)
            down = StoredTensor(f"{names.down_bias}[{index}]", hidden_size)
            result.append(WeightSpec("gate_up_bias", "bias", (rows,), (gate_up,)))
            result.append(WeightSpec("down_bias", "bias", (hidden_size,), (down,)))
        return result


@dataclass(frozen=True, slots=True)
class ParallelExpertsSpec:
    """norm(dense(norm(x))) + norm(experts(norm(x))), each norm with its own weights (Gemma 4).

    The router reads x divided by its root mean square and multiplied by `router_scale`. expert_scale: factors of the
    experts' weights. The other fields name norms.
    """

    experts: MoESpec
    dense_norm: str = "post_feedforward_layernorm_1"
    norm: str = "pre_feedforward_layernorm_2"
    output_norm: str = "post_feedforward_layernorm_2"
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """Norms and scales, then the experts' weights with the prefix `beside`."""
        count = self.experts.experts
        return (
            norm_weight("beside_dense_norm", self.dense_norm, hidden_size),
            norm_weight("beside_norm", self.norm, hidden_size),
            norm_weight("beside_output_norm", self.output_norm, hidden_size),
            WeightSpec("beside_router_norm", "shift", (hidden_size,), (StoredTensor(self.router_scale, hidden_size),)),
            WeightSpec("beside_scales", "shift", (count,), (StoredTensor(self.expert_scale, count),)),
            *(weight.with_prefix("beside.", "") for weight in self.experts.weights(hidden_size)),
        )


_MAX_CACHED_TOKENS = 256  # largest step for which a tensor of ones is cached


class MoEFeedForward:
    """Weighted sum of the chosen experts' outputs, plus the shared expert's."""

    def __init__(
        self,
        spec: MoESpec,
        weights: Mapping[str, Any],
        norm_eps: float,
        backend: Backend,
        scales: Tensor | None = None,
    ) -> None:
        """weights: listed by `MoESpec.weights`. norm_eps: of norms in the shared expert. scales: float32 [E], factors
        of the experts' weights."""
        from windlass.kernels import Routing

        self.spec = spec
        self._scales = scales
        self._backend = backend
        self._routing = Routing(**{field.name: getattr(spec.router, field.name) for field in fields(RouterSpec)})
        self._router: Tensor = weights["router"]  # [E, hidden] float32
        self._router_bias: Tensor | None = weights.get("router_bias")  # [E] float32
        choice_bias: Tensor | None = weights.get("choice_bias")
        self._choice_bias = None if choice_bias is None else choice_bias.view(-1)  # [E] float32
        # [2 * intermediate, hidden] each, or [intermediate, hidden] without gates
        self._up = self._experts(weights, "gate_up" if spec.gated else "up")
        self._down = self._experts(weights, "down")  # [hidden, intermediate] each
        self._shared: GatedMLP | PlainMLP | None = None
        if spec.shared is not None:
            self._shared = build_mlp(spec.shared, under_prefix(weights, "shared."), norm_eps, backend)
        self._cached_ones: dict[int, Tensor] = {}  # by the number of tokens
        self._shared_gate: Tensor | None = weights.get("shared_gate")  # [1, hidden] float32

    def _ones(self, tokens: int, chosen: int) -> Tensor:
        """[tokens, chosen]. For few tokens it is always the same tensor, so that steps of this size can be recorded."""
        result = self._cached_ones.get(tokens)
        if result is None:
            import torch

            result = torch.ones((tokens, chosen), dtype=torch.float32, device=self._backend.device)
            if tokens <= _MAX_CACHED_TOKENS:
                self._cached_ones[tokens] = result
        return result

    def _experts(self, weights: Mapping[str, Any], name: str) -> ExpertWeights:
        each = [f"experts.{index}.{name}" for index in range(self.spec.experts)]
        biases = [weights[f"{one}_bias"] for one in each] if self.spec.bias else None
        return self._backend.experts([weights[one] for one in each], biases)

    def forward(self, x: Tensor, lora: LayerLoRA | None = None, router_input: Tensor | None = None) -> Tensor:
        """x: [T, hidden], normed. lora: applied to the shared expert. router_input: [T, hidden], replaces x as the
        router's input; its logits are divided by sqrt(hidden). Returns [T, hidden]."""
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
        """The experts' output [T, hidden] as separate products: for scaled inputs, limited activations, or no gates."""
        backend = self._backend
        chosen, weights = routed
        up = backend.linear_of_experts(x, self._up, chosen)  # [T * k, 2 * intermediate], or [T * k, intermediate]
        if self.spec.scaled_inputs:  # scaling the product is the same as scaling the input
            backend.scale_rows(up, weights.view(-1))
            weights = self._ones(*weights.shape)
        if self.spec.clamp is not None:
            y = backend.clamped_glu(up, *self.spec.clamp)
        elif self.spec.gated:
            y = backend.gated_activation(up, self.spec.activation)
        else:
            y = backend.activation(up, self.spec.activation)
        return backend.sum_of_experts(backend.linear_of_experts(y, self._down, chosen), weights)


def under_prefix(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those of the weights whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}


class ParallelExperts:
    """See `ParallelExpertsSpec`. Norm weights are float32 [hidden], without an offset."""

    def __init__(self, spec: ParallelExpertsSpec, weights: Mapping[str, Any], eps: float, backend: Backend) -> None:
        """weights: those that the spec lists. eps: of the norms."""
        self.spec, self._backend, self._eps = spec, backend, eps
        self._dense_norm: Tensor = weights["beside_dense_norm"]
        self._norm: Tensor = weights["beside_norm"]
        self._output_norm: Tensor = weights["beside_output_norm"]
        self._router_norm: Tensor = weights["beside_router_norm"]
        scales: Tensor = weights["beside_scales"]
        self._experts = MoEFeedForward(spec.experts, under_prefix(weights, "beside."), eps, backend, scales)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the experts for the hidden state [T, hidden], before its norm. Returns [T, hidden]."""
        backend = self._backend
        router_input = backend.rms_norm(x, self._router_norm, self._eps)
        return self._experts.forward(backend.rms_norm(x, self._norm, self._eps), router_input=router_input)

    def combine(self, dense: Tensor, experts: Tensor) -> Tensor:
        """Sum of the normed outputs of the MLP and the experts, both [T, hidden]."""
        result = self._backend.rms_norm(dense, self._dense_norm, self._eps)
        self._backend.add(result, self._backend.rms_norm(experts, self._output_norm, self._eps))
        return result
