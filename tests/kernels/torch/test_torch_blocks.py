"""Products with weights in blocks in plain torch, against float64 over what was rounded; and weights of several storages."""

from __future__ import annotations

import pytest
import torch
from helpers.block_weights import random_blocks
from helpers.cpu_kernels import choose

from windlass.kernels import FORMS, BlockForm, select_backend
from windlass.kernels.torch import linear

EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)


@EVERY_FORM
@pytest.mark.parametrize(("rows", "columns", "inner"), [(0, 5, 40), (1, 1, 1), (3, 17, 300), (9, 40, 576)])
def test_the_product_is_that_of_what_was_rounded(form: BlockForm, rows: int, columns: int, inner: int) -> None:
    """Independent of layout and of integer sums: rounded rows times the weight as it reads back, in float64."""
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


def test_a_group_that_is_no_number_spoils_its_row_alone() -> None:
    x, weight = torch.randn(4, 70), random_blocks(9, 70, FORMS["q4_1"])
    x[1, 69], x[2] = torch.inf, 1e-38
    found = linear.linear_blocks(x, weight)
    assert found[1].isnan().all() and not found[[0, 3]].isnan().any() and not found[2].any()


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_several_storages_are_one_weight(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_backends_make_weights_of_every_storage(storage: torch.dtype | BlockForm) -> None:
    backend = select_backend("cpu")
    for weight in (
        backend.matrix(20, 64, storage),
        backend.table(20, 64, storage),
        backend.tied_embedding(20, 64, storage),
    ):
        assert weight.shape == (20, 64)
        assert (weight.form if isinstance(storage, BlockForm) else weight.dtype) == storage


@EVERY_FORM
def test_tables_in_blocks_are_gathered_from(form: BlockForm) -> None:
    table, ids = random_blocks(40, 70, form), torch.tensor([39, 0, 0, 17])
    found = select_backend("cpu").embed(table, ids, 3.0)
    assert torch.equal(found, table.dequantize()[ids] * 3.0)
