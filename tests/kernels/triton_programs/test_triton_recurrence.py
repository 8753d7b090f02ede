"""Triton's short convolutions, gated delta rule and state spaces, interpreted, against float64 formulas."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.device import DEVICE
from helpers.recurrences import Convolution, DeltaRule, Operands, StateSpace, apply, some_of, state_rows
from kernels_helpers.checks import assert_near
from kernels_helpers.interpreted import ON_THE_DEVICE
from kernels_helpers.recurrence_checks import (
    SLACK,
    assert_extreme_gates,
    assert_extreme_steps,
    assert_formulas,
    assert_snapshots,
    assert_tiled_heads,
)
from torch import Tensor

from windlass.kernels import StateRows
from windlass.kernels.backend import BackendOptions
from windlass.kernels.triton.triton_backend import TritonBackend

pytestmark = ON_THE_DEVICE


def change(own: Operands, rows: StateRows, **options: bool) -> Tensor:
    return apply(TritonBackend(BackendOptions(torch.device(DEVICE))), own, rows, **options)


def rows_of_a_step() -> StateRows:
    """Return sequences that continue and begin, of one token and of none. Blocks 1 and 4 of 6 are unused."""
    return state_rows([3, 0, 5, 2], [3, 6, 1, 0], [False, True, False, True])


def some_operands(rows: StateRows, key_heads: int = 1, dtype: torch.dtype = torch.float32) -> list[Operands]:
    heads = key_heads, 2 * key_heads
    return [
        Convolution.random(rows, 21, 4, dtype),
        DeltaRule.random(rows, *heads, 12, 20, dtype),
        StateSpace.random(rows, *heads, 12, 20, dtype),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter truncates bfloat16
@pytest.mark.parametrize("which", [0, 1, 2])
def test_formulas(which: int, dtype: torch.dtype) -> None:
    rows = rows_of_a_step()
    assert_formulas(change, some_operands(rows, 2, dtype)[which], rows)


@pytest.mark.parametrize("width", [2, 3, 8])
def test_widths_of_a_convolution(width: int) -> None:
    """More channels than one program computes, and sequences of fewer tokens than the width."""
    rows = rows_of_a_step()
    own = Convolution.random(rows, 530, width)
    for each in (own, own.copy().plain):
        expected, state = each.expected(rows)
        assert_near(change(each, rows), expected, SLACK)
        assert_near(each.state, state, SLACK)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_bits_do_not_depend_on_steps(which: int) -> None:
    rows = rows_of_a_step()
    own = some_operands(rows)[which]
    whole = own.copy()
    expected = change(whole, rows)
    spans = list(pairwise([0, 1, 4, 6, 10]))
    parts = [change(own.part(*span), some_of(rows, *span)) for span in spans]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(own.state[[0, 3, 5]], whole.state[[0, 3, 5]])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_snapshots(which: int) -> None:
    rows = rows_of_a_step()
    assert_snapshots(change, some_operands(rows)[which], rows)


def test_tiled_heads() -> None:
    assert_tiled_heads(change, rows_of_a_step())


def test_extreme_gates() -> None:
    assert_extreme_gates(change)


def test_extreme_steps() -> None:
    assert_extreme_steps(change)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_rows_of_invalid_blocks_become_nan_and_padding_rows_zeros(which: int) -> None:
    """An error would make the host wait. NaN affects no other row, but routers do not expect it in padding rows."""
    rows = state_rows([2, 6, -1, 0], [3, 2, 1, 2], [False, False, True, False])
    own = some_operands(rows)[which]
    good = state_rows([2, 1, 4, 0], [3, 2, 1, 2], [False, False, True, False])
    expected, state = own.expected(good)
    expected[3:5], expected[5], state[[1, 4]] = torch.nan, 0.0, own.state[[1, 4]].double()
    assert_near(change(own, rows), expected, SLACK)
    assert_near(own.state, state, SLACK)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_step_without_tokens_changes_nothing(which: int) -> None:
    for rows in (state_rows([], [], []), state_rows([0], [0], [True])):
        own = some_operands(rows)[which]
        before = own.state.clone()
        assert len(change(own, rows)) == 0
        assert torch.equal(own.state, before)
