"""Compiled quantization and repacking of block weights have the bytes of plain torch, in every instruction set available."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.cpu_kernels import at_the_end_of_memory, kernels
from kernels_helpers.block_bytes import random_block_bytes

from windlass.kernels.cpu import load
from windlass.kernels.cpu.library import Library
from windlass.kernels.cpu.matmul_bindings import pack_blocks, repack_blocks
from windlass.kernels.layouts.weight_layouts import FORMS, BlockForm, BlockWeight, store_block_rows
from windlass.kernels.torch import block_quantization

QUANTIZED = [FORMS[name] for name in ("q8_0", "q4_k", "q5_k", "q6_k")]
by_form = pytest.mark.parametrize("block_form", FORMS.values(), ids=FORMS)
by_quantized_form = pytest.mark.parametrize("block_form", QUANTIZED, ids=lambda form: form.name)


def assert_same(got: BlockWeight, want: BlockWeight) -> None:
    for name, tensor in want.tensors().items():
        same = got.tensors()[name].view(torch.uint8) == tensor.view(torch.uint8)
        assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} bytes differ"


def expected(source: torch.Tensor, form: BlockForm, weights: torch.Tensor | None = None) -> BlockWeight:
    weight = BlockWeight.empty(*source.shape, form)
    store_block_rows(weight.narrow(0, len(source)), *block_quantization.quantize_blocks(source.float(), form, weights))
    return weight


@by_form
def test_repacking(form: Library, block_form: BlockForm) -> None:
    for rows, count in ((1, 1), (16, 2), (53, 3)):
        columns = count * block_quantization.block_elements(block_form)
        blocks = random_block_bytes(rows, columns, block_form)
        got, want = BlockWeight.empty(rows, columns, block_form), BlockWeight.empty(rows, columns, block_form)
        block_quantization.repack_gguf_blocks(want.narrow(0, rows), blocks)
        repack_blocks(form, got.narrow(0, rows), blocks)
        assert_same(got, want)


@by_form
def test_repacking_strided_rows_in_pieces(form: Library, block_form: BlockForm) -> None:
    columns = 2 * block_quantization.block_elements(block_form)
    wide = random_block_bytes(53, 2 * columns, block_form)
    blocks = wide[:, wide.shape[1] // 2 :]
    whole, parts = BlockWeight.empty(53, columns, block_form), BlockWeight.empty(53, columns, block_form)
    block_quantization.repack_gguf_blocks(whole.narrow(0, 53), blocks)
    for first, count in ((40, 13), (0, 7), (7, 20), (27, 13), (5, 0)):
        repack_blocks(form, parts.narrow(first, count), blocks[first : first + count])
    assert_same(parts, whole)


@by_form
def test_threads_do_not_change_the_bytes(block_form: BlockForm) -> None:
    kernels()
    rows, columns = 1030, 2048  # enough for several threads
    blocks, source = random_block_bytes(rows, columns, block_form), torch.randn(rows, columns)
    fillings = [lambda weight: repack_blocks(load(), weight.narrow(0, rows), blocks)]
    if block_form in QUANTIZED:
        fillings.append(lambda weight: pack_blocks(load(), weight.narrow(0, rows), source))
    before = torch.get_num_threads()
    for fill in fillings:
        found = [BlockWeight.empty(rows, columns, block_form) for _ in range(3)]
        for threads, weight in enumerate(found, 1):
            torch.set_num_threads(threads)
            fill(weight)
        torch.set_num_threads(before)
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])


@pytest.mark.quick_cases(6)
@by_quantized_form
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_quantizing(form: Library, block_form: BlockForm, kind: torch.dtype) -> None:
    for rows, columns in ((1, 1), (16, 32), (17, 256), (33, 300), (5, 1041)):
        source = (torch.randn(rows, columns) * torch.exp2(torch.randint(-12, 3, (rows, 1)).float())).to(kind)
        got = BlockWeight.empty(rows, columns, block_form)
        pack_blocks(form, got.narrow(0, rows), source)
        assert_same(got, expected(source, block_form))


@by_quantized_form
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_quantizing_rare_values(form: Library, block_form: BlockForm, kind: torch.dtype) -> None:
    """Heavy tails, ties of extremes and between codes, zeros, values that underflow or overflow, NaN and infinity."""
    source = torch.randn(48, 330) / torch.rand(48, 330)
    source[0], source[1], source[2] = 0.0, 1e-38, -0.0
    source[3], source[4] = 1.0, torch.tensor([1.0, -1.0]).repeat(165)
    source[5] = torch.randint(-8, 9, (330,)) / 8.0
    source[6, ::32], source[7, ::33] = 1e4, -1e4
    source[8, 40], source[9, 300], source[10, 329] = torch.nan, torch.inf, -torch.inf
    source[11:18] *= torch.tensor([3e-38, 1e-30, 3e-5, 1e3, 1e6, 1e10, 1e33])[:, None]
    source[18], source[19], source[20] = -1.0, source[20].abs(), -source[21].abs()
    source[22:30] = torch.randint(-3, 4, (8, 330)).float() * 1e-7
    source[30, :32], source[31, 64:96] = 1e-6, 2e-8
    source = source.to(kind)
    got = BlockWeight.empty(48, 330, block_form)
    pack_blocks(form, got.narrow(0, 48), source)
    assert_same(got, expected(source, block_form))


@by_quantized_form
def test_quantizing_strided_rows_in_pieces(form: Library, block_form: BlockForm) -> None:
    source = torch.randn(53, 900)[:, 100:170]
    parts = BlockWeight.empty(53, 70, block_form)
    for first, count in ((40, 13), (0, 7), (7, 20), (27, 13), (5, 0)):
        pack_blocks(form, parts.narrow(first, count), source[first : first + count])
    assert_same(parts, expected(source, block_form))


@pytest.mark.parametrize("block_form", QUANTIZED[1:], ids=lambda form: form.name)
def test_weighted_errors(form: Library, block_form: BlockForm) -> None:
    source = torch.randn(18, 300)
    for weights in (torch.rand(300) * 1e-3, torch.rand(18, 300) ** 8, torch.zeros(300)):
        got = BlockWeight.empty(18, 300, block_form)
        pack_blocks(form, got.narrow(0, 18), source, weights)
        assert_same(got, expected(source, block_form, weights))


def test_sizes_of_super_groups(form: Library) -> None:
    for groups in (1, 4, 64):
        own = replace(FORMS["q4_k"], super_groups=groups)
        source, got = torch.randn(20, 500), BlockWeight.empty(20, 500, own)
        pack_blocks(form, got.narrow(0, 20), source)
        assert_same(got, expected(source, own))


def test_nothing_past_the_operands_is_read_or_written(form: Library) -> None:
    for block_form in FORMS.values():
        rows, columns = 19, block_quantization.block_elements(block_form)
        parts = BlockWeight.empty(rows, columns, block_form)
        guarded = [
            None if part is None else at_the_end_of_memory(part) for part in (parts.codes, parts.scales, parts.supers)
        ]
        weight = BlockWeight(block_form, rows, columns, *guarded)
        repack_blocks(form, weight.narrow(0, rows), at_the_end_of_memory(random_block_bytes(rows, columns, block_form)))
        if block_form in QUANTIZED:
            pack_blocks(form, weight.narrow(0, rows), at_the_end_of_memory(torch.randn(rows, columns)))


def test_unsuitable_operands_are_refused() -> None:
    kernels()
    weight = BlockWeight.empty(3, 64, FORMS["q4_0"])
    with pytest.raises(ValueError, match="q4_0 wants"):
        repack_blocks(load(), weight.narrow(0, 3), torch.zeros(3, 35, dtype=torch.uint8))
    with pytest.raises(ValueError, match="not into q4_0"):
        pack_blocks(load(), weight.narrow(0, 3), torch.randn(3, 64))
    weight = BlockWeight.empty(3, 64, FORMS["q4_k"])
    for source in (torch.randn(2, 64), torch.randn(3, 64).double()):
        with pytest.raises(ValueError, match="pack_blocks"):
            pack_blocks(load(), weight.narrow(0, 3), source)
    with pytest.raises(ValueError, match="weights"):
        pack_blocks(load(), weight.narrow(0, 3), torch.randn(3, 64), torch.ones(64).half())
    many = BlockWeight.empty(3, 64, replace(FORMS["q4_k"], super_groups=65))
    with pytest.raises(ValueError, match="65"):
        pack_blocks(load(), many.narrow(0, 3), torch.randn(3, 64))
