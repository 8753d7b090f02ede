"""Norms, embeddings, activations, limits and factors of rows against float64, in every instruction set available."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.cpu_kernels import at_the_end_of_memory, kernels
from kernels_helpers.checks import TYPES, assert_near

from windlass.kernels import cpu
from windlass.kernels.cpu import elementwise_bindings, load
from windlass.kernels.cpu.library import Library

SHAPES = ((1, 1), (3, 7), (5, 64), (1, 9001), (2, 9001))
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}


def rows_of(rows: int, dim: int, type_: torch.dtype, spread: float = 4.0) -> torch.Tensor:
    """Return rows of a wider tensor."""
    return (torch.randn(rows, dim + 3) * spread).to(type_)[:, :dim]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(form: Library, name: str, type_: torch.dtype) -> None:
    for rows, dim in SHAPES:
        x, up = rows_of(rows, dim, type_), rows_of(rows, dim, type_, 1.0)
        want = ACTIVATIONS[name](x.double())
        assert_near(elementwise_bindings.activate(form, x, name), want, 3e-6)
        got = elementwise_bindings.gated_activation(form, torch.cat((x, up), dim=1), name)
        assert_near(got, want * up.double(), 8e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_extreme_activations(form: Library, name: str) -> None:
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 40.0, -40.0, 1e4, -1e4, torch.inf, torch.nan]])
    want = ACTIVATIONS[name](x.double()).float()
    want = torch.where(x == -torch.inf, torch.zeros(()), want)
    torch.testing.assert_close(elementwise_bindings.activate(form, x, name), want, rtol=3e-6, atol=1e-7, equal_nan=True)


def test_gelu_over_its_range(form: Library) -> None:
    x = torch.linspace(-12, 12, 40_001)[None]
    assert (elementwise_bindings.activate(form, x, "gelu").double() - F.gelu(x.double())).abs().max() < 1e-6


def test_extreme_gates(form: Library) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 89.0, -89.0, 1e4, -1e4, torch.inf, 3e38, torch.nan])
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    got = cpu.gated_activation(form, gate_up, "silu")[0]
    torch.testing.assert_close(got.double(), F.silu(gate.double()), rtol=1e-6, atol=1e-30, equal_nan=True)
    got = cpu.gated_activation(form, gate_up, "gelu_tanh")[0]
    want = F.gelu(gate.double(), approximate="tanh")
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-30, equal_nan=True)


def test_silu_over_its_range(form: Library) -> None:
    gate = torch.linspace(-87.0, 88.0, 40001)
    got = cpu.gated_activation(form, torch.cat((gate, torch.ones_like(gate)))[None], "silu")[0]
    torch.testing.assert_close(got.double(), F.silu(gate.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("type_", TYPES)
def test_xielu(form: Library, type_: torch.dtype) -> None:
    for alpha_p, alpha_n, beta, eps in ((0.55, 0.3, 0.5, -1e-6), (-2.0, 25.0, 0.1, -0.2)):
        numbers = [torch.tensor([n], dtype=torch.float32) for n in (alpha_p, alpha_n, beta, eps)]
        p, n, b, e = (number.double() for number in numbers)
        for rows, dim in SHAPES:
            x = rows_of(rows, dim, type_, 2.0)
            x[0, :3] = torch.tensor([0.0, -1e-4, -0.34])[:dim].to(type_)
            wide = x.double()
            below = (b + F.softplus(n)) * (torch.expm1(torch.minimum(wide, e)) - wide) + b * wide
            want = torch.where(wide > 0, F.softplus(p) * wide * wide + b * wide, below)
            assert_near(elementwise_bindings.xielu(form, x, *numbers), want, 2e-5 if alpha_n > 20 else 3e-6)


@pytest.mark.parametrize("type_", TYPES)
def test_rms_norm(form: Library, type_: torch.dtype) -> None:
    for rows, dim in ((1, 1), (3, 7), (5, 64), (2, 2049), (40, 1000)):
        x = (torch.randn(rows, dim + 5) * 3).to(type_)[:, :dim]
        weight = torch.randn(dim)
        want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert_near(cpu.rms_norm(form, x, weight, 1e-5), want, 2e-6)

        residual = torch.randn(rows, dim).to(type_)
        total = x + residual  # rounded to the type, as the sum that later layers see is
        want = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        got = cpu.rms_norm(form, x, weight, 1e-5, residual)
        assert torch.equal(residual, total)
        assert_near(got, want, 2e-6)
    fused = torch.randn(5, 7 * 40).to(type_)  # adjacent heads of q, k and v
    for heads in (fused.view(5, 7, 40)[:, :4], fused.view(5, 7, 40)[:, 4:6], fused[:, 3:39].unflatten(1, (2, 18))):
        weight = torch.randn(heads.shape[2])
        got = cpu.rms_norm(form, heads, weight, 1e-5)
        rows = heads.reshape(-1, heads.shape[2])
        assert torch.equal(got.view(rows.shape), cpu.rms_norm(form, rows, weight, 1e-5))
        assert got.is_contiguous() and torch.equal(heads.reshape(rows.shape), rows)
    values = torch.randn(5, 10, 512).to(type_)[:, 8:]  # adjacent to queries and keys
    want = values.double() / (values.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_near(cpu.rms_norm(form, values, torch.ones(512), 1e-6), want, 2e-6)
    assert cpu.rms_norm(form, torch.randn(0, 4).to(type_), torch.ones(4), 1e-5).shape == (0, 4)


@pytest.mark.parametrize("type_", TYPES)
def test_embed_rows(form: Library, type_: torch.dtype) -> None:
    for rows, dim in ((5, 1), (7, 15), (40, 64), (3, 2049)):
        table = at_the_end_of_memory(torch.randn(rows, dim).to(type_))
        ids = torch.tensor([rows - 1, 0, rows // 2, 0])
        assert torch.equal(cpu.embed_rows(form, table, ids), table[ids].float())
        assert torch.equal(cpu.embed_rows(form, table, ids, 1.7), table[ids].float() * 1.7)
        for dtype in TYPES:
            found = cpu.embed_rows(form, table, ids, 1.7, dtype=dtype)
            assert torch.equal(found, (table[ids].float() * 1.7).to(dtype))
        part = table[:, : dim // 2 + 1]
        assert torch.equal(cpu.embed_rows(form, part, ids), part[ids].float())
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="not a row"):
            cpu.embed_rows(form, table, torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="adjacent"):
        cpu.embed_rows(form, table.t(), ids)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("type_", TYPES)
def test_layer_norm(form: Library, type_: torch.dtype, bias: bool) -> None:
    for rows, dim in SHAPES:
        x, weight, more = rows_of(rows, dim, type_) + 3, torch.randn(dim), torch.randn(dim)
        want = F.layer_norm(x.double(), (dim,), weight.double(), more.double() if bias else None, 1e-5)
        assert_near(elementwise_bindings.layer_norm(form, x, weight, more if bias else None, 1e-5), want, 5e-6)
    heads = torch.randn(5, 4, 24).to(type_)[:, 1:3]
    want = F.layer_norm(heads.double(), (24,), torch.ones(24).double(), None, 1e-5)
    assert_near(elementwise_bindings.layer_norm(form, heads, torch.ones(24), None, 1e-5), want, 5e-6)


@pytest.mark.parametrize("type_", TYPES)
def test_limits_and_factors_in_place(form: Library, type_: torch.dtype) -> None:
    for rows, dim in SHAPES:
        whole = (torch.randn(rows, dim + 3) * 2).to(type_)
        before, x = whole.clone(), whole[:, :dim]
        elementwise_bindings.clip(form, x, 0.75)
        assert torch.equal(x, before[:, :dim].clamp(-0.75, 0.75)) and torch.equal(whole[:, dim:], before[:, dim:])
        factors, clipped = torch.randn(rows), x.clone()
        elementwise_bindings.scale_rows(form, x, factors)
        assert_near(x, clipped.double() * factors.double()[:, None])
        first, second, scaled = torch.randn(dim), torch.randn(dim), x.clone()
        elementwise_bindings.scale_columns(form, x, first, second)
        assert_near(x, scaled.double() * first.double() * second.double())
        assert torch.equal(whole[:, dim:], before[:, dim:])
    poisoned = torch.tensor([[torch.nan, torch.inf]])
    elementwise_bindings.clip(form, poisoned, 2.0)
    assert poisoned[0, 0].isnan() and poisoned[0, 1] == 2


@pytest.mark.parametrize("type_", TYPES)
def test_products_in_place_by_strided_rows_and_by_one_factor(form: Library, type_: torch.dtype) -> None:
    """Rounded once, with the bits of plain torch."""
    for rows, dim in SHAPES:
        whole, wide, factor = rows_of(rows, 2 * dim, type_), rows_of(rows, 3 * dim, type_), torch.tensor([0.3])
        before, x, other = whole.clone(), whole[:, :dim], wide[:, dim : 2 * dim]
        elementwise_bindings.multiply(form, x, other)
        want = (before[:, :dim].float() * other.float()).to(type_)
        assert torch.equal(x, want) and torch.equal(whole[:, dim:], before[:, dim:])
        elementwise_bindings.multiply(form, x, factor)
        assert torch.equal(x, (want.float() * factor).to(type_)) and torch.equal(whole[:, dim:], before[:, dim:])
    x, other = torch.randn(6, 37).to(type_), torch.randn(6, 37).to(type_)
    found = at_the_end_of_memory(x)
    elementwise_bindings.multiply(form, found, at_the_end_of_memory(other))
    assert torch.equal(found, (x.float() * other.float()).to(type_))
    elementwise_bindings.multiply(form, x[:0], other[:0])


def test_a_row_does_not_depend_on_others_and_nothing_past_it_is_read(form: Library) -> None:
    x, weight = torch.randn(6, 37), torch.randn(37)
    for call in (
        lambda one: elementwise_bindings.layer_norm(form, one, weight, weight, 1e-5),
        lambda one: elementwise_bindings.activate(form, one, "gelu"),
    ):
        whole = call(at_the_end_of_memory(x))
        assert all(torch.equal(whole[i : i + 1], call(x[i : i + 1])) for i in range(6))


def test_unsuitable_operands_are_refused() -> None:
    form, x = kernels(), torch.randn(3, 8)
    for call, says in (
        (lambda: elementwise_bindings.activate(form, x, "tanh"), "unknown activation"),
        (lambda: elementwise_bindings.activate(form, x.double(), "silu"), "float64"),
        (lambda: elementwise_bindings.clip(form, x.t(), 1.0), "adjacent"),
        (lambda: elementwise_bindings.scale_rows(form, x, torch.ones(4)), r"\[3\]"),
        (lambda: elementwise_bindings.scale_columns(form, x, torch.ones(8), torch.ones(7)), r"\[8\]"),
        (lambda: elementwise_bindings.multiply(form, x, torch.ones(3, 7)), r"\(3, 8\)"),
        (lambda: elementwise_bindings.multiply(form, x, x.bfloat16()), r"float32 \(3, 8\)"),
        (lambda: elementwise_bindings.multiply(form, x, torch.ones(8)), r"float32 \[1\]"),
        (lambda: elementwise_bindings.multiply(form, x, torch.ones(1).half()), r"float32 \[1\]"),
        (lambda: elementwise_bindings.multiply(form, x, torch.ones(8, 3).t()), "adjacent"),
        (lambda: elementwise_bindings.layer_norm(form, x, torch.ones(7), None, 1e-5), r"float32 \[8\]"),
        (
            lambda: elementwise_bindings.layer_norm(form, x, torch.ones(8), torch.ones(7), 1e-5),
            r"float32 \[8\]",
        ),
        (lambda: elementwise_bindings.xielu(form, x, *[torch.ones(2)] * 4), r"float32 \[1\]"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_nothing_past_the_rows_of_norms_and_gates_is_read(form: Library) -> None:
    for type_ in TYPES:
        x = at_the_end_of_memory(torch.randn(3, 38).to(type_))
        weight = at_the_end_of_memory(torch.ones(38))
        residual = at_the_end_of_memory(torch.zeros(3, 38).to(type_))
        assert torch.isfinite(cpu.rms_norm(form, x, weight, 1e-5, residual)).all()
        assert torch.isfinite(cpu.gated_activation(form, x, "silu")).all()


def test_unsuitable_operands_of_norms_and_gates_are_refused() -> None:
    kernels()
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="weight"):
        cpu.rms_norm(load(), x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        cpu.rms_norm(load(), x, torch.ones(8), 1e-5, torch.zeros(3, 8))
    with pytest.raises(ValueError, match="float64"):
        cpu.rms_norm(load(), x.double(), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="relu"):
        cpu.gated_activation(load(), x, "relu")
    with pytest.raises(ValueError, match="2F"):
        cpu.gated_activation(load(), x[:, :7], "silu")
