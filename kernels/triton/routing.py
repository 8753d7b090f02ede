"""Routing of tokens to experts: the arguments of its programs. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.operations.routing import Routed, Routing
from windlass.kernels.triton.launch import launch, power_of_two
from windlass.kernels.triton.programs import routing as programs

_MOST_EXPERTS = 1024  # that a program has scores of
_MOST_PLACES = 4096  # each is compared with each
_BLOCK, _TILE = 64, 32  # places of a program, and of those that it compares them with at a time


def takes_routing(logits: Tensor, routing: Routing) -> bool:
    """Whether there is a program for it."""
    return routing.scores != "sparsemixer" and logits.shape[1] <= _MOST_EXPERTS


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None) -> Routed:
    """See `Backend.route`; of what it `takes_routing`."""
    tokens, experts = logits.shape
    logits = logits.contiguous()
    chosen = torch.empty(tokens, routing.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    launch(
        programs.route_kernel,
        (tokens,),
        logits,
        logits,
        bias,
        scales,
        chosen,
        weights,
        routing.least_sum,
        routing.sum_eps,
        routing.scale,
        EXPERTS=experts,
        TOP_K=routing.top_k,
        SOFTMAX=routing.scores == "softmax",
        BIAS=bias is not None,
        SCALES=scales is not None,
        NORMALIZED=routing.normalized,
        GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups,
        TWO=routing.group_score == "two largest",
        BLOCK_E=power_of_two(experts),
        BLOCK_K=power_of_two(routing.top_k),
        BLOCK_G=power_of_two(routing.groups),
        num_warps=1 if experts <= 256 else 4,
    )
    return Routed(chosen, weights)


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The places of `chosen` in the order of their experts, those of one as they come, [P] int64; and behind which of them each
    expert's end, [experts] int64. chosen: int64, of any shape."""
    flat, places = chosen.reshape(-1), chosen.numel()
    if places > _MOST_PLACES:
        ordered = flat.to(torch.int16).sort(stable=True)  # by radix: a quarter of what int64 takes
        every = torch.arange(experts, dtype=torch.int16, device=chosen.device)
        return ordered.indices, torch.searchsorted(ordered.values, every, right=True)
    order, ends = torch.empty_like(flat), flat.new_empty(experts)
    grid = (-(-max(places, experts) // _BLOCK),)
    launch(programs.by_expert_kernel, grid, flat, flat, order, ends, places, EXPERTS=experts, BLOCK=_BLOCK, TILE=_TILE)
    return order, ends
