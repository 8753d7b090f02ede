"""Weights of 8 and 4 bits against exact integer arithmetic in torch, in every instruction set this machine can run."""

from __future__ import annotations

import pytest
import torch
from helpers.cpu_kernels import PACKED_FORMS, at_the_end_of_memory, kernels

from windlass.kernels import cpu
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts.packed import MAX_COLUMNS, Bits, PackedWeight, integers, store
from windlass.kernels.torch import quantized as quantized_reference

SHAPES = [
    (0, 5, 8),
    (1, 1, 1),
    (1, 16, 32),
    (1, 17, 33),
    (1, 50, 1030),
    (2, 5, 4),
    (3, 40, 100),
    (6, 16, 64),
    (7, 33, 530),
    (8, 64, 96),
    (12, 30, 41),
    (13, 48, 1041),
    (33, 20, 500),
    (100, 3, 17),
]


@pytest.fixture(params=PACKED_FORMS)
def form(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


@pytest.fixture(params=(8, 4))
def bits(request: pytest.FixtureRequest) -> Bits:
    return request.param


def packed(weight: torch.Tensor, bits: Bits) -> PackedWeight:
    result = PackedWeight.empty(*weight.shape, bits)
    quantized_reference.pack(result.narrow(0, weight.shape[0]), weight)
    return result


def assert_linear(x, weight: PackedWeight, bias, got) -> None:
    """The integers agree exactly; what float32 may lose is its rounding of one sum, or of one sum per group."""
    want = quantized_reference.linear(x, weight, bias)
    magnitude = x.abs() @ weight.dequantize().abs().T + (0 if bias is None else bias.abs())
    assert got.shape == want.shape
    assert ((got - want).abs() <= 1e-6 * magnitude).all(), (got - want).abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(form: Library, bits: Bits, shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    x, weight = torch.randn(rows, inner), packed(torch.randn(columns, inner), bits)
    bias = torch.randn(columns) if columns % 2 else None
    assert_linear(x, weight, bias, cpu.linear_packed(x, weight, bias, library=form))


def test_the_reference_is_the_product_of_what_was_rounded(bits: Bits) -> None:
    """Independent of layout and of integer sums: the rounded rows times the weight as it reads back, in float64."""
    x, weight = torch.randn(9, 75), torch.randn(21, 75)
    stored, group = packed(weight, bits), 75 if bits == 8 else 32
    rounded = torch.zeros(9, 75, dtype=torch.float64)
    for begin in range(0, 75, group):
        part = x[:, begin : begin + group].double()
        scale = part.abs().amax(1, keepdim=True) / 127
        rounded[:, begin : begin + group] = (part / scale).round() * scale
    want = rounded @ stored.dequantize().double().T
    torch.testing.assert_close(quantized_reference.linear(x, stored).double(), want, rtol=1e-5, atol=1e-4)
    # Rounding costs what 8 and 4 bits cost, no more.
    error = (want - x.double() @ weight.double().T).norm() / (x.double() @ weight.double().T).norm()
    assert error < (0.015 if bits == 8 else 0.12)


def test_extremes_do_not_saturate(form: Library, bits: Bits) -> None:
    """Every product as large as it gets, with one sign and with both: sums no int16 pair sum may clip."""
    inner = 8192
    top = 127 if bits == 8 else 7
    values = torch.stack([torch.full((inner,), v, dtype=torch.int8) for v in (top, -127 if bits == 8 else -8)] * 9)
    values[4, ::2] = -top
    weight = PackedWeight.empty(18, inner, bits)
    store(weight.narrow(0, 18), values, torch.ones(18) if bits == 8 else torch.ones(18, inner // 32))
    x = torch.full((14, inner), 127.0)
    x[1::3] = -127.0
    x[2, ::2] = -127.0
    got = cpu.linear_packed(x, weight, library=form)
    assert torch.equal(got, (x.double() @ values.double().T).float())


def test_widest_row_keeps_its_sums(form: Library) -> None:
    values = torch.full((2, MAX_COLUMNS), 127, dtype=torch.int8)
    weight = PackedWeight.empty(2, MAX_COLUMNS, 8)
    store(weight.narrow(0, 2), values, torch.ones(2))
    x = torch.full((1, MAX_COLUMNS), -127.0)
    assert torch.equal(cpu.linear_packed(x, weight, library=form), torch.full((1, 2), -127.0 * 127 * MAX_COLUMNS))
    with pytest.raises(ValueError, match="columns"):
        PackedWeight.empty(2, MAX_COLUMNS + 1, 8)


def test_every_pair_of_bytes(form: Library) -> None:
    weight = PackedWeight.empty(255, 4, 8)
    values = torch.zeros(255, 4, dtype=torch.int8)
    for place in range(4):
        values.zero_()[:, place] = torch.arange(-127, 128)
        store(weight.narrow(0, 255), values, torch.ones(255))
        x = torch.zeros(255, 4)
        x[:, place] = torch.arange(-127, 128)
        x[:, (place + 1) % 4] = 127  # fixes the scale at one
        want = torch.arange(-127.0, 128)[:, None] * torch.arange(-127.0, 128)
        assert torch.equal(cpu.linear_packed(x, weight, library=form), want)


def test_a_row_has_the_same_bits_alone_and_in_any_batch(form: Library, bits: Bits) -> None:
    x, weight = torch.randn(210, 1100), packed(torch.randn(37, 1100), bits)
    bias = torch.randn(37)
    whole = cpu.linear_packed(x, weight, bias, library=form)
    for rows in (1, 2, 3, 5, 6, 7, 8, 12, 13, 24, 48, 49, 97):
        assert torch.equal(cpu.linear_packed(x[:rows], weight, bias, library=form), whole[:rows]), rows
    assert torch.equal(cpu.linear_packed(x[200:203], weight, bias, library=form), whole[200:203])


def test_threads_do_not_change_the_bits(bits: Bits) -> None:
    kernels("generic")
    before = torch.get_num_threads()
    for rows in (5, 40):
        x, weight = torch.randn(rows, 700), packed(torch.randn(1500, 700), bits)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(cpu.linear_packed(x, weight))
        torch.set_num_threads(before)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert_linear(x, weight, None, results[0])


def test_nothing_past_the_operands_is_read(form: Library, bits: Bits) -> None:
    for rows, columns, inner in ((1, 3, 5), (2, 17, 33), (5, 4, 47), (30, 6, 551)):
        weight = packed(torch.randn(columns, inner), bits)
        guarded = PackedWeight(
            bits, columns, inner, at_the_end_of_memory(weight.data), at_the_end_of_memory(weight.scales)
        )
        x, bias = at_the_end_of_memory(torch.randn(rows, inner)), at_the_end_of_memory(torch.randn(columns))
        assert_linear(x, weight, bias, cpu.linear_packed(x, guarded, bias, library=form))


def test_strided_rows_and_other_types(form: Library, bits: Bits) -> None:
    weight = packed(torch.randn(20, 100), bits)
    x = torch.full((6, 300), torch.nan)
    x[:, 13:113] = torch.randn(6, 100)
    assert_linear(x[:, 13:113], weight, None, cpu.linear_packed(x[:, 13:113], weight, library=form))
    for kind in (torch.bfloat16, torch.float16):
        narrow = x[:, 13:113].to(kind)
        got = cpu.linear_packed(narrow, weight, torch.ones(20, dtype=kind), library=form)
        assert got.dtype == kind
        assert torch.equal(got, cpu.linear_packed(narrow.float(), weight, torch.ones(20), library=form).to(kind))


def test_zero_rows_tiny_rows_and_rows_that_are_not_numbers(form: Library, bits: Bits) -> None:
    weight = torch.rand(19, 130) + 0.5
    weight[3], weight[4, 64], weight[5, 129] = 0.0, torch.inf, torch.nan
    weight = packed(weight, bits)
    x = torch.rand(20, 130) + 0.5
    x[1], x[2, 129], x[4, 0], x[6] = 0.0, torch.nan, -torch.inf, 1e-38
    x[7, :], x[8, 5] = 1e-25, 3e38
    got = cpu.linear_packed(x, weight, library=form)
    bad_rows, bad_columns = torch.zeros(20, dtype=torch.bool), torch.zeros(19, dtype=torch.bool)
    bad_rows[[2, 4]], bad_columns[[4, 5]] = True, True
    assert torch.equal(got.isnan(), bad_rows[:, None] | bad_columns)
    good = got[~bad_rows][:, ~bad_columns]
    want = quantized_reference.linear(x, weight)[~bad_rows][:, ~bad_columns]
    torch.testing.assert_close(good, want, rtol=2e-6, atol=0)
    assert (got[[1, 6]][:, ~bad_columns] == 0).all()
    assert (got[~bad_rows, 3] == 0).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_packing(form: Library, bits: Bits, kind: torch.dtype) -> None:
    for columns, inner in ((1, 1), (16, 32), (17, 33), (50, 130), (3, 1041)):
        weight = (torch.randn(columns, inner) * torch.exp2(torch.randint(-8, 8, (columns, 1)).float())).to(kind)
        got, want = PackedWeight.empty(columns, inner, bits), packed(weight, bits)
        cpu.pack_rows(got.narrow(0, columns), weight, library=form)
        assert torch.equal(got.data, want.data)
        assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_of_what_is_seldom_seen(form: Library, bits: Bits, kind: torch.dtype) -> None:
    """Heavy tails, ties of the extremes and between ranges, zeros, values too small to count, and what is no number."""
    weight = torch.randn(37, 330) / torch.rand(37, 330)
    weight[0], weight[1], weight[2] = 0.0, 1e-38, -0.0
    weight[3], weight[4] = 1.0, torch.tensor([1.0, -1.0]).repeat(165)
    weight[5] = torch.randint(-8, 9, (330,)) / 8.0
    weight[6, ::32], weight[7, ::33] = 1e4, -1e4
    weight[8, 40], weight[9, 300], weight[10, 329] = torch.nan, torch.inf, -torch.inf
    weight[11:16] *= torch.tensor([3e-38, 1e-30, 3e-5, 1e3, 1e33 if kind != torch.float16 else 1e3])[:, None]
    weight = weight.to(kind)
    got, want = PackedWeight.empty(37, 330, bits), packed(weight, bits)
    cpu.pack_rows(got.narrow(0, 37), weight, library=form)
    assert torch.equal(got.data, want.data)
    torch.testing.assert_close(got.scales, want.scales, rtol=0, atol=0, equal_nan=True)


def test_values_of_four_bits_are_the_nearest_to_their_scale() -> None:
    weight = torch.randn(50, 130)
    got = packed(weight, 4)
    scale = got.scales.permute(0, 2, 1).flatten(0, 1)[:50].float().repeat_interleave(32, 1)[:, :130]
    exact = (weight / scale).clamp(-8, 7)
    assert (integers(got, torch.arange(50)) - exact).abs().max() <= 0.5001


def test_ranges_in_integers_choose_as_well_as_in_float64() -> None:
    """Against all ranges tried on the values themselves, each with its least-squares scale."""
    weight = torch.cat((torch.randn(200, 32), torch.randn(200, 32) / torch.rand(200, 32), torch.rand(200, 32) ** 3))
    exact = weight.double()
    extreme = exact.gather(1, exact.abs().argmax(1, keepdim=True))
    least = torch.full((600,), torch.inf, dtype=torch.float64)
    for quarters in quantized_reference.FACTORS:
        q = (exact / extreme * quarters / 4).round().clamp(-8, 7)
        scale = ((exact * q).sum(1) / (q * q).sum(1))[:, None].bfloat16().double()
        error = (exact - (exact / scale).round().clamp(-8, 7) * scale).square().sum(1)
        least = torch.minimum(least, error)
    errors = (packed(weight, 4).dequantize().double() - exact).square().sum(1)
    assert float((errors / least).mean()) < 1.003


def test_four_bits_do_no_worse_than_the_plain_scale(bits: Bits) -> None:
    weight = torch.randn(64, 256)
    plain = weight.view(64, -1, 32)
    extreme = plain.gather(2, plain.abs().argmax(2, keepdim=True))
    plain_error = ((plain / (extreme / -8)).round().clamp(-8, 7) * (extreme / -8) - plain).square().sum()
    error = (packed(weight, bits).dequantize() - weight).square().sum()
    assert error < 0.9 * plain_error


def test_rows_packed_in_parts_and_in_any_order(form: Library, bits: Bits) -> None:
    weight = torch.randn(53, 70)
    whole, parts = PackedWeight.empty(53, 70, bits), PackedWeight.empty(53, 70, bits)
    cpu.pack_rows(whole.narrow(0, 53), weight, library=form)
    for first, count in ((40, 13), (0, 7), (7, 20), (27, 13), (5, 0)):
        cpu.pack_rows(parts.narrow(first, count), weight[first : first + count], library=form)
    assert torch.equal(whole.dequantize(), parts.dequantize())
    ids = torch.tensor([[3, 52, 3], [0, 17, 16]])
    assert torch.equal(parts.dequantize(ids), whole.dequantize()[ids])
    with pytest.raises(IndexError, match="rows"):
        parts.narrow(50, 4)
    with pytest.raises(IndexError, match="rows"):
        parts.dequantize(torch.tensor([53]))


def test_bytes_per_weight() -> None:
    assert PackedWeight.empty(2048, 2048, 8).nbytes == 2048 * 2048 + 4 * 2048
    assert PackedWeight.empty(2048, 2048, 4).nbytes == 2048 * 2048 * 9 // 16


def test_operands_that_do_not_fit_are_refused(bits: Bits) -> None:
    kernels("generic")
    weight = packed(torch.randn(3, 8), bits)
    for x, bias in ((torch.randn(2, 7), None), (torch.randn(8), None), (torch.randn(2, 8), torch.randn(4))):
        with pytest.raises(ValueError, match="linear_packed"):
            cpu.linear_packed(x, weight, bias)
    with pytest.raises(ValueError, match="float64"):
        cpu.linear_packed(torch.randn(2, 8).double(), weight)
    with pytest.raises(ValueError, match="pack_rows"):
        cpu.pack_rows(weight.narrow(0, 2), torch.randn(3, 8))
