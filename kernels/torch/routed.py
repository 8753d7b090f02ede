"""Experts in plain torch: routing, and which rows of a step each expert takes.

The oracle of the compiled kernels. Knows shapes and no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from windlass.kernels.layouts.experts import ExpertWeights
from windlass.kernels.operations.routing import Routed, Routing

Linear: TypeAlias = Callable[[Tensor, Any, Tensor | None], Tensor]  # as `Backend.linear`


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None) -> Routed:
    """See `Backend.route`."""
    found = _sparsemixer(logits, routing) if routing.scores == "sparsemixer" else _largest(logits, routing, bias)
    return found if scales is None else Routed(found.chosen, found.weights * scales[found.chosen])


def _largest(logits: Tensor, routing: Routing, bias: Tensor | None) -> Routed:
    scores = logits.softmax(dim=-1) if routing.scores == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = ranked.view(ranked.shape[0], routing.groups, -1)  # [T, groups, E / groups]
        best = grouped.topk(1 if routing.group_score == "largest" else 2, dim=-1).values.sum(dim=-1)
        left_out = _best(best, routing.groups)[:, routing.top_groups :]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, left_out, True)
        ranked = grouped.masked_fill(mask[:, :, None], float("-inf")).flatten(1)
    chosen = _best(ranked, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.sum_eps).clamp(min=routing.least_sum)
    return Routed(chosen, weights * routing.scale)


def _best(scores: Tensor, count: int) -> Tensor:
    """The places of the largest scores, the first of equal ones first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _sparsemixer(logits: Tensor, routing: Routing) -> Routed:
    left, chosen, weights = logits, [], []
    for _ in range(routing.top_k):
        first = _best(left, 1)
        largest = left.gather(1, first)
        far = (largest - logits) / logits.abs().maximum(largest) > 2 * routing.jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(1, first))
        chosen.append(first)
        left = left.scatter(1, first, float("-inf"))
    return Routed(torch.cat(chosen, dim=1), torch.cat(weights, dim=1) * routing.scale)


def linear_of_experts(x: Tensor, experts: ExpertWeights, chosen: Tensor, linear: Linear) -> Tensor:
    """See `Backend.linear_of_experts`: one `linear` for each expert that is chosen."""
    per_row = chosen.numel() // max(x.shape[0], 1)  # how many of its experts a row of x meets
    out = torch.empty((chosen.numel(), experts.columns), dtype=x.dtype, device=x.device)
    ordered = chosen.flatten().sort(stable=True)
    counts = ordered.values.bincount(minlength=len(experts)).tolist()
    for expert, places in enumerate(ordered.indices.split_with_sizes(counts)):
        if not len(places):
            continue
        out[places] = linear(x[places // per_row], experts.weights[expert], experts.bias(expert))
    return out


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """See `Backend.sum_of_experts`: summed in the order of the experts, in float32."""
    tokens, count = weights.shape
    parts = x.view(tokens, count, x.shape[1])
    total = parts[:, 0].float() * weights[:, :1]
    for place in range(1, count):
        total += parts[:, place].float() * weights[:, place : place + 1]
    return total.to(x.dtype)
