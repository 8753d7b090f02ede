"""Paged attention of decode steps and prompts against a float64 softmax, in every instruction set available."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention_case import AttentionCase, decode_call
from helpers.code_pages import pages_of_codes
from helpers.cpu_kernels import PACKED_FORMS, PAIR_FORMS, kernels, rounds_queries
from kernels_helpers.checks import TYPES, same_on_threads

from windlass.kernels import AttentionCall, KVPages, cpu
from windlass.kernels.cpu import load
from windlass.kernels.cpu.library import Library

PAGE_TYPES = (*TYPES, torch.int8)
HALVES = (torch.bfloat16, torch.float16)
WIDE_OR_CODES = pytest.mark.parametrize("page_type", [torch.float32, torch.int8])
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SINKS = torch.tensor([-100.0, -1.0, 0.0, 2.0, 30.0, -torch.inf])


@pytest.fixture(params=PACKED_FORMS)
def form(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


def decode_case(lengths: list[int], **options: Any) -> AttentionCase:
    """One new token after these numbers of keys, itself included."""
    return AttentionCase([(length - 1, 1) for length in lengths], **options)


def check(
    case: AttentionCase, library: Library, sinks: torch.Tensor | None = None, soft_cap: float | None = None
) -> None:
    """Compare with float64: sequences of one token by the decode kernel, others by that for prompts."""
    decodes = all(new == 1 for _, new in case.shapes)
    want = case.expected(sinks, soft_cap)
    got = case.decode(library, sinks, soft_cap) if decodes else case.prefill(library, sinks, soft_cap)
    assert got.dtype == case.q.dtype
    relative, absolute = ROUNDING[got.dtype], 3e-6 if decodes else 5e-6
    if case.pages[0].dtype == torch.int8 and multiplies_codes(library, want.shape[-1], decodes):
        # Queries and weights are rounded to 16 bits; values here reach 2.1, and codes have lost 8e-3 of that.
        relative, absolute = relative + 1e-4, 1e-4
    assert ((got.double() - want).abs() <= absolute + relative * want.abs()).all(), (got - want).abs().max()


def multiplies_codes(library: Library, value_dim: int, decodes: bool = False) -> bool:
    """Whether int8 pages are multiplied directly instead of being converted to float32 first."""
    if library.isa == "neon_dot":
        return decodes and value_dim % 4 == 0
    return rounds_queries(library) and value_dim % (16 if library.isa.startswith("avx512") else 8) == 0


# -- shapes, types and visibility ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_type", PAGE_TYPES)
def test_types_and_lengths_around_every_boundary(form: Library, page_type: torch.dtype) -> None:
    for q_type in TYPES:
        lengths = [0, 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300]
        check(decode_case(lengths, q_type=q_type, page_type=page_type), form)
        check(AttentionCase([(10, 31)], q_type=q_type, page_type=page_type, dim=32), form)
    shapes = [(0, 1), (0, 5), (3, 13), (0, 33), (127, 2), (100, 40), (256, 7)]
    check(AttentionCase(shapes, page_type=page_type), form)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("dim", [1, 5, 16, 24, 40, 64, 80, 96, 100, 128, 192, 256, 512])
def test_head_dims(form: Library, dim: int) -> None:
    check(decode_case([3, 70], dim=dim, page_type=torch.bfloat16), form)
    check(decode_case([3, 70], dim=dim, value_dim=dim // 2 + 1), form)
    for page_type in (torch.float32, torch.int8):
        check(AttentionCase([(3, 40)], dim=dim, page_type=page_type), form)
        for value_dim in (dim // 2 + 1, 16, 48):
            check(AttentionCase([(0, 21)], dim=dim, value_dim=value_dim, page_type=page_type), form)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(1, 1), (3, 3), (7, 1), (6, 2), (8, 2), (14, 2), (16, 2), (32, 4), (9, 3), (40, 1)],
)
def test_groups_of_heads(form: Library, heads: int, kv_heads: int) -> None:
    for page_type in PAGE_TYPES:
        check(decode_case([1, 33, 270], heads=heads, kv_heads=kv_heads, dim=32, page_type=page_type), form)
    for page_type in (torch.float32, torch.int8):
        shapes = [(0, 37), (250, 9)]
        check(AttentionCase(shapes, heads=heads, kv_heads=kv_heads, dim=16, page_type=page_type), form)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("page_type", PAGE_TYPES)
@pytest.mark.parametrize("dim", [256, 512])
def test_groups_of_wide_heads(form: Library, dim: int, page_type: torch.dtype) -> None:
    for kv_heads in (4, 2, 1):
        sizes: dict[str, Any] = {"heads": 16, "kv_heads": kv_heads, "dim": dim, "page_type": page_type}
        check(decode_case([5, 130, 270], **sizes), form)
        check(decode_case([5, 130, 270], q_type=torch.bfloat16, window=40, **sizes), form)
        check(AttentionCase([(3, 20), (60, 9)], **sizes), form)
    check(AttentionCase([(3, 40)], heads=16, kv_heads=2, dim=dim, page_type=page_type, window=17), form)


def test_largest_sums_of_the_widest_codes(form: Library) -> None:
    """Heads of 512 numbers, all as large as codes and rounded queries can be."""
    case = AttentionCase([(60, 20)], heads=2, kv_heads=1, dim=512, page_type=torch.int8)
    case.q, scales = 0.05 * case.q[:1, :1].sign().expand(20, 2, 512).contiguous(), case.all_pages.key_scale
    assert scales is not None
    codes = (case.q[0, 0].sign() * 127).char().expand(case.wide[0].shape).clone()
    codes[:, ::2] *= -1
    case.pages[0] = pages_of_codes(codes, scales.transpose(1, 2), codes, scales.transpose(1, 2)).key
    case.wide[0] = codes.float() * scales.transpose(1, 2)[..., None]
    check(case, form)
    call = decode_call(case.table, case.lengths, case.temperature[-1:], case.scale)
    found = cpu.paged_attention_decode(form, case.q[-1:], case.all_pages, call)
    torch.testing.assert_close(found.double(), case.expected()[-1:], rtol=2e-4, atol=2e-4)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("chunk", [1, 6, 16, 40, 128, 256, 1000])
def test_chunks_limit_visible_keys(form: Library, chunk: int) -> None:
    check(decode_case([1, 6, 7, 16, 17, 255, 256, 257, 512, 700], chunk=chunk), form)
    for page_type in (torch.float32, torch.bfloat16, torch.int8):
        shapes = [(0, 1), (0, 70), (37, 65), (80, 3), (127, 2), (128, 40), (200, 1)]
        check(AttentionCase(shapes, chunk=chunk, page_type=page_type), form)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("page_type", PAGE_TYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 17, 130])
def test_bidirectional_attention(form: Library, window: int | None, page_type: torch.dtype) -> None:
    shapes = [(0, 1), (0, 5), (3, 13), (0, 33), (0, 300), (100, 40)]
    case = AttentionCase(shapes, window=window, page_type=page_type, dim=16, causal=False)
    check(case, form)
    want = case.expected()
    case.causal = True
    assert ((case.prefill(form).double() - want).abs().max() > 1e-2) == (window != 1)  # later keys make a difference


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("window", [1, 5, 16, 17, 64, 130, 250, 400])
def test_windows_never_read_hidden_keys(form: Library, window: int) -> None:
    check(decode_case([0, 1, 4, 16, 17, 260, 300, 530], window=window, dim=32, block_size=8), form)
    for page_type, block_size in ((torch.float32, 8), (torch.int8, 16)):
        shapes = [(0, 30), (150, 20), (301, 70), (2040, 21)]
        check(AttentionCase(shapes, window=window, dim=16, block_size=block_size, page_type=page_type), form)


def test_block_sizes_and_int32_lengths(form: Library) -> None:
    for block_size in (1, 8, 48):
        case = decode_case([1, 50, 97], block_size=block_size, dim=32)
        case.lengths = case.lengths.int()
        check(case, form)
    for page_type, block_size in ((torch.float32, 1), (torch.float32, 48), (torch.int8, 32), (torch.int8, 48)):
        check(AttentionCase([(60, 50)], block_size=block_size, dim=16, page_type=page_type), form)


@pytest.mark.parametrize(("page_type", "spread"), [(torch.float32, 4.0), (torch.int8, 1.0)])
@pytest.mark.parametrize(
    "shapes", [[(-1, 1), (0, 1), (8, 1), (299, 1)], [(0, 9), (140, 30)]], ids=["decode", "prompts"]
)
def test_sinks_and_soft_cap(
    form: Library, shapes: list[tuple[int, int]], page_type: torch.dtype, spread: float
) -> None:
    case = AttentionCase(shapes, heads=6, kv_heads=2, dim=32, page_type=page_type, spread=spread)
    for options in ({"sinks": SINKS}, {"soft_cap": 2.0}, {"soft_cap": 50.0}, {"sinks": SINKS, "soft_cap": 15.0}):
        check(case, form, **options)  # type: ignore[arg-type]


# -- numbers -------------------------------------------------------------------------------------------------------


def test_scores_beyond_the_range_of_exp(form: Library) -> None:
    """Scores in the thousands: one key has all the weight, at any position, and nothing overflows."""
    for case in (decode_case([300, 40], dim=32), AttentionCase([(0, 300)], dim=16, heads=2)):
        case.q.fill_(0.0)
        case.q[..., 0] = 1e4
        for b, length in enumerate(case.lengths.tolist()):
            at = torch.arange(length)
            case.pages[0][(*case.slots(b, at), slice(None), 0)] = torch.where(at == 7, 1.0, -1.0 + at / length)[:, None]
        if len(case.shapes) == 1:
            got, sequences = case.prefill(form)[7:], [0] * 293
        else:
            got, sequences = case.decode(form), [0, 1]
        heads = case.q.shape[1] // case.pages[1].shape[2]
        winners = [case.pages[1][int(case.table[b, 0]), 7].repeat_interleave(heads, 0) for b in sequences]
        torch.testing.assert_close(got, torch.stack(winners), rtol=0, atol=0)


def test_increasing_scores_are_rescaled_without_loss(form: Library) -> None:
    case = decode_case([700], heads=2, kv_heads=1, dim=16)
    at = torch.arange(700)
    case.pages[0][case.slots(0, at)] *= (0.02 * at / 16)[:, None, None]
    case.wide[0] = case.pages[0].float()
    torch.testing.assert_close(case.decode(form).double(), case.expected(), rtol=2e-4, atol=2e-5)


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(form: Library) -> None:
    case = decode_case([5, 800, 0, 256, 513], heads=6, kv_heads=2, dim=48, page_type=torch.bfloat16)
    whole = case.decode(form)
    for b in range(5):
        one = slice(b, b + 1)
        call = decode_call(case.table[one], case.lengths[one], case.temperature[one], case.scale)
        assert torch.equal(cpu.paged_attention_decode(form, case.q[one], case.all_pages, call)[0], whole[b])


@WIDE_OR_CODES
@pytest.mark.parametrize(
    ("dim", "window", "old", "new"),
    [(20, None, 0, 400), (32, 90, 0, 400), (16, None, 1900, 300), (16, 2100, 4000, 300)],
)
def test_prefill_chunks_do_not_change_the_bits(
    form: Library, page_type: torch.dtype, dim: int, window: int | None, old: int, new: int
) -> None:
    case = AttentionCase([(old, new)], dim=dim, page_type=page_type, window=window)
    whole = case.prefill(form)
    for cuts in ([0, 1, 130, 137, 150, new - 3, new], [0, 64, new]):
        assert torch.equal(in_chunks(case, form, cuts), whole)


def in_chunks(case: AttentionCase, form: Library, cuts: list[int], **options: Any) -> torch.Tensor:
    """Compute the new tokens of a single sequence in chunks between these of its tokens."""
    ((old, _),), parts = case.shapes, []
    for begin, end in itertools.pairwise(cuts):
        start, lengths = torch.tensor([0, end - begin]), torch.tensor([old + end])
        call = AttentionCall(case.table, start, lengths, case.temperature[begin:end], case.scale, window=case.window)
        parts.append(cpu.paged_attention_prefill(form, case.q[begin:end], case.all_pages, call, **options))
    return torch.cat(parts)


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("page_type", TYPES)
@pytest.mark.parametrize("lengths", [[900, 30, 600], [40], [500], [24, 7]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(10, 5), (18, 1), (21, 3)])
def test_threads_do_not_change_the_bits_of_decoding(
    form: Library, heads: int, kv_heads: int, lengths: list[int], page_type: torch.dtype
) -> None:
    """For few tokens, threads also share the queries of one key head."""
    case = decode_case(lengths, heads=heads, kv_heads=kv_heads, dim=64, page_type=page_type)
    same_on_threads(lambda: case.decode(form), 1, 2, 3, 7)


def test_threads_do_not_change_the_bits_of_prompts(form: Library) -> None:
    """Few rows over many int8 keys are divided among threads."""
    case = AttentionCase([(50, 300), (0, 90)])
    same_on_threads(lambda: case.prefill(form), 1, 3)
    for window in (None, 2500):
        sizes: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dim": 16, "page_type": torch.int8, "window": window}
        case = AttentionCase([(4200, 3), (2040, 15)], **sizes)
        same_on_threads(lambda case=case: case.prefill(form), 1, 3)  # type: ignore[misc]
        check(case, form)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        check(case, form)
        torch.set_num_threads(before)


@pytest.mark.parametrize(("shapes", "row"), [([(19, 1), (299, 1)], 1), ([(20, 60)], 31)], ids=["decode", "prompts"])
def test_a_nan_query_affects_only_its_own_head(form: Library, shapes: list[tuple[int, int]], row: int) -> None:
    case = AttentionCase(shapes, dim=32)
    attend = case.decode if row == 1 else case.prefill
    want = attend(form)
    case.q[row, 2, 3] = torch.nan
    got = attend(form)
    assert got[row, 2].isnan().all()
    want[row, 2] = 0.0
    assert torch.equal(got.nan_to_num(0.0), want)


def test_a_nan_key_affects_later_rows_only(form: Library) -> None:
    case = AttentionCase([(0, 120)], dim=32, heads=2)
    case.pages[0][int(case.table[0, 5]), 0, 1] = torch.nan  # key 80 of the second head
    got = case.prefill(form)
    assert got[80:, 1].isnan().all()
    assert torch.isfinite(got[:, 0]).all()
    assert torch.isfinite(got[:60]).all()


@pytest.mark.parametrize("which", ["key_scale", "value_scale"])
def test_a_nan_scale_affects_exactly_the_rows_that_see_it(form: Library, which: str) -> None:
    case = AttentionCase([(0, 300)], dim=32, heads=2, page_type=torch.int8)
    case.scales[which][int(case.table[0, 5]), 1, 0] = torch.nan  # key 80 of the second head
    got = case.prefill(form)
    assert torch.isfinite(got[:, 0]).all()
    assert not torch.isfinite(got[80:, 1]).any()
    if multiplies_codes(form, 32):
        assert torch.isfinite(got[:80]).all()


# -- operands ------------------------------------------------------------------------------------------------------


def test_strided_queries_and_tables(form: Library) -> None:
    for case in (decode_case([33, 90], dim=32), AttentionCase([(9, 40)], dim=32)):
        fused = torch.randn(len(case.q), 6, 40)
        fused[:, 1:5, 4:36] = case.q
        case.q = fused[:, 1:5, 4:36]
        if len(case.q) == 2:
            table = torch.full((2, case.table.shape[1] * 2), -7, dtype=torch.int32)
            table[:, ::2] = case.table
            case.table = table[:, ::2]
        check(case, form)


@pytest.mark.parametrize("page_type", PAGE_TYPES)
def test_nothing_past_the_operands_is_read(form: Library, page_type: torch.dtype) -> None:
    for dim, shape in itertools.product((5, 36, 64), ((47, 1), (9, 39))):
        case = AttentionCase([shape], heads=3, kv_heads=1, dim=dim, page_type=page_type)
        case.move_to_the_end_of_memory()
        check(case, form)


def test_sequences_of_fewer_tokens_are_skipped(form: Library) -> None:
    case = AttentionCase([(5, 1), (0, 20), (8, 1), (40, 3)], dim=16)
    out = torch.full((25, 4, 16), 7.0)
    case.table[0].fill_(-1)  # none of their data is read
    assert case.prefill(form, out=out, fewest=2) is out
    assert (out[[0, 21]] == 7.0).all()
    case.table[0] = case.table[2]
    torch.testing.assert_close(out[1:21].double(), case.expected()[1:21], rtol=0, atol=5e-6)
    torch.testing.assert_close(out[22:].double(), case.expected()[22:], rtol=0, atol=5e-6)


def test_an_empty_batch(form: Library) -> None:
    case, empty = decode_case([4], dim=16), torch.zeros(0, dtype=torch.int64)
    call = decode_call(case.table[:0], empty, case.temperature[:0], 1.0)
    assert cpu.paged_attention_decode(form, case.q[:0], case.all_pages, call).shape == (0, 4, 16)


@pytest.mark.parametrize("new", [1, 30])
def test_missing_blocks_and_impossible_lengths_are_refused(form: Library, new: int) -> None:
    case = AttentionCase([(40 - new, new)], dim=16)
    attend = case.decode if new == 1 else case.prefill
    table = case.table.clone()
    for column, value in ((0, -1), (2, -1), (1, case.pages[0].shape[0]), (1, 99)):
        case.table = table.clone()
        case.table[0, column] = value
        with pytest.raises(IndexError, match="block"):
            attend(form)
    case.table = table
    for length in (new - 1, 16 * table.shape[1] + 1)[new == 1 :]:
        case.lengths = torch.tensor([length])
        with pytest.raises(IndexError, match="block"):
            attend(form)


def test_unsuitable_operands_of_decoding_are_refused() -> None:
    library, case = kernels(), decode_case([4], dim=16)
    (key, value), pages, call = case.pages, case.all_pages, case.call()

    def refusal(q: torch.Tensor = case.q, pages: KVPages = pages, **changes: Any) -> str:
        return cpu.attention_refusal(q, pages, replace(call, **changes)) or ""

    assert cpu.attention_refusal(case.q, pages, call) is None
    assert "float64" in refusal(case.q.double())
    assert "int8" in refusal(pages=KVPages(key.to(torch.int8), value.to(torch.int8)))
    assert "contiguous" in refusal(pages=KVPages(key[:, ::2], value[:, ::2]))
    assert "fit" in refusal(case.q[:, :3])
    assert refusal(causal=False) == ""
    assert refusal(chunk=8) == ""
    for changes, message in (
        ({"block_tables": case.table.long()}, "block_table"),
        ({"window": 0}, "window"),
        ({"window": 4, "chunk": 4}, "chunk"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.paged_attention_decode(library, case.q, pages, replace(call, **changes))


def test_unsuitable_operands_of_prompts_are_refused() -> None:
    case = AttentionCase([(4, 6)], dim=16)
    for changes, message in (
        ({"query_start": torch.tensor([0, 7])}, "query_start"),
        ({"query_start": torch.tensor([3, 0])}, "query_start"),
        ({"window": 0}, "window"),
        ({"block_tables": case.table.long()}, "block_tables"),
        ({"seq_lens": case.lengths.int()}, "seq_lens"),
        ({"score_scale": case.temperature[:3]}, "score_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.paged_attention_prefill(load(), case.q, case.all_pages, replace(case.call(), **changes))
    with pytest.raises(ValueError, match="out"):
        case.prefill(load(), out=torch.empty(6, 4, 15))


# -- prompts rounded to bfloat16, where the processor multiplies it -------------------------------------------------


@pytest.fixture(params=PAIR_FORMS)
def rounding(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


def check_rounded(case: AttentionCase, form: Library, **options: Any) -> None:
    """Only the weights (2^-9 of each, for a maximum of 1) and the scaled queries are rounded."""
    got = case.prefill(form, bf16_products=True, **options).double()
    case.wide = [part.bfloat16().float() for part in case.wide]
    want = case.expected(**options)
    largest = torch.stack([part[part.isfinite()].abs().max() for part in case.wide]).max()
    error = (got - want).abs()
    assert error.max() <= 2**-7 * largest and error.mean() <= 2**-10 * largest, (error.max(), error.mean())


@pytest.mark.parametrize("page_type", HALVES)
def test_rounded_prompts(rounding: Library, page_type: torch.dtype) -> None:
    for dim in (5, 24, 32, 36, 64, 80, 128, 512):
        shapes = [(0, 33), (100, 40), (127, 16)]
        check_rounded(AttentionCase(shapes, dim=dim, page_type=page_type, spread=0.5), rounding)
    for q_type in HALVES:
        check_rounded(AttentionCase([(10, 31)], q_type=q_type, page_type=page_type, dim=32), rounding)
    for options in ({"window": 17}, {"window": 130}, {"chunk": 40}, {"causal": False}):
        check_rounded(AttentionCase([(150, 70), (37, 65)], dim=32, page_type=page_type, **options), rounding)  # type: ignore[arg-type]
    for heads, kv_heads in ((16, 4), (8, 1), (16, 1)):
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "page_type": page_type, "spread": 0.5}
        check_rounded(AttentionCase([(3, 40)], dim=512, **sizes), rounding)
    sizes = {"value_dim": 48, "heads": 9, "kv_heads": 3, "block_size": 48}
    check_rounded(AttentionCase([(3, 40)], dim=64, page_type=page_type, **sizes), rounding)


def test_rounded_sinks_and_soft_cap(rounding: Library) -> None:
    for options in ({"sinks": SINKS}, {"soft_cap": 2.0}, {"sinks": SINKS, "soft_cap": 15.0}):
        case = AttentionCase([(0, 19), (140, 30)], heads=6, dim=32, page_type=torch.float16)
        check_rounded(case, rounding, **options)


def test_other_prompts_are_not_rounded(rounding: Library) -> None:
    """Few queries, wider pages, codes, and calls without the option have unchanged bits."""
    for page_type, new in ((torch.float16, 15), (torch.float32, 40), (torch.int8, 40)):
        case = AttentionCase([(90, new)], page_type=page_type)
        assert torch.equal(case.prefill(rounding, bf16_products=True), case.prefill(rounding))
    case = AttentionCase([(90, 16), (30, 15)], page_type=torch.float16)
    same = (case.prefill(rounding, bf16_products=True) == case.prefill(rounding)).all(-1).all(-1)
    assert not same[:16].any() and same[16:].all()


def test_chunks_of_sixteen_and_more_do_not_change_rounded_bits(rounding: Library) -> None:
    case = AttentionCase([(37, 300)], dim=64, page_type=torch.bfloat16)
    parts = in_chunks(case, rounding, [0, 16, 146, 163, 284, 300], bf16_products=True)
    assert torch.equal(parts, case.prefill(rounding, bf16_products=True))


def test_a_nan_query_affects_only_its_own_rounded_row(rounding: Library) -> None:
    case = AttentionCase([(20, 60)], dim=32, page_type=torch.float16)
    want = case.prefill(rounding, bf16_products=True)
    case.q[31, 2, 3] = torch.nan
    got = case.prefill(rounding, bf16_products=True)
    assert got[31, 2].isnan().all()
    want[31, 2] = 0.0
    assert torch.equal(got.nan_to_num(0.0), want)


@pytest.mark.parametrize("page_type", HALVES)
def test_nothing_past_the_operands_of_rounded_prompts_is_read(rounding: Library, page_type: torch.dtype) -> None:
    for dim in (5, 36, 64):
        case = AttentionCase([(9, 39)], heads=3, kv_heads=1, dim=dim, page_type=page_type)
        case.move_to_the_end_of_memory()
        check_rounded(case, rounding)
