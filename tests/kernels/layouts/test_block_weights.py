"""Weights in blocks: layout, random values, the bytes of GGUF files, quantization, and products in plain torch."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from helpers.block_weights import random_blocks
from helpers.cpu_kernels import choose
from kernels_helpers.block_bytes import kind, numbers, random_block_bytes

from windlass.kernels import select_backend
from windlass.kernels.layouts.weight_layouts import (
    FORMS,
    BlockForm,
    BlockRows,
    BlockWeight,
    randomize,
    store_block_rows,
    unpack_codes,
)
from windlass.kernels.torch import block_quantization, linear

NAMES = ("q8_0", "q4_k", "q5_k", "q6_k")
# Relative root mean square error of Gaussian rows.
MAX_ERROR = {"q8_0": 0.0056, "q4_k": 0.0705, "q5_k": 0.0345, "q6_k": 0.0170}
EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)


# -- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 80), (48, 576), (5, 300)])
def test_stored_blocks_are_read_back(form: BlockForm, rows: int, columns: int) -> None:
    weight = BlockWeight.empty(rows, columns, form)
    groups = -(-columns // form.group)
    low, high, kind = (-127, 128, torch.int8) if form.bits == 8 else (0, 1 << form.bits, torch.uint8)
    codes = torch.randint(low, high, (rows, columns), dtype=kind)
    if form.super_groups:
        scales = torch.randint(0 if form.minimum else -128, 64, (rows, groups, form.parts)).to(weight.scales.dtype)
        supers = torch.randn(rows, -(-groups // form.super_groups), form.parts).half()
        whole = supers.float().repeat_interleave(form.super_groups, 1)[:, :groups] * scales.float()
        if form.minimum:
            whole[..., 1] *= -1
    else:
        scales, supers = torch.randn(rows, groups, form.parts).half(), None
        whole = scales.float()
    store_block_rows(weight.narrow(0, rows), codes, scales, supers)
    assert torch.equal(unpack_codes(weight, torch.arange(rows)).flatten(1)[:, :columns], codes)
    spread = whole.repeat_interleave(form.group, 1)[:, :columns]
    expected = spread[..., 0] * (codes.float() - form.offset)
    if form.minimum:
        expected += spread[..., 1]
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.dequantize(torch.tensor([rows - 1])), expected[-1:])


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_size_follows_from_the_form(form: BlockForm) -> None:
    scales, columns = form.parts / form.group, form.group * (form.super_groups or 1)
    bits = form.bits + (8 * scales + 16 * form.parts / columns if form.super_groups else 16 * scales)
    weight = BlockWeight.empty(64, 1024, form)
    assert weight.nbytes == weight.numel() * bits / 8


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_random_weights_are_uniform_codes_and_repeatable(form: BlockForm) -> None:
    weight, again = BlockWeight.empty(301, 600, form), BlockWeight.empty(301, 600, form)
    for one in (weight, again):
        randomize(one, torch.Generator().manual_seed(5))
    numbers = weight.dequantize().double()
    assert abs(float(numbers.mean())) * 600**0.5 < 0.02
    assert float(numbers.var()) == pytest.approx(1 / 600, rel=0.02)
    codes = unpack_codes(weight, torch.arange(301)).flatten()
    counts = torch.unique(codes, return_counts=True)[1]
    assert len(counts) == 1 << form.bits
    assert (counts / counts.double().mean() - 1).abs().max() < 0.2
    for name, tensor in weight.tensors().items():
        assert torch.equal(tensor, again.tensors()[name])
        assert not torch.any(tensor[-1].movedim(-1 if name != "codes" else -2, 0)[301 % 16 :])


# -- bytes of GGUF files ---------------------------------------------------------------------------------------------


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def block_form(request: pytest.FixtureRequest) -> BlockForm:
    return request.param


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_any_bytes_have_the_values_of_the_gguf_package(block_form: BlockForm, rows: int) -> None:
    columns = 3 * block_quantization.block_elements(block_form)
    blocks = random_block_bytes(rows, columns, block_form)
    weight = BlockWeight.empty(rows, columns, block_form)
    block_quantization.repack_gguf_blocks(weight.narrow(0, rows), blocks)
    assert torch.equal(weight.dequantize().view(torch.int32), numbers(blocks, block_form).view(torch.int32))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_quantized_files_have_the_values_of_the_gguf_package(name: str) -> None:
    written = gguf.quantize(np.random.default_rng(3).standard_normal((20, 96), dtype=np.float32), kind(FORMS[name]))
    weight = BlockWeight.empty(20, 96, FORMS[name])
    block_quantization.repack_gguf_blocks(weight.narrow(0, 20), torch.from_numpy(written))
    assert torch.equal(weight.dequantize(), numbers(torch.from_numpy(written), FORMS[name]))


def test_rows_are_repacked_in_pieces_in_any_order(block_form: BlockForm) -> None:
    columns = 2 * block_quantization.block_elements(block_form)
    blocks = random_block_bytes(53, columns, block_form)
    whole, parts = BlockWeight.empty(53, columns, block_form), BlockWeight.empty(53, columns, block_form)
    block_quantization.repack_gguf_blocks(whole.narrow(0, 53), blocks)
    for first, count in ((40, 13), (0, 7), (7, 20), (27, 13), (5, 0)):
        block_quantization.repack_gguf_blocks(parts.narrow(first, count), blocks[first : first + count])
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), parts.tensors()[name].view(torch.uint8))


def test_many_rows_are_repacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_quantization, "_REPACK_ELEMENTS", 200)
    blocks = random_block_bytes(11, 64, FORMS["q4_1"])
    weight = BlockWeight.empty(11, 64, FORMS["q4_1"])
    block_quantization.repack_gguf_blocks(weight.narrow(0, 11), blocks)
    assert torch.equal(weight.dequantize(), numbers(blocks, FORMS["q4_1"]))


def test_bytes_of_another_size_are_refused(block_form: BlockForm) -> None:
    elements = block_quantization.block_elements(block_form)
    weight = BlockWeight.empty(3, elements, block_form)
    blocks = random_block_bytes(3, elements, block_form)
    for wrong in (blocks[:2], blocks[:, 1:], blocks.view(torch.int8)):
        with pytest.raises(ValueError, match=block_form.name):
            block_quantization.repack_gguf_blocks(weight.narrow(0, 3), wrong)
    ragged = BlockWeight.empty(3, elements - 1, block_form)
    with pytest.raises(ValueError, match="whole"):
        block_quantization.repack_gguf_blocks(ragged.narrow(0, 3), blocks)


def test_a_form_without_a_file_type_is_refused() -> None:
    weight = BlockWeight.empty(3, 128, replace(FORMS["q4_k"], super_groups=4))
    with pytest.raises(ValueError, match="no file"):
        block_quantization.repack_gguf_blocks(BlockRows(weight, 0, 3), torch.zeros(3, 72, dtype=torch.uint8))


# -- quantization ----------------------------------------------------------------------------------------------------


def quantized(x: torch.Tensor, name: str) -> BlockWeight:
    weight = BlockWeight.empty(*x.shape, FORMS[name])
    block_quantization.quantize_into_blocks(weight.narrow(0, len(x)), x)
    return weight


def rounded_plainly(x: torch.Tensor, name: str) -> torch.Tensor:
    """Map the range of a group to the range of its codes, with scales in float32."""
    form = FORMS[name]
    groups = x.view(len(x), -1, form.group)
    if form.minimum:
        low = groups.amin(2, keepdim=True).clamp(max=0.0)
        scale = (groups.amax(2, keepdim=True) - low) / ((1 << form.bits) - 1)
        return (((groups - low) / scale).round() * scale + low).flatten(1)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = extreme / -form.offset if form.offset else extreme / 127
    top = (form.offset or 128) - 1
    return ((groups / scale).round().clamp(-top - 1, top) * scale).flatten(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1.0, 0.02])
def test_quantization_error(name: str, size: float) -> None:
    x = torch.randn(64, 768) * size
    error = (quantized(x, name).dequantize() - x).norm()
    assert error < MAX_ERROR[name] * x.norm()
    if name != "q8_0":
        assert error < 0.91 * (rounded_plainly(x, name) - x).norm()
    heavy = (torch.randn(64, 768) / torch.rand(64, 768).clamp(min=0.1)) * size
    assert (quantized(heavy, name).dequantize() - heavy).norm() < 1.01 * (rounded_plainly(heavy, name) - heavy).norm()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_q8_0_equals_llama_cpp(kind: torch.dtype) -> None:
    x = (torch.randn(20, 96) * torch.exp2(torch.randint(-9, 9, (20, 1)).float())).to(kind)
    x[3], x[4, :32] = torch.arange(-48, 48) / 2.0, 0.0
    x[3, [0, 32, 64]] = 63.5  # ties: half of 127
    x[3, :96:32] = 127.0
    written = gguf.quantize(x.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    expected = BlockWeight.empty(20, 96, FORMS["q8_0"])
    block_quantization.repack_gguf_blocks(expected.narrow(0, 20), torch.from_numpy(written))
    got = quantized(x, "q8_0")
    rows = torch.arange(20)
    assert torch.equal(got.codes[rows // 16, :, :, rows % 16], expected.codes[rows // 16, :, :, rows % 16])
    assert torch.equal(got.dequantize(), expected.dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_numbers_that_are_not_finite(name: str) -> None:
    x = torch.rand(8, 600) + 0.5
    x[0], x[1], x[2, 300:] = 0.0, 1e-38, -0.0
    x[3, 40], x[4, 599], x[5, 0], x[6] = torch.nan, torch.inf, -torch.inf, 3e38
    got = quantized(x, name).dequantize()
    span = FORMS[name].group * max(FORMS[name].super_groups, 1)
    spoiled = torch.zeros(8, 600, dtype=torch.bool)
    for row, column in ((3, 40), (4, 599), (5, 0)):
        spoiled[row, column // span * span : (column // span + 1) * span] = True
    spoiled[6] = True
    assert torch.equal(got.isnan(), spoiled)
    assert (got[:2] == 0).all()
    assert (got[2, 320:] == 0).all()


@pytest.mark.parametrize("name", ["q4_k", "q5_k"])
def test_groups_of_one_value(name: str) -> None:
    """A negative value is the minimum of its group, whose scale is zero."""
    x = torch.tensor([-3.0, 2.0, 0.0])[:, None].expand(3, 256).contiguous()
    torch.testing.assert_close(quantized(x, name).dequantize(), x, rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_weighted_errors_are_minimized(name: str) -> None:
    x = torch.randn(32, 512)
    weights = torch.where(torch.arange(512) % 4 == 0, 100.0, 1.0)
    errors = []
    for given in (None, weights):
        weight = BlockWeight.empty(32, 512, FORMS[name])
        store_block_rows(weight.narrow(0, 32), *block_quantization.quantize_blocks(x, FORMS[name], given))
        errors.append(float(((weight.dequantize() - x).square() * weights).sum()))
    assert errors[1] < 0.97 * errors[0]


def test_forms_without_a_quantizer_are_refused() -> None:
    for name in ("q4_0", "q5_1"):
        with pytest.raises(ValueError, match=name):
            quantized(torch.randn(2, 32), name)
    with pytest.raises(ValueError, match="rows"):
        block_quantization.quantize_into_blocks(
            BlockWeight.empty(3, 32, FORMS["q8_0"]).narrow(0, 2), torch.randn(3, 32)
        )


# -- products in plain torch -----------------------------------------------------------------------------------------


@EVERY_FORM
@pytest.mark.parametrize(("rows", "columns", "inner"), [(0, 5, 40), (1, 1, 1), (3, 17, 300), (9, 40, 576)])
def test_products_of_rounded_rows(form: BlockForm, rows: int, columns: int, inner: int) -> None:
    """Compare with rounded rows times the dequantized weight in float64, without layout and integer sums."""
    x, weight, bias = torch.randn(rows, inner), random_blocks(columns, inner, form), torch.randn(columns)
    rounded = torch.zeros(rows, inner, dtype=torch.float64)
    for begin in range(0, inner, form.group):
        part = x[:, begin : begin + form.group].double()
        scale = part.abs().amax(1, keepdim=True) / 127
        rounded[:, begin : begin + form.group] = (part / scale).round() * scale
    numbers = weight.dequantize().double()
    error = (linear.linear_blocks(x, weight, bias).double() - (rounded @ numbers.T + bias)).abs()
    assert (error <= 2e-6 * (rounded.abs() @ numbers.abs().T + bias.abs() + 1)).all()


@EVERY_FORM
@pytest.mark.parametrize("deterministic", [False, True])
def test_float32_activations_are_not_rounded(
    form: BlockForm, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, "off")
    monkeypatch.setattr(linear, "_WIDENED", 1000)  # several pieces
    x, weight, bias = torch.randn(7, 300), random_blocks(21, 300, form), torch.randn(21)
    backend = select_backend("cpu", activations="float32", deterministic=deterministic)
    found = backend.linear(x, weight, bias)
    torch.testing.assert_close(found.double(), x.double() @ weight.dequantize().double().T + bias, rtol=1e-5, atol=1e-4)
    if deterministic:
        assert torch.equal(backend.linear(x[2:3], weight, bias), found[2:3])


def test_a_nan_group_affects_only_its_row() -> None:
    x, weight = torch.randn(4, 70), random_blocks(9, 70, FORMS["q4_1"])
    x[1, 69], x[2] = torch.inf, 1e-38
    found = linear.linear_blocks(x, weight)
    assert found[1].isnan().all() and not found[[0, 3]].isnan().any() and not found[2].any()


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_are_stacked_from_several_storages(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        choose(monkeypatch, "off")
    backend = select_backend("cpu")
    plain = backend.matrix(8, 96, torch.float32)
    assert isinstance(plain, torch.Tensor)
    plain.copy_(torch.randn(8, 96))
    parts = (random_blocks(20, 96, FORMS["q4_0"]), plain, random_blocks(16, 96, FORMS["q6_k"]))
    stacked, x, bias = backend.stack(parts), torch.randn(3, 96), torch.randn(44)
    assert stacked.shape == (44, 96) and stacked.numel() == 44 * 96 and stacked.nbytes == sum(p.nbytes for p in parts)
    whole = backend.linear(x, stacked, bias)
    pieces = [backend.linear(x, part, bias[a:b]) for part, a, b in stacked.spans()]
    assert torch.equal(whole, torch.cat(pieces, 1))
    assert stacked.narrow(20, 3).shape == (3, 96) and stacked.narrow(30, 14).shape == (14, 96)
    for first, count in ((19, 2), (40, 5), (-1, 1)):
        with pytest.raises(IndexError, match="one part"):
            stacked.narrow(first, count)
    with pytest.raises(ValueError, match="columns"):
        backend.stack((plain, random_blocks(4, 64, FORMS["q8_0"])))


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, FORMS["q4_k"], FORMS["q8_0"]], ids=str)
def test_backends_create_weights_of_every_storage(storage: torch.dtype | BlockForm) -> None:
    backend = select_backend("cpu")
    for weight in (
        backend.matrix(20, 64, storage),
        backend.table(20, 64, storage),
        backend.tied_embedding(20, 64, storage),
    ):
        assert weight.shape == (20, 64)
        assert (weight.form if isinstance(storage, BlockForm) else weight.dtype) == storage


@EVERY_FORM
def test_tables_in_blocks_are_gathered(form: BlockForm) -> None:
    table, ids = random_blocks(40, 70, form), torch.tensor([39, 0, 0, 17])
    found = select_backend("cpu").embed(table, ids, 3.0)
    assert torch.equal(found, table.dequantize()[ids] * 3.0)
