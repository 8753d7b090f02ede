"""Short convolutions, the gated delta rule and state spaces in torch and on the CPU, against formulas and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import FORMS, at_the_end_of_memory, choose, kernels
from helpers.recurrences import (
    Convolution,
    DeltaRule,
    Operands,
    StateSpace,
    apply,
    some_of,
    some_rows,
    state_rows,
)
from kernels_helpers.checks import TYPES, assert_near, same_on_threads
from kernels_helpers.recurrence_checks import (
    SLACK,
    Change,
    assert_extreme_gates,
    assert_extreme_steps,
    assert_formulas,
    assert_snapshots,
    assert_tiled_heads,
)
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from windlass.kernels import StateRows, cpu, select_backend
from windlass.kernels.cpu import attention_bindings
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.library import Library
from windlass.kernels.torch import reference

OPERATIONS = ("short_convolution", "gated_delta_rule", "state_space")
HEADS = ("key_heads", "heads", "key_dim", "value_dim")
EACH_OPERATION = pytest.mark.parametrize("which", [0, 1, 2], ids=OPERATIONS)


def change_of(library: Library) -> Change:
    functions = {name: partial(getattr(attention_bindings, name), library) for name in OPERATIONS}
    return partial(apply, SimpleNamespace(**functions))


@pytest.fixture(params=[*FORMS, "torch"])
def change(request: pytest.FixtureRequest) -> Change:
    return partial(apply, reference) if request.param == "torch" else change_of(kernels(request.param))


@pytest.fixture
def compiled(form: Library) -> Change:
    return change_of(form)


def some_operands(rows: StateRows) -> list[Operands]:
    return [
        Convolution.random(rows, 300, 4),
        DeltaRule.random(rows, 2, 4, 12, 40),
        StateSpace.random(rows, 2, 4, 40, 92),
    ]


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("channels", "width"), [(1, 2), (40, 2), (77, 3), (600, 4), (33, 8)])
def test_convolution_against_formula(change: Change, dtype: torch.dtype, channels: int, width: int) -> None:
    rows = some_rows()
    operands = Convolution.random(rows, channels, width, dtype)
    for own in (operands, replace(operands.copy(), activation=None), operands.copy().plain):
        expected, state = own.expected(rows)
        found = change(own, rows)
        assert found.dtype == dtype and found.is_contiguous()
        assert_near(found, expected, SLACK)
        assert torch.equal(own.window, state.float())  # also windows of no sequence


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(HEADS, [(1, 1, 4, 8), (1, 3, 12, 5), (2, 4, 12, 20), (2, 4, 17, 33), (1, 2, 64, 80)])
def test_delta_rule_against_formula(
    change: Change, dtype: torch.dtype, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> None:
    rows = some_rows()
    assert_formulas(change, DeltaRule.random(rows, key_heads, heads, key_dim, value_dim, dtype), rows)


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(HEADS, [(1, 1, 4, 8), (1, 3, 12, 5), (2, 4, 17, 33), (1, 2, 64, 80), (2, 2, 40, 150)])
def test_state_space_against_formula(
    change: Change, dtype: torch.dtype, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> None:
    """One panel and several, partial vectors, and single tokens of several rows at once."""
    rows = some_rows()
    assert_formulas(change, StateSpace.random(rows, key_heads, heads, key_dim, value_dim, dtype), rows)


@pytest.mark.parametrize("value_dim", [7, 64, 80, 150])
def test_state_space_of_single_tokens(change: Change, value_dim: int) -> None:
    rows = state_rows([4, 1, 0], [1, 1, 1], [True, False, True])
    assert_formulas(change, StateSpace.random(rows, 1, 2, 20, value_dim), rows)


def test_tiled_heads(change: Change) -> None:
    assert_tiled_heads(change, some_rows())


def test_extreme_gates(change: Change) -> None:
    assert_extreme_gates(change)


def test_extreme_steps(change: Change) -> None:
    assert_extreme_steps(change)


def test_gates_are_exact_to_rounding(change: Change) -> None:
    """Without a correction, a state of ones holds the gate after a token."""
    heads, rows = 400, state_rows([0], [1], [False])
    own = DeltaRule.random(rows, 1, heads, 4, 4)
    own.decay[:] = torch.linspace(-12, 30, heads)
    own.strength[:] = -200.0
    own.rate.copy_(torch.linspace(0.01, 3, heads))
    own.memory[:] = 1
    x = own.decay[0].double() + own.bias.double()
    gates = torch.exp(-own.rate.double() * (torch.exp(x).log1p()))
    change(own, rows)
    left = own.memory[0, :, 0, 0].double()
    big = gates > 1e-30
    assert ((left - gates).abs() <= (2e-6 + 2e-7 * gates.log().abs()) * gates)[big].all()


@EACH_OPERATION
def test_bits_of_a_sequence_do_not_depend_on_steps_batch_or_block(compiled: Change, which: int) -> None:
    rows = some_rows()
    own = some_operands(rows)[which]
    whole = own.copy()
    expected = compiled(whole, rows)
    for cuts in ([0, 1, 2, 40, 76], [0, 33, 34, 35, 70, 76], [0, 65, 76]):
        cut = own.copy()
        parts = [compiled(cut.part(*span), some_of(rows, *span)) for span in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(cut.state[[0, 2, 3, 5]], whole.state[[0, 2, 3, 5]])
    alone = own.copy()
    alone.state[1] = alone.state[5]
    assert torch.equal(compiled(alone.part(71, 74), state_rows([1], [3], [False])), expected[71:74])
    assert torch.equal(alone.state[1], whole.state[5])


@EACH_OPERATION
def test_torch_bits_do_not_depend_on_steps(which: int) -> None:
    rows, change = some_rows(), partial(apply, reference)
    own = some_operands(rows)[which]
    whole = own.copy()
    expected = change(whole, rows)
    parts = [change(own.part(*span), some_of(rows, *span)) for span in pairwise((0, 1, 30, 73, 76))]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(own.state.nan_to_num(), whole.state.nan_to_num())


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_snapshots(change: Change, which: int) -> None:
    rows = some_rows()
    assert_snapshots(change, [*some_operands(rows), Convolution.random(rows, 35, 3)][which], rows)


def test_padding_tokens_become_zeros_and_change_nothing_in_torch() -> None:
    """They follow all others, as in a captured step."""
    change = partial(apply, reference)
    rows, some = state_rows([1, 2, -1], [1, 2, 3], [False, True, False]), state_rows([1, 2], [1, 2], [False, True])
    for own in some_operands(rows):
        alone = own.copy()
        expected = change(alone.part(0, 3), some)
        found = change(own, rows)
        assert torch.equal(found[:3], expected) and not found[3:].any()
        assert torch.equal(own.state.nan_to_num(), alone.state.nan_to_num())


@EACH_OPERATION
def test_threads_do_not_change_the_bits(compiled: Change, which: int) -> None:
    rows = some_rows()
    own = [
        Convolution.random(rows, 1000, 4),
        DeltaRule.random(rows, 2, 8, 32, 96),
        StateSpace.random(rows, 2, 8, 32, 96),
    ][which]

    def outputs_and_states() -> torch.Tensor:
        copy = own.copy()
        return torch.cat((compiled(copy, rows).flatten(), copy.state[[0, 2, 3, 5]].flatten()))

    same_on_threads(outputs_and_states, 1, 2, 3, 5)


def test_nothing_past_the_operands_is_read(compiled: Change) -> None:
    rows = state_rows([5, 0], [3, 2], [False, False])
    rows = StateRows(*map(at_the_end_of_memory, rows[:3]), at_the_end_of_memory(torch.tensor([1, -1, 2, -1, -1])))
    for own in (
        Convolution.random(rows, 37, 4).plain,
        DeltaRule.random(rows, 1, 3, 10, 19),
        StateSpace.random(rows, 1, 3, 10, 19),
    ):
        tensors = {name: value for name, value in vars(own).items() if isinstance(value, torch.Tensor)}
        guarded = replace(own, **{name: at_the_end_of_memory(value) for name, value in tensors.items()})
        assert torch.equal(compiled(own, rows), compiled(guarded, rows))


def test_a_step_without_tokens_changes_nothing(change: Change) -> None:
    for rows in (state_rows([], [], []), state_rows([0], [0], [True])):
        for own in some_operands(rows):
            copy = own.copy()
            assert len(change(own, rows)) == 0
            assert torch.equal(own.state, copy.state)


@EACH_OPERATION
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
def test_invalid_rows_change_nothing(
    compiled: Change, which: int, blocks: list[int], starts: list[int], error: type[Exception], message: str
) -> None:
    good = state_rows([2, 0], [3, 2], [False, False])
    own = some_operands(good)[which]
    before = own.state.clone()
    with pytest.raises(error, match=message):
        compiled(own, StateRows(torch.tensor(blocks), torch.tensor(starts), good.lengths))
    assert torch.equal(own.state, before)
    for block in (6, -2):
        snapshots = torch.tensor([-1, block, -1, -1, -1])
        with pytest.raises(IndexError, match="block is not one of 6"):
            compiled(own, good._replace(snapshots=snapshots))
    assert torch.equal(own.state, before)


def test_unsuitable_operands_are_refused() -> None:
    library = kernels()
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


def test_unsuitable_state_space_operands_are_refused() -> None:
    library = kernels()
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


def test_the_backend_agrees_with_torch(form: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, form)
    backend, rows = select_backend("cpu"), some_rows()
    for own in (
        Convolution.random(rows, 40, 4),
        Convolution.random(rows, 40, 3).plain,
        DeltaRule.random(rows, 2, 4, 16, 24),
        StateSpace.random(rows, 2, 4, 16, 24),
    ):
        copy = own.copy()
        assert_near(apply(backend, own, rows), apply(reference, copy, rows).double(), SLACK)
        assert_near(own.state, copy.state.double(), SLACK)


@pytest.fixture
def recorded(form: Library, monkeypatch: pytest.MonkeyPatch) -> Any:
    choose(monkeypatch, form)
    backend = select_backend("cpu")
    assert isinstance(backend, CompiledBackend)
    return backend


@pytest.mark.parametrize("second", ["gated_delta_rule", "state_space"])
def test_repeated_calls_read_the_current_rows_and_states(recorded: CompiledBackend, second: str) -> None:
    """Other inputs, blocks, boundaries between sequences, new sequences and snapshots."""
    rows = state_rows([2, 0, 3], [2, 1, 3], [True, False, False])._replace(snapshots=torch.full((6,), -1))
    channels, own = 56, DeltaRule.random(rows, 1, 2, 12, 16)
    if second == "state_space":
        channels, own = 64, replace(StateSpace.random(rows, 1, 2, 12, 20), limits=(0.35, 1.1))
    mixed = Convolution.random(rows, channels, 4).plain

    def work() -> torch.Tensor:
        x = recorded.short_convolution(*mixed.operands(rows))
        return apply(recorded, replace(own, **{"qkv" if second == "gated_delta_rule" else "mixed": x}), rows)

    with torch.inference_mode(), recorded.record(cpu.Arena(1 << 18)) as recording:
        found = work()
    assert recording.obstacle is None and len(recording.calls) == 2
    gates = (own.decay, own.strength) if isinstance(own, DeltaRule) else (own.step,)
    for later in (
        state_rows([0, 3, 2], [1, 4, 1], [False, False, True])._replace(snapshots=torch.tensor([-1, 5, -1, 1, -1, -1])),
        state_rows([5, 4, 1], [6, 0, 0], [True, False, False])._replace(snapshots=torch.tensor([0, -1, 2, 3, -1, 4])),
    ):
        for target, source in zip(rows, later, strict=True):
            target.copy_(source)
        for tensor in (mixed.x, mixed.window, *gates, own.memory):
            tensor.copy_(torch.randn(tensor.shape))
        before = mixed.window.clone(), own.memory.clone()
        assert recording.repeat()
        result = found.clone(), mixed.window.clone(), own.memory.clone()
        mixed.window.copy_(before[0]), own.memory.copy_(before[1])
        assert torch.equal(work(), result[0])
        assert torch.equal(mixed.window, result[1]) and torch.equal(own.memory, result[2])


def test_repeated_calls_have_the_same_bits_on_any_number_of_threads(recorded: CompiledBackend) -> None:
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


def test_a_repeated_call_refuses_an_invalid_block(recorded: CompiledBackend) -> None:
    rows = state_rows([2, 0], [2, 1], [False, False])
    for own in (
        Convolution.random(rows, 20, 4),
        Convolution.random(rows, 20, 3).plain,
        DeltaRule.random(rows, 1, 2, 4, 4),
        StateSpace.random(rows, 1, 2, 4, 4),
    ):
        with recorded.record(cpu.Arena(1 << 16)) as recording:
            apply(recorded, own, rows)
        assert recording.repeat()
        before = own.state.clone()
        rows.blocks[1] = 6
        assert not recording.repeat()
        assert torch.equal(own.state, before)
        rows.blocks[1] = 0


# -- transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [qwen3_5.torch_recurrent_gated_delta_rule, qwen3_5.torch_chunk_gated_delta_rule],
    ids=["recurrent", "chunks"],
)
def test_transformers_agree_on_the_delta_rule(form: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A prompt longer than a chunk, after tokens that the state contains."""
    heads, key_heads, key_dim, value_dim, tokens = 6, 2, 16, 24, 150
    rows = state_rows([1], [tokens], [False])
    own = DeltaRule.random(rows, key_heads, heads, key_dim, value_dim)
    parts = own.qkv.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=1)
    q, k, v = (part.reshape(1, tokens, -1, dim) for part, dim in zip(parts, (key_dim, key_dim, value_dim), strict=True))
    q, k = (one.repeat_interleave(heads // key_heads, dim=2) for one in (q, k))
    g = -own.rate * torch.nn.functional.softplus(own.decay + own.bias)
    expected, state = form(
        *(q, k, v),
        g=g[None],
        beta=own.strength.sigmoid()[None],
        initial_state=own.memory[1:2],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found = reference.gated_delta_rule(*own.operands(rows))
    assert_near(found, expected[0].flatten(1).double(), 1e-5)
    assert_near(own.memory[1], state[0].double(), 1e-5)


def operands_of_mamba(own: StateSpace, key_heads: int) -> dict[str, torch.Tensor]:
    """Return the operands of a batch of one, by name."""
    _, heads, key_dim, value_dim = own.memory.shape
    shapes = (heads, value_dim), (key_heads, key_dim), (key_heads, key_dim)
    parts = own.mixed.split([a * b for a, b in shapes], dim=1)
    x, b, c = (part.reshape(1, -1, *shape) for part, shape in zip(parts, shapes, strict=True))
    return {
        "hidden_states": x,
        "dt": own.step[None],
        "A": -own.rate,
        "B": b,
        "C": c,
        "D": own.skip,
        "dt_bias": own.bias,
    }


def test_transformers_agree_on_the_state_space_of_a_prompt() -> None:
    """Longer than a chunk, after tokens that the state contains, with steps beyond both limits."""
    rows = state_rows([1], [70], [False])
    own = StateSpace.random(rows, 2, 6, 16, 24)
    expected, state = mamba2.mamba2_chunk_scan(
        **operands_of_mamba(own, 2),
        chunk_size=32,
        initial_states=own.memory[1:2].transpose(2, 3),
        dt_softplus=True,
        dt_limit=own.limits,
        return_final_states=True,
    )
    steps = torch.nn.functional.softplus(own.step + own.bias)
    assert (steps < own.limits[0]).any() and (steps > own.limits[1]).any()
    found = reference.state_space(*own.operands(rows), limits=own.limits)
    assert_near(found, expected[0].flatten(1).double(), 1e-5)
    assert_near(own.memory[1], state[0].transpose(1, 2).double(), 1e-5)


def test_transformers_agree_on_the_state_space_of_a_token() -> None:
    rows = state_rows([1], [1], [False])
    own = StateSpace.random(rows, 2, 6, 16, 24)
    theirs, state = operands_of_mamba(own, 2), own.memory[1:2].transpose(2, 3).contiguous()
    x, step = theirs.pop("hidden_states")[:, 0], theirs.pop("dt")[:, 0, :, None].expand(-1, -1, 24)
    b, c = theirs.pop("B")[:, 0], theirs.pop("C")[:, 0]
    rate = theirs.pop("A")[:, None, None].expand(-1, 24, 16)
    skip, bias = (theirs.pop(name)[:, None].expand(-1, 24) for name in ("D", "dt_bias"))
    expected = mamba2.mamba2_selective_state_update(state, x, step, rate, b, c, skip, bias, dt_softplus=True)
    assert_near(reference.state_space(*own.operands(rows)), expected.flatten(1).double())
    assert_near(own.memory[1], state[0].transpose(1, 2).double())
