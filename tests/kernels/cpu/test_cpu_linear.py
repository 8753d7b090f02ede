"""Products with float weights, plain and in panels, against float64, and how panels are filled and chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from helpers.cpu_kernels import FORMS, PAIR_FORMS, at_the_end_of_memory, kernels
from kernels_helpers.checks import TYPES, same_on_threads
from torch import Tensor

from windlass.kernels import BlockWeight, cpu, select_backend
from windlass.kernels.cpu import load
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.layouts.weight_layouts import PANEL_DTYPES, PanelWeight
from windlass.kernels.torch.linear import linear_widened

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def panels(weight: Tensor, form: Library | None = None) -> PanelWeight:
    """Fill panels, by default with the generic kernels. `test_packed_rows_are_unpacked_unchanged` compares the others."""
    result = PanelWeight.empty(*weight.shape, weight.dtype)
    cpu.pack_panels(form or kernels(), result.narrow(0, weight.shape[0]), weight)
    return result


class Product(NamedTuple):
    multiply: Callable[..., Tensor]  # (library, x, weight, bias)
    pack: Callable[[Tensor], Tensor | PanelWeight]
    dtypes: tuple[torch.dtype, ...]  # of weights
    x_types: tuple[torch.dtype, ...]


PLAIN = Product(cpu.linear_small, lambda weight: weight, TYPES, TYPES[:2])
PANELS = Product(cpu.linear_panels, panels, tuple(PANEL_DTYPES), TYPES)
PRODUCTS = {"plain": PLAIN, "panels": PANELS, "widened panels": PANELS._replace(multiply=cpu.linear_panels_widened)}


def each_dtype(names: Iterable[str] = PRODUCTS) -> pytest.MarkDecorator:
    cases = [
        pytest.param(PRODUCTS[name], dtype, id=f"{name}-{dtype}") for name in names for dtype in PRODUCTS[name].dtypes
    ]
    return pytest.mark.parametrize(("product", "dtype"), cases)


@pytest.fixture(params=(*FORMS, *PAIR_FORMS))
def form(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


@pytest.fixture(params=PRODUCTS.values(), ids=PRODUCTS)
def product(request: pytest.FixtureRequest) -> Product:
    return request.param


def assert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, got: Tensor) -> None:
    want = x.double() @ weight.double().T
    # Error of float32 summation in any order, relative to the sum of magnitudes, and rounding to x's dtype.
    magnitude = x.double().abs() @ weight.double().abs().T + 1e-30
    if bias is not None:
        want, magnitude = want + bias.double(), magnitude + bias.double().abs()
    assert got.dtype == x.dtype and got.shape == want.shape
    worst = (got.double() - want).abs() - 1e-6 * magnitude - ROUNDING[x.dtype] * want.abs()
    assert (worst <= 0).all(), worst.max()


# -- both storages -------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(6)
@each_dtype()
def test_shapes_and_types(form: Library, product: Product, dtype: torch.dtype) -> None:
    shapes = [(1, 1, 1), (1, 5, 3), (2, 7, 16), (2, 16, 16), (3, 9, 31), (3, 17, 31), (4, 3, 64), (4, 31, 64)]
    shapes += [(5, 17, 513), (5, 33, 513), (6, 4, 1024), (7, 33, 530), (7, 47, 1025), (8, 64, 96), (9, 15, 2049)]
    shapes += [(13, 11, 1041), (13, 70, 1041), (32, 6, 200), (49, 10, 40), (70, 35, 17), (100, 3, 17), (100, 3, 7)]
    for (rows, columns, inner), x_type in itertools.product(shapes, product.x_types):
        x, weight = torch.randn(rows, inner).to(x_type), torch.randn(columns, inner).to(dtype)
        bias = torch.randn(columns).to(dtype) if columns % 2 else None
        assert_linear(x, weight, bias, product.multiply(form, x, product.pack(weight), bias))


@each_dtype(("plain", "panels"))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(form: Library, product: Product, dtype: torch.dtype) -> None:
    for x_type in TYPES[:2]:
        x, weight = torch.randn(110, 2100).to(x_type), torch.randn(53, 2100).to(dtype)
        laid_out = product.pack(weight)
        whole = product.multiply(form, x, laid_out)
        for rows in (1, 2, 3, 4, 5, 7, 8, 11, 24, 48, 56, 97):
            assert torch.equal(product.multiply(form, x[:rows], laid_out), whole[:rows]), rows
        part = product.multiply(form, x[20:21], product.pack(weight[5:30]))
        assert torch.equal(part, whole[20:21, 5:30])


@pytest.mark.parametrize(("product", "dtype"), [(PLAIN, torch.float32), (PANELS, torch.bfloat16)])
def test_threads_do_not_change_the_bits(product: Product, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 700), torch.randn(500, 700).to(dtype)
    laid_out = product.pack(weight)
    assert_linear(x, weight, None, same_on_threads(lambda: product.multiply(load(), x, laid_out)))


def test_strided_rows_and_mixed_bias(form: Library, product: Product) -> None:
    x, weight = torch.randn(6, 300)[:, 13:113], torch.randn(40, 150).to(product.dtypes[0])[::2, 50:]
    views = (x,) if product is PLAIN else (x, x[::2], torch.randn(100, 6).T)
    for given, bias in itertools.product(views, (torch.randn(20).half(), torch.randn(40, dtype=torch.float64)[::2])):
        if product is not PLAIN or bias.dtype == torch.float16:
            assert_linear(given, weight, bias, product.multiply(form, given, product.pack(weight), bias))


@each_dtype()
def test_nothing_past_the_operands_is_read_or_written(form: Library, product: Product, dtype: torch.dtype) -> None:
    for rows, columns, inner in ((1, 3, 5), (2, 7, 33), (2, 17, 33), (5, 4, 47), (5, 40, 47), (8, 6, 551)):
        weight = guarded = at_the_end_of_memory(torch.randn(columns, inner).to(dtype))
        if product.pack is panels:
            empty = PanelWeight.empty(columns, inner, dtype)
            guarded = PanelWeight(columns, inner, at_the_end_of_memory(empty.data))
            cpu.pack_panels(form, guarded.narrow(0, columns), weight)
        x, bias = at_the_end_of_memory(torch.randn(rows, inner)), at_the_end_of_memory(torch.randn(columns))
        assert_linear(x, weight, bias, product.multiply(form, x, guarded, bias))


def test_values_between_the_rows_are_not_read(form: Library, product: Product) -> None:
    """NaN after each row's end, in x and in the weight, must not reach the result through padding."""
    x, weight = torch.full((5, 64), torch.nan), torch.full((9, 64), torch.nan).to(product.dtypes[0])
    x[:, :37], weight[:, :37] = torch.randn(5, 37), torch.randn(9, 37)
    got = product.multiply(form, x[:, :37], product.pack(weight[:, :37]))
    assert_linear(x[:, :37], weight[:, :37], None, got)


@each_dtype()
def test_nan_and_infinity_stay_in_their_row_and_column(form: Library, product: Product, dtype: torch.dtype) -> None:
    x, weight = torch.rand(7, 131) + 0.5, (torch.rand(18, 131) + 0.5).to(dtype)
    x[2, 129], x[4, 0], x[5, 130] = torch.nan, torch.inf, torch.inf
    weight[3, 64], weight[17, 130] = -torch.inf, torch.nan
    got, want = product.multiply(form, x, product.pack(weight)), x.double() @ weight.double().T
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0, equal_nan=True)


@each_dtype()
def test_every_16_bit_value_is_widened_exactly(form: Library, product: Product, dtype: torch.dtype) -> None:
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    if dtype == torch.float32:
        pytest.skip("nothing is widened")
    weight = patterns.view(dtype)[:, None].clone()
    found, want = [product.multiply(form, torch.ones(1, 1), product.pack(weight))[0]], weight.float()[:, 0]
    if product is PLAIN:  # a bias is converted element by element
        found.append(product.multiply(form, torch.ones(1, 1), torch.zeros(65536, 1), weight[:, 0].contiguous())[0])
    for got in found:
        assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), want.nan_to_num(7.0, 8.0, 9.0))
        assert torch.equal(got.isnan(), want.isnan())


def test_empty_operands(form: Library, product: Product) -> None:
    dtype, bias = product.dtypes[0], torch.randn(3)
    for x, columns in ((torch.randn(0, 8), 3), (torch.randn(2, 8), 0)):
        got = product.multiply(form, x, product.pack(torch.randn(columns, 8).to(dtype)))
        assert got.shape == (len(x), columns)
    flat = product.pack(torch.randn(3, 0).to(dtype))
    assert torch.equal(product.multiply(form, torch.randn(2, 0), flat, bias), bias.expand(2, 3))
    assert torch.equal(product.multiply(form, torch.randn(2, 0), flat), torch.zeros(2, 3))


# -- plain weights -------------------------------------------------------------------------------------------------


def test_bfloat16_results_round_to_nearest_even(form: Library) -> None:
    values = torch.randn(5000) * torch.exp2(torch.randint(-120, 120, (5000,)).float())
    halfway = (torch.arange(1, 2001, dtype=torch.int32) * 0x18000 + 0x3F808000).view(torch.float32)
    weight = torch.cat((values, halfway))[:, None]
    got = cpu.linear_small(form, torch.ones(1, 1, dtype=torch.bfloat16), weight)[0]
    assert torch.equal(got, weight[:, 0].to(torch.bfloat16))


def test_unsuitable_operands_are_refused() -> None:
    kernels()
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
    kernels()
    calls, small = [], cpu.linear_small
    monkeypatch.setattr(
        "windlass.kernels.cpu.matmul_bindings.linear_small", lambda *a, **k: calls.append(a) or small(*a, **k)
    )
    x, weight = torch.randn(rows, 8), torch.randn(3, 8)
    assert_linear(x, weight, None, select_backend("cpu").linear(x, weight))
    assert len(calls) == times


@pytest.mark.parametrize(("x_type", "weight_type"), itertools.product(TYPES, TYPES))
def test_widened_products(x_type: torch.dtype, weight_type: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several panels, the last one partial.
    monkeypatch.setattr("windlass.kernels.torch.linear._PANEL_BYTES", 4 * 96 * 70)
    x, weight = torch.randn(40, 96).to(x_type), torch.randn(200, 96).to(weight_type)
    bias = torch.randn(200)
    got, want = linear_widened(x, weight, bias), x.double() @ weight.double().T + bias.double()
    assert got.dtype == x_type
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[x_type]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=2e-4)
    assert linear_widened(x[:0], weight).shape == (0, 200)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("rows", [1, 11, 12, 300])
def test_bfloat16_products_are_rounded_once(rows: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are float32, with or without the processor's bfloat16 products."""
    monkeypatch.setattr("windlass.kernels.torch.linear.multiplies_bfloat16", lambda: native)
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(200, 96).bfloat16()
    assert_linear(x, weight, None, select_backend("cpu", torch.bfloat16).linear(x, weight))


def test_tested_types_are_the_supported_ones() -> None:
    assert set(TYPE_CODES) == set(TYPES)


# -- panels --------------------------------------------------------------------------------------------------------


def test_panels_with_every_number_of_rows(form: Library) -> None:
    weight = torch.randn(50, 70).bfloat16()
    laid_out = panels(weight)
    for rows in (*range(1, 71), 96, 97, 193):
        for x in (torch.randn(rows, 70), torch.randn(rows, 70).bfloat16()):
            assert_linear(x, weight, None, cpu.linear_panels(form, x, laid_out))


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_packed_rows_are_unpacked_unchanged(form: Library, dtype: torch.dtype) -> None:
    for columns, inner in ((1, 1), (16, 2), (15, 64), (33, 65), (48, 31), (100, 96)):
        # Every bit pattern may occur, NaN with any payload too.
        source = torch.randint(-32768, 32768, (columns, inner), dtype=torch.int32).to(torch.int16).view(dtype)
        got = PanelWeight.empty(columns, inner, dtype)
        cpu.pack_panels(form, got.narrow(0, columns), source)
        assert torch.equal(got.unpack().view(torch.int16), source.view(torch.int16))
        assert torch.equal(got.data.view(torch.int16), panels(source).data.view(torch.int16))
        padding = got.data.view(torch.int16).count_nonzero() - source.view(torch.int16).count_nonzero()
        assert padding == 0


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_panels_are_filled_in_parts_of_any_size(form: Library, dtype: torch.dtype) -> None:
    source = torch.randn(90, 71).to(dtype)
    got = PanelWeight.empty(90, 71, dtype)
    first = 0
    for count in (3, 13, 16, 40, 1, 17):
        cpu.pack_panels(form, got.narrow(first, count), source[first : first + count])
        first += count
    assert first == 90
    assert torch.equal(got.data, panels(source).data)


def test_strided_sources_are_rounded(form: Library) -> None:
    source = torch.randn(80, 40)
    for view in (source, source[::2, 3:], source.T, source.T[:, 1::2]):
        got = PanelWeight.empty(*view.shape, torch.bfloat16)
        cpu.pack_panels(form, got.narrow(0, view.shape[0]), view)
        assert torch.equal(got.unpack(), view.bfloat16())


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_panels_are_widened_block_by_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels()
    monkeypatch.setattr("windlass.kernels.cpu.matmul_bindings._WIDENED_BYTES", 4 * 97 * 80)  # the last block is partial
    x, weight, bias = torch.randn(40, 97), torch.randn(203, 97).to(dtype), torch.randn(203)
    assert_linear(x, weight, bias, cpu.linear_panels_widened(load(), x, panels(weight), bias))


@pytest.mark.parametrize("rows", [1, 12, 512, 513, 600])
def test_backends_multiply_by_panels(rows: int) -> None:
    kernels()
    x, weight = torch.randn(rows, 96), torch.randn(200, 96).bfloat16()
    laid_out = panels(weight)
    assert_linear(x, weight, None, select_backend("cpu", weight_dtype=torch.bfloat16).linear(x, laid_out))
    deterministic = select_backend("cpu", weight_dtype=torch.bfloat16, deterministic=True)
    alone = deterministic.linear(x[:1], laid_out)
    assert torch.equal(deterministic.linear(x, laid_out)[:1], alone)


@pytest.mark.slow
def test_backends_choose_panels_for_16_bits_without_native_products(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels()
    wide, narrow = torch.float32, torch.bfloat16

    def lays_out_panels(dtype: torch.dtype, weight_dtype: torch.dtype, device: str = "cpu", **options: bool) -> bool:
        backend = select_backend(device, dtype, weight_dtype, **options)
        matrix = backend.matrix(17, 5, weight_dtype)
        assert isinstance(backend.table(17, 5, weight_dtype), Tensor)
        assert isinstance(backend.tied_embedding(17, 5, weight_dtype), Tensor)
        assert not isinstance(matrix, BlockWeight) and matrix.dtype == weight_dtype
        return isinstance(matrix, PanelWeight)

    monkeypatch.setattr("windlass.kernels.torch.linear.multiplies_bfloat16", lambda: True)
    assert lays_out_panels(wide, narrow)
    assert lays_out_panels(torch.float16, torch.float16)
    monkeypatch.setattr("windlass.kernels.cpu.library.BF16_DOT_ISAS", frozenset())
    assert not lays_out_panels(narrow, narrow)
    assert lays_out_panels(narrow, narrow, deterministic=True)
    assert not lays_out_panels(wide, wide)
    assert not lays_out_panels(wide, narrow, "meta")
    monkeypatch.setattr("windlass.kernels.torch.linear.multiplies_bfloat16", lambda: False)
    assert lays_out_panels(narrow, narrow)
    monkeypatch.setattr("windlass.kernels.cpu.library.unavailable_reason", lambda: "off")
    assert not lays_out_panels(wide, narrow)


def test_unsuitable_panels_are_refused() -> None:
    kernels()
    weight = panels(torch.randn(20, 8).bfloat16())
    with pytest.raises(ValueError, match="float32"):
        PanelWeight.empty(2, 2, torch.float32)
    with pytest.raises(IndexError):
        weight.narrow(10, 11)
    with pytest.raises(ValueError, match="into"):
        cpu.pack_panels(load(), weight.narrow(0, 10), torch.randn(11, 8))
    with pytest.raises(ValueError, match="int32"):
        cpu.pack_panels(load(), weight.narrow(0, 10), torch.zeros(10, 8, dtype=torch.int32))
    for x, bias, word in (
        (torch.randn(2, 7), None, "columns"),
        (torch.randn(8), None, "columns"),
        (torch.randn(2, 8, dtype=torch.float64), None, "float64"),
        (torch.randn(2, 8, device="meta"), None, "meta"),
        (torch.randn(2, 8), torch.randn(19), "bias"),
    ):
        for product in (cpu.linear_panels, cpu.linear_panels_widened):
            with pytest.raises(ValueError, match=word):
                product(load(), x, weight, bias)
    assert weight.nbytes == 2 * 32 * 8
    assert (weight.numel(), weight.shape, weight.device.type) == (160, (20, 8), "cpu")
