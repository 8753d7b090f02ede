"""Attention over ranges in plain torch, against unrotated keys at the positions where they are meant; invalid calls."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.ranges import FAR, Part, RangeCase, random_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.kernels import AttentionCall
from windlass.kernels.attention_call import KeyRange
from windlass.kernels.backend import BackendOptions
from windlass.kernels.torch import batched_attention, reference, row_independent
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

SHAPES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=3)
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def case_of(shapes: list[tuple[int, int]], count: int, seed: int = 1, **options: object) -> RangeCase:
    rng = random.Random(seed)
    return RangeCase(shapes, [random_parts(old, new, count, rng) for old, new in shapes], **options)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shapes=SHAPES,
    count=st.integers(1, 9),
    page_type=st.sampled_from(TYPES),
    sinks=st.booleans(),
    soft_cap=st.sampled_from([None, 2.0]),
    base=st.sampled_from([0, 10_000_000]),
    slopes=st.booleans(),
)
def test_any_ranges(seed, shapes, count, page_type, sinks, soft_cap, base, slopes):  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    extra = torch.randn(4) * 3 if sinks else None
    case = case_of(shapes, count, seed, page_type=page_type, sinks=extra, soft_cap=soft_cap, base=base)
    # Distances reach 3000, of which float32 has a bias of 60 to 4e-6.
    case.slopes = torch.tensor([0.02, 0.005, 0.001, 0.0]) if slopes else None
    operands, expected = case.operands(), case.expected()
    options = BackendOptions(torch.device("cpu"))
    for backend in (TorchBackend(options), RowIndependentBackend(options)):
        found = backend.paged_attention(*operands)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_type", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 4), (16, 2), (16, 1)])
def test_heads_of_512_of_which_some_pairs_stay(heads: int, kv_heads: int, page_type: torch.dtype) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": 512, "value_dim": 512, "pairs": 256, "still": 192}
    options = BackendOptions(torch.device("cpu"))
    for count in (1, 4):
        case = case_of([(40, 9), (20, 1)], count, page_type=page_type, **sizes)
        for backend in (TorchBackend(options), RowIndependentBackend(options)):
            found = backend.paged_attention(*case.operands())
            torch.testing.assert_close(found.double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_rows_have_the_bits_they_have_alone() -> None:
    case = case_of([(50, 9), (30, 1), (0, 12)], 6)
    q, pages, call = case.operands()
    whole = row_independent.paged_attention(q, pages, call)
    for rows, _, own in call.sequences():
        assert torch.equal(row_independent.paged_attention(q, pages, own), whole[rows])
        for i in range(own.num_tokens):
            assert torch.equal(row_independent.paged_attention(q, pages, own.slice_tokens(i, i + 1))[0], whole[rows][i])


def test_blocks_of_queries_change_nothing_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = case_of([(50, 40)], 6).operands()
    whole = reference.paged_attention(*operands)
    monkeypatch.setattr(reference, "MAX_SCORE_BYTES", 7 * 4 * 4 * 90)  # seven queries
    torch.testing.assert_close(reference.paged_attention(*operands), whole, rtol=1e-6, atol=1e-6)


def test_what_a_call_sees() -> None:
    case = RangeCase([(17, 4)], [[Part(4), Part(9, hole=True), Part(9), Part(15, shift=5, reach=8), Part(30)]])
    _, _, call = case.operands()
    assert call.key_ranges() == [
        KeyRange(0, 4, 0, FAR),
        KeyRange(10, 15, 4, 8),  # the first query, at index 17, sees from 10 on
        KeyRange(15, 21, 0, FAR),
    ]
    case = RangeCase([(17, 4)], [[Part(9, reach=-15), Part(16, reach=-18), Part(21)]])
    _, _, call = case.operands()
    assert call.key_ranges() == [
        KeyRange(0, 6, 0, -15),  # the last query, at index 20, sees up to 5
        KeyRange(16, 21, 0, FAR),
    ]
    with pytest.raises(ValueError, match="no ranges"):
        replace(call, ranges=None).key_ranges()


def test_what_cannot_be_is_refused() -> None:
    q, pages, call = RangeCase([(30, 11)], [[Part(10, hole=True), Part(20, shift=3), Part(41)]]).operands()
    ranges = call.ranges
    assert ranges is not None
    for form in (reference, row_independent):
        with pytest.raises(ValueError, match="last range ends before key 40"):
            form.paged_attention(q, pages, replace(call, ranges=replace(ranges, ends=ranges.ends - 1)))
        for row in (-2, len(q) - 10, len(q) + 5):
            with pytest.raises(IndexError, match="row"):
                form.paged_attention(q, pages, replace(call, ranges=replace(ranges, rows=torch.tensor([[-1, row, 0]]))))
    with pytest.raises(ValueError, match="keys in ranges"):
        batched_attention.paged_attention(q, pages, call)
    with pytest.raises(ValueError, match="rows for"):
        reference.paged_attention(q, pages, replace(call, ranges=None))
    with pytest.raises(ValueError, match="come together"):
        replace(call, alibi_slopes=torch.ones(4))
    with pytest.raises(ValueError, match="come together"):
        replace(call, ranges=replace(ranges, gaps=ranges.ends))
    with pytest.raises(ValueError, match="come together"):
        replace(call, ranges=None, alibi_slopes=torch.ones(4))
    for other in ({"window": 5}, {"chunk": 5}, {"causal": False}):
        with pytest.raises(ValueError, match="causal, without"):
            replace(call, **other)  # type: ignore[arg-type]
    assert isinstance(call, AttentionCall)
