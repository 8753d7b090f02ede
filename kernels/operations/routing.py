"""How a router's logits become experts and their weights, as one value that every backend takes. Knows no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

RouterScores: TypeAlias = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore: TypeAlias = Literal["largest", "two largest"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token goes to, and with what weights.

    Scores are made of the logits: `softmax` over all experts, or `sigmoid`, each for itself. A bias of each expert, where
    there is one, is added for the choice alone (2408.15664). With groups, only the best top_groups of them are chosen from: a
    group counts for its largest score (DeepSeek V2, 2405.04434) or its two largest together (DeepSeek V3, 2412.19437). Of
    equal scores the first wins. A weight is its expert's score, divided by the sum of those chosen and sum_eps where
    `normalized` (by least_sum where that is more), and multiplied by scale.

    `sparsemixer` (2409.12136, for top_k 2) chooses one expert after the other; the weight of each is its softmax among those
    that are left and whose logits come within 2 * jitter of it, relative to their size.
    """

    top_k: int
    scores: RouterScores = "softmax"
    normalized: bool = True
    scale: float = 1.0
    least_sum: float = 0.0
    sum_eps: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "two largest"
    jitter: float = 0.0


class Routed(NamedTuple):
    """chosen: int64 [T, top_k], the experts of each token, the best first. weights: float32 [T, top_k]."""

    chosen: Tensor
    weights: Tensor
