"""Products with 16-bit weights in panels against float64, in every instruction set this machine can run."""

from __future__ import annotations

import pytest
import torch
from helpers.cpu_kernels import FORMS, PAIR_FORMS, at_the_end_of_memory, kernels

from windlass.kernels import BlockWeight, cpu, select_backend
from windlass.kernels.cpu import load
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts.weight_layouts import PANEL_DTYPES, PanelWeight

X_TYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = (cpu.linear_panels, cpu.linear_panels_widened)


@pytest.fixture(params=(*FORMS, *PAIR_FORMS))
def form(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


def panels(weight: torch.Tensor) -> PanelWeight:
    """By the generic kernels; `test_rows_come_out_as_they_went_in` holds the others to the same bytes."""
    result = PanelWeight.empty(*weight.shape, weight.dtype)
    cpu.pack_panels(kernels("generic"), result.narrow(0, weight.shape[0]), weight)
    return result


def assert_linear(x, weight, bias, got) -> None:
    want = x.double() @ weight.double().T
    # What float32 summation in any order may lose, against the sum of magnitudes; then x's own rounding.
    magnitude = x.double().abs() @ weight.double().abs().T + 1e-30
    if bias is not None:
        want, magnitude = want + bias.double(), magnitude + bias.double().abs()
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[x.dtype]
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    worst = (got.double() - want).abs() - 1e-6 * magnitude - rounding * want.abs()
    assert (worst <= 0).all(), worst.max()


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
@pytest.mark.parametrize("x_type", X_TYPES)
def test_shapes_and_types(form: Library, x_type: torch.dtype, dtype: torch.dtype) -> None:
    shapes = [
        (1, 1, 1),
        (1, 5, 3),
        (2, 16, 16),
        (3, 17, 31),
        (4, 31, 64),
        (5, 33, 513),
        (6, 4, 1024),
        (7, 47, 1025),
        (8, 64, 96),
        (9, 15, 2049),
    ]
    for rows, columns, inner in [*shapes, (13, 70, 1041), (32, 6, 200), (49, 10, 40), (70, 35, 17), (100, 3, 7)]:
        x, weight = torch.randn(rows, inner).to(x_type), torch.randn(columns, inner).to(dtype)
        bias = torch.randn(columns).to(dtype) if columns % 2 else None
        for product in PRODUCTS:
            assert_linear(x, weight, bias, product(form, x, panels(weight), bias))


def test_every_number_of_rows(form: Library) -> None:
    weight = torch.randn(50, 70).bfloat16()
    laid_out = panels(weight)
    for rows in (*range(1, 71), 96, 97, 193):
        for x in (torch.randn(rows, 70), torch.randn(rows, 70).bfloat16()):
            assert_linear(x, weight, None, cpu.linear_panels(form, x, laid_out))


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
@pytest.mark.parametrize("x_type", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(form: Library, x_type: torch.dtype, dtype: torch.dtype) -> None:
    x, weight = torch.randn(110, 2100).to(x_type), torch.randn(53, 2100).to(dtype)
    whole = cpu.linear_panels(form, x, panels(weight))
    for rows in (1, 2, 3, 4, 5, 7, 8, 11, 24, 48, 97):
        assert torch.equal(cpu.linear_panels(form, x[:rows], panels(weight)), whole[:rows]), rows
    part = cpu.linear_panels(form, x[20:21], panels(weight[5:30]))
    assert torch.equal(part, whole[20:21, 5:30])


def test_threads_do_not_change_the_bits() -> None:
    kernels("generic")
    x, weight = torch.randn(5, 700), panels(torch.randn(500, 700).bfloat16())
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(cpu.linear_panels(load(), x, weight))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert_linear(x, weight.unpack(), None, results[0])


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_rows_come_out_as_they_went_in(form: Library, dtype: torch.dtype) -> None:
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
def test_parts_of_any_size_fill_a_weight(form: Library, dtype: torch.dtype) -> None:
    source = torch.randn(90, 71).to(dtype)
    got = PanelWeight.empty(90, 71, dtype)
    first = 0
    for count in (3, 13, 16, 40, 1, 17):
        cpu.pack_panels(form, got.narrow(first, count), source[first : first + count])
        first += count
    assert first == 90
    assert torch.equal(got.data, panels(source).data)


def test_sources_are_rounded_and_may_have_strides(form: Library) -> None:
    source = torch.randn(80, 40)
    for view in (source, source[::2, 3:], source.T, source.T[:, 1::2]):
        got = PanelWeight.empty(*view.shape, torch.bfloat16)
        cpu.pack_panels(form, got.narrow(0, view.shape[0]), view)
        assert torch.equal(got.unpack(), view.bfloat16())


def test_strided_rows_and_mixed_bias(form: Library) -> None:
    x, weight = torch.randn(6, 300)[:, 13:113], torch.randn(20, 100).bfloat16()
    transposed = torch.randn(100, 6).T
    for given in (x, x[::2], transposed):
        for bias in (torch.randn(20).half(), torch.randn(40, dtype=torch.float64)[::2]):
            for product in PRODUCTS:
                assert_linear(given, weight, bias, product(form, given, panels(weight), bias))


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_nothing_past_the_operands_is_read_or_written(form: Library, dtype: torch.dtype) -> None:
    for rows, columns, inner in ((1, 3, 5), (2, 17, 33), (5, 40, 47), (8, 6, 551)):
        weight = at_the_end_of_memory(torch.randn(columns, inner).to(dtype))
        empty = PanelWeight.empty(columns, inner, dtype)
        guarded = PanelWeight(columns, inner, at_the_end_of_memory(empty.data))
        cpu.pack_panels(form, guarded.narrow(0, columns), weight)
        x, bias = at_the_end_of_memory(torch.randn(rows, inner)), at_the_end_of_memory(torch.randn(columns))
        for product in PRODUCTS:
            assert_linear(x, weight, bias, product(form, x, guarded, bias))


def test_rows_beside_the_operands_do_not_leak_in(form: Library) -> None:
    """NaN after each row's end, in x and in the source, must not reach the result through padding."""
    x, weight = torch.full((5, 64), torch.nan), torch.full((9, 64), torch.nan).bfloat16()
    x[:, :37], weight[:, :37] = torch.randn(5, 37), torch.randn(9, 37).bfloat16()
    for product in PRODUCTS:
        assert_linear(x[:, :37], weight[:, :37], None, product(form, x[:, :37], panels(weight[:, :37])))


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_nan_and_infinity_stay_in_their_row_and_column(form: Library, dtype: torch.dtype) -> None:
    x, weight = torch.rand(7, 131) + 0.5, (torch.rand(18, 131) + 0.5).to(dtype)
    x[2, 129], x[4, 0], x[5, 130], weight[3, 64], weight[17, 130] = (
        torch.nan,
        torch.inf,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    want = x.double() @ weight.double().T
    for product in PRODUCTS:
        got = product(form, x, panels(weight))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_every_value_is_widened_exactly(form: Library, dtype: torch.dtype) -> None:
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    weight = patterns.view(dtype)[:, None].clone()
    want = weight.float()[:, 0]
    for product in PRODUCTS:
        got = product(form, torch.ones(1, 1), panels(weight))[0]
        assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), want.nan_to_num(7.0, 8.0, 9.0))
        assert torch.equal(got.isnan(), want.isnan())


def test_empty_operands(form: Library) -> None:
    weight, none, bias = panels(torch.randn(3, 8).bfloat16()), PanelWeight.empty(0, 8, torch.bfloat16), torch.randn(3)
    flat = PanelWeight.empty(3, 0, torch.bfloat16)
    for product in PRODUCTS:
        assert product(form, torch.randn(0, 8), weight).shape == (0, 3)
        assert product(form, torch.randn(2, 8), none).shape == (2, 0)
        assert torch.equal(product(form, torch.randn(2, 0), flat, bias), bias.expand(2, 3))
        assert torch.equal(product(form, torch.randn(2, 0), flat), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
def test_widened_block_by_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("generic")
    monkeypatch.setattr("windlass.kernels.cpu.matmul_bindings._WIDENED_BYTES", 4 * 97 * 80)  # the last block is partial
    x, weight, bias = torch.randn(40, 97), torch.randn(203, 97).to(dtype), torch.randn(203)
    assert_linear(x, weight, bias, cpu.linear_panels_widened(load(), x, panels(weight), bias))


@pytest.mark.parametrize("rows", [1, 12, 512, 513, 600])
def test_backends_multiply_by_panels(rows: int) -> None:
    kernels("generic")
    x, weight = torch.randn(rows, 96), torch.randn(200, 96).bfloat16()
    laid_out = panels(weight)
    assert_linear(x, weight, None, select_backend("cpu", weight_dtype=torch.bfloat16).linear(x, laid_out))
    deterministic = select_backend("cpu", weight_dtype=torch.bfloat16, deterministic=True)
    alone = deterministic.linear(x[:1], laid_out)
    assert torch.equal(deterministic.linear(x, laid_out)[:1], alone)


def test_panels_are_for_16_bits_on_cpus_without_products_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("generic")
    wide, narrow = torch.float32, torch.bfloat16

    def lays_out_panels(dtype: torch.dtype, weight_dtype: torch.dtype, device: str = "cpu", **options: bool) -> bool:
        backend = select_backend(device, dtype, weight_dtype, **options)
        matrix = backend.matrix(17, 5, weight_dtype)
        assert isinstance(backend.table(17, 5, weight_dtype), torch.Tensor)
        assert isinstance(backend.tied_embedding(17, 5, weight_dtype), torch.Tensor)
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


def test_misuse_is_refused() -> None:
    kernels("generic")
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
        for product in PRODUCTS:
            with pytest.raises(ValueError, match=word):
                product(load(), x, weight, bias)
    assert weight.nbytes == 2 * 32 * 8
    assert (weight.numel(), weight.shape, weight.device.type) == (160, (20, 8), "cpu")
