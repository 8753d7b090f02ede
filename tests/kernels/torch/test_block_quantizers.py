"""Floats quantized into blocks: how much is lost, what the rule of q8_0 is, and the result for rare numbers
seen."""

from __future__ import annotations

import gguf
import pytest
import torch

from windlass.kernels.layouts.weight_layouts import FORMS, BlockWeight, store_block_rows
from windlass.kernels.torch import block_quantization

NAMES = ("q8_0", "q4_k", "q5_k", "q6_k")
# Root mean square of what is lost of Gaussian rows, relative to theirs.
LOST = {"q8_0": 0.0056, "q4_k": 0.0705, "q5_k": 0.0345, "q6_k": 0.0170}


def quantized(x: torch.Tensor, name: str) -> BlockWeight:
    weight = BlockWeight.empty(*x.shape, FORMS[name])
    block_quantization.quantize_into_blocks(weight.narrow(0, len(x)), x)
    return weight


def plainly(x: torch.Tensor, name: str) -> torch.Tensor:
    """The ends of a group's values on the ends of its codes, with scales in float32."""
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
def test_what_is_lost(name: str, size: float) -> None:
    x = torch.randn(64, 768) * size
    error = (quantized(x, name).dequantize() - x).norm()
    assert error < LOST[name] * x.norm()
    if name != "q8_0":
        assert error < 0.91 * (plainly(x, name) - x).norm()
    heavy = (torch.randn(64, 768) / torch.rand(64, 768).clamp(min=0.1)) * size
    assert (quantized(heavy, name).dequantize() - heavy).norm() < 1.01 * (plainly(heavy, name) - heavy).norm()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_are_those_of_llama_cpp(kind: torch.dtype) -> None:
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
def test_zeros_and_what_is_no_number(name: str) -> None:
    x = torch.rand(8, 600) + 0.5
    x[0], x[1], x[2, 300:] = 0.0, 1e-38, -0.0
    x[3, 40], x[4, 599], x[5, 0], x[6] = torch.nan, torch.inf, -torch.inf, 3e38
    got = quantized(x, name).dequantize()
    span = FORMS[name].group * max(FORMS[name].super_groups, 1)
    spoilt = torch.zeros(8, 600, dtype=torch.bool)
    for row, column in ((3, 40), (4, 599), (5, 0)):
        spoilt[row, column // span * span : (column // span + 1) * span] = True
    spoilt[6] = True
    assert torch.equal(got.isnan(), spoilt)
    assert (got[:2] == 0).all()
    assert (got[2, 320:] == 0).all()


@pytest.mark.parametrize("name", ["q4_k", "q5_k"])
def test_groups_of_one_value(name: str) -> None:
    """Those below zero are minima alone; a group that only a minimum describes has no scale."""
    x = torch.tensor([-3.0, 2.0, 0.0])[:, None].expand(3, 256).contiguous()
    torch.testing.assert_close(quantized(x, name).dequantize(), x, rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_weights_say_whose_error_counts(name: str) -> None:
    x = torch.randn(32, 512)
    weights = torch.where(torch.arange(512) % 4 == 0, 100.0, 1.0)
    lost = []
    for given in (None, weights):
        weight = BlockWeight.empty(32, 512, FORMS[name])
        store_block_rows(weight.narrow(0, 32), *block_quantization.quantize_blocks(x, FORMS[name], given))
        lost.append(float(((weight.dequantize() - x).square() * weights).sum()))
    assert lost[1] < 0.97 * lost[0]


def test_forms_that_floats_are_not_quantized_into() -> None:
    for name in ("q4_0", "q5_1"):
        with pytest.raises(ValueError, match=name):
            quantized(torch.randn(2, 32), name)
    with pytest.raises(ValueError, match="rows"):
        block_quantization.quantize_into_blocks(
            BlockWeight.empty(3, 32, FORMS["q8_0"]).narrow(0, 2), torch.randn(3, 32)
        )
