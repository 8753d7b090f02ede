"""Products with weights in blocks against exact integer arithmetic, in every instruction set available."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.block_weights import random_blocks
from helpers.cpu_kernels import PACKED_FORMS, at_the_end_of_memory, choose, kernels
from kernels_helpers.checks import same_on_threads

from windlass.kernels import FORMS, BlockForm, BlockWeight, cpu, select_backend
from windlass.kernels.cpu import elementwise_bindings, load
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts.weight_layouts import group_scales, store_block_rows, unpack_codes
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
    (1, 50, 3000),  # more than one piece of K
    (2, 5, 4),
    (3, 40, 100),
    (6, 16, 64),
    (7, 33, 530),
    (8, 64, 96),
    (13, 48, 1041),
    (33, 20, 500),
    (100, 3, 17),
    (200, 18, 80),  # two passes
]


@pytest.fixture(params=PACKED_FORMS)
def library_of(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


def brute_force(x: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
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


def assert_linear(x: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None, got: torch.Tensor) -> None:
    """Integers are exact. float32 may lose a few rounding errors per group."""
    want, size = brute_force(x.float(), weight, bias)
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= 2e-6 * size).all(), (got - want).abs().max()


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


@EVERY_FORM
def test_shapes(library_of: Library, form: BlockForm) -> None:
    for rows, columns, inner in SHAPES:
        x, weight = torch.randn(rows, inner), random_blocks(columns, inner, form)
        bias = torch.randn(columns) if columns % 2 else None
        assert_linear(x, weight, bias, cpu.linear_blocks(library_of, x, weight, bias))


@EVERY_FORM
def test_plain_torch_agrees(form: BlockForm) -> None:
    for rows, columns, inner in SHAPES:
        x, weight, bias = torch.randn(rows, inner), random_blocks(columns, inner, form), torch.randn(columns)
        assert_linear(x, weight, bias, reference.linear_blocks(x, weight, bias))


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
def test_a_row_has_the_same_bits_alone_and_in_any_batch(library_of: Library, form: BlockForm) -> None:
    x, weight, bias = torch.randn(210, 1100), random_blocks(37, 1100, form), torch.randn(37)
    whole = cpu.linear_blocks(library_of, x, weight, bias)
    for rows in (1, 2, 3, 5, 6, 7, 8, 12, 13, 24, 48, 49, 97):
        assert torch.equal(cpu.linear_blocks(library_of, x[:rows], weight, bias), whole[:rows]), rows
    assert torch.equal(cpu.linear_blocks(library_of, x[200:203], weight, bias), whole[200:203])


@EVERY_FORM
def test_threads_do_not_change_the_bits(form: BlockForm) -> None:
    kernels("generic")
    for rows in (5, 40, 70):
        x, weight = torch.randn(rows, 700), random_blocks(1500, 700, form)
        same_on_threads(lambda x=x, weight=weight: cpu.linear_blocks(load(), x, weight))  # type: ignore[misc]


@EVERY_FORM
def test_nothing_past_the_operands_is_read(library_of: Library, form: BlockForm) -> None:
    for rows, columns, inner in ((1, 3, 5), (2, 17, 33), (5, 4, 47), (30, 6, 551), (65, 20, 300)):
        weight = random_blocks(columns, inner, form)
        supers = None if weight.supers is None else at_the_end_of_memory(weight.supers)
        codes, scales = at_the_end_of_memory(weight.codes), at_the_end_of_memory(weight.scales)
        guarded = BlockWeight(form, columns, inner, codes, scales, supers)
        x, bias = at_the_end_of_memory(torch.randn(rows, inner)), at_the_end_of_memory(torch.randn(columns))
        assert_linear(x, weight, bias, cpu.linear_blocks(library_of, x, guarded, bias))
        ids = at_the_end_of_memory(torch.tensor([columns - 1, 0]))
        assert torch.equal(cpu.embed_blocks(library_of, guarded, ids), weight.dequantize(ids))


def test_strided_rows_other_types_and_an_output_tensor(library_of: Library) -> None:
    weight, x = random_blocks(20, 100, FORMS["q5_1"]), torch.full((6, 300), torch.nan)
    x[:, 13:113] = torch.randn(6, 100)
    assert_linear(x[:, 13:113], weight, None, cpu.linear_blocks(library_of, x[:, 13:113], weight))
    for kind in (torch.bfloat16, torch.float16):
        narrow = x[:, 13:113].to(kind)
        got = cpu.linear_blocks(library_of, narrow, weight, torch.ones(20, dtype=kind))
        assert got.dtype == kind
        assert torch.equal(got, cpu.linear_blocks(library_of, narrow.float(), weight, torch.ones(20)).to(kind))
    padded_out = torch.full((6, 50), -1.0)
    cpu.linear_blocks(library_of, x[:, 13:113], weight, out=padded_out[:, 7:27])
    assert torch.equal(padded_out[:, 7:27], cpu.linear_blocks(library_of, x[:, 13:113], weight))
    assert (padded_out[:, :7] == -1).all() and (padded_out[:, 27:] == -1).all()


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
    weight, library_of = random_blocks(19, 70, FORMS["q4_1"]), kernels("generic")
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
    kernels("generic")
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
    kernels("generic")
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
