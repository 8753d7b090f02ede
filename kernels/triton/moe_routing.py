"""MoE routing in Triton: top-k experts per token, and rows sorted by expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.backend import Routed, Routing
from windlass.kernels.triton.launch import launch, power_of_two, wait_for_predecessor


@triton.jit
def first_largest(keys, left, place, count):
    """The first index of the largest remaining key; `count` if none remains."""
    largest = tl.max(tl.where(left, keys, float("-inf")), 0)
    return tl.min(tl.where(left & (keys == largest), place, count), 0)


@triton.jit
def route_kernel(
    logits,
    bias,
    scales,
    chosen,
    weights,
    least_sum,
    sum_eps,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
):
    """Program (token). SOFTMAX: else scores are sigmoids. TWO: the score of a group is the sum of its two largest scores,
    else its largest."""
    wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, power_of_two(EXPERTS))
    there = expert < EXPERTS
    x = tl.load(logits + token * EXPERTS + expert, mask=there, other=float("-inf"))
    if SOFTMAX:
        shares = tl.exp(x - tl.max(x, 0))
        scores = shares / tl.sum(shares, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-x))
    ranked = scores
    if bias is not None:
        ranked += tl.load(bias + expert, mask=there, other=0.0)
    keys = tl.where(ranked != ranked, float("inf"), ranked)  # NaN comes first, as in torch.sort
    if GROUPS > 1:
        group = expert // (EXPERTS // GROUPS)
        BLOCK_G: tl.constexpr = power_of_two(GROUPS)
        number = tl.arange(0, BLOCK_G)
        of_groups = tl.full([BLOCK_G], float("-inf"), tl.float32)
        for each in range(GROUPS):
            own = there & (group == each)
            found = tl.max(tl.where(own, keys, float("-inf")), 0)
            if TWO:
                others = own & (expert != first_largest(keys, own, expert, EXPERTS))
                found += tl.max(tl.where(others, keys, float("-inf")), 0)
            of_groups = tl.where(number == each, found, of_groups)
        left_groups = number < GROUPS
        kept = expert < 0
        for _ in range(TOP_GROUPS):
            best = first_largest(of_groups, left_groups, number, GROUPS)
            left_groups = left_groups & (number != best)
            kept = kept | (group == best)
        keys = tl.where(kept, keys, float("-inf"))
    BLOCK_K: tl.constexpr = power_of_two(TOP_K)
    place = tl.arange(0, BLOCK_K)
    taken = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    left = there
    for k in range(TOP_K):
        best = tl.minimum(first_largest(keys, left, expert, EXPERTS), EXPERTS - 1)
        left = left & (expert != best)
        taken = tl.where(place == k, best, taken)
        weight = tl.where(place == k, tl.sum(tl.where(expert == best, scores, 0.0), 0), weight)
    if NORMALIZED:
        weight = weight / tl.maximum(tl.sum(weight, 0) + sum_eps, least_sum, propagate_nan=tl.PropagateNan.ALL)
    weight *= scale
    if scales is not None:
        weight *= tl.load(scales + taken)
    at = token * TOP_K + place
    tl.store(chosen + at, taken.to(tl.int64), mask=place < TOP_K)
    tl.store(weights + at, weight, mask=place < TOP_K)


@triton.jit(do_not_specialize=["places"])  # it differs from step to step
def by_expert_kernel(chosen, order, ends, places, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Program (BLOCK places, BLOCK experts): the index of each place in the order of experts, and the number of places of
    these and all previous experts."""
    wait_for_predecessor()
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen + own, mask=own < places, other=EXPERTS)
    before = tl.zeros([BLOCK], tl.int32)
    until = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, places, TILE):
        other = begin + tl.arange(0, TILE)
        theirs = tl.load(chosen + other, mask=other < places, other=EXPERTS)
        same = (theirs[None, :] == expert[:, None]) & (other[None, :] < own[:, None])
        before += tl.sum(((theirs[None, :] < expert[:, None]) | same).to(tl.int32), 1)
        until += tl.sum((theirs[None, :] <= own[:, None]).to(tl.int32), 1)
    tl.store(order + before, own.to(tl.int64), mask=own < places)
    tl.store(ends + own, until.to(tl.int64), mask=own < EXPERTS)


_MOST_EXPERTS = 1024  # with scores in one program

_MOST_PLACES = 4096  # all pairs are compared

_BLOCK, _TILE = 64, 32  # places of a program, and places that they are compared with at a time


def takes_routing(logits: Tensor, routing: Routing) -> bool:
    """Whether the kernel supports this routing."""
    return routing.scores != "sparsemixer" and logits.shape[1] <= _MOST_EXPERTS


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None) -> Routed:
    """See `Backend.route`; requires `takes_routing`."""
    tokens, experts = logits.shape
    logits = logits.contiguous()
    chosen = torch.empty(tokens, routing.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    launch(
        route_kernel,
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
        NORMALIZED=routing.normalized,
        GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups,
        TWO=routing.group_score == "two largest",
        num_warps=1 if experts <= 256 else 4,
    )
    return Routed(chosen, weights)


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The places of `chosen` sorted by expert (stable), [P] int64, and the end of each expert among them, [experts] int64.
    chosen: int64, of any shape."""
    flat, places = chosen.reshape(-1), chosen.numel()
    if places > _MOST_PLACES:
        ordered = flat.to(torch.int16).sort(stable=True)  # radix sort: a quarter of the time of int64
        every = torch.arange(experts, dtype=torch.int16, device=chosen.device)
        return ordered.indices, torch.searchsorted(ordered.values, every, right=True)
    order, ends = torch.empty_like(flat), flat.new_empty(experts)
    grid = (-(-max(places, experts) // _BLOCK),)
    launch(by_expert_kernel, grid, flat, flat, order, ends, places, EXPERTS=experts, BLOCK=_BLOCK, TILE=_TILE)
    return order, ends
