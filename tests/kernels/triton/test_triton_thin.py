"""Triton's products of one row, interpreted, against torch's: gates, biases, sizes that nothing divides."""

from __future__ import annotations

import pytest
import torch
from kernels_helpers.interpreted import ON_THE_DEVICE, assert_near

from windlass.kernels.torch import reference
from windlass.kernels.triton import gemv

pytestmark = ON_THE_DEVICE
HALF = torch.float16
ROUNDED = 2**-9


@pytest.mark.parametrize(("columns", "inner"), [(7, 40), (16, 2048), (9, 2088)])
def test_products_and_gates(columns: int, inner: int) -> None:
    x = torch.randn(1, inner + 16).to(HALF)[:, :inner]
    weight, bias = (torch.randn(2 * columns, inner) * inner**-0.5).to(HALF), torch.randn(2 * columns).to(HALF)
    for own in (None, bias):
        assert gemv.takes_single_row(x, weight)
        wide = x.double() @ weight.double().T + (0 if own is None else own.double())
        assert_near(gemv.linear_single_row(x, weight, own), wide.to(HALF), ROUNDED)
        for kind in ("silu", "gelu_tanh"):
            opened = reference.gated_activation(wide.to(HALF), kind)
            assert_near(gemv.linear_single_row(x, weight, own, kind), opened, ROUNDED)


def test_what_is_left_to_torch() -> None:
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
