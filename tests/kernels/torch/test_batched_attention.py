"""Batched attention and the reference against a plain softmax over gathered keys, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.kernels import AttentionCall, KVPages
from windlass.kernels.torch import batched_attention, reference


def brute_force(q, keys, values, *, scale, window, soft_cap):  # type: ignore[no-untyped-def]
    """One sequence, float64 loops over heads and queries. q: [Q, Hq, D], keys: [S, Hkv, D]."""
    out = torch.zeros(q.shape[0], q.shape[1], values.shape[-1], dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for i in range(q.shape[0]):
        position = keys.shape[0] - q.shape[0] + i
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(q.shape[1]):
            scores = keys[first : position + 1, h // group].double() @ q[i, h].double() * scale[i].double()
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[i, h] = scores.softmax(0) @ values[first : position + 1, h // group].double()
    return out


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 50)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 1)]),
    dims=st.sampled_from([(16, 16), (5, 3)]),
    window=st.sampled_from([None, 1, 8, 17]),
    soft_cap=st.sampled_from([None, 3.0]),
)
@pytest.mark.parametrize("implementation", [reference.paged_attention, batched_attention.paged_attention])
def test_paged_attention(implementation, seed, shapes, heads, dims, window, soft_cap):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    block_size, num_blocks = 16, 40
    (num_heads, num_kv_heads), (dim, value_dim) = heads, dims

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # Whatever was never written is NaN: reading it anywhere shows in the result.
    pages = KVPages(
        torch.full((num_blocks, block_size, num_kv_heads, dim), float("nan")),
        torch.full((num_blocks, block_size, num_kv_heads, value_dim), float("nan")),
    )
    free = torch.randperm(num_blocks, generator=generator).tolist()
    lengths = [new + old for new, old in shapes]
    tables = torch.full((len(shapes), 1 + max(lengths) // block_size), -1, dtype=torch.int32)
    expected, queries = [], []
    score_scale = 0.5 + torch.rand(sum(new for new, _ in shapes), generator=generator)
    row = 0
    for b, (new, old) in enumerate(shapes):
        keys, values = randn(new + old, num_kv_heads, dim), randn(new + old, num_kv_heads, value_dim)
        first = 0 if window is None else max(0, old - window + 1)
        for block in range(first // block_size, -(-(new + old) // block_size)):
            tables[b, block] = free.pop()
        for i in range(first // block_size * block_size, new + old):
            pages.key[tables[b, i // block_size], i % block_size] = keys[i]
            pages.value[tables[b, i // block_size], i % block_size] = values[i]
        query = randn(new, num_heads, dim)
        queries.append(query)
        scale = 0.3 * score_scale[row : row + new]
        expected.append(brute_force(query, keys, values, scale=scale, window=window, soft_cap=soft_cap))
        row += new
    counts = torch.tensor([new for new, _ in shapes])
    query_start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    call = AttentionCall(tables, query_start, torch.tensor(lengths), score_scale, 0.3, window=window, soft_cap=soft_cap)
    actual = implementation(torch.cat(queries), pages, call)
    assert torch.allclose(actual.double(), torch.cat(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_prompts_longer_than_a_query_block(window, soft_cap):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(3)
    pages = KVPages(torch.randn(50, 16, 2, 16, generator=generator), torch.randn(50, 16, 2, 16, generator=generator))
    tables = torch.randperm(50, generator=generator)[None].int()
    q = torch.randn(600, 4, 16, generator=generator)
    start, lengths = torch.tensor([0, 600]), torch.tensor([731])
    call = AttentionCall(tables, start, lengths, torch.ones(600), 0.25, window=window, soft_cap=soft_cap)
    expected = reference.paged_attention(q, pages, call)
    assert torch.allclose(batched_attention.paged_attention(q, pages, call), expected, atol=2e-6, rtol=1e-5)
