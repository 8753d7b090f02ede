"""Triton's products, interpreted, against plain torch: single rows, blocks, heads, experts, and independent rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.block_weights import random_blocks
from helpers.device import DEVICE
from kernels_helpers.interpreted import ON_THE_DEVICE, assert_near
from torch import Tensor

from windlass.kernels import FORMS, BlockWeight, StackedWeight
from windlass.kernels.backend import Routed
from windlass.kernels.torch import linear, reference
from windlass.kernels.triton import gemv, grouped_gemm, matmul
from windlass.kernels.triton.launch import SMALL, Device
from windlass.kernels.triton.matmul import PointerTableExperts

pytestmark = ON_THE_DEVICE
SMALL_TILES = [grouped_gemm.Tile(16, 32, 16, 4, 2), grouped_gemm.Tile(32, 16, 32, 4, 2)]
HALF = torch.float16
ROUNDED = 2**-9


@pytest.mark.parametrize("name", FORMS)
def test_products_with_blocks(name: str) -> None:
    weight, x, bias = random_blocks(35, 300, FORMS[name]), torch.randn(3, 300), torch.randn(35)
    assert_near(matmul.linear(x, weight, bias), linear.linear_blocks_widened(x, weight, bias))
    ids = torch.tensor([34, 0, 17])
    assert_near(matmul.embed(weight, ids, torch.float32, 1.0), weight.dequantize(ids))
    scaled = weight.dequantize(ids).half() * torch.tensor(7.3).half()
    assert_near(matmul.embed(weight, ids, torch.float16, 7.3), scaled, 2**-10)
    assert matmul.embed(weight, torch.tensor([35]), torch.float32, 1.0).isnan().all()


@pytest.mark.parametrize("name", ["q4_k", "q8_0"])
def test_products_of_many_rows_with_blocks(name: str) -> None:
    weight, x = random_blocks(20, 64, FORMS[name]), torch.randn(260, 64).half()
    assert_near(matmul.linear(x, weight).float(), linear.linear_blocks_widened(x.float(), weight, None), 2**-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_fixed_tiles_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    weight, x = torch.randn(70, 100).to(dtype), torch.randn(19, 130)[:, :100]
    whole = matmul.linear(x, weight, fixed=True)
    assert_near(whole, x @ weight.float().T)
    for rows in (1, 9, 16):
        assert torch.equal(matmul.linear(x[:rows], weight, fixed=True), whole[:rows])
    if DEVICE == "cpu":
        # numpy multiplies here. On some processors its order of sums depends on the row; sums of integers are exact.
        weight, x = (weight * 8).round(), (x * 8).round()
        whole = matmul.linear(x, weight, fixed=True)
    for first, last in ((18, 19), (3, 12)):
        assert torch.equal(matmul.linear(x[first:last], weight, fixed=True), whole[first:last])


def test_products_by_head() -> None:
    up, q, attended = torch.randn(3, 10, 24), torch.randn(4, 3, 8)[:, :, 2:], torch.randn(4, 3, 24)
    for fixed in (False, True):
        assert_near(matmul.by_head(q, up[:, :6], fixed=fixed), reference.head_products(q, up[:, :6]))
        values = up[:, 6:].transpose(1, 2)
        assert_near(matmul.by_head(attended, values, fixed=fixed), reference.head_products(attended, values))


def plain(x: Tensor, weight: Tensor | BlockWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight, bias)
    return linear.linear_blocks_widened(x, weight, bias)


@pytest.mark.parametrize("form", ["float32", "q4_k", "q8_0"])
@pytest.mark.parametrize("per_row", [1, 2])
def test_products_with_experts(form: str, per_row: int) -> None:
    """Experts chosen by no row, by one row, and by many."""
    weights = [torch.randn(20, 64) if form == "float32" else random_blocks(20, 64, FORMS[form]) for _ in range(6)]
    biases = [torch.randn(20) for _ in weights] if per_row == 2 else None
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(25)])
    chosen[4, 0] = 5
    x = torch.randn(50 // per_row, 64)
    experts = PointerTableExperts(weights, biases)
    expected = reference.linear_of_experts(x, experts, chosen, plain)
    for fixed in (False, True):
        assert_near(matmul.linear_of_experts(x, experts, chosen, fixed=fixed), expected)


def test_few_rows_and_many_experts() -> None:
    """One expert has more rows than a tile, others have one."""
    weights = [torch.randn(20, 64) for _ in range(30)]
    chosen = torch.full((10, 2), 7)
    chosen[3, 0], chosen[8, 1] = 29, 0
    x, experts = torch.randn(10, 64), PointerTableExperts(weights)
    expected = reference.linear_of_experts(x, experts, chosen, plain)
    for fixed in (False, True):
        assert_near(matmul.linear_of_experts(x, experts, chosen, fixed=fixed), expected)
        one = matmul.linear_of_experts(x[3:4], experts, chosen[3:4], fixed=fixed)
        assert_near(one, expected[6:8])


def test_large_grids_have_row_tiles_in_their_first_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device limits the other dimensions. Results do not change."""
    launch, grids = matmul.launch, list[tuple[int, ...]]()

    def watched(kernel: Any, grid: tuple[int, ...], *given: Any, **sizes: Any) -> None:
        assert sizes["ROWS_FIRST"] == (grid[1] < grid[0])
        grids.append(grid)
        launch(kernel, grid, *given, **sizes)

    monkeypatch.setattr(matmul, "launch", watched)
    x, weight, bias, up = torch.randn(90, 48), torch.randn(70, 48), torch.randn(70), torch.randn(2, 24, 20)
    experts = PointerTableExperts([torch.randn(70, 48) for _ in range(3)])
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(90)])

    def found() -> list[Tensor]:
        return [
            matmul.linear(x, weight, bias, fixed=True),
            matmul.by_head(x.view(90, 2, 24), up, fixed=True),
            matmul.linear_of_experts(x, experts, chosen, fixed=True),
        ]

    few = found()
    assert grids == [(2, 6, 1), (1, 6, 2), (2, 14, 1)]
    grids.clear()
    monkeypatch.setattr(matmul, "_MOST_BEHIND", 5)
    assert all(torch.equal(one, other) for one, other in zip(found(), few, strict=True))
    assert grids == [(6, 2, 1), (6, 1, 2), (14, 2, 1)]


def test_experts_of_two_storages() -> None:
    """Files may store gate and up projections in different types."""
    weights = [StackedWeight((random_blocks(16, 64, FORMS["q4_k"]), torch.randn(20, 64))) for _ in range(4)]
    biases = [torch.randn(36) for _ in weights]
    chosen, x = torch.stack([torch.randperm(4)[:2] for _ in range(9)]), torch.randn(9, 64)

    def parts(x: Tensor, weight: StackedWeight, bias: Tensor) -> Tensor:
        return torch.cat([plain(x, part, bias[first:end]) for part, first, end in weight.spans()], dim=1)

    experts = PointerTableExperts(weights, biases)
    assert len(experts.parts) == 2
    assert_near(matmul.linear_of_experts(x, experts, chosen), reference.linear_of_experts(x, experts, chosen, parts))
    other = StackedWeight((torch.randn(16, 64), torch.randn(20, 64)))
    assert not PointerTableExperts([*weights, other]).parts


def test_experts_of_different_types_have_no_tables() -> None:
    several = [torch.randn(4, 32), torch.randn(4, 32).half()], [torch.randn(4, 32), random_blocks(4, 32, FORMS["q8_0"])]
    for weights in several:
        experts = PointerTableExperts(weights)
        assert not experts.parts
        with pytest.raises(ValueError, match="several kinds"):
            matmul.linear_of_experts(torch.ones(1, 32), experts, torch.zeros(1, 1).long())


def ragged(experts: int, places: int) -> Tensor:
    """Return choices [places / 2, 2]: none of the first expert, one of the last, most of the second."""
    chosen = torch.randint(1, experts - 1, (places // 2, 2))
    chosen[: places // 3, 0] = 1
    chosen[3, 1] = experts - 1
    return chosen


def wide(weights: list[Tensor], biases: list[Tensor] | None = None) -> PointerTableExperts:
    return PointerTableExperts(
        [one.float() for one in weights], None if biases is None else [one.float() for one in biases]
    )


@pytest.mark.parametrize("tile", SMALL_TILES)
@pytest.mark.parametrize("per_row", [1, 2])
@pytest.mark.parametrize(("columns", "inner"), [(64, 64), (40, 56)])
def test_grouped_products_with_experts(tile: grouped_gemm.Tile, per_row: int, columns: int, inner: int) -> None:
    """Sizes that are multiples of the tiles, and sizes that are not."""
    weights = [torch.randn(columns, inner).half() for _ in range(5)]
    biases = [torch.randn(columns).half() for _ in weights] if per_row == 2 else None
    chosen = ragged(5, 90)
    x = torch.randn(90 // per_row, inner).half()
    expected = reference.linear_of_experts(x.float(), wide(weights, biases), chosen, plain)
    order, ends = matmul.by_expert(chosen, 5)
    experts = PointerTableExperts(weights, biases)
    found = grouped_gemm.multiply_grouped(x, experts, order, ends, tile, gathered=True, scattered=True, per_row=per_row)
    assert found.dtype == torch.float16
    assert_near(found.float(), expected, 2**-9)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu2"])
def test_feed_forward_of_experts(activation: str) -> None:
    gate_up, down = [torch.randn(48, 40).half() for _ in range(4)], [torch.randn(40, 24).half() for _ in range(4)]
    x, chosen, weights = torch.randn(120, 40).half(), ragged(4, 240), torch.rand(120, 2)
    both = PointerTableExperts(gate_up), PointerTableExperts(down)
    assert grouped_gemm.takes_grouped(x, chosen.numel(), *both)
    found = grouped_gemm.feed_forward_of_experts(x, *both, Routed(chosen, weights), activation, SMALL)
    opened = reference.gated_activation(
        reference.linear_of_experts(x.float(), wide(gate_up), chosen, plain), activation
    )
    expected = reference.weighted_sum(reference.linear_of_experts(opened, wide(down), chosen, plain), weights)
    assert_near(found.float(), expected, 2**-9)


def test_grouped_products_need_many_rows_and_aligned_weights() -> None:
    x, weights = torch.ones(3, 64).half(), [torch.ones(8, 64).half()] * 2
    assert grouped_gemm.takes_grouped(x, 64, PointerTableExperts(weights)) and not grouped_gemm.takes_grouped(
        x, 63, PointerTableExperts(weights)
    )
    for other in (
        [one.float() for one in weights],
        [one.bfloat16() for one in weights],
        [torch.ones(64, 8).half().T] * 2,
    ):
        assert not grouped_gemm.takes_grouped(x, 96, PointerTableExperts(other))
    assert not grouped_gemm.takes_grouped(x, 96, PointerTableExperts([random_blocks(8, 64, FORMS["q8_0"])] * 2))
    assert not grouped_gemm.takes_grouped(
        x, 96, PointerTableExperts([torch.ones(8 * 64 + 1).half()[1:].view(8, 64)] * 2)
    )


def test_tiles_fit_the_device() -> None:
    for device in (SMALL, Device(132, 227 << 10)):
        for rows in (32, 95, 96, 4096):
            tile = grouped_gemm.tile_for(rows, device)
            assert tile.shared_memory <= device.shared_memory and (rows < 96) == (tile.rows < 128)


# -- single rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "inner"), [(7, 40), (16, 2048), (9, 2088)])
def test_products_of_a_single_row(columns: int, inner: int) -> None:
    x = torch.randn(1, inner + 16).to(HALF)[:, :inner]
    weight, bias = (torch.randn(2 * columns, inner) * inner**-0.5).to(HALF), torch.randn(2 * columns).to(HALF)
    for own in (None, bias):
        assert gemv.takes_single_row(x, weight)
        wide = x.double() @ weight.double().T + (0 if own is None else own.double())
        assert_near(gemv.linear_single_row(x, weight, own), wide.to(HALF), ROUNDED)
        for kind in ("silu", "gelu_tanh"):
            opened = reference.gated_activation(wide.to(HALF), kind)
            assert_near(gemv.linear_single_row(x, weight, own, kind), opened, ROUNDED)


def test_other_products_are_left_to_torch() -> None:
    weight = torch.randn(8, 40).to(HALF)
    assert gemv.takes_single_row(torch.ones(1, 40).to(HALF), weight)
    for x, other in (
        (torch.ones(2, 40).to(HALF), weight),
        (torch.ones(0, 40).to(HALF), weight),
        (torch.ones(1, 40), weight.float()),
        (torch.ones(1, 40), weight),
        (torch.ones(1, 39).to(HALF), weight[:, :39].contiguous()),
        (torch.ones(1, 8).to(HALF), weight.T),
    ):
        assert not gemv.takes_single_row(x, other)
    with pytest.raises(ValueError, match="unknown activation"):
        gemv.linear_single_row(torch.ones(1, 40).to(HALF), weight, None, "tanh")
