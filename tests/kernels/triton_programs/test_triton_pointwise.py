"""Triton's norms, activations and gates, interpreted, against plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.device import DEVICE
from kernels_helpers.interpreted import ON_THE_DEVICE, assert_near

from windlass.kernels.backend import BackendOptions
from windlass.kernels.torch import reference
from windlass.kernels.triton import elementwise, norms
from windlass.kernels.triton.triton_backend import TritonBackend

pytestmark = ON_THE_DEVICE


def test_norms() -> None:
    weight, bias = torch.randn(24), torch.randn(24)
    many = torch.randn(90, 72)[:, 8:32]
    for x in (many, many[:5], torch.randn(23, 80)[:, :48].view(23, 2, 24), torch.randn(0, 24)):
        assert_near(norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        for shift in (None, bias):
            found = norms.layer_norm(x + 3, weight, shift, 1e-5)
            assert_near(found, reference.layer_norm(x + 3, weight, shift, 1e-5), 5e-6)
    values = torch.randn(3, 10 * 512).view(3, 10, 512)[:, 8:]  # adjacent to queries and keys
    assert_near(norms.rms_norm(values, torch.ones(512), 1e-6), reference.rms_norm(values, torch.ones(512), 1e-6))
    whole = torch.randn(41, 40)
    inside, plain = whole.clone(), whole.clone()
    norms.rms_norm_in_place(inside[:, 8:32], weight, 1e-5)
    reference.rms_norm_in_place(plain[:, 8:32], weight, 1e-5)
    assert_near(inside, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_sums_use_the_rounded_sum(dtype: torch.dtype) -> None:
    residual, x, weight = torch.randn(3, 24).to(dtype), (torch.randn(3, 24) * 1e-3).to(dtype), torch.randn(24)
    expected = residual + x
    found = norms.add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(residual, expected)
    assert_near(found, reference.rms_norm(expected, weight, 1e-5), 2e-6 if dtype == torch.float32 else 2**-10)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu2"])
def test_activations(kind: str) -> None:
    x = torch.cat((torch.randn(2, 14) * 4, torch.tensor([[-90.0, 90.0, 0.0, -0.0, torch.nan, 1e-30, 3.0] * 2])))
    assert_near(elementwise.activation(x, kind), reference.activated(x, kind))
    assert_near(elementwise.activation(x, kind, gated=True), reference.gated_activation(x, kind))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="'tanh'"):
        elementwise.activation(torch.ones(1, 2), "tanh")


def test_gates_caps_and_weighted_sums() -> None:
    x = torch.randn(3, 14) * 4
    x[1, 3], x[2, 9] = torch.nan, 50.0
    assert_near(elementwise.clamped_glu(x, 1.7, 7.0), reference.clamped_glu(x, 1.7, 7.0))
    assert_near(elementwise.soft_cap(x, 2.0), reference.soft_cap(x, 2.0))
    for gate in (torch.randn(3, 1), torch.randn(3, 20)[:, :14]):
        found = x.clone()
        elementwise.gate_by_sigmoid(found, gate)
        assert_near(found, x * gate.sigmoid())
    rows, weights = torch.randn(6, 1100), torch.rand(3, 2)
    assert_near(elementwise.sum_of_experts(rows, weights), reference.weighted_sum(rows, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_in_place_are_rounded_once(dtype: torch.dtype) -> None:
    backend = TritonBackend(BackendOptions(torch.device(DEVICE), dtype))
    whole, wide = torch.randn(5, 50).to(dtype), torch.randn(5, 120).to(dtype)
    for by in (wide[:, 40:80], torch.tensor([0.3])):
        before = whole.clone()
        backend.multiply(whole[:, :40], by)
        assert torch.equal(whole[:, :40], (before[:, :40].float() * by.float()).to(dtype))
        assert torch.equal(whole[:, 40:], before[:, 40:])
