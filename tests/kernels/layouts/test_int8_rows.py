"""Rows of int8 codes (latent attention): quantization of groups, rotation of cached rows, and attention over codes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers.attention_case import decode_call
from helpers.cpu_kernels import PACKED_FORMS, PAIR_FORMS, at_the_end_of_memory, choose, kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_helpers.checks import same_on_threads

from windlass.kernels import AttentionCall, KeyRanges, KVPages, cpu, page_tensor_shapes, select_backend
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts import kv_pages
from windlass.kernels.torch import reference

FORMS = [*PACKED_FORMS, *PAIR_FORMS]
WIDTHS = [576, 288, 40, 29, 64, 3]  # rows of DeepSeek and MiniCPM3, and rows that end within a group


def code_pages(dim: int, blocks: int = 4, size: int = 16) -> KVPages:
    """Return pages with random codes and scales of different magnitudes."""
    planes = [torch.zeros(shape, dtype=kind) for shape, kind in page_tensor_shapes(blocks, size, 1, dim, 0, torch.int8)]
    planes[0] = torch.randint(-127, 128, planes[0].shape).to(torch.int8)
    planes[2] = (torch.rand(planes[2].shape) / 60 + 1e-3) * 4.0 ** torch.randint(-2, 2, planes[2].shape)
    return KVPages(*planes)


def copy_of(pages: KVPages) -> KVPages:
    return KVPages(*(part.clone() for part in (pages.key, pages.value, scale_of(pages), pages.value_scale)))  # type: ignore[union-attr]


def scale_of(pages: KVPages) -> torch.Tensor:
    assert pages.key_scale is not None
    return pages.key_scale


def wide(pages: KVPages) -> torch.Tensor:
    """Return rows as float64 [slots, D]."""
    codes, scales = pages.key.flatten(0, 2), scale_of(pages).flatten(0, 2)
    groups = torch.arange(codes.shape[1]) // 32
    return codes.double() * scales.double()[:, groups]


def steps(rows: torch.Tensor) -> torch.Tensor:
    """Return the step size of the group of each number of rows [N, D]."""
    parts = [part.abs().amax(dim=1, keepdim=True).expand_as(part) for part in rows.split(32, dim=1)]
    return torch.cat(parts, dim=1) / 127


def append(form: Library | None, pages: KVPages, q, k, cos, sin, q_scale, slots) -> None:  # type: ignore[no-untyped-def]
    if form is None:
        reference.rotate_and_append(q, k, k[:, :, :0], cos, sin, q_scale, pages, slots)
    else:
        cpu.rotate_and_append(form, q, k, k[:, :, :0], cos, sin, q_scale, pages, slots)


def rerotate(form: Library | None, pages: KVPages, *operands: torch.Tensor) -> None:
    if form is None:
        reference.rerotate_cached_keys(pages, *operands)
    else:
        cpu.rerotate_cached_keys(form, pages, *operands)


def rotated(rows: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    half, c, s = angle.shape[1], angle.cos(), angle.sin()
    first, second = rows[:, :half], rows[:, half : 2 * half]
    return torch.cat((first * c - second * s, second * c + first * s, rows[:, 2 * half :]), dim=1)


def test_pages_of_rows() -> None:
    shapes = page_tensor_shapes(5, 24, 1, 70, 0, torch.int8)  # any block size is valid
    assert [shape for shape, _ in shapes] == [(5, 24, 1, 70), (5, 24, 1, 0), (5, 24, 1, 3), (5, 24, 1, 0)]
    assert [kind for _, kind in shapes] == [torch.int8, torch.int8, torch.float32, torch.float32]
    pages = code_pages(70, 5, 24)
    assert (pages.block_size, pages.num_kv_heads, pages.num_slots, pages.value_dim) == (24, 1, 120, 0)
    assert pages.has_rows_of_codes and not pages.in_panels
    seen = pages.with_keys_as_values
    for got in (pages.keys_of(torch.tensor([3, 1]), 70), seen.values_of(torch.tensor([3, 1]))):
        assert torch.equal(got, wide(pages).float().view(5, 24, 1, 70)[[3, 1]])
    assert pages.values_of(torch.tensor([3])).shape == (1, 24, 1, 0)
    assert kv_pages.num_groups(0) == 0 and kv_pages.num_groups(33) == 2


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 20),
    dim=st.sampled_from(WIDTHS),
    half=st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
)
@pytest.mark.parametrize("name", [*FORMS, "plain torch"])
def test_append(name, seed, tokens, dim, half, dtype, size):  # type: ignore[no-untyped-def]
    """Groups are within half a step of their float64 rotation, with a largest code of 127. Other slots are unchanged."""
    form = None if name == "plain torch" else kernels(name)
    torch.manual_seed(seed)
    half = min(half, dim // 2)
    pages = code_pages(dim)
    before, slots = copy_of(pages), torch.randperm(64)[:tokens]
    q, k = torch.randn(tokens, 3, dim + 2).to(dtype)[..., :dim], (torch.randn(tokens, 1, dim) * size).to(dtype)
    angle, q_scale = torch.rand(tokens, half, dtype=torch.float64) * 100, torch.rand(tokens) + 0.5
    own, theirs = q.clone(), q.clone()
    append(form, pages, own, k, angle.cos().float(), angle.sin().float(), q_scale, slots)
    want = rotated(k[:, 0].double(), angle)
    got = wide(pages)[slots]
    assert ((got - want).abs() <= steps(want) * (0.5 + 2e-4) + 1e-30).all()
    for codes in pages.key.flatten(0, 2)[slots].split(32, dim=1):
        assert (codes.abs().amax(dim=1) == 127).all()
    reference.rotate_and_append(
        theirs, k, k[:, :, :0], angle.cos().float(), angle.sin().float(), q_scale, copy_of(before), slots
    )
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(own, theirs, **exact)
    others = torch.ones(64, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(pages.key.flatten(0, 2)[others], before.key.flatten(0, 2)[others])
    assert torch.equal(scale_of(pages).flatten(0, 2)[others], scale_of(before).flatten(0, 2)[others])


@pytest.mark.parametrize("name", [*FORMS, "plain torch"])
def test_extreme_groups(name: str) -> None:
    """Zeros, the smallest and the largest numbers. NaN and infinity affect only their own group."""
    form = None if name == "plain torch" else kernels(name)
    rows = torch.randn(7, 1, 70)
    rows[0], rows[1], rows[3, 0, :32] = 0.0, 1e-45, 1e-3
    rows[2] *= 3e37
    rows[3, 0, 40] = 1e6
    rows[4, 0, 5], rows[5, 0, 33], rows[6, 0, 69] = torch.nan, torch.inf, -torch.inf
    pages, none, slots = code_pages(70), torch.empty(7, 0), torch.arange(3, 10)
    append(form, pages, rows.clone(), rows, none, none, torch.ones(7), slots)
    got, want = wide(pages)[slots], rows[:, 0].double()
    assert (got[:2] == 0).all()
    assert ((got - want).abs() <= steps(want) * 0.501)[2:4].all()
    assert (got[3, :32] > 9e-4).all()
    for row, group in ((4, slice(0, 32)), (5, slice(32, 64)), (6, slice(64, 70))):
        bad = torch.zeros(70, dtype=torch.bool)
        bad[group] = True
        assert got[row, bad].isnan().all() and torch.isfinite(got[row, ~bad]).all()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dim=st.sampled_from(WIDTHS),
    half=st.integers(0, 40),
    elsewhere=st.integers(0, 20),
    in_place=st.integers(0, 8),
)
@pytest.mark.parametrize("name", [*FORMS, "plain torch"])
def test_rerotations(name, seed, dim, half, elsewhere, in_place):  # type: ignore[no-untyped-def]
    """Groups with rotated numbers are rounded once. All other groups and slots keep their bits."""
    form = None if name == "plain torch" else kernels(name)
    torch.manual_seed(seed)
    half = min(half, dim // 2)
    pages = code_pages(dim)
    before, order = copy_of(pages), torch.randperm(64)
    sources, targets = order[:elsewhere], order[20 : 20 + elsewhere]
    sources, targets = (torch.cat((part, order[40 : 40 + in_place])) for part in (sources, targets))
    angle = torch.randn(len(sources), half, dtype=torch.float64) * 100
    rerotate(form, pages, sources, targets, angle.cos().float(), angle.sin().float())
    want, rounded = rotated(wide(before)[sources], angle), min(dim, -(-2 * half // 32) * 32)
    assert ((wide(pages)[targets] - want).abs() <= steps(want) * (0.5 + 2e-4))[:, :rounded].all()
    codes, had = pages.key.flatten(0, 2), before.key.flatten(0, 2)
    scales, had_scales = scale_of(pages).flatten(0, 2), scale_of(before).flatten(0, 2)
    assert torch.equal(codes[targets][:, rounded:], had[sources][:, rounded:])
    assert torch.equal(scales[targets][:, -(-rounded // 32) :], had_scales[sources][:, -(-rounded // 32) :])
    others = torch.ones(64, dtype=torch.bool)
    others[targets] = False
    assert torch.equal(codes[others], had[others]) and torch.equal(scales[others], had_scales[others])


def case_of(
    dim: int, heads: int, shapes: list[tuple[int, int]], window: int | None = None, size: int = 16
) -> tuple[torch.Tensor, KVPages, KVPages, AttentionCall]:
    """Return queries, pages of codes, the same as float32, and a call. Invisible tokens have scales of NaN or no block."""
    counts = [-(-(old + new) // size) for old, new in shapes]
    free = torch.randperm(sum(counts) + 1).tolist()
    pages = code_pages(dim, sum(counts) + 1, size)
    table = torch.full((len(shapes), max(counts) + 1), -1, dtype=torch.int32)
    seen = torch.zeros(sum(counts) + 1, size, dtype=torch.bool)
    for b, (old, new) in enumerate(shapes):
        first = 0 if window is None else max(0, old + 1 - window)
        for i in range(first // size, counts[b]):
            table[b, i] = free.pop()
        at = torch.arange(first, old + new)
        seen[table[b].long()[at // size], at % size] = True
    scale_of(pages)[~seen] = torch.nan
    floats = wide(pages).float().view(-1, size, 1, dim)
    tokens = sum(new for _, new in shapes)
    call = AttentionCall(
        table,
        torch.tensor([0, *(new for _, new in shapes)]).cumsum(0),
        torch.tensor([old + new for old, new in shapes]),
        torch.rand(tokens) + 0.5,
        dim**-0.5,
        window=window,
    )
    return torch.randn(tokens, heads, dim), pages.with_keys_as_values, KVPages(floats, floats), call


def exact(q: torch.Tensor, pages: KVPages, call: AttentionCall) -> torch.Tensor:
    """Compute attention in float64, one query at a time, and return float32 [T, H, D]."""
    rows, out = wide(pages), []
    for own, length, one in call.sequences():
        for token in range(own.start, own.stop):
            index = length - (own.stop - token)
            at = torch.arange(0 if call.window is None else max(0, index + 1 - call.window), index + 1)
            keys = rows[one.block_tables[0][at // pages.block_size].long() * pages.block_size + at % pages.block_size]
            scores = keys @ q[token].double().T * (call.scale * call.score_scale[token].double())  # [S, H]
            out.append(scores.softmax(0).T @ keys)
    return torch.stack(out).float()


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 600), min_size=1, max_size=4),
    shape=st.sampled_from([(16, 576), (5, 29), (40, 288), (1, 64), (3, 3)]),
    size=st.sampled_from([16, 24, 64]),
    window=st.sampled_from([None, 1, 40, 300]),
)
@pytest.mark.parametrize("name", FORMS)
def test_decode(name, seed, lengths, shape, size, window):  # type: ignore[no-untyped-def]
    """Compare with the bits of attention over float32 pages of the same values, and with float64."""
    form = kernels(name)
    torch.manual_seed(seed)
    q, coded, floats, call = case_of(shape[1], shape[0], [(length, 1) for length in lengths], window, size)
    got = cpu.paged_attention_decode(form, q, coded, call)
    assert torch.equal(got, cpu.paged_attention_decode(form, q, floats, call))
    torch.testing.assert_close(got, exact(q, coded, call), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "dim"), [(16, 576), (5, 29), (7, 96)])
def test_prompts(name: str, heads: int, dim: int, window: int | None) -> None:
    form = kernels(name)
    q, coded, floats, call = case_of(dim, heads, [(300, 9), (0, 40), (513, 30), (20, 1)], window)
    got = cpu.paged_attention_prefill(form, q, coded, call)
    assert torch.equal(got, cpu.paged_attention_prefill(form, q, floats, call))
    torch.testing.assert_close(got, exact(q, coded, call), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", PAIR_FORMS)
def test_prompts_rounded_to_bfloat16(name: str) -> None:
    """The error of rounded products is below that of the codes."""
    form = kernels(name)
    for heads, dim in ((16, 576), (5, 29), (7, 96)):
        q, coded, floats, call = case_of(dim, heads, [(300, 20), (0, 40), (513, 30)])
        got = cpu.paged_attention_prefill(form, q, coded, call, bf16_products=True)
        want = cpu.paged_attention_prefill(form, q, floats, call)
        assert not torch.equal(got, want)
        assert float((got - want).norm() / want.norm()) < 6e-3


@pytest.mark.parametrize("name", FORMS)
def test_key_ranges_with_rotated_query_copies(name: str) -> None:
    """The first range of each sequence uses another query copy, and a hole is never read."""
    form = kernels(name)
    for shapes, attention in (
        ([(300, 1), (70, 1)], cpu.paged_attention_decode),
        ([(300, 30), (70, 20)], cpu.paged_attention_prefill),
    ):
        q, coded, floats, call = case_of(576, 16, shapes)
        count = len(q)
        ends = torch.tensor([[32, 64, 999]] * 2)
        rows = torch.stack((call.query_start[:2] + count, torch.tensor([-1, -1]), call.query_start[:2]), dim=1)
        call = replace(call, ranges=KeyRanges(ends, rows.contiguous(), torch.full((2, 3), 10**6)))
        for b in range(2):
            scale_of(coded)[call.block_tables[b, 2:4].long()] = torch.nan
            call.block_tables[b, 2:4] = -1
        query_copies = torch.cat((q, torch.randn_like(q)))
        got = attention(form, query_copies, coded, call)
        assert torch.equal(got, attention(form, query_copies, floats, call))
        torch.testing.assert_close(got, reference.paged_attention(query_copies, coded, call), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FORMS)
def test_nan_affects_exactly_the_rows_that_see_it(name: str) -> None:
    form = kernels(name)
    q, coded, _, call = case_of(64, 3, [(150, 1), (200, 1)])
    clean = cpu.paged_attention_decode(form, q, coded, call)
    place = int(call.block_tables[1, 10]), 3, 0, 1  # the second group of token 163
    scale_of(coded)[place] = torch.nan
    got = cpu.paged_attention_decode(form, q, coded, call)
    assert got[1].isnan().all() and torch.equal(got[0], clean[0])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_mixed_batches_on_every_backend(compiled: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, kernels("generic") if compiled else "turned off by this test")
    q, coded, floats, call = case_of(96, 6, [(50, 40), (139, 1), (0, 20), (30, 3)])
    own = select_backend("cpu", deterministic=deterministic)
    got = own.paged_attention(q, coded, call)
    torch.testing.assert_close(got, reference.paged_attention(q, floats, call), rtol=2e-5, atol=2e-5)
    if deterministic:
        one = next(part for _, length, part in call.sequences() if length == 90)
        parts = [own.paged_attention(q[a:b], coded, one.slice_tokens(a, b)) for a, b in pairwise((0, 1, 7, 40))]
        assert torch.equal(torch.cat(parts), got[:40])


@pytest.mark.parametrize("shapes", [[(1030, 1), (70, 1)], [(70, 1)]])
def test_threads_do_not_change_the_bits(shapes: list[tuple[int, int]]) -> None:
    form = kernels("generic")
    q, coded, _, call = case_of(576, 16, shapes)
    same_on_threads(lambda: cpu.paged_attention_decode(form, q, coded, call), 1, 3)


@pytest.mark.parametrize("name", FORMS)
def test_nothing_past_the_operands_is_read_or_written(name: str) -> None:
    form = kernels(name)
    for dim in (5, 19, 64, 67):
        made = code_pages(dim, 2)
        planes = [at_the_end_of_memory(part) if part.numel() else part for part in (made.key, made.value)]
        planes += [at_the_end_of_memory(scale_of(made)), made.value_scale]  # type: ignore[list-item]
        pages = KVPages(*planes)
        index = at_the_end_of_memory(torch.arange(32))
        x = at_the_end_of_memory(torch.randn(32, 1, dim))
        cos, sin = (at_the_end_of_memory(torch.rand(32, dim // 2)) for _ in range(2))
        append(form, pages, x, x.clone(), cos, sin, torch.ones(32), index)
        rerotate(form, pages, index, index, cos, sin)
        table = at_the_end_of_memory(torch.arange(2, dtype=torch.int32)[None])
        single = decode_call(table, torch.tensor([32]), torch.ones(1), 1.0)
        rows = AttentionCall(table, torch.tensor([0, 32]), torch.tensor([32]), torch.ones(32), 1.0)
        seen = pages.with_keys_as_values
        assert torch.isfinite(cpu.paged_attention_decode(form, x[:1], seen, single)).all()
        for rounds in (False, True):
            assert torch.isfinite(cpu.paged_attention_prefill(form, x, seen, rows, bf16_products=rounds)).all()


def test_unsuitable_operands_are_refused(form: Library) -> None:
    pages = code_pages(40)
    before, x, half = copy_of(pages), torch.randn(2, 1, 40), torch.ones(2, 8)
    with pytest.raises(IndexError, match="past"):
        append(form, pages, x.clone(), x, half, half, torch.ones(2), torch.tensor([1, 64]))
    for source, target in ((64, 0), (0, 64), (-1, 0), (0, -1)):
        with pytest.raises(IndexError, match="outside"):
            rerotate(form, pages, torch.tensor([3, source]), torch.tensor([9, target]), half, half)
    append(form, pages, x.clone(), x, half, half, torch.ones(2), torch.tensor([-1, -5]))  # padding
    assert torch.equal(pages.key, before.key) and torch.equal(scale_of(pages), scale_of(before))
    _, coded, _, call = case_of(40, 3, [(20, 1)])
    q = torch.randn(1, 3, 40)
    for bad in (None, scale_of(coded)[..., :1], scale_of(coded).double(), scale_of(coded)[:1]):
        assert "scales" in (cpu.attention_refusal(q, replace(coded, key_scale=bad), call) or "")
    assert "at once" in (cpu.attention_refusal(q, replace(coded, value=coded.value.clone()), call) or "")
    values = KVPages(coded.key, coded.key.clone(), coded.key_scale, coded.key_scale)
    none, angles = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)
    with pytest.raises(ValueError, match="no values"):
        rerotate(form, values, none, none, angles, angles)
    assert form.paged_attention_decode is not None


def test_recorded_appends_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels(FORMS[0])
    choose(monkeypatch, found)
    backend = select_backend("cpu")
    assert isinstance(backend, CompiledBackend)
    q, coded, _, call = case_of(64, 3, [(30, 1), (90, 1)])
    pages = KVPages(coded.key, coded.key[..., :0].contiguous(), coded.key_scale, scale_of(coded)[..., :0].contiguous())
    last = call.seq_lens - 1
    slots = call.block_tables[torch.arange(2), last // 16].long() * 16 + last % 16
    k, cos, sin, ones = torch.randn(2, 1, 64), torch.rand(2, 16), torch.rand(2, 16), torch.ones(2)
    with backend.record(cpu.Arena(1 << 20)) as recording:
        backend.rotate_and_append(q, k, k[:, :, :0], cos, sin, ones, pages, slots)
        out = backend.paged_attention(q, coded, call)
    assert recording.obstacle is None
    first = out.clone()
    k.mul_(3)
    assert recording.repeat() and not torch.equal(out, first)
