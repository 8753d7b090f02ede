"""Checks of recurrent layers that hold for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from helpers.recurrences import Convolution, DeltaRule, Operands, StateSpace, some_of, state_rows
from kernels_helpers.checks import assert_near
from torch import Tensor

from windlass.kernels import StateRows

Change = Callable[..., Tensor]  # operands and rows to the output; writes the state
SLACK = 3e-6


def assert_formulas(change: Change, own: Operands, rows: StateRows) -> None:
    """Compare the output and all states with the formulas in float64. States of no sequence are unchanged."""
    before, (expected, state) = own.state.clone(), own.expected(rows)
    found = change(own, rows)
    dtype = {Convolution: "x", DeltaRule: "qkv", StateSpace: "mixed"}[type(own)]
    assert found.dtype == getattr(own, dtype).dtype
    assert_near(found, expected, SLACK)
    assert_near(own.state, state, SLACK)
    unused = sorted(set(range(len(before))) - set(rows.blocks.tolist()))
    assert torch.equal(own.state[unused], before[unused])


def assert_tiled_heads(change: Change, rows: StateRows) -> None:
    """Value heads may alternate between key heads."""
    own = DeltaRule.random(rows, 2, 6, 12, 20)
    tiled, order = own.tiled_heads()
    expected, found = change(own, rows), change(tiled, rows, tiled_heads=True)
    assert torch.equal(found.unflatten(1, (6, 20)), expected.unflatten(1, (6, 20))[:, order])
    assert torch.equal(tiled.memory.nan_to_num(-1.0), own.memory[:, order].nan_to_num(-1.0))


def assert_extreme_gates(change: Change) -> None:
    """Large arguments overflow nowhere. A query and a key of length 0 read and write nothing."""
    rows = state_rows([0], [6], [False])
    own = DeltaRule.random(rows, 1, 2, 8, 8)
    own.decay[:] = torch.tensor([30.0, 1e4, -1e4, 20.5, -30.0, 88.0])[:, None]
    own.strength[:] = torch.tensor([200.0, -200.0, 0.0, 88.0, -88.0, 1.0])[:, None]
    own.rate.copy_(torch.tensor([1e-3, 0.04]))
    own.qkv[3, :16] = 0
    expected, state = own.expected(rows)
    assert_near(change(own, rows), expected, SLACK)
    assert_near(own.memory, state, SLACK)
    assert expected.abs().max() > 0.1


def assert_extreme_steps(change: Change) -> None:
    """Large arguments overflow nowhere, small steps are exact to rounding, and NaN affects one head."""
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
    assert ((change(small, rows) - expected).abs() <= 2e-6 * expected.abs().amax(1, keepdim=True)).all()
    own.step[0, 1] = torch.nan
    assert change(own, rows).view(6, 3, 8).isnan().any(2).tolist() == [[False, True, False]] * 6


def assert_snapshots(change: Change, own: Operands, rows: StateRows) -> None:
    """The state stored after a token has the bits of a step that ends there, and nothing else changes.

    States are stored for some tokens of every sequence, including the first and the last.
    """
    tokens = int(rows.starts[-1])
    chosen = sorted({t for t in range(tokens) if t % 7 < 2} | {max(0, tokens - i) for i in range(1, 7)})
    snapshots = torch.full((tokens,), -1)
    snapshots[chosen] = len(own.state) + torch.randperm(len(chosen))
    more = torch.cat((own.state, torch.full((len(chosen), *own.state.shape[1:]), torch.nan)))
    storing = replace(own, window=more) if isinstance(own, Convolution) else replace(own, memory=more)
    whole = own.copy()
    expected = change(whole, rows)
    assert torch.equal(change(storing, rows._replace(snapshots=snapshots)), expected)
    assert torch.equal(storing.state[: len(own.state)].nan_to_num(), whole.state.nan_to_num())
    for token in chosen:
        cut = own.copy()
        change(cut.part(0, token + 1), some_of(rows, 0, token + 1))
        sequence = int((rows.starts <= token).sum()) - 1
        assert torch.equal(storing.state[snapshots[token]], cut.state[rows.blocks[sequence]]), token
