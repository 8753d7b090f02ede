"""paged_attention_decode against a float64 loop over sequences and heads, in every instruction set available."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import at_the_end_of_memory, kernels
from kernels_helpers.attention_calls import decode_call

from windlass.kernels import AttentionCall, KVPages, cpu
from windlass.kernels.cpu import load
from windlass.kernels.cpu.library import Library

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# What rounding the result to q's dtype may add.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Case:
    """Sequences over shuffled blocks. What no query may see is NaN, and table entries before the window are -1."""

    def __init__(
        self,
        lengths: list[int],
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 64,
        value_dim: int | None = None,
        block_size: int = 16,
        window: int | None = None,
        q_type: torch.dtype = torch.float32,
        page_type: torch.dtype = torch.float32,
        index_type: torch.dtype = torch.int64,
        spread: float = 1.0,
        chunk: int | None = None,
    ) -> None:
        value_dim = value_dim or dim
        self.window, self.chunk, self.lengths = window, chunk, lengths
        self.q = (torch.randn(len(lengths), heads, dim) * spread).to(q_type)
        counts = [-(-n // block_size) for n in lengths]
        free = (torch.randperm(sum(counts) + 3) + 0).tolist()
        blocks = len(free)
        self.key = torch.full((blocks, block_size, kv_heads, dim), torch.nan, dtype=page_type)
        self.value = torch.full((blocks, block_size, kv_heads, value_dim), torch.nan, dtype=page_type)
        self.table = torch.full((len(lengths), max([*counts, 1]) + 2), -1, dtype=torch.int32)
        for b, length in enumerate(lengths):
            first = self.first(length)
            for i in range(first // block_size, counts[b]):
                self.table[b, i] = free.pop()
            where = self.places(b, torch.arange(first, length))
            self.key[where] = torch.randn(length - first, kv_heads, dim).to(page_type)
            self.value[where] = torch.randn(length - first, kv_heads, value_dim).to(page_type)
        self.seq_lens = torch.tensor(lengths, dtype=index_type)
        self.score_scale = torch.rand(len(lengths)) + 0.5
        self.scale = dim**-0.5

    def places(self, b: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of these keys of sequence b, and where they are in them."""
        block_size = self.key.shape[1]
        return self.table[b].long()[at // block_size], at % block_size

    def first(self, length: int) -> int:
        """The first key that the last query of a sequence sees."""
        if self.chunk is not None:
            return (length - 1) // self.chunk * self.chunk
        return 0 if self.window is None else max(0, length - self.window)

    def expected(self, sinks: torch.Tensor | None = None, soft_cap: float | None = None) -> torch.Tensor:
        heads, kv_heads = self.q.shape[1], self.key.shape[2]
        out = torch.zeros(*self.q.shape[:2], self.value.shape[-1], dtype=torch.float64)
        for b, length in enumerate(self.lengths):
            first = self.first(length)
            if first == length:
                continue
            where = self.places(b, torch.arange(first, length))
            seen = self.key[where].double(), self.value[where].double()
            for h in range(heads):
                kv = h // (heads // kv_heads)
                keys, values = (part[:, kv] for part in seen)
                scores = keys @ self.q[b, h].double() * (self.scale * self.score_scale[b].double())
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[h : h + 1].double()))
                out[b, h] = scores.softmax(0)[: length - first] @ values
        return out

    def got(self, library: Library, sinks: torch.Tensor | None = None, soft_cap: float | None = None) -> torch.Tensor:
        call = self.call(sink_logits=sinks, soft_cap=soft_cap)
        return cpu.paged_attention_decode(library, self.q, self.pages, call)

    @property
    def pages(self) -> KVPages:
        return KVPages(self.key, self.value)

    def call(self, **options: Any) -> AttentionCall:
        return decode_call(
            self.table, self.seq_lens, self.score_scale, self.scale, window=self.window, chunk=self.chunk, **options
        )

    def check(self, library: Library, sinks: torch.Tensor | None = None, soft_cap: float | None = None) -> None:
        want, got = self.expected(sinks, soft_cap), self.got(library, sinks, soft_cap)
        assert got.dtype == self.q.dtype
        assert ((got.double() - want).abs() <= 3e-6 + ROUNDING[got.dtype] * want.abs()).all(), (got - want).abs().max()


@pytest.mark.parametrize("page_type", TYPES)
@pytest.mark.parametrize("q_type", TYPES)
def test_types_and_lengths_about_every_boundary(form: Library, q_type: torch.dtype, page_type: torch.dtype) -> None:
    lengths = [0, 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300]
    Case(lengths, q_type=q_type, page_type=page_type).check(form)


@pytest.mark.parametrize("chunk", [1, 6, 16, 256, 1000])
def test_queries_see_the_keys_of_their_chunk_only(form: Library, chunk: int) -> None:
    Case([1, 6, 7, 16, 17, 255, 256, 257, 512, 700], chunk=chunk).check(form)


@pytest.mark.parametrize("dim", [16, 24, 40, 64, 80, 96, 100, 128, 192, 256, 512, 5])
def test_head_dims(form: Library, dim: int) -> None:
    Case([3, 70], dim=dim, page_type=torch.bfloat16).check(form)
    Case([3, 70], dim=dim, value_dim=dim // 2 + 1).check(form)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (6, 2), (14, 2), (32, 4), (9, 3), (40, 1)])
def test_groups(form: Library, heads: int, kv_heads: int) -> None:
    for page_type in TYPES:
        Case([1, 33, 270], heads=heads, kv_heads=kv_heads, dim=32, page_type=page_type).check(form)


@pytest.mark.parametrize("dim", [256, 512])
def test_groups_of_wide_heads(form: Library, dim: int) -> None:
    for heads, kv_heads, page_type in ((16, 4, torch.float16), (16, 2, torch.bfloat16), (16, 1, torch.float32)):
        Case([5, 130, 270], heads=heads, kv_heads=kv_heads, dim=dim, page_type=page_type).check(form)
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_type": page_type, "window": 40}
        Case([5, 130, 270], q_type=torch.bfloat16, **sizes).check(form)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [1, 5, 16, 17, 64, 250, 400])
def test_windows_never_touch_what_they_hide(form: Library, window: int) -> None:
    Case([0, 1, 4, 16, 17, 260, 300, 530], window=window, dim=32, block_size=8).check(form)


@pytest.mark.parametrize("block_size", [1, 8, 48])
def test_block_sizes_and_int32_lengths(form: Library, block_size: int) -> None:
    Case([1, 50, 97], block_size=block_size, dim=32, index_type=torch.int32).check(form)


def test_sinks_and_soft_cap(form: Library) -> None:
    case = Case([0, 1, 9, 300], heads=6, kv_heads=2, dim=32, spread=4.0)
    sinks = torch.tensor([-100.0, -1.0, 0.0, 2.0, 30.0, -torch.inf])
    case.check(form, sinks=sinks)
    case.check(form, soft_cap=2.0)
    case.check(form, soft_cap=50.0)
    case.check(form, sinks=sinks, soft_cap=15.0)


def test_scores_far_beyond_the_range_of_exp(form: Library) -> None:
    """Scores in the thousands: one key takes all the weight, at any position; nothing overflows."""
    case = Case([300, 40], dim=32, spread=1.0)
    case.q.fill_(0.0)
    case.q[..., 0] = 1e4
    values = case.value.clone()
    for b, length in enumerate(case.lengths):
        at = torch.arange(length)
        case.key[(*case.places(b, at), slice(None), 0)] = torch.where(at == 7, 1.0, -1.0 + at / length)[:, None]
        got = case.got(form)[b]
        winner = values[int(case.table[b, 0]), 7]
        torch.testing.assert_close(got, winner.repeat_interleave(2, 0), rtol=0, atol=0)


def test_increasing_scores_rescale_without_losing_early_keys(form: Library) -> None:
    case = Case([700], heads=2, kv_heads=1, dim=16)
    at = torch.arange(700)
    case.key[case.places(0, at)] *= (0.02 * at / 16)[:, None, None]
    want, got = case.expected(), case.got(form)
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-5)


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(form: Library) -> None:
    case = Case([5, 800, 0, 256, 513], heads=6, kv_heads=2, dim=48, page_type=torch.bfloat16)
    whole = case.got(form)
    for b in range(5):
        one = slice(b, b + 1)
        call = decode_call(case.table[one], case.seq_lens[one], case.score_scale[one], case.scale)
        alone = cpu.paged_attention_decode(form, case.q[one], case.pages, call)
        assert torch.equal(alone[0], whole[b])


@pytest.mark.parametrize("page_type", TYPES)
@pytest.mark.parametrize("lengths", [[900, 30, 600], [40], [500], [24, 7]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(10, 5), (18, 1), (21, 3)])
def test_threads_do_not_change_the_bits(
    form: Library, heads: int, kv_heads: int, lengths: list[int], page_type: torch.dtype
) -> None:
    case = Case(lengths, heads=heads, kv_heads=kv_heads, dim=64, page_type=page_type)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3, 7):  # of a few tokens, threads share the queries of a key's head, too
        torch.set_num_threads(threads)
        results.append(case.got(form))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_poisoned_query_harms_only_its_own_head(form: Library) -> None:
    case = Case([20, 300], heads=4, kv_heads=2, dim=32)
    want = case.got(form)
    case.q[1, 2, 3] = torch.nan
    got = case.got(form)
    assert got[1, 2].isnan().all()
    want[1, 2] = 0.0
    assert torch.equal(got.nan_to_num(0.0), want)


def test_strided_queries_and_tables(form: Library) -> None:
    case = Case([33, 90], dim=32)
    fused = torch.randn(2, 6, 40)
    fused[:, 1:5, 4:36] = case.q
    case.q = fused[:, 1:5, 4:36]
    table = torch.full((2, case.table.shape[1] * 2), -7, dtype=torch.int32)
    table[:, ::2] = case.table
    case.table = table[:, ::2]
    case.check(form)


@pytest.mark.parametrize("page_type", TYPES)
def test_nothing_past_the_pages_is_read(form: Library, page_type: torch.dtype) -> None:
    for dim in (5, 36, 64):
        case = Case([48], heads=3, kv_heads=1, dim=dim, page_type=page_type)
        used = case.table[0, :3].long()
        case.key, case.value = at_the_end_of_memory(case.key[used]), at_the_end_of_memory(case.value[used])
        case.table = at_the_end_of_memory(torch.arange(3, dtype=torch.int32)[None])
        case.q = at_the_end_of_memory(case.q)
        case.check(form)


def test_missing_blocks_are_refused(form: Library) -> None:
    case = Case([40], dim=16)
    for column, value in ((0, -1), (2, -1), (1, case.key.shape[0])):
        broken = case.table.clone()
        broken[0, column] = value
        case_table, case.table = case.table, broken
        with pytest.raises(IndexError, match="block"):
            case.got(form)
        case.table = case_table
    case.seq_lens = torch.tensor([16 * case.table.shape[1] + 1])
    with pytest.raises(IndexError, match="block"):
        case.got(form)


def test_refusals_say_why() -> None:
    kernels("generic")
    case = Case([4], dim=16)
    pages, call = case.pages, case.call()

    def refusal(q: torch.Tensor = case.q, pages: KVPages = pages, **changes: Any) -> str:
        return cpu.attention_refusal(q, pages, replace(call, **changes)) or ""

    assert cpu.attention_refusal(case.q, pages, call) is None
    assert "float64" in refusal(case.q.double())
    assert "int8" in refusal(pages=KVPages(case.key.to(torch.int8), case.value.to(torch.int8)))
    assert "contiguous" in refusal(pages=KVPages(case.key[:, ::2], case.value[:, ::2]))
    assert "fit" in refusal(case.q[:, :3])
    assert refusal(causal=False) == ""
    assert refusal(chunk=8) == ""
    with pytest.raises(ValueError, match="block_table"):
        cpu.paged_attention_decode(load(), case.q, pages, replace(call, block_tables=case.table.long()))
    with pytest.raises(ValueError, match="window"):
        case.window = 0
        case.got(kernels("generic"))
    with pytest.raises(ValueError, match="chunk"):
        case.window = case.chunk = 4
        case.got(kernels("generic"))


def test_an_empty_batch(form: Library) -> None:
    case = Case([4], dim=16)
    empty = torch.zeros(0, dtype=torch.int64)
    call = decode_call(case.table[:0], empty, case.score_scale[:0], 1.0)
    out = cpu.paged_attention_decode(form, case.q[:0], case.pages, call)
    assert out.shape == (0, 4, 16)
    assert math.prod(out.shape) == 0
