"""Blocks of GGUF files in panels: the numbers are those that the `gguf` package finds in the same bytes, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from kernels_helpers.block_bytes import kind, numbers, random_blocks

from windlass.kernels.layouts.weight_layouts import FORMS, BlockForm, BlockRows, BlockWeight
from windlass.kernels.torch import block_quantization


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def block_form(request: pytest.FixtureRequest) -> BlockForm:
    return request.param


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_any_bits_mean_what_they_mean_in_the_file(block_form: BlockForm, rows: int) -> None:
    columns = 3 * block_quantization.block_elements(block_form)
    blocks = random_blocks(rows, columns, block_form)
    weight = BlockWeight.empty(rows, columns, block_form)
    block_quantization.repack_gguf_blocks(weight.narrow(0, rows), blocks)
    assert torch.equal(weight.dequantize().view(torch.int32), numbers(blocks, block_form).view(torch.int32))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_what_gguf_writes(name: str) -> None:
    written = gguf.quantize(np.random.default_rng(3).standard_normal((20, 96), dtype=np.float32), kind(FORMS[name]))
    weight = BlockWeight.empty(20, 96, FORMS[name])
    block_quantization.repack_gguf_blocks(weight.narrow(0, 20), torch.from_numpy(written))
    assert torch.equal(weight.dequantize(), numbers(torch.from_numpy(written), FORMS[name]))


def test_rows_in_pieces_and_in_any_order(block_form: BlockForm) -> None:
    columns = 2 * block_quantization.block_elements(block_form)
    blocks = random_blocks(53, columns, block_form)
    whole, parts = BlockWeight.empty(53, columns, block_form), BlockWeight.empty(53, columns, block_form)
    block_quantization.repack_gguf_blocks(whole.narrow(0, 53), blocks)
    for first, count in ((40, 13), (0, 7), (7, 20), (27, 13), (5, 0)):
        block_quantization.repack_gguf_blocks(parts.narrow(first, count), blocks[first : first + count])
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), parts.tensors()[name].view(torch.uint8))


def test_many_rows_are_repacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_quantization, "_REPACK_ELEMENTS", 200)
    blocks = random_blocks(11, 64, FORMS["q4_1"])
    weight = BlockWeight.empty(11, 64, FORMS["q4_1"])
    block_quantization.repack_gguf_blocks(weight.narrow(0, 11), blocks)
    assert torch.equal(weight.dequantize(), numbers(blocks, FORMS["q4_1"]))


def test_bytes_that_do_not_fit_are_refused(block_form: BlockForm) -> None:
    elements = block_quantization.block_elements(block_form)
    weight = BlockWeight.empty(3, elements, block_form)
    blocks = random_blocks(3, elements, block_form)
    for wrong in (blocks[:2], blocks[:, 1:], blocks.view(torch.int8)):
        with pytest.raises(ValueError, match=block_form.name):
            block_quantization.repack_gguf_blocks(weight.narrow(0, 3), wrong)
    ragged = BlockWeight.empty(3, elements - 1, block_form)
    with pytest.raises(ValueError, match="whole"):
        block_quantization.repack_gguf_blocks(ragged.narrow(0, 3), blocks)


def test_a_form_that_no_file_has_is_refused() -> None:
    weight = BlockWeight.empty(3, 128, replace(FORMS["q4_k"], super_groups=4))
    with pytest.raises(ValueError, match="no file"):
        block_quantization.repack_gguf_blocks(BlockRows(weight, 0, 3), torch.zeros(3, 72, dtype=torch.uint8))
