"""Triton's routing to experts, interpreted, against torch: chosen experts, their order and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.device import DEVICE
from kernels_helpers.interpreted import ON_THE_DEVICE, assert_near

from windlass.kernels.backend import BackendOptions, Routing
from windlass.kernels.torch import reference
from windlass.kernels.triton import moe_routing as routes
from windlass.kernels.triton.triton_backend import TritonBackend

pytestmark = ON_THE_DEVICE

RULES: list[dict[str, Any]] = [
    {"top_k": 8},
    {"top_k": 2, "normalized": False, "scale": 2.5},
    {"top_k": 1, "scores": "sigmoid", "normalized": False},
    {"top_k": 3, "scores": "sigmoid", "least_sum": 1e-20, "scale": 1.7},
    {"top_k": 4, "scores": "sigmoid", "sum_eps": 0.4},
    {"top_k": 4, "groups": 4, "top_groups": 2, "group_score": "largest", "normalized": False},
    {"top_k": 6, "groups": 8, "top_groups": 3, "scores": "sigmoid", "least_sum": 5.0},
]


@pytest.mark.parametrize("experts", [8, 64, 120])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_routing_equals_plain_torch(rule: dict[str, Any], experts: int) -> None:
    routing, generator = Routing(**rule), torch.Generator("cpu").manual_seed(experts)
    if routing.groups * 2 > experts:
        routing = Routing(**{**rule, "groups": 4, "top_groups": 3})
    for tokens in (1, 5):
        logits = (torch.randn(tokens, experts, generator=generator, device="cpu") * 3).to(DEVICE)
        for bias in (None, (torch.randn(experts, generator=generator, device="cpu") / 4).to(DEVICE)):
            assert routes.takes_routing(logits, routing)
            found, wanted = routes.route(logits, routing, bias), reference.route(logits, routing, bias)
            assert torch.equal(found.chosen, wanted.chosen)
            assert_near(found.weights, wanted.weights)


@pytest.mark.parametrize("rule", [*RULES, {"top_k": 2, "scores": "sparsemixer", "jitter": 0.3}], ids=str)
def test_weights_are_multiplied_by_scales_of_experts(rule: dict[str, Any]) -> None:
    backend = TritonBackend(BackendOptions(torch.device(DEVICE)))
    routing, logits, scales = Routing(**rule), torch.randn(3, 24), torch.randn(24)
    plain, found = backend.route(logits, routing), backend.route(logits, routing, scales=scales)
    assert torch.equal(found.chosen, plain.chosen)
    assert torch.equal(found.weights, plain.weights * scales[plain.chosen])


def test_the_first_of_equal_scores_is_chosen() -> None:
    for routing in (
        Routing(3),
        Routing(3, "sigmoid", groups=3, top_groups=2),
        Routing(2, groups=2, group_score="largest"),
    ):
        logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [0.0] * 6])
        assert torch.equal(routes.route(logits, routing, None).chosen, reference.route(logits, routing).chosen)


def test_nan_gives_nan_weights_of_valid_experts() -> None:
    for routing in (Routing(3), Routing(3, groups=3, top_groups=2), Routing(2, "sigmoid")):
        logits = torch.randn(2, 6)
        logits[1, 4] = torch.nan
        found, wanted = routes.route(logits, routing, None), reference.route(logits, routing)
        assert torch.equal(found.chosen, wanted.chosen)
        assert_near(found.weights, wanted.weights)
        assert found.weights[1].isnan().any() and not found.weights[0].isnan().any()


def test_other_routing_is_left_to_torch() -> None:
    assert not routes.takes_routing(torch.ones(1, 8), Routing(2, "sparsemixer"))
    assert not routes.takes_routing(torch.ones(1, 1025), Routing(2))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 128), (1, 1, 3), (70, 2, 5), (9, 8, 160), (0, 2, 5)])
def test_rows_are_sorted_by_expert(tokens: int, top_k: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program, and by torch for many rows."""
    chosen = torch.randint(0, experts, (tokens, top_k))
    order, ends = routes.by_expert(chosen, experts)
    wanted = chosen.flatten().sort(stable=True).indices
    assert order.dtype == ends.dtype == torch.int64
    assert torch.equal(order, wanted)
    assert torch.equal(ends, chosen.flatten().bincount(minlength=experts).cumsum(0))
    monkeypatch.setattr(routes, "_MOST_PLACES", -1)
    by_torch = routes.by_expert(chosen, experts)
    assert torch.equal(by_torch[0], wanted) and torch.equal(by_torch[1], ends)
