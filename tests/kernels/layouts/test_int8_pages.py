"""int8 pages of heads and of rows (latent attention): quantization, rotation of cached keys, and attention over codes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from helpers.attention_case import decode_call
from helpers.code_pages import pages_of_codes
from helpers.cpu_kernels import PACKED_FORMS, PAIR_FORMS, at_the_end_of_memory, choose, kernels, rounds_queries
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels_helpers.checks import same_on_threads

from windlass.kernels import AttentionCall, KeyRanges, KVPages, cpu, page_tensor_shapes, select_backend
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts import kv_pages
from windlass.kernels.torch import reference

FORMS = [*PACKED_FORMS, *PAIR_FORMS]


# -- pages ---------------------------------------------------------------------------------------------------------


def head_pages(kv_heads: int, dim: int, value_dim: int, blocks: int = 3, size: int = 16) -> KVPages:
    """Return pages with random codes, and a random scale per head."""
    codes = [torch.randint(-127, 128, (blocks, size, kv_heads, d)).to(torch.int8) for d in (dim, value_dim)]
    scales = [torch.rand(blocks, size, kv_heads) / 60 + 1e-3 for _ in range(2)]
    return pages_of_codes(codes[0], scales[0], codes[1], scales[1])


def row_pages(dim: int, blocks: int = 4, size: int = 16) -> KVPages:
    """Return pages with random codes, and scales of different magnitudes per 32 numbers."""
    planes = [torch.zeros(shape, dtype=kind) for shape, kind in page_tensor_shapes(blocks, size, 1, dim, 0, torch.int8)]
    planes[0] = torch.randint(-127, 128, planes[0].shape).to(torch.int8)
    planes[2] = (torch.rand(planes[2].shape) / 60 + 1e-3) * 4.0 ** torch.randint(-2, 2, planes[2].shape)
    return KVPages(*planes)


class Layout(NamedTuple):
    random: Callable[[int, int, int], KVPages]  # of key heads, key dims and value dims
    group: int  # numbers of a head with one scale
    slack: float  # rounding error in addition to half a step, in steps
    heads: list[tuple[int, int]]
    dims: list[tuple[int, int]]


LAYOUTS = {
    "heads": Layout(
        head_pages,
        1 << 20,
        2e-6 * 127,
        [(1, 1), (6, 3), (8, 1)],
        [(64, 64), (17, 3), (80, 96), (1, 1), (6, 33), (10, 40), (512, 512)],
    ),
    "rows": Layout(
        lambda kv_heads, dim, value_dim: row_pages(dim, 3),
        32,
        2e-4,
        [(1, 1), (3, 1), (8, 1)],
        # Rows of DeepSeek and MiniCPM3, and rows that end within a group.
        [(576, 0), (288, 0), (40, 0), (29, 0), (64, 0), (3, 0), (512, 0)],
    ),
}
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
EACH_FORM = pytest.mark.parametrize("name", [*FORMS, "plain torch"])


def planes_of(pages: KVPages) -> list[torch.Tensor]:
    assert pages.key_scale is not None and pages.value_scale is not None
    return [pages.key, pages.value, pages.key_scale, pages.value_scale]


def copy_of(pages: KVPages) -> KVPages:
    return KVPages(*(part.clone() for part in planes_of(pages)))


def scale_of(pages: KVPages) -> torch.Tensor:
    assert pages.key_scale is not None
    return pages.key_scale


def contents(pages: KVPages) -> dict[str, torch.Tensor]:
    """Return codes [slots, Hkv, D], keys of heads padded to whole quads, and scales [slots, Hkv, groups]."""
    key, value, key_scale, value_scale = planes_of(pages)
    rows = {"key": key, "value": value, "key_scale": key_scale, "value_scale": value_scale}
    if not pages.has_rows_of_codes:
        rows["key"], rows["value"] = kv_pages.key_rows(key), kv_pages.value_rows(value)
        rows["key_scale"], rows["value_scale"] = (s.transpose(1, 2)[..., None] for s in (key_scale, value_scale))
    return {name: part.flatten(0, 1) for name, part in rows.items()}


def dequantized(pages: KVPages, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as float64 [slots, Hkv, D]."""
    rows, group, found = contents(pages), 32 if pages.has_rows_of_codes else 1 << 20, []
    for name in ("key", "value"):
        codes, scales = rows[name].double(), rows[f"{name}_scale"].double()
        found.append(codes * scales[..., torch.arange(codes.shape[-1]) // group])
    return found[0][..., :dim], found[1]


def steps(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Return the step size of the group of each number of rows [..., D]."""
    parts = [part.abs().amax(dim=-1, keepdim=True).expand_as(part) for part in rows.split(group, dim=-1)]
    return torch.cat(parts, dim=-1) / 127


def rotated(rows: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate the first pairs of rows [N, H, D] by angles [N, pairs], float64."""
    half, c, s = angle.shape[1], angle.cos()[:, None], angle.sin()[:, None]
    first, second = rows[..., :half], rows[..., half : 2 * half]
    return torch.cat((first * c - second * s, second * c + first * s, rows[..., 2 * half :]), dim=-1)


def poison(pages: KVPages, seen: torch.Tensor) -> None:
    """Fill tokens that are not seen [num_blocks, P] with any codes, including -128, and scales of NaN."""
    blocks, tokens = (~seen).nonzero(as_tuple=True)
    slots = blocks * pages.block_size + tokens
    heads, quads, value_dim = pages.num_kv_heads, pages.key.shape[3], pages.value_dim
    keys, values = (torch.randint(-128, 128, (len(slots), heads, d)).to(torch.int8) for d in (4 * quads, value_dim))
    kv_pages.put_keys(pages.key, slots, keys)
    kv_pages.put_values(pages.value, slots, values)
    for scale in (pages.key_scale, pages.value_scale):
        assert scale is not None
        kv_pages.put_scales(scale, slots, torch.full((len(slots), heads), torch.nan))


def append(form: Library | None, pages: KVPages, q, k, v, cos, sin, q_scale, slots) -> None:  # type: ignore[no-untyped-def]
    if form is None:
        reference.rotate_and_append(q, k, v, cos, sin, q_scale, pages, slots)
    else:
        cpu.rotate_and_append(form, q, k, v, cos, sin, q_scale, pages, slots)


def rerotate(form: Library | None, pages: KVPages, *operands: torch.Tensor) -> None:
    if form is None:
        reference.rerotate_cached_keys(pages, *operands)
    else:
        cpu.rerotate_cached_keys(form, pages, *operands)


# -- both layouts --------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(6)
@settings(max_examples=20, deadline=None)
@example(seed=1, tokens=9, heads=2, dims=6, half=256, dtype=torch.bfloat16, size=1.0)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 20),
    heads=st.integers(0, 2),
    dims=st.integers(0, 5),
    half=st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
)
@EACH_LAYOUT
@EACH_FORM
def test_append(name, layout, seed, tokens, heads, dims, half, dtype, size):  # type: ignore[no-untyped-def]
    """Groups are within half a step of their float64 rotation, with a largest code of 127. Other slots are unchanged."""
    form = None if name == "plain torch" else kernels(name)
    torch.manual_seed(seed)
    (q_heads, kv_heads), (dim, value_dim) = layout.heads[heads], layout.dims[dims]
    half = min(half, dim // 2)
    pages = layout.random(kv_heads, dim, value_dim)
    before, slots = copy_of(pages), torch.randperm(48)[:tokens]
    q, k = ((torch.randn(tokens, h, dim + 2) * size).to(dtype)[..., :dim] for h in (q_heads, kv_heads))
    v = (torch.randn(tokens, kv_heads, value_dim) * size).to(dtype)
    angle, q_scale = torch.rand(tokens, half, dtype=torch.float64) * 100, torch.rand(tokens) + 0.5
    cos, sin, rotated_q = angle.cos().float(), angle.sin().float(), q.clone()
    append(form, pages, rotated_q, k, v, cos, sin, q_scale, slots)

    rows = contents(pages)
    wanted = {"key": rotated(k.double(), angle), "value": v.double()}
    for (name, want), got in zip(wanted.items(), dequantized(pages, dim), strict=True):
        if want.shape[-1]:
            assert ((got[slots] - want).abs() <= steps(want, layout.group) * (0.5 + layout.slack) + 1e-30).all()
            for codes in rows[name][slots].split(layout.group, dim=-1):
                assert (codes.abs().amax(dim=-1) == 127).all()
    assert (rows["key"][..., dim:] == 0).all()
    plain, plain_q = copy_of(before), q.clone()
    reference.rotate_and_append(plain_q, k, v, cos, sin, q_scale, plain, slots)
    torch.testing.assert_close(rotated_q, plain_q, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5 * size)
    # Values are not rotated, so that their codes equal those of plain torch.
    assert torch.equal(pages.value, plain.value)
    assert torch.equal(pages.value_scale, plain.value_scale)
    others = torch.ones(48, dtype=torch.bool)
    others[slots] = False
    for name, old in contents(before).items():
        assert torch.equal(rows[name][others], old[others])


@EACH_LAYOUT
@EACH_FORM
def test_extreme_numbers(name: str, layout: Layout) -> None:
    """Zeros, the smallest and the largest numbers, and an outlier. NaN and infinity affect only their own group."""
    form = None if name == "plain torch" else kernels(name)
    heads, dim = (1, 70) if layout.group == 32 else (2, 20)
    rows, finite = torch.randn(9, heads, dim), torch.ones(9, heads, dim, dtype=torch.bool)
    rows[0], rows[1], rows[4] = 0.0, 1e-45, 0.01
    rows[2] *= 1e-36
    rows[3] *= 3e37
    rows[4, :, dim // 2] = 1e6
    for row, column, number in ((5, dim - 1, torch.nan), (6, 5, torch.inf), (7, dim // 2, -torch.inf)):
        rows[row, 0, column] = number
        finite[row, 0, column // layout.group * layout.group :][: layout.group] = False
    value_dim = 0 if layout.group == 32 else dim
    pages, none, slots = layout.random(heads, dim, value_dim), torch.empty(9, 0), torch.arange(3, 12)
    append(form, pages, rows[:, :1].clone(), rows, rows[..., :value_dim], none, none, torch.ones(9), slots)
    got, values = (part[slots] for part in dequantized(pages, dim))
    assert torch.equal(got[..., :value_dim].nan_to_num(), values.nan_to_num())
    assert (got[: 2 if layout.group == 32 else 3] == 0).all()
    assert torch.equal(got.isnan(), ~finite)
    bound = steps(rows.double(), layout.group) * 0.501 + 1e-28
    assert ((got - rows.double()).abs() <= bound)[finite].all()


@pytest.mark.quick_cases(6)
@settings(max_examples=20, deadline=None)
@example(seed=1, heads=1, dims=6, half=256, elsewhere=5, in_place=3)
@given(
    seed=st.integers(0, 2**31),
    heads=st.integers(0, 2),
    dims=st.integers(0, 5),
    half=st.integers(0, 40),
    elsewhere=st.integers(0, 20),
    in_place=st.integers(0, 8),
)
@EACH_LAYOUT
@EACH_FORM
def test_rerotations(name, layout, seed, heads, dims, half, elsewhere, in_place):  # type: ignore[no-untyped-def]
    """Groups with rotated numbers are rounded once. Values, other groups and all other slots keep their bits."""
    form = None if name == "plain torch" else kernels(name)
    torch.manual_seed(seed)
    (_, kv_heads), (dim, value_dim) = layout.heads[heads], layout.dims[dims]
    half = min(half, dim // 2)
    pages = layout.random(kv_heads, dim, value_dim)
    before, order = copy_of(pages), torch.randperm(48)
    sources, targets = order[:elsewhere], order[20 : 20 + elsewhere]
    sources, targets = (torch.cat((part, order[40 : 40 + in_place])) for part in (sources, targets))
    angle = torch.randn(len(sources), half, dtype=torch.float64) * 100
    rerotate(form, pages, sources, targets, angle.cos().float(), angle.sin().float())
    want = rotated(dequantized(before, dim)[0][sources], angle)
    groups = -(-2 * half // layout.group)
    rounded = min(dim, groups * layout.group)
    bound = steps(want, layout.group) * (0.5 + layout.slack)
    assert ((dequantized(pages, dim)[0][targets] - want).abs() <= bound)[..., :rounded].all()
    others = torch.ones(48, dtype=torch.bool)
    others[targets] = False
    rows, had = contents(pages), contents(before)
    for name, unchanged in (("key", rounded), ("key_scale", groups), ("value", 0), ("value_scale", 0)):
        assert torch.equal(rows[name][others], had[name][others])
        assert torch.equal(rows[name][targets][..., unchanged:], had[name][sources][..., unchanged:])
    assert (rows["key"][..., dim:] == 0).all()


@EACH_LAYOUT
def test_slots_outside_the_pages_are_refused(form: Library, layout: Layout) -> None:
    value_dim = 0 if layout.group == 32 else 16
    pages = layout.random(1, 40, value_dim)
    before, x, half = copy_of(pages), torch.randn(2, 1, 40), torch.ones(2, 8)
    v = x[..., :value_dim]
    with pytest.raises(IndexError, match="past"):
        append(form, pages, x.clone(), x, v, half, half, torch.ones(2), torch.tensor([1, 48]))
    for source, target in ((48, 0), (0, 48), (-1, 0), (0, -1)):
        with pytest.raises(IndexError, match="outside"):
            rerotate(form, pages, torch.tensor([3, source]), torch.tensor([9, target]), half, half)
    append(form, pages, x.clone(), x, v, half, half, torch.ones(2), torch.tensor([-1, -5]))  # padding
    assert all(map(torch.equal, planes_of(pages), planes_of(before)))


@EACH_LAYOUT
@pytest.mark.parametrize("name", FORMS)
def test_nothing_past_the_operands_is_read_or_written(name: str, layout: Layout) -> None:
    form = kernels(name)
    for dim in (5, 19, 64, 67):
        made = row_pages(dim, 2) if layout.group == 32 else head_pages(1, dim, dim, 2)
        pages = KVPages(*(at_the_end_of_memory(part) if part.numel() else part for part in planes_of(made)))
        index = at_the_end_of_memory(torch.arange(32))
        x = at_the_end_of_memory(torch.randn(32, 1, dim))
        v = at_the_end_of_memory(x) if pages.value_dim else x[..., :0]
        cos, sin = (at_the_end_of_memory(torch.rand(32, dim // 2)) for _ in range(2))
        append(form, pages, x, x.clone(), v, cos, sin, torch.ones(32), index)
        rerotate(form, pages, index, index, cos, sin)
        table = at_the_end_of_memory(torch.arange(2, dtype=torch.int32)[None])
        single = decode_call(table, torch.tensor([32]), torch.ones(1), 1.0)
        rows = AttentionCall(table, torch.tensor([0, 32]), torch.tensor([32]), torch.ones(32), 1.0)
        seen = pages if pages.value_dim else pages.with_keys_as_values
        assert torch.isfinite(cpu.paged_attention_decode(form, x[:1], seen, single)).all()
        for rounds in (False, True):
            assert torch.isfinite(cpu.paged_attention_prefill(form, x, seen, rows, bf16_products=rounds)).all()


# -- pages of heads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [6, 16, 33])
def test_code_layout(dim: int) -> None:
    """Compare with the addresses that kernels compute."""
    keys, values = (torch.randint(-127, 128, (2, 32, 3, dim)).to(torch.int8) for _ in range(2))
    scale = torch.rand(2, 32, 3)
    pages = pages_of_codes(keys, scale, values, scale)
    assert (pages.block_size, pages.num_kv_heads, pages.num_slots, pages.value_dim) == (32, 3, 64, dim)
    quads = -(-dim // 4)
    key, value, scales = pages.key.flatten(), pages.value.flatten(), pages.key_scale
    assert scales is not None
    for b, t, h, d in itertools.product(range(2), range(0, 32, 5), range(3), range(dim)):
        tokens = (b * 3 + h) * 32
        assert key[(tokens + t // 16 * 16) * quads * 4 + d // 4 * 64 + t % 16 * 4 + d % 4] == keys[b, t, h, d]
        assert value[(tokens + t // 4 * 4) * dim + d * 4 + t % 4] == values[b, t, h, d]
        assert scales.flatten()[tokens + t] == scale[b, t, h]
    assert torch.equal(kv_pages.key_rows(pages.key)[..., :dim], keys)
    assert torch.equal(kv_pages.value_rows(pages.value), values)
    assert (kv_pages.key_rows(pages.key)[..., dim:] == 0).all()
    slots = torch.randperm(64)[:9]
    assert torch.equal(kv_pages.take_keys(pages.key, slots)[..., :dim], keys.flatten(0, 1)[slots])
    assert torch.equal(kv_pages.take_values(pages.value, slots), values.flatten(0, 1)[slots])
    assert torch.equal(kv_pages.take_scales(pages.key_scale, slots), scale.flatten(0, 1)[slots])


@pytest.mark.parametrize("name", [*PACKED_FORMS, "plain torch"])
def test_values_move_only_on_request(name: str) -> None:
    pages = head_pages(2, 16, 16)
    before, sources, targets, angle = copy_of(pages), torch.arange(3), torch.arange(3) + 8, torch.rand(3, 8)
    operands = sources, targets, angle.cos(), angle.sin()
    if name == "plain torch":
        reference.rerotate_cached_keys(pages, *operands, values=False)
    else:
        form = kernels(name)
        cpu.rerotate_cached_keys(form, pages, *operands, values=False)
    assert torch.equal(pages.value, before.value)
    assert torch.equal(pages.value_scale, before.value_scale)
    assert not torch.equal(pages.key, before.key)
    assert not torch.equal(pages.key_scale, before.key_scale)


def test_rotation_by_ten_million_positions_and_back(form: Library) -> None:
    """A key that is rotated by ten million positions and back has only two rounding errors."""
    pages = head_pages(2, 64, 64)
    before = dequantized(copy_of(pages), 64)[0]
    angle = 1e7 * 1e4 ** -(torch.arange(32, dtype=torch.float64) / 32).repeat(16, 1)
    slots, aside = torch.arange(16), torch.arange(20, 36)
    for source, target, sign in ((slots, aside, 1), (aside, slots, -1)):
        cos, sin = angle.cos().float(), (sign * angle).sin().float()
        cpu.rerotate_cached_keys(form, pages, source, target, cos, sin)
    after = dequantized(pages, 64)[0]
    step = math.sqrt(2) * before[slots].abs().amax(dim=-1, keepdim=True) / 127
    assert ((after - before)[slots].abs() <= 1.5 * step).all()


@settings(max_examples=15, deadline=None)
@example(seed=1, lengths=[9, 300], heads=(16, 1), dims=(512, 512), size=16, window=None, soft_cap=None, sinks=False)
@example(seed=1, lengths=[9, 300], heads=(16, 4), dims=(512, 512), size=16, window=40, soft_cap=3.0, sinks=True)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (6, 3), (9, 3), (16, 4), (7, 1), (8, 1)]),
    dims=st.sampled_from([(64, 64), (128, 64), (64, 256), (17, 3), (80, 96), (33, 5), (6, 10), (20, 40), (16, 16)]),
    size=st.sampled_from([16, 32, 48]),
    window=st.sampled_from([None, 1, 40, 300]),
    soft_cap=st.sampled_from([None, 3.0]),
    sinks=st.booleans(),
)
@pytest.mark.parametrize("name", PACKED_FORMS)
def test_decode_of_heads(name, seed, lengths, heads, dims, size, window, soft_cap, sinks):  # type: ignore[no-untyped-def]
    """Compare with attention over float32 pages of the same values. Invisible scales and codes may have any value."""
    form = kernels(name)
    torch.manual_seed(seed)
    (q_heads, kv_heads), (dim, value_dim) = heads, dims
    counts = [-(-n // size) for n in lengths]
    pages = head_pages(kv_heads, dim, value_dim, sum(counts) + 1, size)
    free = torch.randperm(sum(counts) + 1).tolist()
    table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    seen = torch.zeros(sum(counts) + 1, size, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for i in range(counts[b]):
            table[b, i] = free.pop()
        first = 0 if window is None else max(0, length - window)
        at = torch.arange(first, length)
        seen[table[b].long()[at // size], at % size] = True
        table[b, : first // size] = -1
    poison(pages, seen)
    assert pages.key_scale is not None
    pages.key_scale[0, :, 0] *= 0.0  # zeros
    keys, values = (part.float().view(-1, size, *part.shape[1:]) for part in dequantized(pages, dim))
    q, temperature = torch.randn(len(lengths), q_heads, dim), torch.rand(len(lengths)) + 0.5
    extra = torch.randn(q_heads) if sinks else None
    call = decode_call(
        table, torch.tensor(lengths), temperature, dim**-0.5, window=window, sink_logits=extra, soft_cap=soft_cap
    )
    got = cpu.paged_attention_decode(form, q, pages, call)
    want = cpu.paged_attention_decode(form, q, KVPages(keys, values), call)
    # With vpdpbusd, queries and weights are rounded to 16 bits; values here reach 2.3, and codes have lost 1e-2 of that.
    lanes = 4 if form.isa == "neon_dot" else 16 if form.isa.startswith("avx512") else 8
    tolerance = 1e-4 if rounds_queries(form) and value_dim % lanes == 0 else 2e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PACKED_FORMS)
def test_rows_of_one_prompt_have_the_same_bits_alone(name: str) -> None:
    """Packs of rows share a table, at every position around the boundaries of chunks and splits."""
    form = kernels(name)
    for first, heads, dim, window in ((120, (8, 2), 64, None), (505, (3, 3), 128, None), (640, (16, 1), 64, 200)):
        pages = head_pages(heads[1], dim, dim, blocks=90)
        q, lengths = torch.randn(17, heads[0], dim), torch.arange(first, first + 17)
        table = torch.randperm(90)[None].int()
        seen = torch.zeros(90, 16, dtype=torch.bool)
        at = torch.arange(0 if window is None else first - window, first + 16)
        seen[table[0].long()[at // 16], at % 16] = True
        poison(pages, seen)
        call = decode_call(table.expand(17, -1), lengths, torch.ones(17), dim**-0.5, window=window)
        packed = cpu.paged_attention_decode(form, q, pages, call)
        for b in range(17):
            one = decode_call(table, lengths[b : b + 1], torch.ones(1), dim**-0.5, window=window)
            alone = cpu.paged_attention_decode(form, q[b : b + 1], pages, one)
            assert torch.equal(alone[0], packed[b])


@pytest.mark.parametrize("name", PACKED_FORMS)
def test_nan_of_a_head_affects_exactly_the_rows_that_see_it(name: str) -> None:
    form = kernels(name)
    pages = head_pages(2, 16, 32, blocks=20)
    table, lengths = torch.randperm(20)[None].int().expand(3, -1), torch.tensor([150, 200, 310])
    q = torch.randn(3, 6, 16)

    def got(window: int | None = None) -> torch.Tensor:
        call = decode_call(table, lengths, torch.ones(3), 0.25, window=window)
        return cpu.paged_attention_decode(form, q, pages, call)

    clean = got()
    for scale in (pages.key_scale, pages.value_scale):
        assert scale is not None
        spot = scale[int(table[0, 10])][1, 3:4]  # token 163 of the second head
        before = spot.clone()
        spot.fill_(torch.nan)
        poisoned = got()
        assert poisoned[1:, 3:].isnan().all()
        assert torch.equal(poisoned[0], clean[0])
        assert torch.equal(poisoned[:, :3], clean[:, :3])
        assert torch.isfinite(got(window=36)).all()  # tokens 164 and on, for the second row
        spot.copy_(before)
    q[1, 2, 5] = torch.nan
    poisoned = got()
    assert poisoned[1, 2].isnan().all()
    clean[1, 2] = 0.0
    assert torch.equal(poisoned.nan_to_num(0.0), clean)


@pytest.mark.parametrize(("kv_heads", "length"), [(4, 1030), (1, 60)])
@pytest.mark.parametrize("name", PACKED_FORMS)
def test_threads_do_not_change_the_bits_of_decoding(name: str, kv_heads: int, length: int) -> None:
    form = kernels(name)
    pages = head_pages(kv_heads, 64, 64, blocks=70)
    q, lengths = torch.randn(2, 16, 64), torch.tensor([length, 70])
    table = torch.randperm(70)[None].int().repeat(2, 1)
    call = decode_call(table, lengths, torch.ones(2), 0.125)
    same_on_threads(lambda: cpu.paged_attention_decode(form, q, pages, call), 1, 3, 6)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_mixed_batches_of_heads_on_every_backend(
    compiled: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, kernels() if compiled else "turned off by this test")
    pages = head_pages(2, 16, 16, blocks=30, size=16)
    table = torch.randperm(30).view(3, 10).int()
    q, temperature = torch.randn(61, 4, 16), torch.rand(61) + 0.5
    call = AttentionCall(table, torch.tensor([0, 40, 41, 61]), torch.tensor([90, 140, 20]), temperature, 0.25)
    got = select_backend("cpu", deterministic=deterministic).paged_attention(q, pages, call)
    keys, values = (part.float().view(30, 16, 2, 16) for part in dequantized(pages, 16))
    want = reference.paged_attention(q, KVPages(keys, values), call)
    rounds = compiled and rounds_queries(kernels())
    torch.testing.assert_close(got, want, rtol=1e-4 if rounds else 2e-5, atol=1e-4 if rounds else 5e-6)
    torch.testing.assert_close(reference.paged_attention(q, pages, call), want, rtol=1e-6, atol=1e-6)


def rerotate_nothing(pages: KVPages) -> None:
    """Check the pages by a call without entries."""
    none, half = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)
    cpu.rerotate_cached_keys(cpu.load(), pages, none, none, half, half)


def test_unsuitable_scales_are_refused() -> None:
    kernels()
    pages, q = head_pages(2, 16, 16), torch.randn(1, 4, 16)
    key, value, scale = pages.key, pages.value, pages.key_scale
    assert scale is not None
    call = decode_call(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1).long(), torch.ones(1), 1.0)
    assert cpu.attention_refusal(q, KVPages(key, value, scale, scale), call) is None
    for bad in (None, scale.double(), scale[:, :, :1], scale[:2], scale.transpose(0, 1).contiguous().transpose(0, 1)):
        assert "scales" in (cpu.attention_refusal(q, KVPages(key, value, scale, bad), call) or "")
        with pytest.raises(ValueError, match="scales"):
            rerotate_nothing(KVPages(key, value, bad, scale))
    floats = torch.zeros(3, 16, 2, 16)
    with pytest.raises(ValueError, match="floats have none"):
        rerotate_nothing(KVPages(floats, floats, scale, scale))


def test_unsuitable_codes_are_refused() -> None:
    kernels()
    pages, other = head_pages(2, 16, 16), head_pages(2, 20, 16, blocks=2)
    rerotate_nothing(pages)
    rows = torch.zeros(3, 16, 2, 16, dtype=torch.int8)
    for key, value, words in (
        (rows, rows, "scales"),
        (pages.key, other.value, "same tokens"),
        (pages.key.transpose(4, 5).contiguous(), pages.value, "same tokens"),
        (pages.key.transpose(0, 1), pages.value.transpose(0, 1), "contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            rerotate_nothing(KVPages(key, value, pages.key_scale, pages.value_scale))
    k, v = torch.zeros(1, 2, 14), torch.zeros(1, 2, 16)  # 14 dims need the same number of quads
    half, ones, slots = torch.zeros(1, 4), torch.ones(1), torch.tensor([-1])
    append(cpu.load(), pages, k, k, v, half, half, ones, slots)
    for wrong in (torch.zeros(1, 2, 12), torch.zeros(1, 1, 16)):
        with pytest.raises(ValueError, match="fit"):
            append(cpu.load(), pages, wrong, wrong, v, half, half, ones, slots)
    with pytest.raises(ValueError, match="multiple of 16"):
        head_pages(1, 8, 8, size=24)


# -- pages of rows -------------------------------------------------------------------------------------------------


def test_pages_of_rows() -> None:
    shapes = page_tensor_shapes(5, 24, 1, 70, 0, torch.int8)  # any block size is valid
    assert [shape for shape, _ in shapes] == [(5, 24, 1, 70), (5, 24, 1, 0), (5, 24, 1, 3), (5, 24, 1, 0)]
    assert [kind for _, kind in shapes] == [torch.int8, torch.int8, torch.float32, torch.float32]
    pages = row_pages(70, 5, 24)
    assert (pages.block_size, pages.num_kv_heads, pages.num_slots, pages.value_dim) == (24, 1, 120, 0)
    assert pages.has_rows_of_codes and not pages.in_panels
    seen = pages.with_keys_as_values
    for got in (pages.keys_of(torch.tensor([3, 1]), 70), seen.values_of(torch.tensor([3, 1]))):
        assert torch.equal(got, dequantized(pages, 70)[0].float().view(5, 24, 1, 70)[[3, 1]])
    assert pages.values_of(torch.tensor([3])).shape == (1, 24, 1, 0)
    assert kv_pages.num_groups(0) == 0 and kv_pages.num_groups(33) == 2


def case_of(
    dim: int, heads: int, shapes: list[tuple[int, int]], window: int | None = None, size: int = 16
) -> tuple[torch.Tensor, KVPages, KVPages, AttentionCall]:
    """Return queries, pages of codes, the same as float32, and a call. Invisible tokens have scales of NaN or no block."""
    counts = [-(-(old + new) // size) for old, new in shapes]
    free = torch.randperm(sum(counts) + 1).tolist()
    pages = row_pages(dim, sum(counts) + 1, size)
    table = torch.full((len(shapes), max(counts) + 1), -1, dtype=torch.int32)
    seen = torch.zeros(sum(counts) + 1, size, dtype=torch.bool)
    for b, (old, new) in enumerate(shapes):
        first = 0 if window is None else max(0, old + 1 - window)
        for i in range(first // size, counts[b]):
            table[b, i] = free.pop()
        at = torch.arange(first, old + new)
        seen[table[b].long()[at // size], at % size] = True
    scale_of(pages)[~seen] = torch.nan
    floats = dequantized(pages, dim)[0].float().view(-1, size, 1, dim)
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
    rows, out = dequantized(pages, q.shape[-1])[0][:, 0], []
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
def test_decode_of_rows(name, seed, lengths, shape, size, window):  # type: ignore[no-untyped-def]
    """Compare with the bits of attention over float32 pages of the same values, and with float64."""
    form = kernels(name)
    torch.manual_seed(seed)
    q, coded, floats, call = case_of(shape[1], shape[0], [(length, 1) for length in lengths], window, size)
    got = cpu.paged_attention_decode(form, q, coded, call)
    assert torch.equal(got, cpu.paged_attention_decode(form, q, floats, call))
    torch.testing.assert_close(got, exact(q, coded, call), rtol=2e-5, atol=2e-5)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "dim"), [(16, 576), (5, 29), (7, 96)])
def test_prompts_of_rows(name: str, heads: int, dim: int, window: int | None) -> None:
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
def test_nan_of_a_group_affects_exactly_the_rows_that_see_it(name: str) -> None:
    form = kernels(name)
    q, coded, _, call = case_of(64, 3, [(150, 1), (200, 1)])
    clean = cpu.paged_attention_decode(form, q, coded, call)
    place = int(call.block_tables[1, 10]), 3, 0, 1  # the second group of token 163
    scale_of(coded)[place] = torch.nan
    got = cpu.paged_attention_decode(form, q, coded, call)
    assert got[1].isnan().all() and torch.equal(got[0], clean[0])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_mixed_batches_of_rows_on_every_backend(
    compiled: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, kernels() if compiled else "turned off by this test")
    q, coded, floats, call = case_of(96, 6, [(50, 40), (139, 1), (0, 20), (30, 3)])
    own = select_backend("cpu", deterministic=deterministic)
    got = own.paged_attention(q, coded, call)
    torch.testing.assert_close(got, reference.paged_attention(q, floats, call), rtol=2e-5, atol=2e-5)
    if deterministic:
        one = next(part for _, length, part in call.sequences() if length == 90)
        parts = [own.paged_attention(q[a:b], coded, one.slice_tokens(a, b)) for a, b in pairwise((0, 1, 7, 40))]
        assert torch.equal(torch.cat(parts), got[:40])


@pytest.mark.parametrize("shapes", [[(1030, 1), (70, 1)], [(70, 1)]])
def test_threads_do_not_change_the_bits_of_rows(shapes: list[tuple[int, int]]) -> None:
    form = kernels()
    q, coded, _, call = case_of(576, 16, shapes)
    same_on_threads(lambda: cpu.paged_attention_decode(form, q, coded, call), 1, 3)


def test_unsuitable_pages_of_rows_are_refused(form: Library) -> None:
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
    found = kernels()
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
