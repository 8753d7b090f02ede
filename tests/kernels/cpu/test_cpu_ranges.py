"""Attention over key ranges with rotated query copies, against unrotated keys at their effective positions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import PACKED_FORMS, PAIR_FORMS, choose, kernels, rounds_queries
from helpers.marks import slow_but
from helpers.ranges import FAR, Part, RangeCase, random_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_helpers.checks import same_on_threads
from torch import Tensor

from windlass.kernels import AttentionCall, KVPages, cpu, select_backend
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.library import Library
from windlass.kernels.torch import reference

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
SINGLE, MIXED = [(300, 1), (0, 1), (700, 1)], [(300, 1), (40, 60), (0, 9), (600, 1), (513, 30)]


def decode(q: Tensor, pages: KVPages, call: AttentionCall, form: Library) -> Tensor:
    return cpu.paged_attention_decode(form, q, pages, call)


def prefill(q: Tensor, pages: KVPages, call: AttentionCall, form: Library) -> Tensor:
    return cpu.paged_attention_prefill(form, q, pages, call)


def case_of(shapes: list[tuple[int, int]], count: int, seed: int = 1, **options: Any) -> RangeCase:
    rng = random.Random(seed)
    return RangeCase(shapes, [random_parts(old, new, count, rng) for old, new in shapes], **options)


def check(case: RangeCase, form: Library, attention: Callable[..., Tensor]) -> None:
    q, pages, call = case.operands()
    rounds = attention is decode and pages.key.dtype == torch.int8 and rounds_queries(form)
    tolerance = 2e-4 if rounds else 1e-5
    before = [part.clone() for part in (pages.key, pages.value)]
    found = attention(q, pages, call, form)
    torch.testing.assert_close(found.double(), case.expected(), rtol=tolerance, atol=tolerance)
    for part, kept in zip((pages.key, pages.value), before, strict=True):
        assert torch.equal(part.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("page_type", TYPES, ids=str)
@pytest.mark.parametrize("count", [1, 4, 17])
def test_decode(form: Library, page_type: torch.dtype, count: int) -> None:
    check(case_of(SINGLE, count, page_type=page_type), form, decode)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("page_type", TYPES, ids=str)
@pytest.mark.parametrize("count", [1, 4, 17])
def test_prefill(form: Library, page_type: torch.dtype, count: int) -> None:
    check(case_of(MIXED, count, page_type=page_type), form, prefill)


@pytest.mark.parametrize("name", PACKED_FORMS)
def test_codes_in_every_instruction_set(name: str) -> None:
    check(case_of(SINGLE, 6, page_type=torch.int8), kernels(name), decode)
    check(case_of(MIXED, 6, page_type=torch.int8), kernels(name), prefill)


@pytest.mark.parametrize(("dim", "pairs"), [(64, 32), (64, 8), (80, 20), (24, 12), (5, 2), (16, 0)])
def test_head_dims_and_partial_rotation(form: Library, dim: int, pairs: int) -> None:
    for heads, kv_heads in ((9, 3), (7, 1)):
        sizes = {"dim": dim, "value_dim": dim // 2 + 1, "pairs": pairs, "heads": heads, "kv_heads": kv_heads}
        check(case_of([(150, 1), (90, 1)], 5, **sizes), form, decode)
        check(case_of([(150, 20), (90, 7)], 5, **sizes), form, prefill)


@pytest.mark.parametrize("page_type", [torch.float32, torch.int8], ids=str)
def test_heads_of_512_with_partial_rotation(form: Library, page_type: torch.dtype) -> None:
    sizes = {"dim": 512, "value_dim": 512, "pairs": 256, "still": 192, "page_type": page_type}
    for heads, kv_heads in ((8, 2), (16, 1)):
        check(case_of([(90, 1), (20, 1)], 5, heads=heads, kv_heads=kv_heads, **sizes), form, decode)
        check(case_of([(50, 12), (20, 3)], 5, heads=heads, kv_heads=kv_heads, **sizes), form, prefill)


@pytest.mark.parametrize("base", [10_000_000, 9_999_999_000])
def test_positions_of_ten_million_and_more(form: Library, base: int) -> None:
    rng = random.Random(3)
    parts = [random_parts(old, new, 6, rng, far=base) for old, new in ((200, 1), (130, 20))]
    check(RangeCase([(200, 1)], parts[:1], base=base), form, decode)
    check(RangeCase([(130, 20)], parts[1:], base=base), form, prefill)


def test_sixty_four_ranges_sinks_and_caps(form: Library) -> None:
    for options in ({"sinks": torch.tensor([-3.0, 0.0, 2.0, 30.0])}, {"soft_cap": 2.0}):
        check(case_of([(700, 1), (90, 1)], 64, **options), form, decode)
        check(case_of([(700, 30), (90, 3)], 64, **options), form, prefill)


def test_sinks_and_a_window(form: Library) -> None:
    """The first four keys are always visible, and a window follows them directly."""
    for old, new in ((900, 1), (100, 1), (40, 70), (0, 200)):
        parts = [Part(4), Part(old + new, reach=64)]
        check(RangeCase([(old, new)], [parts]), form, decode if new == 1 else prefill)


SLOPES = torch.tensor([0.02, 0.005, 0.001, 0.0])


@pytest.mark.parametrize("name", (*PACKED_FORMS, *PAIR_FORMS))
@pytest.mark.parametrize("page_type", slow_but(TYPES, torch.bfloat16, torch.int8), ids=str)
def test_slopes(name: str, page_type: torch.dtype) -> None:
    """Scores decrease with the distance of effective positions, also after keys were moved."""
    form = kernels(name)
    for options in ({}, {"soft_cap": 2.0}, {"sinks": torch.tensor([-3.0, 0.0, 2.0, 30.0])}, {"kv_heads": 4}):
        for count in (1, 9):
            sizes = {"slopes": SLOPES, "page_type": page_type, **options}
            check(case_of(SINGLE, count, **sizes), form, decode)
            check(case_of(MIXED, count, **sizes), form, prefill)


@pytest.mark.parametrize("page_type", TYPES, ids=str)
def test_threads_share_queries_with_slopes_and_copies(form: Library, page_type: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(9)
    for slopes in (None, torch.rand(18) / 50):
        sizes = {"heads": 18, "kv_heads": 2, "page_type": page_type, "slopes": slopes}
        check(case_of([(40, 1)], 3, **sizes), form, decode)
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", PAIR_FORMS)
@pytest.mark.parametrize("page_type", [torch.bfloat16, torch.float16], ids=str)
def test_slopes_of_rounded_prompts(name: str, page_type: torch.dtype) -> None:
    form = kernels(name)
    for count in (1, 9):
        case = case_of(MIXED, count, slopes=SLOPES, page_type=page_type)
        q, pages, call = case.operands()
        found = cpu.paged_attention_prefill(form, q, pages, call, bf16_products=True).double()
        torch.testing.assert_close(found, case.expected(), rtol=0.03, atol=0.03)
        flat = replace(call, alibi_slopes=torch.zeros(4))
        other = cpu.paged_attention_prefill(form, q, pages, flat, bf16_products=True).double()
        assert (other - case.expected()).abs().max() > 0.1


def test_slopes_far_from_the_beginning(form: Library) -> None:
    """Distances do not depend on absolute positions."""
    for shapes, attention in (([(200, 1)], decode), ([(130, 20)], prefill)):
        parts = [[Part(60, shift=-5), Part(sum(shapes[0]))]]
        check(RangeCase(shapes, parts, base=10_000_000, slopes=SLOPES), form, attention)


def test_unsuitable_slopes_are_refused(form: Library) -> None:
    q, pages, call = case_of([(40, 1)], 3, slopes=SLOPES).operands()
    for slopes in (SLOPES[:3], SLOPES.double(), SLOPES.repeat(2)[::2]):
        with pytest.raises(ValueError, match="alibi_slopes"):
            decode(q, pages, replace(call, alibi_slopes=slopes), form)
    ranges = call.ranges
    assert ranges is not None and ranges.gaps is not None
    with pytest.raises(ValueError, match="int64"):
        decode(q, pages, replace(call, ranges=replace(ranges, gaps=ranges.gaps.int())), form)


@pytest.mark.parametrize("name", PACKED_FORMS)
@pytest.mark.parametrize("page_type", TYPES, ids=str)
def test_a_single_range_has_the_bits_of_a_call_without_ranges(name: str, page_type: torch.dtype) -> None:
    form = kernels(name)
    for shapes, attention in ((SINGLE, decode), (MIXED, prefill)):
        if attention is prefill and page_type == torch.int8 and rounds_queries(form) and form.isa != "neon_dot":
            continue  # ranges use other code there
        for window in (None, 70):
            case = RangeCase(
                shapes, [[Part(old + new, reach=window or FAR)] for old, new in shapes], page_type=page_type
            )
            q, pages, call = case.operands()
            plain = replace(call, window=window, ranges=None)
            assert torch.equal(attention(q, pages, call, form), attention(q, pages, plain, form))


@pytest.mark.parametrize("page_type", [torch.float32, torch.int8], ids=str)
def test_bits_of_a_row_depend_on_its_own_ranges_only(form: Library, page_type: torch.dtype) -> None:
    case = case_of([(300, 1), (700, 1), (20, 1)], 9, page_type=page_type)
    q, pages, call = case.operands()
    whole = same_on_threads(lambda: decode(q, pages, call, form))
    for b, (_, _, own) in enumerate(call.sequences()):
        assert torch.equal(decode(q, pages, own, form)[0], whole[b])
    # Rows of one prompt, and their chunks.
    case = case_of([(500, 90)], 9, page_type=page_type)
    q, pages, call = case.operands()
    whole, parts = prefill(q, pages, call, form), ((0, 17), (17, 50), (50, 90))
    assert torch.equal(torch.cat([prefill(q, pages, call.slice_tokens(*part), form) for part in parts]), whole)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.tuples(st.integers(0, 260), st.sampled_from([1, 1, 2, 9, 40])), min_size=1, max_size=4),
    count=st.integers(1, 12),
    page_type=st.sampled_from(TYPES),
    sinks=st.booleans(),
    slopes=st.booleans(),
)
def test_any_ranges_in_any_batch(seed, shapes, count, page_type, sinks, slopes):  # type: ignore[no-untyped-def]
    """Use both backends with the fastest instruction set of this machine."""
    kernels()
    torch.manual_seed(seed)
    case = case_of(shapes, count, seed, page_type=page_type, sinks=torch.randn(4) * 3 if sinks else None)
    case.slopes = SLOPES if slopes else None
    operands, expected = case.operands(), case.expected()
    for backend in (select_backend("cpu"), select_backend("cpu", deterministic=True)):
        assert isinstance(backend, CompiledBackend)
        found = backend.paged_attention(*operands).double()
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4 if page_type == torch.int8 else 2e-5)


def test_deterministic_bits_do_not_depend_on_chunks() -> None:
    kernels()
    backend = select_backend("cpu", deterministic=True)
    q, pages, call = case_of([(300, 75)], 7).operands()
    whole = backend.paged_attention(q, pages, call)
    for bounds in ((0, 75), (0, 1, 2, 40, 75), tuple(range(76))):
        chunks = [backend.paged_attention(q, pages, call.slice_tokens(a, b)) for a, b in pairwise(bounds)]
        assert torch.equal(torch.cat(chunks), whole)


def test_rows_with_one_table(form: Library) -> None:
    q, pages, call = case_of([(300, 20)], 7).operands()
    alone = call.as_single_tokens()
    assert alone.block_tables.stride(0) == 0
    torch.testing.assert_close(decode(q, pages, alone, form), prefill(q, pages, call, form), rtol=1e-5, atol=1e-5)


def test_invalid_ranges_are_refused(form: Library) -> None:
    for shapes, attention in (([(40, 1)], decode), ([(30, 11)], prefill)):
        case = RangeCase(shapes, [[Part(10, hole=True), Part(20, shift=3), Part(41)]])
        q, pages, call = case.operands()
        ranges = call.ranges
        assert ranges is not None
        for broken in (len(q), len(q) - shapes[0][1] + 1, -2, FAR, -FAR):
            with pytest.raises(IndexError, match="row that q lacks"):
                attention(q, pages, replace(call, ranges=replace(ranges, rows=torch.tensor([[-1, broken, 0]]))), form)
        # The row of a hole is not read.
        seen = replace(ranges, reaches=torch.tensor([[5, 0, FAR]]), rows=torch.tensor([[-1, 999, 0]]))
        attention(q, pages, replace(call, ranges=seen), form)
        with pytest.raises(ValueError, match="before the last key"):
            attention(q, pages, replace(call, ranges=replace(ranges, ends=ranges.ends - 1)), form)
        tables = call.block_tables.clone()
        tables[0, 1] = -1
        with pytest.raises(IndexError, match="block"):
            attention(q, pages, replace(call, block_tables=tables), form)
        with pytest.raises(ValueError, match="int64"):
            attention(q, pages, replace(call, ranges=replace(ranges, rows=ranges.rows.int())), form)
        with pytest.raises(ValueError, match="rows for"):
            attention(q, pages, replace(call, ranges=None), form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "pairs"), [(64, 32), (512, 256), (64, 4), (24, 12), (6, 1), (16, 0)])
def test_rotated_query_copies(form: Library, dtype: torch.dtype, dim: int, pairs: int) -> None:
    q = torch.randn(5, 6, dim + 8).to(dtype)[:, 1:5, 3 : dim + 3]
    rows = torch.tensor([4, 0, 0, 2, 4, 1, 3])
    angles = torch.randn(7, pairs)
    found = cpu.rotate_queries(form, q, rows, angles.cos(), angles.sin())
    want = reference.rotate_queries(q, rows, angles.cos(), angles.sin())
    assert found.shape == (12, 4, dim) and found.dtype == dtype and found.is_contiguous()
    assert torch.equal(found[:5], q) and torch.equal(found[5:, :, 2 * pairs :], q[rows][..., 2 * pairs :])
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found, want, rtol=step, atol=step)
    # A row has the same bits alone.
    alone = cpu.rotate_queries(form, q[4:], torch.tensor([0]), angles.cos()[4:5], angles.sin()[4:5])
    assert torch.equal(alone[1], found[9])


def test_invalid_rows_of_query_copies_are_refused(form: Library) -> None:
    q, angles = torch.randn(3, 2, 8), torch.zeros(1, 4)
    for row in (-1, 3, FAR):
        with pytest.raises(IndexError, match="row"):
            cpu.rotate_queries(form, q, torch.tensor([row]), angles, angles)
        with pytest.raises(IndexError, match="row"):
            reference.rotate_queries(q, torch.tensor([row]), angles, angles)
    for rows, table in (
        (torch.tensor([0]).int(), angles),
        (torch.tensor([0, 1]), angles),
        (torch.tensor([0]), torch.zeros(1, 5)),
    ):
        with pytest.raises(ValueError, match="rotate_queries"):
            cpu.rotate_queries(form, q, rows, table, table)


@pytest.mark.parametrize("name", PACKED_FORMS)
def test_recorded_ranges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated step reads the current ranges."""
    found = kernels(name)
    choose(monkeypatch, found)
    backend, case = select_backend("cpu"), case_of([(300, 1), (40, 1), (700, 1)], 5)
    assert isinstance(backend, CompiledBackend)
    q, rows, cos, sin, _ = case.versions()
    _, pages, call = case.operands()
    with backend.record(cpu.Arena(1 << 20)) as recording:
        out = backend.paged_attention(backend.rotate_queries(q, rows, cos, sin), pages, call)
    assert recording.obstacle is None
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-5, atol=1e-5)
    ranges = call.ranges
    assert ranges is not None
    for change in (lambda: q.mul_(0.5), lambda: ranges.reaches.clamp_(max=50), lambda: sin.neg_()):
        change()
        assert recording.repeat()
        expected = backend.paged_attention(backend.rotate_queries(q, rows, cos, sin), pages, call)
        assert torch.equal(out, expected)
    rows[0] = 99
    assert not recording.repeat()
