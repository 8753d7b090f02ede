"""Triton's short convolutions, gated delta rule and state spaces, interpreted, against float64 formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers.device import DEVICE
from helpers.recurrences import (
    Convolution,
    DeltaRule,
    Operands,
    StateSpace,
    assert_keeps,
    assert_near,
    some_of,
    state_rows,
)
from kernels_helpers.interpreted import ON_THE_DEVICE
from torch import Tensor

from windlass.kernels import StateRows
from windlass.kernels.backend import BackendOptions
from windlass.kernels.triton.triton_backend import TritonBackend

pytestmark = ON_THE_DEVICE


def change(own: Operands, rows: StateRows) -> Tensor:
    backend = TritonBackend(BackendOptions(torch.device(DEVICE)))
    if isinstance(own, Convolution):
        return backend.short_convolution(*own.operands(rows))
    if isinstance(own, StateSpace):
        return backend.state_space(*own.operands(rows), limits=own.limits)
    return backend.gated_delta_rule(*own.operands(rows))


def rows_of_a_step() -> StateRows:
    """One continues, one begins, one is a token, one has none; blocks 1 and 4 of 6 are unused."""
    return state_rows([3, 0, 5, 2], [3, 6, 1, 0], [False, True, False, True])


def some_operands(rows: StateRows, key_heads: int = 1, dtype: torch.dtype = torch.float32) -> list[Operands]:
    heads = key_heads, 2 * key_heads
    return [
        Convolution.random(rows, 21, 4, dtype),
        DeltaRule.random(rows, *heads, 12, 20, dtype),
        StateSpace.random(rows, *heads, 12, 20, dtype),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize("which", [0, 1, 2])
def test_formulas(which: int, dtype: torch.dtype) -> None:
    rows = rows_of_a_step()
    own = some_operands(rows, 2, dtype)[which]
    before = own.state.clone()
    expected, state = own.expected(rows)
    found = change(own, rows)
    assert found.dtype == dtype
    assert_near(found, expected)
    assert_near(own.state, state)
    assert torch.equal(own.state[[1, 4]], before[[1, 4]])


@pytest.mark.parametrize("width", [2, 3, 8])
def test_widths_of_a_convolution(width: int) -> None:
    """More channels than a program takes, and sequences of fewer tokens than the width."""
    rows = rows_of_a_step()
    own = Convolution.random(rows, 530, width)
    for each in (own, own.copy().plain):
        expected, state = each.expected(rows)
        assert_near(change(each, rows), expected)
        assert_near(each.state, state)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_bits_of_a_row_are_its_sequences(which: int) -> None:
    rows = rows_of_a_step()
    own = some_operands(rows)[which]
    whole = own.copy()
    expected = change(whole, rows)
    spans = list(pairwise([0, 1, 4, 6, 10]))
    parts = [change(own.part(*span), some_of(rows, *span)) for span in spans]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(own.state[[0, 3, 5]], whole.state[[0, 3, 5]])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_states_are_kept_behind_tokens(which: int) -> None:
    rows = rows_of_a_step()
    assert_keeps(some_operands(rows)[which], rows, change)


def test_heads_of_keys_met_in_turns() -> None:
    rows = rows_of_a_step()
    own = DeltaRule.random(rows, 2, 6, 12, 20)
    turned, order = own.tiled_heads()
    backend = TritonBackend(BackendOptions(torch.device(DEVICE)))
    expected = backend.gated_delta_rule(*own.operands(rows))
    found = backend.gated_delta_rule(*turned.operands(rows), tiled_heads=True)
    assert torch.equal(found.unflatten(1, (6, 20)), expected.unflatten(1, (6, 20))[:, order])
    assert torch.equal(turned.memory.nan_to_num(-1.0), own.memory[:, order].nan_to_num(-1.0))


def test_gates_at_their_ends() -> None:
    rows = state_rows([0], [6], [False])
    own = DeltaRule.random(rows, 1, 2, 8, 8)
    own.decay[:] = torch.tensor([30.0, 1e4, -1e4, 20.5, -30.0, 88.0])[:, None]
    own.strength[:] = torch.tensor([200.0, -200.0, 0.0, 88.0, -88.0, 1.0])[:, None]
    own.rate.copy_(torch.tensor([1e-3, 0.04]))
    own.qkv[3, :16] = 0
    expected, state = own.expected(rows)
    assert_near(change(own, rows), expected)
    assert_near(own.memory, state)


def test_steps_at_their_ends() -> None:
    """Large arguments overflow nowhere, small steps are right to rounding, and NaN stays in its head."""
    rows = state_rows([0], [6], [False])
    own = replace(StateSpace.random(rows, 1, 3, 8, 8), limits=(0.0, math.inf))
    own.step[:] = torch.tensor([30.0, 1e4, -1e4, 20.5, -9.0, -16.5])[:, None]
    own.rate.copy_(torch.tensor([1e-3, 0.04, 0.1]))
    expected, state = own.expected(rows)
    assert_near(change(own, rows), expected, 1e-6 * float(expected.abs().max()))
    assert_near(own.memory, state, 1e-6 * float(state.abs().max()))
    small = replace(StateSpace.random(rows, 1, 1, 4, 4), memory=torch.zeros(1, 1, 4, 4), limits=(0.0, math.inf))
    small.step[:], small.bias[:], small.skip[:] = torch.linspace(-17, -5, 6)[:, None], 0, 0
    expected, _ = small.expected(rows)
    found = change(small, rows)
    assert ((found - expected).abs() <= 2e-6 * expected.abs().amax(1, keepdim=True)).all()
    own.step[0, 1] = torch.nan
    assert change(own, rows).view(6, 3, 8).isnan().any(2).tolist() == [[False, True, False]] * 6


@pytest.mark.parametrize("which", [0, 1, 2])
def test_rows_of_a_block_that_there_is_not_become_nan_and_rows_that_are_none_zeros(which: int) -> None:
    """Instead of an error, for which the host would have to wait. NaN affects no other row, but a router may not like
    NaN."""
    rows = state_rows([2, 6, -1, 0], [3, 2, 1, 2], [False, False, True, False])
    own = some_operands(rows)[which]
    good = state_rows([2, 1, 4, 0], [3, 2, 1, 2], [False, False, True, False])
    expected, state = own.expected(good)
    expected[3:5], expected[5], state[[1, 4]] = torch.nan, 0.0, own.state[[1, 4]].double()
    assert_near(change(own, rows), expected)
    assert_near(own.state, state)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_step_without_tokens_changes_nothing(which: int) -> None:
    for rows in (state_rows([], [], []), state_rows([0], [0], [True])):
        own = some_operands(rows)[which]
        before = own.state.clone()
        assert len(change(own, rows)) == 0
        assert torch.equal(own.state, before)
