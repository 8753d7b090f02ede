"""The description of a feed-forward of experts: its router, sizes and activation, and its weights with their names.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from windlass.engine.model.feed_forward.gated_spec import Activation, GatedMLPNames, GatedMLPSpec
from windlass.engine.model.feed_forward.plain_spec import PlainMLPNames, PlainMLPSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec

_MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Which experts a token goes to, and with what weights: the fields of `kernels.Routing`, which explains them."""

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
        """Why a router cannot choose so among this many experts, None where it can."""
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
    """Full names of tensors that hold all experts, [E, rows, columns], within their layer.

    transposed: [E, columns, rows]. alternating: rows of gate and up by turns. biases: of their [E, rows].
    """

    gate_up: str
    down: str
    gate_up_bias: str = ""
    down_bias: str = ""
    transposed: bool = False
    alternating: bool = False


@dataclass(frozen=True, slots=True)
class MoENames:
    """Of a checkpoint's tensors, within their layer.

    expert: of each, "<experts>.<index>.<name>", plain where experts have no gates; stacks: where all are stored as one instead.
    router_bias: a bias of the
    router's product; choice_bias: what is added to scores for the choice alone, and whether it is stored as a row [1, experts].
    shared: of what every token meets; shared_gate: of its gate.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert: GatedMLPNames | PlainMLPNames = field(
        default_factory=lambda: GatedMLPNames("gate_proj", "up_proj", down="down_proj")
    )
    router_bias: bool = False
    choice_bias: str | None = None
    choice_bias_is_row: bool = False
    shared: GatedMLPNames | PlainMLPNames | None = None
    shared_gate: str | None = None
    stacks: ExpertStacks | None = None


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The sum over the chosen experts of weight * down(activation(gate(x)) * up(x)), where they have no gates of
    weight * down(activation(up(x))), and what the shared expert makes of x.

    shared_size: width of the shared expert, None where there is none; it is multiplied by sigmoid(gate(x)) where it has a gate.
    clamp: (alpha, limit) of gpt-oss's activation in place of the other. scaled_inputs: weights multiply what an expert is given
    instead of what it makes of it.
    """

    experts: int
    intermediate_size: int
    router: RouterSpec
    activation: Activation = "silu"
    bias: bool = False
    shared_size: int | None = None
    shared_bias: bool = False
    clamp: tuple[float, float] | None = None
    scaled_inputs: bool = False
    names: MoENames = field(default_factory=MoENames)

    @property
    def unfused(self) -> MoESpec:
        """The same of a checkpoint that has gate and up of experts as tensors of their own, under names of the usual kind."""
        names, shared = self.names, self.names.shared
        if isinstance(shared, GatedMLPNames) and shared.gate_up is not None:
            shared = replace(shared, gate="mlp.shared_expert.gate_proj", up="mlp.shared_expert.up_proj", gate_up=None)
        return replace(self, names=replace(names, stacks=None, shared=shared))

    @property
    def gated(self) -> bool:
        """Whether experts have gates."""
        return isinstance(self.names.expert, GatedMLPNames)

    @property
    def shared(self) -> GatedMLPSpec | PlainMLPSpec | None:
        """The shared expert."""
        if self.shared_size is None or self.names.shared is None:
            return None
        return self._one(self.shared_size, self.shared_bias, self.names.shared)

    def _one(self, size: int, bias: bool, names: GatedMLPNames | PlainMLPNames) -> GatedMLPSpec | PlainMLPSpec:
        if isinstance(names, GatedMLPNames):
            return GatedMLPSpec(size, self.activation, bias, names)
        return PlainMLPSpec(size, self.activation, bias, names)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The router's fields of `ExpertsWeights`, then each expert's under "experts.<index>.", then "shared."."""
        names, count = self.names, self.experts
        found = [WeightSpec("router", "score", (count, hidden_size), (StoredTensor(f"{names.router}.weight", count),))]
        if names.router_bias:
            found.append(WeightSpec("router_bias", "shift", (count,), (StoredTensor(f"{names.router}.bias", count),)))
        if names.choice_bias is not None:
            row = names.choice_bias_is_row
            stored = (StoredTensor(names.choice_bias, 1 if row else count),)
            found.append(
                WeightSpec("choice_bias", "score" if row else "shift", (1, count) if row else (count,), stored)
            )
        for index in range(count):
            found += self._expert(index, hidden_size)
        if (shared := self.shared) is not None:
            found += [weight.with_prefix("shared.", "") for weight in shared.weights(hidden_size)]
            if names.shared_gate is not None:
                gate = (StoredTensor(f"{names.shared_gate}.weight", 1),)
                found.append(WeightSpec("shared_gate", "score", (1, hidden_size), gate))
        return tuple(found)

    def _expert(self, index: int, hidden_size: int) -> list[WeightSpec]:
        """The weights of one expert."""
        names, prefix = self.names, f"experts.{index}."
        if names.stacks is not None:
            return [weight.with_prefix(prefix, "") for weight in self._of_stacks(names.stacks, index, hidden_size)]
        spec = self._one(self.intermediate_size, self.bias, names.expert)
        weights = [weight.with_prefix(prefix, f"{names.experts}.{index}.") for weight in spec.weights(hidden_size)]
        return [replace(one, kind="expert") if one.kind == "matrix" else one for one in weights]

    def _of_stacks(self, names: ExpertStacks, index: int, hidden_size: int) -> list[WeightSpec]:
        rows, inner = 2 * self.intermediate_size, self.intermediate_size
        interleaved, turned = names.alternating, names.transposed
        gate_up = StoredTensor(
            f"{names.gate_up}[{index}]", rows, role="gate up", transposed=turned, alternating=interleaved
        )
        down = StoredTensor(f"{names.down}[{index}]", hidden_size, role="down", transposed=turned)
        found = [
            WeightSpec("gate_up", "expert", (rows, hidden_size), (gate_up,)),
            WeightSpec("down", "expert", (hidden_size, inner), (down,)),
        ]
        if self.bias:
            gate_up = StoredTensor(f"{names.gate_up_bias}[{index}]", rows, alternating=interleaved)
            down = StoredTensor(f"{names.down_bias}[{index}]", hidden_size)
            found.append(WeightSpec("gate_up_bias", "bias", (rows,), (gate_up,)))
            found.append(WeightSpec("down_bias", "bias", (hidden_size,), (down,)))
        return found
