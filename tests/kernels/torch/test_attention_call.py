"""Every field of an attention call, against float64 loops over queries, heads and keys without pages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.kernels import AttentionCall, KeyRanges, KVPages, select_backend
from windlass.kernels.torch import batched_attention, reference, row_independent

BLOCK, DIM, VALUE_DIM = 4, 6, 5
FORMS = [reference.paged_attention, batched_attention.paged_attention, row_independent.paged_attention]


class Case:
    """Sequences of (cached, new) tokens over shuffled pages, whose rows no query sees are NaN."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        heads: int = 4,
        kv_heads: int = 2,
        sinks: bool = False,
        **options: Any,
    ) -> None:
        self.shapes, self.options = shapes, options
        tokens, lengths = sum(new for _, new in shapes), [old + new for old, new in shapes]
        self.q = torch.randn(tokens, heads, DIM)
        self.keys = [torch.randn(length, kv_heads, DIM) for length in lengths]
        self.values = [torch.randn(length, kv_heads, VALUE_DIM) for length in lengths]
        self.score_scale = torch.rand(tokens) + 0.5
        self.sinks = torch.randn(heads) * 3 if sinks else None

    def sees(self, i: int, j: int) -> bool:
        """Whether a query at index i sees the key at index j."""
        if self.options.get("causal", True) and j > i:
            return False
        window, chunk = self.options.get("window"), self.options.get("chunk")
        if window is not None and abs(i - j) >= window:
            return False
        return chunk is None or i // chunk == j // chunk

    def expected(self) -> torch.Tensor:
        heads, group = self.q.shape[1], self.q.shape[1] // self.keys[0].shape[1]
        cap, row = self.options.get("soft_cap"), 0
        out = torch.zeros(self.q.shape[0], heads, VALUE_DIM, dtype=torch.float64)
        for b, (old, new) in enumerate(self.shapes):
            for i in range(old, old + new):
                seen = [j for j in range(old + new) if self.sees(i, j)]
                for h in range(heads):
                    total = 0.0 if self.sinks is None else math.exp(float(self.sinks[h]))
                    for j in seen:
                        query, key = self.q[row, h].double(), self.keys[b][j, h // group].double()
                        score = float(query @ key) * 0.4 * float(self.score_scale[row])
                        weight = math.exp(score if cap is None else cap * math.tanh(score / cap))
                        total += weight
                        out[row, h] += weight * self.values[b][j, h // group].double()
                    out[row, h] /= total
                row += 1
        return out

    def operands(self) -> tuple[torch.Tensor, KVPages, AttentionCall]:
        kv_heads, lengths = self.keys[0].shape[1], [old + new for old, new in self.shapes]
        blocks = sum(-(-n // BLOCK) for n in lengths)
        free = torch.randperm(blocks).tolist()
        key, value = (torch.full((blocks, BLOCK, kv_heads, d), torch.nan) for d in (DIM, VALUE_DIM))
        table = torch.full((len(lengths), -(-max(lengths) // BLOCK) + 1), -1, dtype=torch.int32)
        for b, (old, new) in enumerate(self.shapes):
            seen = [j for j in range(old + new) if any(self.sees(i, j) for i in range(old, old + new))]
            for block in {j // BLOCK for j in seen}:
                table[b, block] = free.pop()
                for j in range(block * BLOCK, min(old + new, (block + 1) * BLOCK)):
                    key[table[b, block], j % BLOCK] = self.keys[b][j]
                    value[table[b, block], j % BLOCK] = self.values[b][j]
        start = torch.tensor([0, *(new for _, new in self.shapes)]).cumsum(0)
        call = AttentionCall(
            table, start, torch.tensor(lengths), self.score_scale, 0.4, sink_logits=self.sinks, **self.options
        )
        return self.q, KVPages(key, value), call


shapes = st.lists(st.tuples(st.integers(0, 18), st.integers(1, 7)), min_size=1, max_size=3)
options = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window": st.sampled_from([None, 1, 3, 9]),
        "chunk": st.sampled_from([None, 1, 4, 6]),
        "soft_cap": st.sampled_from([None, 2.0]),
        "sinks": st.booleans(),
        "heads": st.sampled_from([2, 6]),
    }
)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), shapes=shapes, options=options)
@pytest.mark.parametrize("attention", FORMS)
def test_every_form(attention, seed, shapes, options):  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    case = Case(shapes, **options)
    torch.testing.assert_close(attention(*case.operands()).double(), case.expected(), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    "options",
    [{"causal": False}, {"chunk": 6}, {"causal": False, "chunk": 6}, {"sinks": True}],
    ids=str,
)
def test_whoever_asks_for_attention_gets_it_whatever_the_fields(options: dict[str, Any]) -> None:
    case = Case([(9, 3), (14, 1), (0, 8)], **options)
    found = select_backend("cpu").paged_attention(*case.operands())
    torch.testing.assert_close(found.double(), case.expected(), rtol=1e-5, atol=5e-6)


def test_parts_of_a_call() -> None:
    _q, _, plain = Case([(9, 3), (14, 1), (0, 8), (3, 1)]).operands()
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
    assert Case([(9, 3), (0, 8)]).operands()[2].decode_part() is None


@pytest.mark.parametrize("chosen", [[0], [2], [0, 3], [1, 2, 3], [0, 1, 2, 3]])
def test_a_call_for_some_sequences_gives_their_rows(chosen: list[int]) -> None:
    case = Case([(3, 2), (9, 1), (0, 5), (6, 3)], window=4)
    q, pages, call = case.operands()
    tokens, own = call.select_sequences(torch.tensor(chosen))
    starts = [0, 2, 3, 8, 11]
    assert tokens.tolist() == [t for b in chosen for t in range(starts[b], starts[b + 1])]
    got = reference.paged_attention(q[tokens], pages, own)
    assert (got - case.expected()[tokens]).abs().max() < 1e-5
