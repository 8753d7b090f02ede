"""Layers that carry a state in plain torch: float64 formulas, and transformers' forms of the gated delta rule and of Mamba
2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.recurrences import (
    Convolution,
    DeltaRule,
    StateSpace,
    assert_keeps,
    assert_near,
    some_of,
    some_rows,
    state_rows,
)
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from windlass.kernels.torch import reference

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_convolution(dtype: torch.dtype, width: int) -> None:
    rows = some_rows()
    for own in (Convolution.random(rows, 40, width, dtype), Convolution.random(rows, 40, width, dtype).plain):
        expected, state = own.expected(rows)
        assert_near(reference.short_convolution(*own.operands(rows)), expected)
        assert torch.equal(own.window, state.float())


@pytest.mark.parametrize("dtype", TYPES)
def test_delta_rule(dtype: torch.dtype) -> None:
    rows = some_rows()
    own = DeltaRule.random(rows, 2, 4, 12, 20, dtype)
    expected, state = own.expected(rows)
    assert_near(reference.gated_delta_rule(*own.operands(rows)), expected)
    assert_near(own.memory, state)


@pytest.mark.parametrize("dtype", TYPES)
def test_state_space(dtype: torch.dtype) -> None:
    rows = some_rows()
    own = StateSpace.random(rows, 2, 4, 12, 20, dtype)
    expected, state = own.expected(rows)
    assert_near(reference.state_space(*own.operands(rows), limits=own.limits), expected)
    assert_near(own.memory, state)


def test_heads_of_keys_met_in_turns() -> None:
    rows = some_rows()
    own = DeltaRule.random(rows, 2, 6, 12, 20)
    turned, order = own.tiled_heads()
    expected = reference.gated_delta_rule(*own.operands(rows))
    found = reference.gated_delta_rule(*turned.operands(rows), tiled_heads=True)
    assert torch.equal(found.unflatten(1, (6, 20)), expected.unflatten(1, (6, 20))[:, order])
    assert torch.equal(turned.memory.nan_to_num(-1.0), own.memory[:, order].nan_to_num(-1.0))


def test_bits_do_not_depend_on_where_a_sequence_is_cut() -> None:
    rows = some_rows()
    spans = [(0, 1), (1, 30), (30, 73), (73, 76)]
    for own, call in (
        (Convolution.random(rows, 40, 4), reference.short_convolution),
        (DeltaRule.random(rows, 2, 4, 12, 20), reference.gated_delta_rule),
        (StateSpace.random(rows, 2, 4, 12, 20), reference.state_space),
    ):
        whole = own.copy()
        expected = call(*whole.operands(rows))
        parts = [call(*own.part(*span).operands(some_of(rows, *span))) for span in spans]
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(own.state.nan_to_num(), whole.state.nan_to_num())


def test_tokens_that_are_none_become_zeros_and_change_nothing() -> None:
    """Behind all others, as in a captured step."""
    rows, some = state_rows([1, 2, -1], [1, 2, 3], [False, True, False]), state_rows([1, 2], [1, 2], [False, True])
    for own, call in (
        (Convolution.random(rows, 9, 4), reference.short_convolution),
        (DeltaRule.random(rows, 1, 2, 4, 6), reference.gated_delta_rule),
        (StateSpace.random(rows, 1, 2, 4, 6), reference.state_space),
    ):
        alone = own.copy()
        expected = call(*alone.part(0, 3).operands(some))
        found = call(*own.operands(rows))
        assert torch.equal(found[:3], expected) and not found[3:].any()
        assert torch.equal(own.state.nan_to_num(), alone.state.nan_to_num())


def test_states_are_kept_behind_tokens() -> None:
    rows = some_rows()
    assert_keeps(Convolution.random(rows, 9, 4), rows, lambda one, of: reference.short_convolution(*one.operands(of)))
    assert_keeps(
        DeltaRule.random(rows, 1, 2, 4, 6), rows, lambda one, of: reference.gated_delta_rule(*one.operands(of))
    )
    assert_keeps(StateSpace.random(rows, 1, 2, 4, 6), rows, lambda one, of: reference.state_space(*one.operands(of)))


@pytest.mark.parametrize(
    "form", [theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule], ids=["recurrent", "chunks"]
)
def test_transformers_agree(form: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A prompt of more than a chunk behind tokens that the memory has."""
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


def _as_theirs(own: StateSpace, key_heads: int) -> dict[str, torch.Tensor]:
    """Operands by their names, of a batch of one."""
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
    """Of more than a chunk, behind tokens that the memory has, with steps beyond both limits."""
    rows = state_rows([1], [70], [False])
    own = StateSpace.random(rows, 2, 6, 16, 24)
    expected, state = mamba2.mamba2_chunk_scan(
        **_as_theirs(own, 2),
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
    theirs_own, state = _as_theirs(own, 2), own.memory[1:2].transpose(2, 3).contiguous()
    x, step = theirs_own.pop("hidden_states")[:, 0], theirs_own.pop("dt")[:, 0, :, None].expand(-1, -1, 24)
    b, c = theirs_own.pop("B")[:, 0], theirs_own.pop("C")[:, 0]
    rate = theirs_own.pop("A")[:, None, None].expand(-1, 24, 16)
    skip, bias = (theirs_own.pop(name)[:, None].expand(-1, 24) for name in ("D", "dt_bias"))
    expected = mamba2.mamba2_selective_state_update(state, x, step, rate, b, c, skip, bias, dt_softplus=True)
    assert_near(reference.state_space(*own.operands(rows)), expected.flatten(1).double())
    assert_near(own.memory[1], state[0].transpose(1, 2).double())
