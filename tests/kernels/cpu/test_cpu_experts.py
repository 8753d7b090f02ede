"""Compiled experts: routing against plain torch, and products against those of single experts."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.marks import slow_but

from windlass.kernels import FORMS, Backend, Routing, StackedWeight, select_backend
from windlass.kernels.cpu import elementwise_bindings, matmul_bindings
from windlass.kernels.cpu.library import Library
from windlass.kernels.torch import reference, row_independent

ROUTINGS = {
    "mixtral": Routing(2),
    "qwen2 moe": Routing(4, normalized=False),
    "deepseek v2": Routing(3, normalized=False, scale=16.0, groups=4, top_groups=2, group_score="largest"),
    "deepseek v3": Routing(3, "sigmoid", least_sum=1e-20, scale=2.5, groups=4, top_groups=2),
    "least sum": Routing(2, "softmax", least_sum=0.9),
    "sum eps": Routing(3, "sigmoid", sum_eps=0.4, scale=1.5),
    "phi": Routing(2, "sparsemixer", normalized=False, jitter=0.3),
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("experts", [8, 60, 160])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_routing_equals_plain_torch(form: Library, routing: Routing, experts: int) -> None:
    torch.manual_seed(experts)
    logits = 2 * torch.randn(33, experts + 3)[:, :experts]
    for bias in (None, 0.5 * torch.randn(experts)) if routing.scores != "sparsemixer" else (None,):
        expected, found = (
            reference.route(logits, routing, bias),
            matmul_bindings.route(form, logits, routing, bias),
        )
        assert torch.equal(found.chosen, expected.chosen)
        torch.testing.assert_close(found.weights, expected.weights, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_weights_are_multiplied_by_scales_of_experts(form: Library, routing: Routing) -> None:
    """The result has the bits of the unscaled weights times the scales."""
    logits, scales = 2 * torch.randn(9, 60), torch.randn(60)
    for route in (reference.route, row_independent.route, functools.partial(matmul_bindings.route, form)):
        plain, found = route(logits, routing), route(logits, routing, scales=scales)
        assert torch.equal(found.chosen, plain.chosen)
        assert torch.equal(found.weights, plain.weights * scales[plain.chosen])
    with pytest.raises(ValueError, match="logits"):
        matmul_bindings.route(form, logits, routing, scales=scales[:59])


def test_the_first_of_equal_scores_is_chosen_and_nan_chooses_valid_experts(form: Library) -> None:
    equal = matmul_bindings.route(form, torch.zeros(2, 6), Routing(3))
    assert equal.chosen.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(reference.route(torch.zeros(2, 6), Routing(3)).chosen, equal.chosen)
    broken = matmul_bindings.route(form, torch.full((1, 6), torch.nan), Routing(3, groups=3, top_groups=2))
    assert all(0 <= one < 6 for one in broken.chosen[0].tolist())


def random_weight(backend: Backend, storage: str, rows: int, columns: int, seed: int) -> object:
    """Return a random weight. "stacked" has two forms of blocks."""
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if storage == "stacked":
        half = rows // 2
        parts = [backend.matrix(half, columns, FORMS["q8_0"]), backend.matrix(rows - half, columns, FORMS["q5_k"])]
        for part, own in zip(parts, (numbers[:half], numbers[half:]), strict=True):
            backend.pack(part.narrow(0, len(own)), own)
        return StackedWeight(tuple(parts))
    kind = FORMS[storage] if storage in FORMS else getattr(torch, storage)
    weight = backend.matrix(rows, columns, kind)
    if isinstance(weight, torch.Tensor):
        weight.copy_(numbers)
    else:
        backend.pack(weight.narrow(0, rows), numbers)
    return weight


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize(
    "storage", slow_but(["float32", "bfloat16", "float16", "q8_0", "q4_k", "stacked"], "bfloat16", "q4_k", "stacked")
)
@pytest.mark.parametrize(("rows", "tokens"), [(37, 9), (600, 9), pytest.param(600, 250, marks=pytest.mark.slow)])
def test_products_equal_those_of_single_experts(form: Library, storage: str, rows: int, tokens: int) -> None:
    """The bits of a row do not depend on the other rows and experts."""
    backend = select_backend("cpu", deterministic=True)
    inner, count = 64, 5
    weights = [random_weight(backend, storage, rows, inner, seed) for seed in range(count)]
    biases = [torch.randn(rows) for _ in range(count)]
    experts = matmul_bindings.CompiledExperts(weights, biases, form)  # type: ignore[arg-type]
    x = torch.randn(tokens, inner)
    chosen = torch.stack([torch.randperm(count)[:3] for _ in range(tokens)])
    chosen[:, 0] = 2  # many rows of one expert, and possibly none of another
    found = matmul_bindings.linear_of_experts(form, x, experts, chosen).view(tokens, 3, rows)
    again = matmul_bindings.linear_of_experts(form, x.repeat_interleave(3, 0), experts, chosen).view(tokens, 3, rows)
    assert torch.equal(found, again)
    for t in range(0, tokens, tokens // 9):
        alone = matmul_bindings.linear_of_experts(form, x[t : t + 1], experts, chosen[t : t + 1].clone())
        assert torch.equal(alone, found[t])
        for j, expert in enumerate(chosen[t].tolist()):
            expected = backend.linear(x[t : t + 1], weights[expert], biases[expert])[0]  # type: ignore[arg-type]
            torch.testing.assert_close(found[t, j], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows(form: Library, dtype: torch.dtype) -> None:
    backend = select_backend("cpu")
    for storage in ("float32", "bfloat16", "q8_0"):
        weights = [random_weight(backend, storage, 32, 64, seed) for seed in range(3)]
        experts = matmul_bindings.CompiledExperts(weights, None, form)  # type: ignore[arg-type]
        x, chosen = torch.randn(4, 64).to(dtype), torch.tensor([[0, 2], [1, 2], [0, 1], [2, 0]])
        found = matmul_bindings.linear_of_experts(form, x, experts, chosen)
        expected = matmul_bindings.linear_of_experts(form, x.float(), experts, chosen)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_an_invalid_expert_is_refused(form: Library) -> None:
    experts = matmul_bindings.CompiledExperts([torch.randn(8, 8), torch.randn(8, 8)], None, form)
    for wrong in (2, -1):
        with pytest.raises(IndexError, match="not one of 2"):
            matmul_bindings.linear_of_experts(form, torch.randn(1, 8), experts, torch.tensor([[0, wrong]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_gates_and_clamped_glu(form: Library, dtype: torch.dtype) -> None:
    """Compare with plain torch in shapes that do not fill vectors."""
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    parts, weights = torch.randn(21, 53).to(dtype), torch.rand(7, 3)
    total = matmul_bindings.sum_of_experts(form, parts, weights)
    torch.testing.assert_close(total, reference.weighted_sum(parts, weights), **exact)
    for gate in (torch.randn(21, 1), torch.randn(21, 53).to(dtype)):
        own = parts.clone()
        elementwise_bindings.gate_by_sigmoid(form, own, gate)
        torch.testing.assert_close(own, (parts.float() * gate.float().sigmoid()).to(dtype), **exact)
    gate_up = 4 * torch.randn(5, 74).to(dtype)
    found = elementwise_bindings.clamped_glu(form, gate_up, 1.7, 3.0)
    torch.testing.assert_close(found, reference.clamped_glu(gate_up, 1.7, 3.0), **exact)
