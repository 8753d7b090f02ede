"""Short convolutions, the gated delta rule and state spaces on the CPU: float64 formulas, bits that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import at_the_end_of_memory, choose, kernels
from helpers.recurrences import (
    Convolution,
    DeltaRule,
    Operands,
    StateSpace,
    assert_keeps,
    assert_near,
    some_of,
    some_rows,
    state_rows,
)

from windlass.kernels import StateRows, cpu, select_backend
from windlass.kernels.cpu import attention_bindings
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.library import Library
from windlass.kernels.torch import reference as plain

TYPES = (torch.float32, torch.bfloat16, torch.float16)
Change = Callable[..., torch.Tensor]


def change_of(operands: Operands, library: Library) -> Change:
    if isinstance(operands, StateSpace):
        return lambda own, rows: attention_bindings.state_space(library, *own.operands(rows), limits=own.limits)
    found = (
        attention_bindings.short_convolution
        if isinstance(operands, Convolution)
        else attention_bindings.gated_delta_rule
    )
    return lambda own, rows: found(library, *own.operands(rows))


def some_operands(rows: StateRows) -> list[Operands]:
    return [
        Convolution.random(rows, 300, 4),
        DeltaRule.random(rows, 2, 4, 12, 40),
        StateSpace.random(rows, 2, 4, 40, 92),
    ]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("channels", "width"), [(1, 2), (77, 3), (600, 4), (33, 8)])
def test_convolution(form: Library, dtype: torch.dtype, channels: int, width: int) -> None:
    rows = some_rows()
    operands = Convolution.random(rows, channels, width, dtype)
    for own in (operands, replace(operands.copy(), activation=None), operands.copy().plain):
        expected, state = own.expected(rows)
        found = attention_bindings.short_convolution(form, *own.operands(rows))
        assert found.dtype == dtype and found.is_contiguous()
        assert_near(found, expected)
        assert torch.equal(own.window, state.float())  # unchanged inputs, and blocks of no sequence


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"), [(1, 1, 4, 8), (1, 3, 12, 5), (2, 4, 17, 33), (1, 2, 64, 80)]
)
def test_delta_rule(
    form: Library, dtype: torch.dtype, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> None:
    rows = some_rows()
    own = DeltaRule.random(rows, key_heads, heads, key_dim, value_dim, dtype)
    before = own.memory.clone()
    expected, state = own.expected(rows)
    found = attention_bindings.gated_delta_rule(form, *own.operands(rows))
    assert found.dtype == dtype and found.is_contiguous()
    assert_near(found, expected)
    assert_near(own.memory, state)
    assert torch.equal(own.memory[[1, 4]], before[[1, 4]])


def test_heads_of_keys_met_in_turns(form: Library) -> None:
    rows = some_rows()
    own = DeltaRule.random(rows, 2, 6, 12, 20)
    turned, order = own.tiled_heads()
    expected = attention_bindings.gated_delta_rule(form, *own.operands(rows))
    found = attention_bindings.gated_delta_rule(form, *turned.operands(rows), tiled_heads=True)
    assert torch.equal(found.unflatten(1, (6, 20)), expected.unflatten(1, (6, 20))[:, order])
    assert torch.equal(turned.memory.nan_to_num(-1.0), own.memory[:, order].nan_to_num(-1.0))


def test_gates_at_their_ends(form: Library) -> None:
    """Large arguments overflow nowhere; a query and a key of length 0 read and write nothing."""
    rows = state_rows([0], [6], [False])
    own = DeltaRule.random(rows, 1, 2, 8, 8)
    own.decay[:] = torch.tensor([30.0, 1e4, -1e4, 20.5, -30.0, 88.0])[:, None]
    own.strength[:] = torch.tensor([200.0, -200.0, 0.0, 88.0, -88.0, 1.0])[:, None]
    own.rate.copy_(torch.tensor([1e-3, 0.04]))
    own.qkv[3, :16] = 0
    expected, state = own.expected(rows)
    assert_near(attention_bindings.gated_delta_rule(form, *own.operands(rows)), expected)
    assert_near(own.memory, state)
    assert expected.abs().max() > 0.1


def test_gates_are_right_to_rounding(form: Library) -> None:
    """Of a memory without a correction what is left after a token is the gate, times one."""
    heads, rows = 400, state_rows([0], [1], [False])
    own = DeltaRule.random(rows, 1, heads, 4, 4)
    own.decay[:] = torch.linspace(-12, 30, heads)
    own.strength[:] = -200.0
    own.rate.copy_(torch.linspace(0.01, 3, heads))
    own.memory[:] = 1
    x = own.decay[0].double() + own.bias.double()
    gates = torch.exp(-own.rate.double() * (torch.exp(x).log1p()))
    attention_bindings.gated_delta_rule(form, *own.operands(rows))
    left = own.memory[0, :, 0, 0].double()
    big = gates > 1e-30
    assert ((left - gates).abs() <= (2e-6 + 2e-7 * gates.log().abs()) * gates)[big].all()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_bits_of_a_row_are_its_sequences(form: Library, which: int) -> None:
    """For any split into steps, any other sequences in the batch, and any block."""
    rows = some_rows()
    own = some_operands(rows)[which]
    change, whole = change_of(own, form), own.copy()
    expected = change(whole, rows)
    for cuts in ([0, 1, 2, 40, 76], [0, 33, 34, 35, 70, 76], [0, 65, 76]):
        cut = own.copy()
        spans = list(pairwise(cuts))
        parts = [change(cut.part(*span), some_of(rows, *span)) for span in spans]
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(cut.state[[0, 2, 3, 5]], whole.state[[0, 2, 3, 5]])
    alone = own.copy()
    alone.state[1] = alone.state[5]
    assert torch.equal(change(alone.part(71, 74), state_rows([1], [3], [False])), expected[71:74])
    assert torch.equal(alone.state[1], whole.state[5])


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_states_are_kept_behind_tokens(form: Library, which: int) -> None:
    rows = some_rows()
    own = [*some_operands(rows), Convolution.random(rows, 35, 3)][which]
    assert_keeps(own, rows, change_of(own, form))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_bits_are_the_same_at_any_number_of_threads(form: Library, which: int) -> None:
    rows = some_rows()
    own = [
        Convolution.random(rows, 1000, 4),
        DeltaRule.random(rows, 2, 8, 32, 96),
        StateSpace.random(rows, 2, 8, 32, 96),
    ][which]
    change, before = change_of(own, form), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            copy = own.copy()
            found.append((change(copy, rows), copy.state[[0, 2, 3, 5]]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, first) for pair in found for one, first in zip(pair, found[0], strict=True))


def test_nothing_outside_is_read(form: Library) -> None:
    rows = state_rows([5, 0], [3, 2], [False, False])
    rows = StateRows(*map(at_the_end_of_memory, rows[:3]), at_the_end_of_memory(torch.tensor([1, -1, 2, -1, -1])))
    own = Convolution.random(rows, 37, 4).plain
    assert own.bias is not None
    x, weight, window, bias = map(at_the_end_of_memory, (own.x, own.weight, own.window, own.bias))
    end = Convolution(x, weight, window, None, bias)
    expected = attention_bindings.short_convolution(form, *own.operands(rows))
    assert torch.equal(attention_bindings.short_convolution(form, *end.operands(rows)), expected)
    rule = DeltaRule.random(rows, 1, 3, 10, 19)
    ends = DeltaRule(*map(at_the_end_of_memory, rule.operands(rows)[:-1]))
    expected = attention_bindings.gated_delta_rule(form, *rule.operands(rows))
    assert torch.equal(attention_bindings.gated_delta_rule(form, *ends.operands(rows)), expected)
    space = StateSpace.random(rows, 1, 3, 10, 19)
    last = StateSpace(*map(at_the_end_of_memory, space.operands(rows)[:-1]))
    expected = attention_bindings.state_space(form, *space.operands(rows))
    assert torch.equal(attention_bindings.state_space(form, *last.operands(rows)), expected)


def test_a_step_without_tokens_changes_nothing(form: Library) -> None:
    for rows in (state_rows([], [], []), state_rows([0], [0], [True])):
        for own in some_operands(rows):
            copy = own.copy()
            assert len(change_of(own, form)(own, rows)) == 0
            assert torch.equal(own.state, copy.state)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    ("blocks", "starts", "error", "message"),
    [
        ([2, 6], [0, 3, 5], IndexError, "block is not one of 6"),
        ([2, -1], [0, 3, 5], IndexError, "block is not one of 6"),
        ([2, 0], [0, 3, 4], ValueError, "from 0 to 5"),
        ([2, 0], [1, 3, 5], ValueError, "from 0 to 5"),
        ([2, 0], [0, 6, 5], ValueError, "from 0 to 5"),
        ([2, 0], [0, -1, 5], ValueError, "from 0 to 5"),
    ],
)
def test_rows_that_are_none_change_nothing(
    form: Library, which: int, blocks: list[int], starts: list[int], error: type[Exception], message: str
) -> None:
    good = state_rows([2, 0], [3, 2], [False, False])
    own = some_operands(good)[which]
    before = own.state.clone()
    with pytest.raises(error, match=message):
        change_of(own, form)(own, StateRows(torch.tensor(blocks), torch.tensor(starts), good.lengths))
    assert torch.equal(own.state, before)
    for block in (6, -2):
        kept = torch.tensor([-1, block, -1, -1, -1])
        with pytest.raises(IndexError, match="block is not one of 6"):
            change_of(own, form)(own, good._replace(snapshots=kept))
    assert torch.equal(own.state, before)


def test_operands_that_do_not_fit_are_refused() -> None:
    library = kernels("generic")
    rows = state_rows([2, 0], [3, 2], [False, False])
    x, weight, window, *_ = Convolution.random(rows, 8, 4).operands(rows)
    bias = torch.ones(8)
    for operands, message in (
        ((x.double(), weight, window, rows), "x is"),
        ((x[:, ::2], weight, window, rows), "adjacent"),
        ((x, weight[:7], window, rows), "weight is"),
        ((x, weight.double(), window, rows), "weight is"),
        ((x, torch.ones(8, 9), torch.ones(6, 8, 8), rows), "2 to 8"),
        ((x, weight[:, :1].contiguous(), window[:, :0], rows), "2 to 8"),
        ((x, weight, window[:, 1:], rows), "window is"),
        ((x, weight, window.transpose(1, 2).contiguous().transpose(1, 2), rows), "contiguous"),
        ((x, weight, window, rows._replace(lengths=rows.lengths[:1])), "blocks, starts and lengths"),
        ((x, weight, window, rows._replace(starts=rows.starts.int())), "blocks, starts and lengths"),
        ((x, weight, window, rows._replace(snapshots=rows.blocks)), r"snapshots must be int64 \[5\]"),
        ((x, weight, window, rows, None, bias[:7]), "bias must be"),
        ((x, weight, window, rows, None, bias.bfloat16()), "bias must be"),
        ((x, weight, window, rows, "gelu"), "activation 'gelu' is not silu"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_bindings.short_convolution(library, *operands)
    qkv, decay, strength, rate, bias, memory, _ = DeltaRule.random(rows, 2, 4, 8, 8).operands(rows)
    gates = decay, strength, rate, bias
    for changed, message in (
        ((qkv[:, :-8], *gates, memory, rows), "not queries"),
        ((qkv[:, :32], *gates, memory, rows), "not queries"),
        ((qkv.bfloat16(), *gates, memory, rows), "decay is"),
        ((qkv, decay[:, :3], *gates[1:], memory, rows), "decay is"),
        ((qkv, decay, strength[:4], rate, bias, memory, rows), "strength is"),
        ((qkv, decay, strength, rate.double(), bias, memory, rows), "rate and bias"),
        ((qkv, decay, strength, rate, bias[:3], memory, rows), "rate and bias"),
        ((qkv, *gates, memory.bfloat16(), rows), "memory is"),
        ((qkv, *gates, memory.transpose(2, 3), rows), "memory is"),
        ((qkv, *gates, memory, rows._replace(blocks=rows.blocks[:, None])), "blocks, starts and lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_bindings.gated_delta_rule(library, *changed)


def test_the_backend_agrees_with_plain_torch(form: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, form)
    backend = select_backend("cpu")
    rows = some_rows()
    for own, found, reference in (
        (Convolution.random(rows, 40, 4), backend.short_convolution, plain.short_convolution),
        (Convolution.random(rows, 40, 3).plain, backend.short_convolution, plain.short_convolution),
        (DeltaRule.random(rows, 2, 4, 16, 24), backend.gated_delta_rule, plain.gated_delta_rule),
        (StateSpace.random(rows, 2, 4, 16, 24), backend.state_space, plain.state_space),
    ):
        copy = own.copy()
        assert_near(found(*own.operands(rows)), reference(*copy.operands(rows)).double())
        assert_near(own.state, copy.state.double())


@pytest.fixture
def recorded(form: Library, monkeypatch: pytest.MonkeyPatch) -> Any:
    choose(monkeypatch, form)
    backend = select_backend("cpu")
    assert isinstance(backend, CompiledBackend)
    return backend


def test_recorded_calls_read_rows_and_states_anew(recorded: CompiledBackend) -> None:
    """Other inputs, other blocks, other cuts between sequences, another one that begins, and other tokens that are kept."""
    rows = state_rows([2, 0, 3], [2, 1, 3], [True, False, False])._replace(snapshots=torch.full((6,), -1))
    mixed, rule = Convolution.random(rows, 56, 4).plain, DeltaRule.random(rows, 1, 2, 12, 16)

    def work() -> torch.Tensor:
        qkv = recorded.short_convolution(*mixed.operands(rows))
        gates = rule.decay, rule.strength, rule.rate, rule.bias
        return recorded.gated_delta_rule(qkv, *gates, rule.memory, rows)

    with torch.inference_mode(), recorded.record(cpu.Arena(1 << 18)) as recording:
        found = work()
    assert recording.obstacle is None and len(recording.calls) == 2
    for later in (
        state_rows([0, 3, 2], [1, 4, 1], [False, False, True])._replace(snapshots=torch.tensor([-1, 5, -1, 1, -1, -1])),
        state_rows([5, 4, 1], [6, 0, 0], [True, False, False])._replace(snapshots=torch.tensor([0, -1, 2, 3, -1, 4])),
    ):
        for target, source in zip(rows, later, strict=True):
            target.copy_(source)
        for tensor in (mixed.x, mixed.window, rule.decay, rule.strength, rule.memory):
            tensor.copy_(torch.randn(tensor.shape))
        kept = mixed.window.clone(), rule.memory.clone()
        assert recording.repeat()
        result = found.clone(), mixed.window.clone(), rule.memory.clone()
        mixed.window.copy_(kept[0]), rule.memory.copy_(kept[1])
        assert torch.equal(work(), result[0])
        assert torch.equal(mixed.window, result[1]) and torch.equal(rule.memory, result[2])


def test_a_team_of_threads_has_the_bits_of_one(recorded: CompiledBackend) -> None:
    rows, before = some_rows(), torch.get_num_threads()
    mixed, rule = Convolution.random(rows, 1000, 4), DeltaRule.random(rows, 2, 8, 32, 96)
    space = StateSpace.random(rows, 2, 8, 32, 96)
    held = mixed.window, rule.memory, space.memory
    states = [one.clone() for one in held]
    try:
        torch.set_num_threads(1)
        with recorded.record(cpu.Arena(1 << 20)) as recording:
            found = (
                recorded.short_convolution(*mixed.operands(rows)),
                recorded.gated_delta_rule(*rule.operands(rows)),
                recorded.state_space(*space.operands(rows)),
            )
        named = *found, *(one[rows.blocks] for one in held)
        expected = [one.clone() for one in named]
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for _ in range(5):
                for one, state in zip(held, states, strict=True):
                    one.copy_(state)
                for one in found:
                    one.fill_(torch.nan)
                assert recording.repeat()
                named = *found, *(one[rows.blocks] for one in held)
                assert all(map(torch.equal, named, expected))
    finally:
        torch.set_num_threads(before)


def test_a_recorded_call_refuses_a_block_that_there_is_not(recorded: CompiledBackend) -> None:
    rows = state_rows([2, 0], [2, 1], [False, False])
    for own, call in (
        (Convolution.random(rows, 20, 4), recorded.short_convolution),
        (Convolution.random(rows, 20, 3).plain, recorded.short_convolution),
        (DeltaRule.random(rows, 1, 2, 4, 4), recorded.gated_delta_rule),
        (StateSpace.random(rows, 1, 2, 4, 4), recorded.state_space),
    ):
        with recorded.record(cpu.Arena(1 << 16)) as recording:
            call(*own.operands(rows))
        assert recording.repeat()
        before = own.state.clone()
        rows.blocks[1] = 6
        assert not recording.repeat()
        assert torch.equal(own.state, before)
        rows.blocks[1] = 0
