"""State spaces on the CPU: float64 formulas, steps at their ends, invalid operands. test_cpu_recurrence.py has the rest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.cpu_kernels import choose, kernels
from helpers.recurrences import Convolution, StateSpace, assert_near, some_rows, state_rows

from windlass.kernels import cpu, select_backend
from windlass.kernels.cpu import attention_bindings
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.library import Library

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"),
    [(1, 1, 4, 8), (1, 3, 12, 5), (2, 4, 17, 33), (1, 2, 64, 80), (2, 2, 40, 150)],
)
def test_state_space(
    form: Library, dtype: torch.dtype, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> None:
    """Of one panel and of several, with vectors that are not full, and single tokens of several rows at once."""
    rows = some_rows()
    own = StateSpace.random(rows, key_heads, heads, key_dim, value_dim, dtype)
    before = own.memory.clone()
    expected, state = own.expected(rows)
    found = attention_bindings.state_space(form, *own.operands(rows), limits=own.limits)
    assert found.dtype == dtype and found.is_contiguous()
    assert_near(found, expected)
    assert_near(own.memory, state)
    assert torch.equal(own.memory[[1, 4]], before[[1, 4]])


@pytest.mark.parametrize("value_dim", [7, 64, 80, 150])
def test_single_tokens(form: Library, value_dim: int) -> None:
    """New and continued sequences, in memories of full vectors and of other sizes."""
    rows = state_rows([4, 1, 0], [1, 1, 1], [True, False, True])
    own = StateSpace.random(rows, 1, 2, 20, value_dim)
    before = own.memory.clone()
    expected, state = own.expected(rows)
    assert_near(attention_bindings.state_space(form, *own.operands(rows), limits=own.limits), expected)
    assert_near(own.memory, state)
    assert torch.equal(own.memory[[2, 3, 5]], before[[2, 3, 5]])


def test_steps_at_their_ends(form: Library) -> None:
    """Large arguments overflow nowhere, small steps are right to rounding, and NaN stays in its head."""
    rows = state_rows([0], [6], [False])
    own = replace(StateSpace.random(rows, 1, 3, 8, 8), limits=(0.0, math.inf))
    own.step[:] = torch.tensor([30.0, 1e4, -1e4, 20.5, -9.0, -16.5])[:, None]
    own.rate.copy_(torch.tensor([1e-3, 0.04, 0.1]))
    expected, state = own.expected(rows)
    assert_near(attention_bindings.state_space(form, *own.operands(rows)), expected, 1e-6 * float(expected.abs().max()))
    assert_near(own.memory, state, 1e-6 * float(state.abs().max()))
    small = replace(StateSpace.random(rows, 1, 1, 4, 4), memory=torch.zeros(1, 1, 4, 4), limits=(0.0, math.inf))
    small.step[:], small.bias[:], small.skip[:] = torch.linspace(-17, -5, 6)[:, None], 0, 0
    expected, _ = small.expected(rows)
    found = attention_bindings.state_space(form, *small.operands(rows))
    assert ((found - expected).abs() <= 2e-6 * expected.abs().amax(1, keepdim=True)).all()
    own.step[0, 1] = torch.nan
    found = attention_bindings.state_space(form, *own.operands(rows))
    assert found.view(6, 3, 8).isnan().any(2).tolist() == [[False, True, False]] * 6


def test_operands_that_do_not_fit_are_refused() -> None:
    library = kernels("generic")
    rows = state_rows([2, 0], [3, 2], [False, False])
    mixed, step, rate, bias, skip, memory, _ = StateSpace.random(rows, 2, 4, 8, 8).operands(rows)
    of_heads = rate, bias, skip
    for operands, message in (
        ((mixed[:, :-8], step, *of_heads, memory, rows), "not values, keys and queries"),
        ((mixed[:, :32], step, *of_heads, memory, rows), "not values, keys and queries"),
        ((torch.ones(5, 32 + 6 * 8), step, *of_heads, memory, rows), "not values, keys and queries"),
        ((mixed.double(), step, *of_heads, memory, rows), "mixed is"),
        ((mixed[:, ::2], step, *of_heads, memory, rows), "adjacent"),
        ((mixed.bfloat16(), step, *of_heads, memory, rows), "step is"),
        ((mixed, step[:, :3], *of_heads, memory, rows), "step is"),
        ((mixed, step[:4], *of_heads, memory, rows), "step is"),
        ((mixed, step, rate.double(), bias, skip, memory, rows), "rate, bias and skip"),
        ((mixed, step, rate, bias[:3], skip, memory, rows), "rate, bias and skip"),
        ((mixed, step, rate, bias, torch.ones(8)[::2], memory, rows), "rate, bias and skip"),
        ((mixed, step, *of_heads, memory.bfloat16(), rows), "memory is"),
        ((mixed, step, *of_heads, memory.transpose(2, 3), rows), "memory is"),
        ((mixed, step, *of_heads, memory[0], rows), "memory is"),
        ((mixed, step, *of_heads, memory, rows._replace(starts=rows.starts[:2])), "blocks, starts and lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_bindings.state_space(library, *operands)
    for limits in ((1.0, 0.5), (math.nan, 1.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="do not ascend"):
            attention_bindings.state_space(library, mixed, step, *of_heads, memory, rows, limits=limits)


def test_recorded_calls_read_rows_and_states_anew(form: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other inputs, other blocks, other cuts between sequences, another one that begins; with limits."""
    choose(monkeypatch, form)
    recorded = select_backend("cpu")
    assert isinstance(recorded, CompiledBackend)
    rows = state_rows([2, 0, 3], [2, 1, 3], [True, False, False])._replace(snapshots=torch.full((6,), -1))
    inputs = Convolution.random(rows, 64, 4).plain
    own = replace(StateSpace.random(rows, 1, 2, 12, 20), limits=(0.35, 1.1))

    def work() -> torch.Tensor:
        mixed = recorded.short_convolution(*inputs.operands(rows))
        return recorded.state_space(mixed, *own.operands(rows)[1:], limits=own.limits)

    with torch.inference_mode(), recorded.record(cpu.Arena(1 << 18)) as recording:
        found = work()
    assert recording.obstacle is None and len(recording.calls) == 2
    later = state_rows([0, 3, 2], [1, 4, 1], [False, False, True])._replace(
        snapshots=torch.tensor([-1, 5, -1, 1, -1, -1])
    )
    for target, source in zip(rows, later, strict=True):
        target.copy_(source)
    for tensor in (inputs.x, inputs.window, own.step, own.memory):
        tensor.copy_(torch.randn(tensor.shape))
    kept = inputs.window.clone(), own.memory.clone()
    assert recording.repeat()
    result = found.clone(), own.memory.clone()
    inputs.window.copy_(kept[0]), own.memory.copy_(kept[1])
    assert torch.equal(work(), result[0]) and torch.equal(own.memory, result[1])
