"""Products with weights in blocks, in every instruction set available and by the matrix unit, against exact arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from helpers.block_weights import random_blocks
from helpers.cpu_kernels import MATRIX_FORMS, PACKED_FORMS, at_the_end_of_memory, choose, kernels
from kernels_helpers.checks import same_on_threads
from torch import Tensor

from windlass.kernels import FORMS, BlockForm, BlockWeight, StackedWeight, cpu, select_backend
from windlass.kernels.cpu import elementwise_bindings, load, matmul_bindings
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.elementwise_bindings import ACTIVATIONS
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts.weight_layouts import PanelWeight, group_scales, store_block_rows, unpack_codes
from windlass.kernels.torch import linear as reference

# Groups of 128 with zero points (GPTQ), and super groups of which the last is partly filled.
MORE = [replace(FORMS["q4_k"], super_groups=4), replace(FORMS["q6_k"], super_groups=3)]
EVERY_FORM = pytest.mark.parametrize(
    "form", [*FORMS.values(), *MORE], ids=lambda form: f"{form.name}x{form.super_groups}"
)
SHAPES = [
    (0, 5, 8),
    (1, 1, 1),
    (1, 16, 32),
    (1, 17, 33),
    (2, 5, 4),
    (3, 17, 33),
    (3, 40, 100),
    (6, 16, 64),
    (7, 33, 530),
]
SHAPES += [(8, 64, 96), (13, 48, 1041), (16, 16, 32), (17, 40, 100), (33, 20, 500), (33, 33, 256), (100, 3, 17)]
SHAPES += [(1, 50, 3000), (40, 100, 530), (70, 150, 1100)]  # several pieces of K
SHAPES += [(200, 18, 80), (530, 20, 80)]  # two passes
GATED_SHAPES = [(1, 32, 8), (17, 64, 100), (49, 96, 700), (530, 32, 1300)]


class Product(NamedTuple):
    """The product of one instruction set, which rounds rows to int8, or of its matrix unit, which rounds to bfloat16."""

    library: Library
    matrix_unit: bool = False

    def __call__(self, x: Tensor, weight: BlockWeight, bias: Tensor | None = None, **options: Any) -> Tensor:
        multiply = matmul_bindings.linear_blocks_amx if self.matrix_unit else cpu.linear_blocks
        return multiply(self.library, x, weight, bias, **options)

    def check(self, x: Tensor, weight: BlockWeight, bias: Tensor | None, got: Tensor) -> None:
        """Products are exact, and float32 sums have a few rounding errors per group."""
        want, size = (rounded_product if self.matrix_unit else brute_force)(x.float(), weight, bias)
        assert got.shape == want.shape
        assert ((got.double() - want).abs() <= 2e-6 * size + 1e-30).all(), (got - want).abs().max()


def each_product() -> Iterator[Any]:
    for matrix_unit, forms in ((False, PACKED_FORMS), (True, MATRIX_FORMS)):
        for form in forms:
            name, marks = (form, ()) if isinstance(form, str) else (form.values[0], form.marks)
            yield pytest.param((name, matrix_unit), marks=marks, id=f"{name} matrix unit" if matrix_unit else name)


@pytest.fixture(params=each_product())
def product(request: pytest.FixtureRequest) -> Product:
    name, matrix_unit = request.param
    return Product(kernels(name), matrix_unit)


@pytest.fixture(params=PACKED_FORMS)
def library_of(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


@pytest.fixture(params=MATRIX_FORMS)
def matrix_unit(request: pytest.FixtureRequest) -> Product:
    return Product(kernels(request.param), True)


def brute_force(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the product in float64 from codes, scales and rounded rows, and the sum of magnitudes."""
    form, every = weight.form, torch.arange(weight.rows)
    values, scale = reference.round_groups(x, form.group)
    codes, (own, minimum) = unpack_codes(weight, every).double() - form.offset, group_scales(weight, every)
    # Padding of K has no effect: rounded rows are zero there.
    sums = torch.einsum("mgk,ngk->mng", values.double(), codes)
    terms = sums * own[:, :, 0].double() * scale.double()[:, None]
    sizes = terms.abs()
    if minimum is not None:
        totals = values.double().sum(2) * scale.double()
        terms = terms + minimum[:, :, 0].double() * totals[:, None]
        sizes = sizes + (minimum[:, :, 0].double() * totals[:, None]).abs()
    extra = 0.0 if bias is None else bias.double()
    return terms.sum(2) + extra, sizes.sum(2) + abs(extra)


def rounded_product(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the product of operands rounded to bfloat16 in float64, and the sum of magnitudes."""
    rows, numbers = x.bfloat16().double(), weight.dequantize().bfloat16().double()
    extra = 0.0 if bias is None else bias.double()
    return rows @ numbers.T + extra, rows.abs() @ numbers.abs().T + abs(extra)


def guarded(weight: BlockWeight) -> BlockWeight:
    """Return a copy with an unreadable page after each of its tensors."""
    parts = (
        None if part is None else at_the_end_of_memory(part) for part in (weight.codes, weight.scales, weight.supers)
    )
    return BlockWeight(weight.form, weight.rows, weight.columns, *parts)  # type: ignore[arg-type]


@pytest.mark.quick_cases(6)
@EVERY_FORM
def test_shapes(product: Product, form: BlockForm) -> None:
    for rows, columns, inner in SHAPES:
        x, weight = torch.randn(rows, inner), random_blocks(columns, inner, form)
        bias = torch.randn(columns) if columns % 2 else None
        product.check(x, weight, bias, product(x, weight, bias))


@pytest.mark.quick_cases(6)
@EVERY_FORM
def test_a_row_has_the_same_bits_alone_and_in_any_batch(product: Product, form: BlockForm) -> None:
    x, weight, bias = torch.randn(600, 1100), random_blocks(37, 1100, form), torch.randn(37)
    whole = product(x, weight, bias)
    for rows in (1, 2, 3, 5, 6, 7, 8, 12, 13, 15, 16, 17, 24, 48, 49, 97, 512, 513):
        assert torch.equal(product(x[:rows], weight, bias), whole[:rows]), rows
    for part in (slice(200, 203), slice(500, 530)):
        assert torch.equal(product(x[part], weight, bias), whole[part])


@pytest.mark.quick_cases(6)
@EVERY_FORM
def test_nothing_past_the_operands_is_read(product: Product, form: BlockForm) -> None:
    for rows, columns, inner in (
        (1, 3, 5),
        (2, 17, 33),
        (5, 4, 47),
        (17, 17, 33),
        (30, 6, 551),
        (50, 4, 551),
        (65, 20, 300),
    ):
        weight = random_blocks(columns, inner, form)
        x, bias = at_the_end_of_memory(torch.randn(rows, inner)), at_the_end_of_memory(torch.randn(columns))
        product.check(x, weight, bias, product(x, guarded(weight), bias))
        ids = at_the_end_of_memory(torch.tensor([columns - 1, 0]))
        assert torch.equal(cpu.embed_blocks(product.library, guarded(weight), ids), weight.dequantize(ids))


def test_strided_rows_other_types_and_an_output_tensor(product: Product) -> None:
    weight, x = random_blocks(20, 100, FORMS["q5_1"]), torch.full((60, 300), torch.nan)
    x[:, 13:113] = torch.randn(60, 100)
    part = x[:, 13:113]
    whole = product(part, weight)
    product.check(part, weight, None, whole)
    for kind in (torch.bfloat16, torch.float16):
        narrow = part.to(kind)
        got = product(narrow, weight, torch.ones(20, dtype=kind))
        assert got.dtype == kind and torch.equal(got, product(narrow.float(), weight, torch.ones(20)).to(kind))
    assert torch.equal(product(part.t().contiguous().t(), weight), whole)
    wider = torch.full((60, 50), -1.0)
    product(part, weight, out=wider[:, 7:27])
    assert torch.equal(wider[:, 7:27], whole)
    assert (wider[:, :7] == -1).all() and (wider[:, 27:] == -1).all()


@pytest.mark.quick_cases(6)
@EVERY_FORM
def test_threads_do_not_change_the_bits(form: BlockForm) -> None:
    kernels()
    for rows in (5, 40, 70):
        x, weight = torch.randn(rows, 700), random_blocks(1500, 700, form)
        same_on_threads(lambda x=x, weight=weight: cpu.linear_blocks(load(), x, weight))  # type: ignore[misc]


def test_threads_do_not_change_the_bits_of_the_matrix_unit(matrix_unit: Product) -> None:
    x, weight = torch.randn(70, 700), random_blocks(1500, 700, FORMS["q4_k"])
    same_on_threads(lambda: matrix_unit(x, weight))


# -- rows rounded to int8 ------------------------------------------------------------------------------------------


@EVERY_FORM
def test_gated_products_have_the_bits_of_two_calls(library_of: Library, form: BlockForm) -> None:
    weight, bias = random_blocks(96, 130, form), torch.randn(96)
    for rows, activation in zip(
        (1, 7, 8, 9, 17, 64, 65, 131), itertools.cycle(elementwise_bindings.ACTIVATIONS), strict=False
    ):
        x, own = torch.randn(rows, 130), bias if rows % 2 else None
        both = cpu.linear_blocks(library_of, x, weight, own)
        want = elementwise_bindings.gated_activation(library_of, both, activation)
        assert torch.equal(cpu.linear_blocks(library_of, x, weight, own, activation=activation), want), rows
    with pytest.raises(ValueError, match="do not fill panels"):
        cpu.linear_blocks(library_of, torch.randn(2, 8), random_blocks(40, 8, form), activation="silu")


@pytest.mark.quick_cases(6)
@EVERY_FORM
def test_plain_torch_agrees(form: BlockForm) -> None:
    for rows, columns, inner in (*SHAPES[:17], (200, 18, 80)):
        x, weight, bias = torch.randn(rows, inner), random_blocks(columns, inner, form), torch.randn(columns)
        Product(load()).check(x, weight, bias, reference.linear_blocks(x, weight, bias))


@EVERY_FORM
def test_extreme_codes_do_not_saturate(library_of: Library, form: BlockForm) -> None:
    """Use the largest products, of one sign and of both, with scales of one, so that the result is exact."""
    inner, columns = 512, 18
    low, high = (-127, 127) if form.bits == 8 else (0, (1 << form.bits) - 1)
    codes = torch.full((columns, inner), high, dtype=torch.int8)
    codes[1::3] = low
    codes[2::3, ::2] = low
    weight = BlockWeight.empty(columns, inner, form)
    scales = torch.ones(columns, weight.scales.shape[1], form.parts).to(weight.scales.dtype)
    supers = None if weight.supers is None else torch.ones(columns, weight.supers.shape[1], form.parts).half()
    stored = codes if form.bits == 8 else codes.view(torch.uint8)
    store_block_rows(weight.narrow(0, columns), stored, scales, supers)
    numbers = weight.dequantize()
    for rows in (1, 14, 40, 70):
        x = torch.full((rows, inner), 127.0)
        x[1::3] = -127.0
        x[2::3, ::2] = -127.0
        got = cpu.linear_blocks(library_of, x, weight)
        assert torch.equal(got, (x.double() @ numbers.double().T).float())


def test_every_pair_of_bytes(library_of: Library) -> None:
    for name, low, high in (("q8_0", -127, 128), ("q6_k", 0, 64), ("q5_0", 0, 32), ("q4_0", 0, 16)):
        form, count = FORMS[name], high - low
        for place in range(8):
            codes = torch.full((count, form.group), form.offset, dtype=torch.int16)
            codes[:, place] = torch.arange(low, high)
            weight = BlockWeight.empty(count, form.group, form)
            scales = torch.ones(count, 1, 1).to(weight.scales.dtype)
            supers = None if weight.supers is None else torch.ones(count, 1, 1).half()
            narrow = codes.to(torch.int8)
            store_block_rows(
                weight.narrow(0, count), narrow if form.bits == 8 else narrow.view(torch.uint8), scales, supers
            )
            x = torch.zeros(255, form.group)
            x[:, place] = torch.arange(-127, 128)
            x[:, (place + 1) % form.group] = 127  # makes the scale one
            want = torch.arange(-127.0, 128)[:, None] * (torch.arange(low, high) - form.offset)
            assert torch.equal(cpu.linear_blocks(library_of, x, weight), want)


@EVERY_FORM
def test_zero_rows_tiny_rows_and_rows_that_are_not_finite(library_of: Library, form: BlockForm) -> None:
    weight = random_blocks(19, 130, form)
    x = torch.rand(20, 130) + 0.5
    x[1], x[2, 129], x[4, 0], x[6] = 0.0, torch.nan, -torch.inf, 1e-38
    x[7, :], x[8, 5], x[9, :64] = 1e-25, 3e30, 0.0
    got = cpu.linear_blocks(library_of, x, weight)
    bad = torch.zeros(20, dtype=torch.bool)
    bad[[2, 4]] = True
    assert torch.equal(got.isnan(), bad[:, None].expand(20, 19))
    want, size = brute_force(x[~bad], weight, None)
    assert ((got[~bad].double() - want).abs() <= 2e-6 * size).all()
    assert (got[[1, 6]] == 0).all()


def test_a_nan_scale_affects_its_row_of_the_weight() -> None:
    weight, library_of = random_blocks(19, 70, FORMS["q4_1"]), kernels()
    weight.scales[0, 1, 0, 5], weight.scales[1, 2, 1, 1] = torch.nan, torch.nan
    bad = cpu.linear_blocks(library_of, torch.randn(3, 70), weight).isnan().all(0)
    assert bad.nonzero().flatten().tolist() == [5, 17]


@EVERY_FORM
def test_embedded_rows_equal_dequantized_rows(library_of: Library, form: BlockForm) -> None:
    table = random_blocks(53, 300, form)
    ids = torch.tensor([52, 0, 17, 17, 31])
    assert torch.equal(cpu.embed_blocks(library_of, table, ids), table.dequantize(ids))
    scaled = cpu.embed_blocks(library_of, table, ids, 0.3)
    assert torch.equal(scaled, table.dequantize(ids) * torch.tensor(0.3))
    for wrong in (-1, 53):
        with pytest.raises(IndexError, match="not a row"):
            cpu.embed_blocks(library_of, table, torch.tensor([0, wrong]))


@EVERY_FORM
def test_products_of_unrounded_rows(library_of: Library, form: BlockForm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.kernels.cpu.matmul_bindings._WIDENED", 3000)  # several pieces
    x, weight, bias = torch.randn(9, 300), random_blocks(37, 300, form), torch.randn(37)
    want = x.double() @ weight.dequantize().double().T + bias
    for most in (0, 100):
        got = cpu.linear_blocks_widened(library_of, x, weight, bias, most_rows=most)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    alone = cpu.linear_blocks_widened(library_of, x[3:4], weight, bias, most_rows=100)
    assert torch.equal(alone, got[3:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backends_multiply_and_embed(dtype: torch.dtype, activations: str, deterministic: bool) -> None:
    kernels()
    chosen = "int8" if activations == "int8" else "float32"
    backend = select_backend("cpu", dtype, torch.float32, activations=chosen, deterministic=deterministic)
    assert isinstance(backend, CompiledBackend)
    plain = torch.randn(8, 96)
    parts = (random_blocks(20, 96, FORMS["q4_k"]), plain, random_blocks(33, 96, FORMS["q8_0"]))
    stacked, bias = backend.stack(parts), torch.randn(61).to(dtype)
    for rows in (1, 3, 300):
        x = torch.randn(rows, 96).to(dtype)
        got = backend.linear(x, stacked, bias)
        wide = [p if isinstance(p, torch.Tensor) else p.dequantize() for p in parts]
        want = x.double() @ torch.cat(wide).double().T + bias
        tolerance = 0.002 if chosen == "float32" and dtype == torch.float32 else 0.05
        assert got.dtype == dtype and (got.double() - want).norm() <= tolerance * want.norm()
        if deterministic:
            assert torch.equal(backend.linear(x[:1], stacked, bias), got[:1])
    ids = torch.tensor([3, 3, 0])
    embedded = backend.embed(parts[0], ids, 7.3)
    want = parts[0].dequantize(ids).to(dtype) * torch.tensor(7.3, dtype=dtype)
    assert torch.equal(embedded, want) and embedded.dtype == dtype


@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_recorded_products_are_repeated(library_of: Library, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, library_of)
    backend = select_backend("cpu", activations="int8" if activations == "int8" else "float32")
    assert isinstance(backend, CompiledBackend)
    plain = torch.randn(16, 96)
    table = random_blocks(40, 96, FORMS["q6_k"])
    stacked = backend.stack((random_blocks(20, 96, FORMS["q4_1"]), plain, random_blocks(60, 96, FORMS["q5_k"])))
    ids, arena = torch.tensor([3, 17]), cpu.Arena(9 << 20)
    with torch.inference_mode(), backend.record(arena) as recording:
        x = backend.embed(table, ids)
        found = backend.linear(backend.linear(x, stacked), table)
    assert recording.obstacle is None
    ids.copy_(torch.tensor([39, 0]))
    assert recording.repeat()
    repeated = found.clone()
    assert torch.equal(repeated, backend.linear(backend.linear(backend.embed(table, ids), stacked), table))


def test_unsuitable_operands_are_refused() -> None:
    kernels()
    weight = random_blocks(3, 8, FORMS["q4_0"])
    for x, bias in ((torch.randn(2, 7), None), (torch.randn(8), None), (torch.randn(2, 8), torch.randn(4))):
        with pytest.raises(ValueError, match="linear_blocks"):
            cpu.linear_blocks(load(), x, weight, bias)
    with pytest.raises(ValueError, match="float64"):
        cpu.linear_blocks(load(), torch.randn(2, 8).double(), weight)
    with pytest.raises(ValueError, match="out is"):
        cpu.linear_blocks(load(), torch.randn(2, 8), weight, out=torch.empty(2, 4))
    with pytest.raises(ValueError, match="no product"):
        cpu.linear_blocks(load(), torch.randn(2, 8), random_blocks(3, 8, BlockForm("odd", bits=8, group=16)))


# -- rows rounded to bfloat16 by the matrix unit -------------------------------------------------------------------


def filled_panels(numbers: Tensor) -> PanelWeight:
    weight = PanelWeight.empty(*numbers.shape, numbers.dtype)
    matmul_bindings.pack_panels(load(), weight.narrow(0, numbers.shape[0]), numbers)
    return weight


def test_every_code_at_every_place_of_the_matrix_unit(matrix_unit: Product) -> None:
    """One row of x for each element of K selects the values of the weight."""
    for form in FORMS.values():
        weight = random_blocks(50, 330, form)
        got = matrix_unit(torch.eye(330), weight)
        assert torch.equal(got, weight.dequantize().bfloat16().float().T)


def test_nan_rows_do_not_affect_others_in_the_matrix_unit(matrix_unit: Product) -> None:
    weight, x = random_blocks(40, 130, FORMS["q8_0"]), torch.randn(50, 130)
    want = matrix_unit(x, weight)
    x[20, 129], x[33] = torch.nan, 0.0
    got = matrix_unit(x, weight)
    assert got[20].isnan().all() and (got[33] == 0).all()
    others = [row for row in range(50) if row not in (20, 33)]
    assert torch.equal(got[others], want[others])


def test_panels_in_the_matrix_unit(matrix_unit: Product) -> None:
    for rows, columns, inner in SHAPES:
        x, numbers = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
        weight = filled_panels(numbers)
        bias = torch.randn(columns).bfloat16() if columns % 2 else None
        got = matmul_bindings.linear_panels_amx(matrix_unit.library, x, weight, bias)
        want = x.double() @ numbers.double().T + (0.0 if bias is None else bias.double())
        size = x.double().abs() @ numbers.double().abs().T + 2
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 2e-6 * size).all()
        panels = PanelWeight(columns, inner, at_the_end_of_memory(weight.data))
        given = at_the_end_of_memory(x) if rows else x
        assert torch.equal(matmul_bindings.linear_panels_amx(matrix_unit.library, given, panels, bias), got)
    padded_out = torch.full((70, 200), -1.0).bfloat16()
    x, weight = torch.randn(70, 1100).bfloat16(), filled_panels(torch.randn(150, 1100).bfloat16())
    whole = matmul_bindings.linear_panels_amx(matrix_unit.library, x, weight)
    matmul_bindings.linear_panels_amx(matrix_unit.library, x, weight, out=padded_out[:, 20:170])
    assert (
        torch.equal(padded_out[:, 20:170], whole)
        and (padded_out[:, :20] == -1).all()
        and (padded_out[:, 170:] == -1).all()
    )
    assert torch.equal(matmul_bindings.linear_panels_amx(matrix_unit.library, x[40:50], weight), whole[40:50])


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gated_products_of_the_matrix_unit(matrix_unit: Product, activation: str) -> None:
    """Compare with the activation of a plain product; for bfloat16, without rounding in between."""
    for rows, columns, inner in GATED_SHAPES:
        x, bias = torch.randn(rows, inner), torch.randn(columns) if rows % 2 else None
        for form in (FORMS["q8_0"], FORMS["q4_k"]):
            weight = random_blocks(columns, inner, form)
            plain = matrix_unit(x, weight, bias)
            want = cpu.gated_activation(matrix_unit.library, plain, activation)
            got = matmul_bindings.linear_blocks_amx(matrix_unit.library, x, weight, bias, activation=activation)
            assert got.shape == (rows, columns // 2) and torch.allclose(
                got, want, rtol=1e-6, atol=1e-6 * float(want.abs().max())
            )
            padded_out = torch.full((rows, columns), -1.0)
            into = padded_out[:, 7 : 7 + columns // 2]
            matmul_bindings.linear_blocks_amx(matrix_unit.library, x, weight, bias, activation=activation, out=into)
            assert (
                torch.equal(into, got)
                and (padded_out[:, :7] == -1).all()
                and (padded_out[:, 7 + columns // 2 :] == -1).all()
            )
        narrow, numbers = x.bfloat16(), (torch.randn(columns, inner) / inner**0.5).bfloat16()
        wide = narrow.float() @ numbers.float().T + (0.0 if bias is None else bias)
        want = cpu.gated_activation(load(), wide, activation)
        got = matmul_bindings.linear_panels_amx(
            matrix_unit.library, narrow, filled_panels(numbers), bias, activation=activation
        )
        assert got.dtype == torch.bfloat16
        assert torch.allclose(got.float(), want, rtol=2**-8, atol=1e-5)


@EVERY_FORM
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_with_many_rows_in_blocks(matrix_unit: Product, form: BlockForm, stacked: bool) -> None:
    """Experts with many rows use the matrix unit, each in two parts if it is stacked."""
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
        own = matmul_bindings.CompiledExperts(experts, biases, matrix_unit.library, amx_blocks=True)
        got = matmul_bindings.linear_of_experts(matrix_unit.library, x, own, chosen)
        for expert, n in enumerate(counts):
            mine = chosen[:, 0] == expert
            multiply = matmul_bindings.linear_blocks_amx if n >= few else matmul_bindings.linear_blocks
            parts = experts[expert].spans() if stacked else [(weights[expert], 0, rows)]
            for part, begin, end in parts:
                want = multiply(matrix_unit.library, x[mine], part, biases[expert][begin:end].contiguous())
                assert torch.equal(got[mine][:, begin:end], want), (counts, expert)


def test_experts_with_many_rows_in_panels(matrix_unit: Product) -> None:
    count, few = 3, matmul_bindings.PANEL_TILE_MIN_ROWS
    weights = [filled_panels(torch.randn(70, 330).bfloat16()) for _ in range(count)]
    for counts in ((few, few - 1, 1), (100, 7, 60)):
        chosen = torch.cat([torch.full((n,), expert) for expert, n in enumerate(counts)])
        chosen = chosen[torch.randperm(len(chosen))][:, None].contiguous()
        x = torch.randn(len(chosen), 330).bfloat16()
        own = matmul_bindings.CompiledExperts(weights, None, matrix_unit.library, amx_panels=True)
        got = matmul_bindings.linear_of_experts(matrix_unit.library, x, own, chosen)
        for expert, n in enumerate(counts):
            mine = chosen[:, 0] == expert
            multiply = matmul_bindings.linear_panels_amx if n >= few else matmul_bindings.linear_panels
            assert torch.equal(got[mine], multiply(matrix_unit.library, x[mine], weights[expert])), (counts, expert)


def test_backends_that_round_rows_of_experts(matrix_unit: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the backends that round dense products of that many rows."""
    choose(monkeypatch, matrix_unit.library)
    weights = [random_blocks(40, 320, FORMS["q8_0"]) for _ in range(2)]
    few = matmul_bindings.BLOCK_TILE_MIN_ROWS - 1
    x, chosen = torch.randn(60 + few, 320), torch.zeros(60 + few, 1, dtype=torch.int64)
    chosen[60:] = 1
    for options, rounds in (
        ({"bf16_prefill": True}, True),
        ({}, False),
        ({"bf16_prefill": True, "deterministic": True}, False),
    ):
        own = select_backend("cpu", **options)
        got = own.linear_of_experts(x, own.experts(weights), chosen)
        assert torch.equal(got[:60], own.linear(x[:60], weights[0]))
        assert torch.equal(got[60:], matmul_bindings.linear_blocks(matrix_unit.library, x[60:], weights[1]))
        plain = matmul_bindings.linear_blocks(matrix_unit.library, x[:60], weights[0])
        assert torch.equal(got[:60], plain) is not rounds


def test_unsuitable_operands_of_the_matrix_unit_are_refused(matrix_unit: Product) -> None:
    weight = random_blocks(20, 64, FORMS["q8_0"])
    without = copy(matrix_unit.library)
    without.linear_blocks_amx = without.linear_panels_amx = None
    with pytest.raises(ValueError, match="do not fill panels of 16"):
        matmul_bindings.linear_blocks_amx(matrix_unit.library, torch.randn(3, 64), weight, activation="silu")
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        matmul_bindings.linear_blocks_amx(matrix_unit.library, torch.randn(3, 64), weight, activation="tanh")
    odd = BlockWeight(replace(weight.form, offset=3), 20, 64, weight.codes, weight.scales, None)
    with pytest.raises(ValueError, match="no product for the form"):
        matrix_unit(torch.randn(3, 64), odd)
    with pytest.raises(ValueError, match="64 columns"):
        matrix_unit(torch.randn(3, 65), weight)
    with pytest.raises(ValueError, match="no matrix unit"):
        Product(without, True)(torch.randn(3, 64), weight)
    narrow = filled_panels(torch.randn(20, 64).bfloat16())
    with pytest.raises(ValueError, match="float32 times"):
        matmul_bindings.linear_panels_amx(matrix_unit.library, torch.randn(3, 64), narrow)
    with pytest.raises(ValueError, match="elements of a row are apart"):
        matmul_bindings.linear_panels_amx(matrix_unit.library, torch.randn(64, 3).bfloat16().t(), narrow)
    with pytest.raises(ValueError, match="no matrix unit"):
        matmul_bindings.linear_panels_amx(without, torch.randn(3, 64).bfloat16(), narrow)


def test_backends_that_may_round_use_the_matrix_unit_for_many_rows() -> None:
    kernels("avx512_amx")
    if load().isa != "avx512_amx":
        pytest.skip("another instruction set is selected")
    weight, few = random_blocks(40, 320, FORMS["q4_k"]), matmul_bindings.BLOCK_TILE_MIN_ROWS - 1
    x = torch.randn(few + 1, 320)
    bytes_of = {rows: cpu.linear_blocks(load(), x[:rows], weight) for rows in (few, few + 1)}
    rounded = select_backend("cpu", torch.float32, activations="int8", bf16_prefill=True)
    assert torch.equal(rounded.linear(x[:few], weight), bytes_of[few])
    assert torch.equal(rounded.linear(x, weight), Product(load(), True)(x, weight))
    gates = random_blocks(64, 320, FORMS["q4_k"])
    opened = matmul_bindings.linear_blocks_amx(load(), x, gates, activation="gelu")
    assert torch.equal(rounded.gated_linear(x, gates, None, "gelu"), opened)
    for few_or_odd in ((x[:few], gates), (x, weight)):  # too few rows, and gates that do not fill panels
        want = rounded.gated_activation(rounded.linear(*few_or_odd), "gelu")
        assert torch.equal(rounded.gated_linear(*few_or_odd, None, "gelu"), want)
    narrow = select_backend("cpu", torch.bfloat16, activations="int8", bf16_prefill=True)
    assert torch.equal(narrow.linear(x.bfloat16(), weight), Product(load(), True)(x.bfloat16(), weight))
    numbers = torch.randn(40, 320).bfloat16()
    panel_weight, many = filled_panels(numbers), x[: matmul_bindings.PANEL_TILE_MIN_ROWS].bfloat16()
    assert torch.equal(
        narrow.linear(many, panel_weight),
        matmul_bindings.linear_panels_amx(load(), many, panel_weight),
    )
    exact = select_backend("cpu", torch.bfloat16, deterministic=True)
    assert torch.equal(exact.linear(many, panel_weight), matmul_bindings.linear_panels(load(), many, panel_weight))
    for options in ({"bf16_prefill": False}, {"bf16_prefill": True, "deterministic": True}):
        exact = select_backend("cpu", torch.float32, activations="int8", **options)
        assert torch.equal(exact.linear(x, weight), bytes_of[few + 1])


def test_recorded_products_of_the_matrix_unit_are_repeated() -> None:
    kernels("avx512_amx")
    if load().isa != "avx512_amx":
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
