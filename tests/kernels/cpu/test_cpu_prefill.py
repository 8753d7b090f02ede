"""paged_attention_prefill against a float64 softmax per query and head, in every instruction set available."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.code_pages import pages_of_codes
from helpers.cpu_kernels import PACKED_FORMS, at_the_end_of_memory, kernels
from helpers.prefill_case import PrefillCase
from kernels_helpers.attention_calls import decode_call

from windlass.kernels import AttentionCall, cpu
from windlass.kernels.cpu.library import Library

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=PACKED_FORMS)
def form(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


class Case(PrefillCase):
    def check(self, library: Library, sinks: torch.Tensor | None = None, soft_cap: float | None = None) -> None:
        want, got = self.expected(sinks, soft_cap), self.got(library, sinks, soft_cap)
        assert got.dtype == self.q.dtype
        relative, absolute = ROUNDING[got.dtype], 5e-6
        if self.pages[0].dtype == torch.int8 and multiplies_codes(library, want.shape[-1]):
            # Queries and weights are rounded to 16 bits; values here reach 2.1, codes have lost 8e-3 of that.
            relative, absolute = relative + 1e-4, 1e-4
        assert ((got.double() - want).abs() <= absolute + relative * want.abs()).all(), (got - want).abs().max()


def multiplies_codes(library: Library, value_dim: int) -> bool:
    """Whether int8 pages are multiplied as they lie; elsewhere they are converted to float32 first."""
    return library.isa.endswith("vnni") and value_dim % (16 if library.isa.startswith("avx512") else 8) == 0


@pytest.mark.parametrize("page_type", TYPES)
def test_types_and_lengths_about_every_boundary(form: Library, page_type: torch.dtype) -> None:
    Case([(0, 1), (0, 5), (3, 13), (0, 33), (127, 2), (100, 40), (256, 7)], page_type=page_type).check(form)
    for q_type in (torch.bfloat16, torch.float16):
        Case([(10, 31)], q_type=q_type, page_type=page_type, dim=32).check(form)


@pytest.mark.parametrize("dim", [1, 5, 16, 24, 40, 80, 100, 128, 256, 512])
@pytest.mark.parametrize("page_type", [torch.float32, torch.int8])
def test_head_dims(form: Library, dim: int, page_type: torch.dtype) -> None:
    Case([(3, 40)], dim=dim, page_type=page_type).check(form)
    for value_dim in (dim // 2 + 1, 16, 48):
        Case([(0, 21)], dim=dim, value_dim=value_dim, page_type=page_type).check(form)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (8, 2), (9, 3), (16, 2), (40, 1)])
@pytest.mark.parametrize("page_type", [torch.float32, torch.int8])
def test_groups(form: Library, heads: int, kv_heads: int, page_type: torch.dtype) -> None:
    Case([(0, 37), (250, 9)], heads=heads, kv_heads=kv_heads, dim=16, page_type=page_type).check(form)


@pytest.mark.parametrize("page_type", TYPES)
@pytest.mark.parametrize("dim", [256, 512])
def test_groups_of_wide_heads(form: Library, dim: int, page_type: torch.dtype) -> None:
    for heads, kv_heads in ((16, 4), (16, 2), (16, 1)):
        Case([(3, 20), (60, 9)], heads=heads, kv_heads=kv_heads, dim=dim, page_type=page_type).check(form)
    Case([(3, 40)], heads=16, kv_heads=2, dim=dim, page_type=page_type, window=17).check(form)


def test_the_largest_sums_of_the_widest_codes_fit(form: Library) -> None:
    """Of heads of 512 numbers, all of them as large as codes and rounded queries can be."""
    case = Case([(60, 20)], heads=2, kv_heads=1, dim=512, page_type=torch.int8)
    case.q, scales = 0.05 * case.q[:1, :1].sign().expand(20, 2, 512).contiguous(), case.all_pages.key_scale
    assert scales is not None
    codes = (case.q[0, 0].sign() * 127).char().expand(case.wide[0].shape).clone()
    codes[:, ::2] *= -1
    case.pages[0] = pages_of_codes(codes, scales.transpose(1, 2), codes, scales.transpose(1, 2)).key
    case.wide[0] = codes.float() * scales.transpose(1, 2)[..., None]
    case.check(form)
    call = decode_call(case.table, case.lengths, case.temperature[-1:], case.scale)
    found = cpu.paged_attention_decode(form, case.q[-1:], case.all_pages, call)
    torch.testing.assert_close(found.double(), case.expected()[-1:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("page_type", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("chunk", [1, 6, 16, 40, 128, 1000])
def test_queries_see_the_keys_of_their_chunk_only(form: Library, chunk: int, page_type: torch.dtype) -> None:
    shapes = [(0, 1), (0, 70), (37, 65), (80, 3), (127, 2), (128, 40), (200, 1)]
    Case(shapes, chunk=chunk, page_type=page_type).check(form)


@pytest.mark.parametrize("page_type", TYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 17, 130])
def test_queries_that_see_keys_behind_them(form: Library, window: int | None, page_type: torch.dtype) -> None:
    shapes = [(0, 1), (0, 5), (3, 13), (0, 33), (0, 300), (100, 40)]
    case = Case(shapes, window=window, page_type=page_type, dim=16, causal=False)
    case.check(form)
    want = case.expected()
    case.causal = True
    assert ((case.got(form).double() - want).abs().max() > 1e-2) == (window != 1)  # the others would show


@pytest.mark.parametrize("window", [1, 5, 17, 64, 130])
@pytest.mark.parametrize(("page_type", "block_size"), [(torch.float32, 8), (torch.int8, 16)])
def test_windows_never_touch_what_they_hide(
    form: Library, window: int, page_type: torch.dtype, block_size: int
) -> None:
    shapes = [(0, 30), (150, 20), (301, 70), (2040, 21)]
    Case(shapes, window=window, dim=16, block_size=block_size, page_type=page_type).check(form)


@pytest.mark.parametrize(
    ("page_type", "block_size"), [(torch.float32, 1), (torch.float32, 48), (torch.int8, 32), (torch.int8, 48)]
)
def test_block_sizes(form: Library, page_type: torch.dtype, block_size: int) -> None:
    Case([(60, 50)], block_size=block_size, dim=16, page_type=page_type).check(form)


@pytest.mark.parametrize(("page_type", "spread"), [(torch.float32, 4.0), (torch.int8, 1.0)])
def test_sinks_and_soft_cap(form: Library, page_type: torch.dtype, spread: float) -> None:
    case = Case([(0, 9), (140, 30)], heads=6, kv_heads=2, dim=32, page_type=page_type, spread=spread)
    sinks = torch.tensor([-100.0, -1.0, 0.0, 2.0, 30.0, -torch.inf])
    case.check(form, sinks=sinks)
    case.check(form, soft_cap=2.0)
    case.check(form, sinks=sinks, soft_cap=15.0)


def test_scores_far_beyond_the_range_of_exp(form: Library) -> None:
    """One key takes all the weight, at any position; nothing overflows."""
    case = Case([(0, 300)], dim=16, heads=2)
    case.q.fill_(0.0)
    case.q[..., 0] = 1e4
    blocks, at = case.table[0].long(), torch.arange(300)
    case.pages[0][blocks[at // 16], at % 16, :, 0] = torch.where(at == 7, 1.0, -1.0 + at / 300)[:, None]
    got = case.got(form)
    winner = case.pages[1][blocks[0], 7]
    torch.testing.assert_close(got[7:], winner.expand(293, -1, -1), rtol=0, atol=0)


@pytest.mark.parametrize("page_type", [torch.float32, torch.int8])
@pytest.mark.parametrize(
    ("dim", "window", "old", "new"),
    [(20, None, 0, 400), (32, 90, 0, 400), (16, None, 1900, 300), (16, 2100, 4000, 300)],
)
def test_chunks_do_not_change_the_bits(
    form: Library, page_type: torch.dtype, dim: int, window: int | None, old: int, new: int
) -> None:
    case = Case([(old, new)], dim=dim, page_type=page_type, window=window)
    whole = case.got(form)
    for cuts in ([0, 1, 130, 137, 150, new - 3, new], [0, 64, new]):
        parts = []
        for begin, end in itertools.pairwise(cuts):
            start, lengths = torch.tensor([0, end - begin]), torch.tensor([old + end])
            call = AttentionCall(case.table, start, lengths, case.temperature[begin:end], case.scale, window=window)
            parts.append(cpu.paged_attention_prefill(form, case.q[begin:end], case.all_pages, call))
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("window", [None, 2500])
def test_few_rows_over_many_int8_keys_spread_over_threads_with_the_same_bits(form: Library, window: int | None) -> None:
    case = Case([(4200, 3), (2040, 15)], heads=2, kv_heads=1, dim=16, page_type=torch.int8, window=window)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(case.got(form))
    case.check(form)
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_threads_do_not_change_the_bits() -> None:
    case, before, found = Case([(50, 300), (0, 90)]), torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(case.got(kernels("generic")))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_poisoned_query_harms_only_its_own_row(form: Library) -> None:
    case = Case([(20, 60)], dim=32)
    want = case.got(form)
    case.q[31, 2, 3] = torch.nan
    got = case.got(form)
    assert got[31, 2].isnan().all()
    want[31, 2] = 0.0
    assert torch.equal(got.nan_to_num(0.0), want)


def test_a_poisoned_key_shows_in_every_later_row_and_in_no_row_that_comes_tiles_before(form: Library) -> None:
    case = Case([(0, 120)], dim=32, heads=2)
    case.pages[0][int(case.table[0, 5]), 0, 1] = torch.nan  # key 80 of the second head
    got = case.got(form)
    assert got[80:, 1].isnan().all()
    assert torch.isfinite(got[:, 0]).all()
    assert torch.isfinite(got[:60]).all()


@pytest.mark.parametrize("which", ["key_scale", "value_scale"])
def test_a_poisoned_int8_token_shows_in_every_row_that_sees_it_and_in_no_other(form: Library, which: str) -> None:
    case = Case([(0, 300)], dim=32, heads=2, page_type=torch.int8)
    case.scales[which][int(case.table[0, 5]), 1, 0] = torch.nan  # key 80 of the second head
    got = case.got(form)
    assert torch.isfinite(got[:, 0]).all()
    assert not torch.isfinite(got[80:, 1]).any()
    if multiplies_codes(form, 32):
        assert torch.isfinite(got[:80]).all()


def test_strided_queries(form: Library) -> None:
    case = Case([(9, 40)], dim=32)
    fused = torch.randn(40, 6, 40)
    fused[:, 1:5, 4:36] = case.q
    case.q = fused[:, 1:5, 4:36]
    case.check(form)


@pytest.mark.parametrize("page_type", TYPES)
def test_nothing_past_the_operands_is_read(form: Library, page_type: torch.dtype) -> None:
    for dim in (5, 36, 64):
        case = Case([(9, 39)], heads=3, kv_heads=1, dim=dim, page_type=page_type)
        used = case.table[0, :3].long()
        case.pages = [at_the_end_of_memory(part[used]) for part in case.pages]
        case.scales = {name: at_the_end_of_memory(scale[used]) for name, scale in case.scales.items()}
        case.wide = [part[used] for part in case.wide]
        case.table = at_the_end_of_memory(torch.arange(3, dtype=torch.int32)[None])
        case.q = at_the_end_of_memory(case.q)
        case.check(form)


def test_short_sequences_are_passed_over(form: Library) -> None:
    case = Case([(5, 1), (0, 20), (8, 1), (40, 3)], dim=16)
    out = torch.full((25, 4, 16), 7.0)
    case.table[0].fill_(-1)  # none of their data is read
    assert case.got(form, out=out, fewest=2) is out
    assert (out[[0, 21]] == 7.0).all()
    case.table[0] = case.table[2]
    torch.testing.assert_close(out[1:21].double(), case.expected()[1:21], rtol=0, atol=5e-6)
    torch.testing.assert_close(out[22:].double(), case.expected()[22:], rtol=0, atol=5e-6)


def test_missing_blocks_and_impossible_lengths_are_refused(form: Library) -> None:
    for column, value in ((0, -1), (2, -1), (1, 99)):
        case = Case([(10, 30)], dim=16)
        case.table[0, column] = value
        with pytest.raises(IndexError, match="block"):
            case.got(form)
    case = Case([(10, 30)], dim=16)
    for length in (29, 16 * case.table.shape[1] + 1):
        case.lengths = torch.tensor([length])
        with pytest.raises(IndexError, match="block"):
            case.got(form)


def test_refusals_say_why() -> None:
    library = kernels("generic")
    case = Case([(4, 6)], dim=16)
    for change, message in (
        ({"start": torch.tensor([0, 7])}, "query_start"),
        ({"start": torch.tensor([3, 0])}, "query_start"),
        ({"window": 0}, "window"),
        ({"table": case.table.long()}, "block_tables"),
        ({"lengths": case.lengths.int()}, "seq_lens"),
        ({"temperature": case.temperature[:3]}, "score_scale"),
    ):
        before = {name: getattr(case, name) for name in change}
        for name, value in change.items():
            setattr(case, name, value)
        with pytest.raises(ValueError, match=message):
            case.got(library)
        for name, value in before.items():
            setattr(case, name, value)
    with pytest.raises(ValueError, match="out"):
        case.got(library, out=torch.empty(6, 4, 15))
