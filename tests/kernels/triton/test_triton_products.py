"""Triton's products, interpreted, against the plain forms: blocks of every form, by head, of experts, rows by themselves."""

from __future__ import annotations

import pytest
import torch
from helpers.block_weights import random_blocks
from helpers.interpreted import ON_THE_DEVICE, assert_near
from torch import Tensor

from windlass.kernels import FORMS, BlockWeight, StackedWeight
from windlass.kernels.torch import blocks, latent, routed
from windlass.kernels.triton import products
from windlass.kernels.triton.products import AddressedExperts

pytestmark = ON_THE_DEVICE


@pytest.mark.parametrize("name", FORMS)
def test_blocks_are_multiplied_as_the_numbers_they_mean(name: str) -> None:
    weight, x, bias = random_blocks(35, 300, FORMS[name]), torch.randn(3, 300), torch.randn(35)
    assert_near(products.linear(x, weight, bias), blocks.linear_widened(x, weight, bias))
    ids = torch.tensor([34, 0, 17])
    assert_near(products.embed(weight, ids, torch.float32, 1.0), weight.dequantize(ids))
    scaled = weight.dequantize(ids).half() * torch.tensor(7.3).half()
    assert_near(products.embed(weight, ids, torch.float16, 7.3), scaled, 2**-10)
    assert products.embed(weight, torch.tensor([35]), torch.float32, 1.0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_fixed_tiles_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    weight, x = torch.randn(70, 100).to(dtype), torch.randn(19, 130)[:, :100]
    whole = products.linear(x, weight, fixed=True)
    assert_near(whole, x @ weight.float().T)
    for first, last in ((0, 1), (18, 19), (3, 12)):
        assert torch.equal(products.linear(x[first:last], weight, fixed=True), whole[first:last])


def test_products_by_head() -> None:
    up, q, attended = torch.randn(3, 10, 24), torch.randn(4, 3, 8)[:, :, 2:], torch.randn(4, 3, 24)
    for fixed in (False, True):
        assert_near(products.by_head(q, up[:, :6], fixed=fixed), latent._by_head(q, up[:, :6]))
        values = up[:, 6:].transpose(1, 2)
        assert_near(products.by_head(attended, values, fixed=fixed), latent._by_head(attended, values))


def plain(x: Tensor, weight: Tensor | BlockWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight, bias)
    return blocks.linear_widened(x, weight, bias)


@pytest.mark.parametrize("form", ["float32", "q4_k", "q8_0"])
@pytest.mark.parametrize("per_row", [1, 2])
def test_each_row_meets_its_experts(form: str, per_row: int) -> None:
    """Experts that nobody chose, that one row chose, and that many did."""
    weights = [torch.randn(20, 64) if form == "float32" else random_blocks(20, 64, FORMS[form]) for _ in range(6)]
    biases = [torch.randn(20) for _ in weights] if per_row == 2 else None
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(25)])
    chosen[4, 0] = 5
    x = torch.randn(50 // per_row, 64)
    experts = AddressedExperts(weights, biases)
    expected = routed.linear_of_experts(x, experts, chosen, plain)
    for fixed in (False, True):
        assert_near(products.linear_of_experts(x, experts, chosen, fixed=fixed), expected)


def test_experts_whose_rows_are_stored_in_two_ways() -> None:
    """As files have gates and ups of two kinds."""
    weights = [StackedWeight((random_blocks(16, 64, FORMS["q4_k"]), torch.randn(20, 64))) for _ in range(4)]
    biases = [torch.randn(36) for _ in weights]
    chosen, x = torch.stack([torch.randperm(4)[:2] for _ in range(9)]), torch.randn(9, 64)

    def parts(x: Tensor, weight: StackedWeight, bias: Tensor) -> Tensor:
        return torch.cat([plain(x, part, bias[first:end]) for part, first, end in weight.spans()], dim=1)

    experts = AddressedExperts(weights, biases)
    assert len(experts.parts) == 2
    assert_near(products.linear_of_experts(x, experts, chosen), routed.linear_of_experts(x, experts, chosen, parts))
    other = StackedWeight((torch.randn(16, 64), torch.randn(20, 64)))
    assert not AddressedExperts([*weights, other]).parts


def test_experts_of_several_kinds_have_no_tables() -> None:
    several = [torch.randn(4, 32), torch.randn(4, 32).half()], [torch.randn(4, 32), random_blocks(4, 32, FORMS["q8_0"])]
    for weights in several:
        experts = AddressedExperts(weights)
        assert not experts.parts
        with pytest.raises(ValueError, match="several kinds"):
            products.linear_of_experts(torch.ones(1, 32), experts, torch.zeros(1, 1).long())
