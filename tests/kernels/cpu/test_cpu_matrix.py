"""Products by the matrix unit, against float64 of rounded operands, and when backends use them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.block_weights import random_blocks
from helpers.cpu_kernels import MATRIX_FORMS, at_the_end_of_memory, choose, kernels
from kernels_helpers.checks import same_on_threads

from windlass.kernels import FORMS, BlockForm, BlockWeight, StackedWeight, cpu, select_backend
from windlass.kernels.cpu import library, load, matmul_bindings
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.elementwise_bindings import ACTIVATIONS
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts.weight_layouts import PanelWeight

EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
SHAPES = [
    (0, 5, 8),
    (1, 1, 1),
    (3, 17, 33),
    (16, 16, 32),
    (17, 40, 100),
    (33, 33, 256),
    (40, 100, 530),  # more than one piece of K
    (70, 150, 1100),
    (530, 20, 80),  # two passes
]


@pytest.fixture(params=MATRIX_FORMS)
def library_of(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


def filled_panels(numbers: torch.Tensor) -> PanelWeight:
    weight = PanelWeight.empty(*numbers.shape, numbers.dtype)
    matmul_bindings.pack_panels(load(), weight.narrow(0, numbers.shape[0]), numbers)
    return weight


def product(x: torch.Tensor, weight: BlockWeight, library_of: Library, **options: torch.Tensor) -> torch.Tensor:
    return matmul_bindings.linear_blocks_amx(library_of, x, weight, **options)  # type: ignore[arg-type]


def assert_product(x: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None, got: torch.Tensor) -> None:
    """Products are exact, and sums have a few float32 rounding errors per step of K."""
    rows, numbers = x.bfloat16().double(), weight.dequantize().bfloat16().double()
    extra = 0.0 if bias is None else bias.double()
    want, size = rows @ numbers.T + extra, rows.abs() @ numbers.abs().T + abs(extra)
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= 2e-6 * size + 1e-30).all(), (got - want).abs().max()


@EVERY_FORM
def test_shapes(library_of: Library, form: BlockForm) -> None:
    for rows, columns, inner in SHAPES:
        x, weight = torch.randn(rows, inner), random_blocks(columns, inner, form)
        bias = torch.randn(columns) if columns % 2 else None
        assert_product(x, weight, bias, product(x, weight, library_of, **({} if bias is None else {"bias": bias})))


def test_every_code_at_every_place(library_of: Library) -> None:
    """One row of x for each element of K selects the values of the weight."""
    for form in FORMS.values():
        weight = random_blocks(50, 330, form)
        got = product(torch.eye(330), weight, library_of)
        assert torch.equal(got, weight.dequantize().bfloat16().float().T)


@EVERY_FORM
def test_a_row_has_the_same_bits_alone_and_in_any_batch(library_of: Library, form: BlockForm) -> None:
    x, weight = torch.randn(600, 700), random_blocks(37, 700, form)
    whole = product(x, weight, library_of)
    for rows in (1, 2, 15, 16, 17, 48, 512, 513):
        assert torch.equal(product(x[:rows], weight, library_of), whole[:rows]), rows
    assert torch.equal(product(x[500:530], weight, library_of), whole[500:530])


def test_threads_do_not_change_the_bits(library_of: Library) -> None:
    x, weight = torch.randn(70, 700), random_blocks(1500, 700, FORMS["q4_k"])
    same_on_threads(lambda: product(x, weight, library_of))


@EVERY_FORM
def test_nothing_past_the_operands_is_read(library_of: Library, form: BlockForm) -> None:
    for rows, columns, inner in ((1, 3, 5), (17, 17, 33), (50, 4, 551)):
        weight = random_blocks(columns, inner, form)
        supers = None if weight.supers is None else at_the_end_of_memory(weight.supers)
        codes, scales = at_the_end_of_memory(weight.codes), at_the_end_of_memory(weight.scales)
        guarded = BlockWeight(form, columns, inner, codes, scales, supers)
        x, bias = at_the_end_of_memory(torch.randn(rows, inner)), at_the_end_of_memory(torch.randn(columns))
        assert_product(x, weight, bias, product(x, guarded, library_of, bias=bias))


def test_strided_rows_other_types_and_an_output_tensor(library_of: Library) -> None:
    weight, x = random_blocks(20, 100, FORMS["q5_1"]), torch.full((60, 300), torch.nan)
    x[:, 13:113] = torch.randn(60, 100)
    part = x[:, 13:113]
    whole = product(part, weight, library_of)
    assert_product(part, weight, None, whole)
    for kind in (torch.bfloat16, torch.float16):
        narrow = part.to(kind)
        got = product(narrow, weight, library_of)
        assert got.dtype == kind and torch.equal(got, product(narrow.float(), weight, library_of).to(kind))
    assert torch.equal(product(part.t().contiguous().t(), weight, library_of), whole)
    padded_out = torch.full((60, 50), -1.0)
    product(part, weight, library_of, out=padded_out[:, 7:27])
    assert torch.equal(padded_out[:, 7:27], whole)
    assert (padded_out[:, :7] == -1).all() and (padded_out[:, 27:] == -1).all()


def test_nan_rows_do_not_affect_others(library_of: Library) -> None:
    weight, x = random_blocks(40, 130, FORMS["q8_0"]), torch.randn(50, 130)
    want = product(x, weight, library_of)
    x[20, 129], x[33] = torch.nan, 0.0
    got = product(x, weight, library_of)
    assert got[20].isnan().all() and (got[33] == 0).all()
    others = [row for row in range(50) if row not in (20, 33)]
    assert torch.equal(got[others], want[others])


def test_panels_of_bfloat16(library_of: Library) -> None:
    for rows, columns, inner in SHAPES:
        x, numbers = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
        weight = filled_panels(numbers)
        bias = torch.randn(columns).bfloat16() if columns % 2 else None
        got = matmul_bindings.linear_panels_amx(library_of, x, weight, bias)
        want = x.double() @ numbers.double().T + (0.0 if bias is None else bias.double())
        size = x.double().abs() @ numbers.double().abs().T + 2
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 2e-6 * size).all()
        guarded = PanelWeight(columns, inner, at_the_end_of_memory(weight.data))
        given = at_the_end_of_memory(x) if rows else x
        assert torch.equal(matmul_bindings.linear_panels_amx(library_of, given, guarded, bias), got)
    padded_out = torch.full((70, 200), -1.0).bfloat16()
    x, weight = torch.randn(70, 1100).bfloat16(), filled_panels(torch.randn(150, 1100).bfloat16())
    whole = matmul_bindings.linear_panels_amx(library_of, x, weight)
    matmul_bindings.linear_panels_amx(library_of, x, weight, out=padded_out[:, 20:170])
    assert (
        torch.equal(padded_out[:, 20:170], whole)
        and (padded_out[:, :20] == -1).all()
        and (padded_out[:, 170:] == -1).all()
    )
    assert torch.equal(matmul_bindings.linear_panels_amx(library_of, x[40:50], weight), whole[40:50])


GATED_SHAPES = [(1, 32, 8), (17, 64, 100), (49, 96, 700), (530, 32, 1300)]


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gated_products(library_of: Library, activation: str) -> None:
    """Compare with the activation of a plain product; for bfloat16, without rounding in between."""
    for rows, columns, inner in GATED_SHAPES:
        x, bias = torch.randn(rows, inner), torch.randn(columns) if rows % 2 else None
        for form in (FORMS["q8_0"], FORMS["q4_k"]):
            weight = random_blocks(columns, inner, form)
            given = {} if bias is None else {"bias": bias}
            plain = product(x, weight, library_of, **given)
            want = cpu.gated_activation(library_of, plain, activation)
            got = matmul_bindings.linear_blocks_amx(library_of, x, weight, bias, activation=activation)
            assert got.shape == (rows, columns // 2) and torch.allclose(
                got, want, rtol=1e-6, atol=1e-6 * float(want.abs().max())
            )
            padded_out = torch.full((rows, columns), -1.0)
            into = padded_out[:, 7 : 7 + columns // 2]
            matmul_bindings.linear_blocks_amx(library_of, x, weight, bias, activation=activation, out=into)
            assert (
                torch.equal(into, got)
                and (padded_out[:, :7] == -1).all()
                and (padded_out[:, 7 + columns // 2 :] == -1).all()
            )
        narrow, numbers = x.bfloat16(), (torch.randn(columns, inner) / inner**0.5).bfloat16()
        wide = narrow.float() @ numbers.float().T + (0.0 if bias is None else bias)
        want = cpu.gated_activation(load(), wide, activation)
        got = matmul_bindings.linear_panels_amx(library_of, narrow, filled_panels(numbers), bias, activation=activation)
        assert got.dtype == torch.bfloat16
        assert torch.allclose(got.float(), want, rtol=2**-8, atol=1e-5)


@EVERY_FORM
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_with_many_rows_in_blocks(library_of: Library, form: BlockForm, stacked: bool) -> None:
    """Experts with 48 rows or more use the matrix unit, each in two parts if it is stacked."""
    count, rows, inner, few = 5, 600, 330, matmul_bindings.BLOCK_TILE_MIN_ROWS
    weights = [random_blocks(rows, inner, form) for _ in range(count)]
    experts: list[Any] = (
        [StackedWeight((one, random_blocks(40, inner, form))) for one in weights] if stacked else weights
    )  # type: ignore[assignment]
    biases = [torch.randn(640 if stacked else rows) for _ in range(count)]
    for counts in ((few, 1, few - 1, 0, 3), (230, 0, few, few - 1, 200)):
        chosen = torch.cat([torch.full((n,), expert) for expert, n in enumerate(counts)])
        chosen = chosen[torch.randperm(len(chosen))][:, None].contiguous()
        x = torch.randn(len(chosen), inner)
        own = matmul_bindings.CompiledExperts(experts, biases, library_of, amx_blocks=True)
        got = matmul_bindings.linear_of_experts(library_of, x, own, chosen)
        for expert, n in enumerate(counts):
            mine = chosen[:, 0] == expert
            multiply = matmul_bindings.linear_blocks_amx if n >= few else matmul_bindings.linear_blocks
            parts = experts[expert].spans() if stacked else [(weights[expert], 0, rows)]
            for part, begin, end in parts:
                want = multiply(library_of, x[mine], part, biases[expert][begin:end].contiguous())
                assert torch.equal(got[mine][:, begin:end], want), (counts, expert)


def test_experts_with_many_rows_in_panels(library_of: Library) -> None:
    count, few = 3, matmul_bindings.PANEL_TILE_MIN_ROWS
    weights = [filled_panels(torch.randn(70, 330).bfloat16()) for _ in range(count)]
    for counts in ((few, few - 1, 1), (100, 7, 60)):
        chosen = torch.cat([torch.full((n,), expert) for expert, n in enumerate(counts)])
        chosen = chosen[torch.randperm(len(chosen))][:, None].contiguous()
        x = torch.randn(len(chosen), 330).bfloat16()
        own = matmul_bindings.CompiledExperts(weights, None, library_of, amx_panels=True)
        got = matmul_bindings.linear_of_experts(library_of, x, own, chosen)
        for expert, n in enumerate(counts):
            mine = chosen[:, 0] == expert
            multiply = matmul_bindings.linear_panels_amx if n >= few else matmul_bindings.linear_panels
            assert torch.equal(got[mine], multiply(library_of, x[mine], weights[expert])), (counts, expert)


def test_backends_that_round_rows_of_experts(library_of: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the backends that round dense products of that many rows."""
    choose(monkeypatch, library_of)
    weights = [random_blocks(40, 320, FORMS["q8_0"]) for _ in range(2)]
    x, chosen = torch.randn(100, 320), torch.zeros(100, 1, dtype=torch.int64)
    chosen[60:] = 1
    for options, rounds in (
        ({"bf16_prefill": True}, True),
        ({}, False),
        ({"bf16_prefill": True, "deterministic": True}, False),
    ):
        own = select_backend("cpu", **options)
        got = own.linear_of_experts(x, own.experts(weights), chosen)
        assert torch.equal(got[:60], own.linear(x[:60], weights[0]))
        assert torch.equal(got[60:], matmul_bindings.linear_blocks(library_of, x[60:], weights[1]))
        plain = matmul_bindings.linear_blocks(library_of, x[:60], weights[0])
        assert torch.equal(got[:60], plain) is not rounds


def test_unsuitable_operands_are_refused(library_of: Library) -> None:
    weight = random_blocks(20, 64, FORMS["q8_0"])
    with pytest.raises(ValueError, match="do not fill panels of 16"):
        matmul_bindings.linear_blocks_amx(library_of, torch.randn(3, 64), weight, activation="silu")
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        matmul_bindings.linear_blocks_amx(library_of, torch.randn(3, 64), weight, activation="tanh")
    odd = BlockWeight(replace(weight.form, offset=3), 20, 64, weight.codes, weight.scales, None)
    with pytest.raises(ValueError, match="no product for the form"):
        product(torch.randn(3, 64), odd, library_of)
    with pytest.raises(ValueError, match="64 columns"):
        product(torch.randn(3, 65), weight, library_of)
    with pytest.raises(ValueError, match="no matrix unit"):
        product(torch.randn(3, 64), weight, kernels("generic"))
    narrow = filled_panels(torch.randn(20, 64).bfloat16())
    with pytest.raises(ValueError, match="float32 times"):
        matmul_bindings.linear_panels_amx(library_of, torch.randn(3, 64), narrow)
    with pytest.raises(ValueError, match="elements of a row are apart"):
        matmul_bindings.linear_panels_amx(library_of, torch.randn(64, 3).bfloat16().t(), narrow)
    with pytest.raises(ValueError, match="no matrix unit"):
        matmul_bindings.linear_panels_amx(kernels("generic"), torch.randn(3, 64).bfloat16(), narrow)


def test_backends_that_may_round_use_the_matrix_unit_for_many_rows() -> None:
    kernels("avx512_amx")
    if cpu.library.load().isa != "avx512_amx":
        pytest.skip("another instruction set is selected")
    weight, few = random_blocks(40, 320, FORMS["q4_k"]), matmul_bindings.BLOCK_TILE_MIN_ROWS - 1
    x = torch.randn(few + 1, 320)
    bytes_of = {rows: cpu.linear_blocks(load(), x[:rows], weight) for rows in (few, few + 1)}
    rounded = select_backend("cpu", torch.float32, activations="int8", bf16_prefill=True)
    assert torch.equal(rounded.linear(x[:few], weight), bytes_of[few])
    assert torch.equal(rounded.linear(x, weight), product(x, weight, library.load()))
    gates = random_blocks(64, 320, FORMS["q4_k"])
    opened = matmul_bindings.linear_blocks_amx(library.load(), x, gates, activation="gelu")
    assert torch.equal(rounded.gated_linear(x, gates, None, "gelu"), opened)
    for few_or_odd in ((x[:few], gates), (x, weight)):  # too few rows, and gates that do not fill panels
        want = rounded.gated_activation(rounded.linear(*few_or_odd), "gelu")
        assert torch.equal(rounded.gated_linear(*few_or_odd, None, "gelu"), want)
    narrow = select_backend("cpu", torch.bfloat16, activations="int8", bf16_prefill=True)
    assert torch.equal(narrow.linear(x.bfloat16(), weight), product(x.bfloat16(), weight, library.load()))
    numbers = torch.randn(40, 320).bfloat16()
    panel_weight, many = filled_panels(numbers), x[: matmul_bindings.PANEL_TILE_MIN_ROWS].bfloat16()
    assert torch.equal(
        narrow.linear(many, panel_weight),
        matmul_bindings.linear_panels_amx(library.load(), many, panel_weight),
    )
    exact = select_backend("cpu", torch.bfloat16, deterministic=True)
    assert torch.equal(exact.linear(many, panel_weight), matmul_bindings.linear_panels(load(), many, panel_weight))
    for options in ({"bf16_prefill": False}, {"bf16_prefill": True, "deterministic": True}):
        exact = select_backend("cpu", torch.float32, activations="int8", **options)
        assert torch.equal(exact.linear(x, weight), bytes_of[few + 1])


def test_recorded_products_are_repeated() -> None:
    kernels("avx512_amx")
    if cpu.library.load().isa != "avx512_amx":
        pytest.skip("another instruction set is selected")
    blocks_of, panels_of = random_blocks(96, 320, FORMS["q8_0"]), filled_panels(torch.randn(64, 48).bfloat16())
    backend = select_backend("cpu", torch.bfloat16, activations="int8", bf16_prefill=True)
    assert isinstance(backend, CompiledBackend)
    x = torch.randn(matmul_bindings.BLOCK_TILE_MIN_ROWS, 320).bfloat16()
    with torch.inference_mode(), backend.record(cpu.Arena(1 << 20)) as recording:
        found = backend.gated_linear(backend.gated_linear(x, blocks_of, None, "silu"), panels_of, None, "relu2")
    assert recording.obstacle is None
    assert [name for name, _ in recording.calls] == ["linear_blocks_amx", "linear_panels_amx"]
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        want = backend.gated_linear(backend.gated_linear(x, blocks_of, None, "silu"), panels_of, None, "relu2")
        assert recording.repeat() and torch.equal(found, want)
