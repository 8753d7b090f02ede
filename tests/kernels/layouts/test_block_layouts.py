"""The layout of weights in blocks: what is stored comes out again, and means what the form says."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels.layouts.weight_layouts import FORMS, BlockForm, BlockWeight, store_block_rows, unpack_codes


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 80), (48, 576), (5, 300)])
def test_what_is_stored_comes_out_again(form: BlockForm, rows: int, columns: int) -> None:
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
def test_a_weight_takes_the_bits_that_its_form_says(form: BlockForm) -> None:
    scales, columns = form.parts / form.group, form.group * (form.super_groups or 1)
    bits = form.bits + (8 * scales + 16 * form.parts / columns if form.super_groups else 16 * scales)
    weight = BlockWeight.empty(64, 1024, form)
    assert weight.nbytes == weight.numel() * bits / 8
