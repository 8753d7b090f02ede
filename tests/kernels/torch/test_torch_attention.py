"""Attention in plain torch, with every field of a call and with key ranges, against float64; and parts of a call."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention_case import AttentionCase
from helpers.ranges import FAR, Part, RangeCase, random_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.kernels import AttentionCall, KeyRanges, KVPages, select_backend
from windlass.kernels.attention_call import KeyRange
from windlass.kernels.backend import BackendOptions
from windlass.kernels.torch import batched_attention, reference, row_independent
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

FORMS = [reference.paged_attention, batched_attention.paged_attention, row_independent.paged_attention]
FEW_TOKENS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=3)
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def small_case(shapes: list[tuple[int, int]], **options: Any) -> AttentionCase:
    return AttentionCase(shapes, **{"dim": 6, "value_dim": 5, "block_size": 4, "poisoned": False, **options})


@pytest.mark.quick_cases(2)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (6, 2), (8, 1)]),
    dims=st.sampled_from([(16, 16), (6, 5), (5, 3)]),
    block_size=st.sampled_from([4, 16]),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, 8, 9, 17]),
    chunk=st.sampled_from([None, None, 1, 4, 6]),
    soft_cap=st.sampled_from([None, 2.0, 3.0]),
    sinks=st.booleans(),
)
@pytest.mark.parametrize("attention", FORMS)
def test_any_call(attention, seed, heads, dims, soft_cap, sinks, **options):  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    sizes = {"heads": heads[0], "kv_heads": heads[1], "dim": dims[0], "value_dim": dims[1]}
    case = AttentionCase(**sizes, **options, poisoned=False)
    logits = torch.randn(heads[0]) * 3 if sinks else None
    found = attention(*case.operands(soft_cap=soft_cap, sink_logits=logits)).double()
    torch.testing.assert_close(found, case.expected(logits, soft_cap), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [{"causal": False}, {"chunk": 6}, {"causal": False, "chunk": 6}, {"sinks": True}],
    ids=str,
)
def test_the_backend_computes_any_call(options: dict[str, Any]) -> None:
    sinks = torch.randn(4) * 3 if options.pop("sinks", False) else None
    case = small_case([(9, 3), (14, 1), (0, 8)], **options)
    found = select_backend("cpu").paged_attention(*case.operands(sink_logits=sinks))
    torch.testing.assert_close(found.double(), case.expected(sinks), rtol=1e-5, atol=5e-6)


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


def test_parts_of_a_call() -> None:
    _q, _, plain = small_case([(9, 3), (14, 1), (0, 8), (3, 1)]).operands()
    ends = torch.tensor([[5, 12], [0, 15], [8, 8], [4, 4]])
    firsts, reaches = torch.tensor([[0, 13], [-1, 3], [4, -1], [12, 16]]), torch.full((4, 2), 9)
    call = replace(plain, ranges=KeyRanges(ends, firsts, reaches, gaps=ends + 7), alibi_slopes=torch.ones(1))
    assert (call.batch_size, call.num_tokens, call.is_decode, call.has_ranges) == (4, 13, False, True)
    assert not plain.has_ranges
    whole = torch.randn(17, 1, 1)
    assert call.queries(whole, slice(0, 2)) is whole and len(plain.queries(whole, slice(0, 2))) == 2
    found = call.decode_part()
    assert found is not None
    rows, singles = found
    assert rows.tolist() == [3, 12] and singles.is_decode and singles.query_start.tolist() == [0, 1, 2]
    assert torch.equal(singles.block_tables, call.block_tables[[1, 3]]) and singles.seq_lens.tolist() == [15, 4]
    assert torch.equal(singles.score_scale, call.score_scale[[3, 12]])
    assert singles.ranges is not None and singles.ranges.gaps is not None
    assert torch.equal(singles.ranges.ends, ends[[1, 3]]) and torch.equal(singles.ranges.rows, firsts[[1, 3]])
    assert torch.equal(singles.ranges.gaps, ends[[1, 3]] + 7) and torch.equal(singles.ranges.reaches, reaches[:2])
    parts = list(call.sequences(fewest=2))
    assert [(rows, length) for rows, length, _ in parts] == [(slice(0, 3), 12), (slice(4, 12), 8)]
    for b, (rows, length, own) in zip((0, 2), parts, strict=True):
        assert own.batch_size == 1 and own.num_tokens == rows.stop - rows.start and own.seq_lens.tolist() == [length]
        assert torch.equal(own.block_tables[0], call.block_tables[b])
        assert own.query_start.tolist() == [0, own.num_tokens]
        alone = own.as_single_tokens()
        assert alone.is_decode and alone.seq_lens.tolist() == list(range(length - own.num_tokens + 1, length + 1))
        assert torch.equal(alone.block_tables, call.block_tables[b].expand(own.num_tokens, -1))
        assert alone.ranges is not None and alone.ranges.gaps is not None
        wanted = [[r if r < 0 else r + i for r in firsts[b].tolist()] for i in range(own.num_tokens)]
        assert (
            alone.ranges.rows.tolist() == wanted and alone.ranges.ends.tolist() == [ends[b].tolist()] * own.num_tokens
        )
        assert torch.equal(alone.ranges.gaps, alone.ranges.ends + 7) and (alone.ranges.reaches == 9).all()
        some = own.slice_tokens(1, 3)
        assert (some.num_tokens, some.seq_lens.tolist()) == (2, [length - own.num_tokens + 3])
        assert some.ranges is not None and some.ranges.rows.tolist() == wanted[1:2]
    with pytest.raises(ValueError, match="token by token"):
        call.as_single_tokens()
    with pytest.raises(ValueError, match="token by token"):
        replace(next(plain.sequences(fewest=2))[2], causal=False).as_single_tokens()
    assert small_case([(9, 3), (0, 8)]).operands()[2].decode_part() is None


@pytest.mark.parametrize("chosen", [[0], [2], [0, 3], [1, 2, 3], [0, 1, 2, 3]])
def test_a_call_for_some_sequences_computes_their_rows(chosen: list[int]) -> None:
    case = small_case([(3, 2), (9, 1), (0, 5), (6, 3)], window=4)
    q, pages, call = case.operands()
    tokens, own = call.select_sequences(torch.tensor(chosen))
    starts = [0, 2, 3, 8, 11]
    assert tokens.tolist() == [t for b in chosen for t in range(starts[b], starts[b + 1])]
    got = reference.paged_attention(q[tokens], pages, own)
    assert (got - case.expected()[tokens]).abs().max() < 1e-5


# -- key ranges ----------------------------------------------------------------------------------------------------


def case_of(shapes: list[tuple[int, int]], count: int, seed: int = 1, **options: object) -> RangeCase:
    rng = random.Random(seed)
    return RangeCase(shapes, [random_parts(old, new, count, rng) for old, new in shapes], **options)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shapes=FEW_TOKENS,
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
    # Distances reach 3000, where float32 stores a bias of 60 to 4e-6.
    case.slopes = torch.tensor([0.02, 0.005, 0.001, 0.0]) if slopes else None
    operands, expected = case.operands(), case.expected()
    options = BackendOptions(torch.device("cpu"))
    for backend in (TorchBackend(options), RowIndependentBackend(options)):
        found = backend.paged_attention(*operands)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("page_type", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 4), (16, 2), (16, 1)])
def test_heads_of_512_with_partial_rotation(heads: int, kv_heads: int, page_type: torch.dtype) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": 512, "value_dim": 512, "pairs": 256, "still": 192}
    options = BackendOptions(torch.device("cpu"))
    for count in (1, 4):
        case = case_of([(40, 9), (20, 1)], count, page_type=page_type, **sizes)
        for backend in (TorchBackend(options), RowIndependentBackend(options)):
            found = backend.paged_attention(*case.operands())
            torch.testing.assert_close(found.double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_rows_have_the_same_bits_alone() -> None:
    case = case_of([(50, 9), (30, 1), (0, 12)], 6)
    q, pages, call = case.operands()
    whole = row_independent.paged_attention(q, pages, call)
    for rows, _, own in call.sequences():
        assert torch.equal(row_independent.paged_attention(q, pages, own), whole[rows])
        for i in range(own.num_tokens):
            assert torch.equal(row_independent.paged_attention(q, pages, own.slice_tokens(i, i + 1))[0], whole[rows][i])


def test_blocks_of_queries_change_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = case_of([(50, 40)], 6).operands()
    whole = reference.paged_attention(*operands)
    monkeypatch.setattr(reference, "MAX_SCORE_BYTES", 7 * 4 * 4 * 90)  # seven queries
    torch.testing.assert_close(reference.paged_attention(*operands), whole, rtol=1e-6, atol=1e-6)


def test_key_ranges_of_a_call() -> None:
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


def test_invalid_ranges_are_refused() -> None:
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
