"""linear_small and linear_widened against float64, in every instruction set this machine can run."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.cpu_kernels import at_the_end_of_memory, kernels

from windlass.kernels import cpu, select_backend
from windlass.kernels.cpu import load
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.torch.linear import linear_widened

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = x.double() @ weight.double().T
    return result if bias is None else result + bias.double()


def assert_linear(x, weight, bias, got) -> None:
    want = exact(x, weight, bias)
    # What float32 summation in any order may lose, against the sum of magnitudes; then x's own rounding.
    magnitude = x.double().abs() @ weight.double().abs().T + 1e-30
    if bias is not None:
        magnitude += bias.double().abs()
    allowed = 1e-6 * magnitude
    if x.dtype == torch.bfloat16:
        allowed = allowed + want.abs() * 2**-8
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= allowed).all(), (got.double() - want).abs().max()


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("x_type", TYPES[:2])
def test_shapes_and_types(form: Library, x_type: torch.dtype, weight_type: torch.dtype) -> None:
    shapes = [
        (1, 1, 1),
        (1, 5, 3),
        (2, 7, 16),
        (3, 9, 31),
        (4, 3, 64),
        (5, 17, 513),
        (6, 4, 1024),
        (7, 33, 530),
        (8, 64, 96),
    ]
    for rows, columns, inner in [*shapes, (13, 11, 1041), (32, 6, 200), (49, 10, 40), (100, 3, 17)]:
        x, weight = torch.randn(rows, inner).to(x_type), torch.randn(columns, inner).to(weight_type)
        bias = torch.randn(columns).to(weight_type) if columns % 2 else None
        assert_linear(x, weight, bias, cpu.linear_small(form, x, weight, bias))


@pytest.mark.parametrize("weight_type", TYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(form: Library, weight_type: torch.dtype) -> None:
    x, weight = torch.randn(56, 1100), torch.randn(37, 1100).to(weight_type)
    whole = cpu.linear_small(form, x, weight)
    for rows in (1, 2, 3, 4, 5, 7, 8, 11, 24, 48):
        assert torch.equal(cpu.linear_small(form, x[:rows], weight), whole[:rows]), rows
    part = cpu.linear_small(form, x[20:21], weight[5:11])
    assert torch.equal(part, whole[20:21, 5:11])


def test_threads_do_not_change_the_bits() -> None:
    x, weight = torch.randn(5, 700), torch.randn(500, 700)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(cpu.linear_small(load(), x, weight))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert_linear(x, weight, None, results[0])


def test_strided_rows_and_mixed_bias(form: Library) -> None:
    x, weight = torch.randn(6, 300)[:, 13:113], torch.randn(40, 150)[::2, 50:]
    bias = torch.randn(20).to(torch.float16)
    assert_linear(x, weight, bias, cpu.linear_small(form, x, weight, bias))


@pytest.mark.parametrize("weight_type", TYPES)
def test_nothing_past_the_operands_is_read(form: Library, weight_type: torch.dtype) -> None:
    for rows, columns, inner in ((1, 3, 5), (2, 7, 33), (5, 4, 47), (8, 6, 551)):
        x = at_the_end_of_memory(torch.randn(rows, inner))
        weight = at_the_end_of_memory(torch.randn(columns, inner).to(weight_type))
        bias = at_the_end_of_memory(torch.randn(columns))
        assert_linear(x, weight, bias, cpu.linear_small(form, x, weight, bias))


def test_rows_beside_the_operands_do_not_leak_in(form: Library) -> None:
    """NaN after each row's end, in x and in the weight, must not reach the result through padding."""
    x, weight = torch.full((5, 64), torch.nan), torch.full((9, 64), torch.nan)
    x[:, :37], weight[:, :37] = torch.randn(5, 37), torch.randn(9, 37)
    assert_linear(x[:, :37], weight[:, :37], None, cpu.linear_small(form, x[:, :37], weight[:, :37]))


def test_nan_and_infinity_stay_in_their_row_and_column(form: Library) -> None:
    x, weight = torch.rand(7, 130) + 0.5, torch.rand(10, 130) + 0.5
    x[2, 129], x[4, 0], weight[3, 64] = torch.nan, torch.inf, -torch.inf
    got = cpu.linear_small(form, x, weight)
    want = x.double() @ weight.double().T
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0, equal_nan=True)


def test_every_float16_and_bfloat16_value_is_widened_exactly(form: Library) -> None:
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for kind in (torch.float16, torch.bfloat16):
        weight = patterns.view(kind)[:, None].clone()
        got = cpu.linear_small(form, torch.ones(1, 1), weight)[0]
        want = weight.float()[:, 0]
        assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), want.nan_to_num(7.0, 8.0, 9.0))
        assert torch.equal(got.isnan(), want.isnan())
        # A bias goes through the conversion of single elements.
        got = cpu.linear_small(form, torch.ones(1, 1), torch.zeros(65536, 1), weight[:, 0].contiguous())[0]
        assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), want.nan_to_num(7.0, 8.0, 9.0))


def test_bfloat16_results_round_to_nearest_even(form: Library) -> None:
    values = torch.randn(5000) * torch.exp2(torch.randint(-120, 120, (5000,)).float())
    halfway = (torch.arange(1, 2001, dtype=torch.int32) * 0x18000 + 0x3F808000).view(torch.float32)
    weight = torch.cat((values, halfway))[:, None]
    got = cpu.linear_small(form, torch.ones(1, 1, dtype=torch.bfloat16), weight)[0]
    assert torch.equal(got, weight[:, 0].to(torch.bfloat16))


def test_empty_operands(form: Library) -> None:
    assert cpu.linear_small(form, torch.randn(0, 8), torch.randn(3, 8)).shape == (0, 3)
    assert cpu.linear_small(form, torch.randn(2, 8), torch.randn(0, 8)).shape == (2, 0)
    bias = torch.randn(3)
    assert torch.equal(cpu.linear_small(form, torch.randn(2, 0), torch.randn(3, 0), bias), bias.expand(2, 3))
    assert torch.equal(cpu.linear_small(form, torch.randn(2, 0), torch.randn(3, 0)), torch.zeros(2, 3))


def test_refusals_say_why() -> None:
    kernels("generic")
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    cases = [
        (x[:, :7], weight, None, "shapes"),
        (x[0], weight, None, "shapes"),
        (x.double(), weight, None, "float64"),
        (x, weight.to(torch.int8), None, "int8"),
        (torch.randn(8, 2).T, weight, None, "contiguous"),
        (x, torch.randn(8, 3).T, None, "contiguous"),
        (x, weight, torch.randn(4), "bias"),
        (x.to("meta"), weight, None, "not on the CPU"),
    ]
    for wrong_x, wrong_weight, bias, word in cases:
        reason = cpu.linear_refusal(wrong_x, wrong_weight, bias)
        assert reason is not None
        assert word in reason
        with pytest.raises(ValueError, match=word):
            cpu.linear_small(load(), wrong_x, wrong_weight, bias)


@pytest.mark.parametrize(("rows", "times"), [(2, 1), (192, 1), (193, 0), (4096, 0)])
def test_few_rows_are_multiplied_by_the_kernel(rows: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("generic")
    calls, small = [], cpu.linear_small
    monkeypatch.setattr(
        "windlass.kernels.cpu.matmul_bindings.linear_small", lambda *a, **k: calls.append(a) or small(*a, **k)
    )
    x, weight = torch.randn(rows, 8), torch.randn(3, 8)
    assert_linear(x, weight, None, select_backend("cpu").linear(x, weight))
    assert len(calls) == times


@pytest.mark.parametrize(("x_type", "weight_type"), itertools.product(TYPES, TYPES))
def test_widened(x_type: torch.dtype, weight_type: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "windlass.kernels.torch.linear._PANEL_BYTES", 4 * 96 * 70
    )  # several panels, the last one partial
    x, weight = torch.randn(40, 96).to(x_type), torch.randn(200, 96).to(weight_type)
    bias = torch.randn(200)
    got = linear_widened(x, weight, bias)
    assert got.dtype == x_type
    want = exact(x, weight, bias)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[x_type]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=2e-4)
    assert linear_widened(x[:0], weight).shape == (0, 200)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("rows", [1, 11, 12, 300])
def test_bfloat16_rows_meet_bfloat16_weights(rows: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever product the processor's units choose, sums are float32 and rounded once."""
    monkeypatch.setattr("windlass.kernels.torch.linear.multiplies_bfloat16", lambda: native)
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(200, 96).bfloat16()
    assert_linear(x, weight, None, select_backend("cpu", torch.bfloat16).linear(x, weight))


def test_type_codes_cover_the_types_tested() -> None:
    assert set(TYPE_CODES) == set(TYPES)
