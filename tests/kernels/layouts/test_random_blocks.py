"""Random weights in blocks: how they are distributed, and that a seed gives the same ones."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels.layouts.weight_layouts import FORMS, BlockForm, BlockWeight, randomize, unpack_codes


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_distribution(form: BlockForm) -> None:
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
