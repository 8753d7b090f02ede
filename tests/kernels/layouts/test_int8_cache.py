"""int8 pages: quantization of heads, rotation of cached keys, and attention over codes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.attention_case import decode_call
from helpers.code_pages import pages_of_codes
from helpers.cpu_kernels import FORMS, PACKED_FORMS, at_the_end_of_memory, choose, kernels
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels_helpers.checks import same_on_threads

from windlass.kernels import AttentionCall, KVPages, cpu, select_backend
from windlass.kernels.cpu.library import Library
from windlass.kernels.layouts import kv_pages as int8_layout
from windlass.kernels.torch import reference


def int8_pages(kv_heads: int, dim: int, value_dim: int, blocks: int = 3, size: int = 16) -> KVPages:
    """Return pages with random codes and scales."""
    codes = [torch.randint(-127, 128, (blocks, size, kv_heads, d)).to(torch.int8) for d in (dim, value_dim)]
    scales = [torch.rand(blocks, size, kv_heads) / 60 + 1e-3 for _ in range(2)]
    return pages_of_codes(codes[0], scales[0], codes[1], scales[1])


def rows_of(pages: KVPages) -> dict[str, torch.Tensor]:
    """Return the contents by token: codes [slots, Hkv, D], keys padded to whole quads, and scales [slots, Hkv]."""
    assert pages.key_scale is not None
    assert pages.value_scale is not None
    rows = {"key": int8_layout.key_rows(pages.key), "value": int8_layout.value_rows(pages.value)}
    rows |= {"key_scale": pages.key_scale.transpose(1, 2), "value_scale": pages.value_scale.transpose(1, 2)}
    return {name: part.flatten(0, 1) for name, part in rows.items()}


def copy_of(pages: KVPages) -> KVPages:
    assert pages.key_scale is not None
    assert pages.value_scale is not None
    return KVPages(pages.key.clone(), pages.value.clone(), pages.key_scale.clone(), pages.value_scale.clone())


def dequantized(pages: KVPages, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as float64 [slots, Hkv, D]."""
    rows = rows_of(pages)
    keys, values = (rows[name].double() * rows[f"{name}_scale"].double()[..., None] for name in ("key", "value"))
    return keys[..., :dim], values


def poison(pages: KVPages, seen: torch.Tensor) -> None:
    """Fill tokens that are not seen [num_blocks, P] with any codes, including -128, and scales of NaN."""
    blocks, tokens = (~seen).nonzero(as_tuple=True)
    slots = blocks * pages.block_size + tokens
    heads, quads, value_dim = pages.num_kv_heads, pages.key.shape[3], pages.value_dim
    keys, values = (torch.randint(-128, 128, (len(slots), heads, d)).to(torch.int8) for d in (4 * quads, value_dim))
    int8_layout.put_keys(pages.key, slots, keys)
    int8_layout.put_values(pages.value, slots, values)
    for scale in (pages.key_scale, pages.value_scale):
        assert scale is not None
        int8_layout.put_scales(scale, slots, torch.full((len(slots), heads), torch.nan))


def append(form: Library | None, pages: KVPages, q, k, v, cos, sin, q_scale, slots) -> None:  # type: ignore[no-untyped-def]
    if form is None:
        reference.rotate_and_append(q, k, v, cos, sin, q_scale, pages, slots)
    else:
        cpu.rotate_and_append(form, q, k, v, cos, sin, q_scale, pages, slots)


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
    assert torch.equal(int8_layout.key_rows(pages.key)[..., :dim], keys)
    assert torch.equal(int8_layout.value_rows(pages.value), values)
    assert (int8_layout.key_rows(pages.key)[..., dim:] == 0).all()
    slots = torch.randperm(64)[:9]
    assert torch.equal(int8_layout.take_keys(pages.key, slots)[..., :dim], keys.flatten(0, 1)[slots])
    assert torch.equal(int8_layout.take_values(pages.value, slots), values.flatten(0, 1)[slots])
    assert torch.equal(int8_layout.take_scales(pages.key_scale, slots), scale.flatten(0, 1)[slots])


@settings(max_examples=20, deadline=None)
@example(seed=1, tokens=9, heads=(8, 1), dims=(512, 512), half=256, dtype=torch.bfloat16, size=1.0)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 20),
    heads=st.sampled_from([(1, 1), (6, 3), (8, 1)]),
    dims=st.sampled_from([(64, 64), (17, 3), (80, 96), (1, 1), (6, 33), (10, 40)]),
    half=st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
)
@pytest.mark.parametrize("name", [*FORMS, "plain torch"])
def test_append(name, seed, tokens, heads, dims, half, dtype, size):  # type: ignore[no-untyped-def]
    """Heads are within half a step of their float64 rotation, with a largest code of 127. Other slots are unchanged."""
    form = None if name == "plain torch" else kernels(name)
    torch.manual_seed(seed)
    (q_heads, kv_heads), (dim, value_dim) = heads, dims
    half = min(half, dim // 2)
    pages = int8_pages(kv_heads, dim, value_dim)
    before = copy_of(pages)
    q, k = ((torch.randn(tokens, h, dim) * size).to(dtype) for h in (q_heads, kv_heads))
    v = (torch.randn(tokens, kv_heads, value_dim) * size).to(dtype)
    angle = torch.rand(tokens, half, dtype=torch.float64) * 100
    slots = torch.randperm(48)[:tokens]
    rotated_q, q_scale = q.clone(), torch.rand(tokens) + 0.5
    append(form, pages, rotated_q, k, v, angle.cos().float(), angle.sin().float(), q_scale, slots)

    c, s = angle.cos()[:, None], angle.sin()[:, None]
    first, second = k[..., :half].double(), k[..., half : 2 * half].double()
    rotated = torch.cat((first * c - second * s, second * c + first * s, k[..., 2 * half :].double()), dim=-1)
    rows = rows_of(pages)
    for got, name, want in zip(dequantized(pages, dim), ("key", "value"), (rotated, v.double()), strict=True):
        largest = want.abs().amax(dim=-1, keepdim=True)
        assert ((got[slots] - want).abs() <= largest * (0.5 / 127 + 2e-6)).all()
        assert (rows[name][slots].abs().amax(dim=-1) == 127).all()
    assert (rows["key"][..., dim:] == 0).all()
    plain = copy_of(before)
    expected_q = q.clone()
    reference.rotate_and_append(expected_q, k, v, angle.cos().float(), angle.sin().float(), q_scale, plain, slots)
    torch.testing.assert_close(rotated_q, expected_q, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5 * size)
    # Values are not rotated, so that their codes equal those of plain torch.
    assert torch.equal(pages.value, plain.value)
    assert torch.equal(pages.value_scale, plain.value_scale)
    others = torch.ones(48, dtype=torch.bool)
    others[slots] = False
    for name, old in rows_of(before).items():
        assert torch.equal(rows[name][others], old[others])


@pytest.mark.parametrize("name", [*FORMS, "plain torch"])
def test_extreme_heads(name: str) -> None:
    """Zeros, the smallest and the largest numbers, and an outlier. NaN and infinity affect only their own head."""
    form = None if name == "plain torch" else kernels(name)
    rows = torch.randn(9, 2, 20)
    rows[0] = 0.0
    rows[1] = 1e-45
    rows[2] *= 1e-36
    rows[3] *= 3e37
    rows[4] = 0.01
    rows[4, :, 3] = 1e6
    rows[5, 0, 19] = torch.nan
    rows[6, 0, 0] = torch.inf
    rows[7, 0, 8] = -torch.inf
    pages = int8_pages(2, 20, 20)
    none, slots = torch.empty(9, 0), torch.arange(3, 12)
    append(form, pages, rows[:, :1].clone(), rows, rows, none, none, torch.ones(9), slots)
    keys, values = dequantized(pages, 20)
    assert torch.equal(keys[slots].nan_to_num(), values[slots].nan_to_num())
    got = keys[slots]
    assert (got[:3] == 0.0).all()
    assert got[5:8, 0].isnan().all()
    finite = torch.ones(9, 2, dtype=torch.bool)
    finite[5:8, 0] = False
    step = rows.double().abs().amax(dim=-1, keepdim=True) / 127
    assert ((got - rows.double()).abs() <= step * 0.501 + 1e-28)[finite].all()


@settings(max_examples=20, deadline=None)
@example(seed=1, kv_heads=2, dims=(512, 512), half=256, elsewhere=5, in_place=3)
@given(
    seed=st.integers(0, 2**31),
    kv_heads=st.integers(1, 4),
    dims=st.sampled_from([(64, 64), (17, 3), (80, 5), (2, 2), (6, 40)]),
    half=st.integers(0, 40),
    elsewhere=st.integers(0, 20),
    in_place=st.integers(0, 8),
)
@pytest.mark.parametrize("name", [*FORMS, "plain torch"])
def test_rerotations(name, seed, kv_heads, dims, half, elsewhere, in_place):  # type: ignore[no-untyped-def]
    """Re-rotated keys are rounded once; values, keys without pairs and all other slots keep their bits."""
    form = None if name == "plain torch" else kernels(name)
    torch.manual_seed(seed)
    dim, value_dim = dims
    half = min(half, dim // 2)
    pages = int8_pages(kv_heads, dim, value_dim)
    before = copy_of(pages)
    order = torch.randperm(48)
    sources, targets = order[:elsewhere], order[20 : 20 + elsewhere]
    sources, targets = (torch.cat((part, order[40 : 40 + in_place])) for part in (sources, targets))
    angle = torch.randn(len(sources), half, dtype=torch.float64) * 100
    cos, sin = angle.cos().float(), angle.sin().float()
    if form is None:
        reference.rerotate_cached_keys(pages, sources, targets, cos, sin)
    else:
        cpu.rerotate_cached_keys(form, pages, sources, targets, cos, sin)
    old, new = dequantized(before, dim)[0], dequantized(pages, dim)[0]
    first, second = old[sources][..., :half], old[sources][..., half : 2 * half]
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    want = torch.cat((first * c - second * s, second * c + first * s, old[sources][..., 2 * half :]), dim=-1)
    if half:
        assert ((new[targets] - want).abs() <= want.abs().amax(dim=-1, keepdim=True) * (0.5 / 127 + 2e-6)).all()
    others = torch.ones(48, dtype=torch.bool)
    others[targets] = False
    rows, had = rows_of(pages), rows_of(before)
    for name in rows:
        assert torch.equal(rows[name][others], had[name][others])
        if name.startswith("value") or not half:
            assert torch.equal(rows[name][targets], had[name][sources])
    assert (rows["key"][..., dim:] == 0).all()


@pytest.mark.parametrize("name", [*FORMS, "plain torch"])
def test_values_move_only_on_request(name: str) -> None:
    pages = int8_pages(2, 16, 16)
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
    pages = int8_pages(2, 64, 64)
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
def test_decode(name, seed, lengths, heads, dims, size, window, soft_cap, sinks):  # type: ignore[no-untyped-def]
    """Compare with attention over float32 pages of the same values. Invisible scales and codes may have any value."""
    form = kernels(name)
    torch.manual_seed(seed)
    (q_heads, kv_heads), (dim, value_dim) = heads, dims
    counts = [-(-n // size) for n in lengths]
    pages = int8_pages(kv_heads, dim, value_dim, sum(counts) + 1, size)
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
    lanes = {"avx2_vnni": 8, "8 lanes vnni": 8, "avx512_vnni": 16, "16 lanes vnni": 16, "neon_dot": 4}.get(name)
    tolerance = 1e-4 if lanes and value_dim % lanes == 0 else 2e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PACKED_FORMS)
def test_rows_of_one_prompt_have_the_same_bits_alone(name: str) -> None:
    """Packs of rows share a table, at every position around the boundaries of chunks and splits."""
    form = kernels(name)
    for first, heads, dim, window in ((120, (8, 2), 64, None), (505, (3, 3), 128, None), (640, (16, 1), 64, 200)):
        pages = int8_pages(heads[1], dim, dim, blocks=90)
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
def test_nan_affects_exactly_the_rows_that_see_it(name: str) -> None:
    form = kernels(name)
    pages = int8_pages(2, 16, 32, blocks=20)
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
    pages = int8_pages(kv_heads, 64, 64, blocks=70)
    q, lengths = torch.randn(2, 16, 64), torch.tensor([length, 70])
    table = torch.randperm(70)[None].int().repeat(2, 1)
    call = decode_call(table, lengths, torch.ones(2), 0.125)
    same_on_threads(lambda: cpu.paged_attention_decode(form, q, pages, call), 1, 3, 6)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_mixed_batches_on_every_backend(compiled: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, kernels("generic") if compiled else "turned off by this test")
    pages = int8_pages(2, 16, 16, blocks=30, size=16)
    table = torch.randperm(30).view(3, 10).int()
    q, temperature = torch.randn(61, 4, 16), torch.rand(61) + 0.5
    call = AttentionCall(table, torch.tensor([0, 40, 41, 61]), torch.tensor([90, 140, 20]), temperature, 0.25)
    got = select_backend("cpu", deterministic=deterministic).paged_attention(q, pages, call)
    keys, values = (part.float().view(30, 16, 2, 16) for part in dequantized(pages, 16))
    want = reference.paged_attention(q, KVPages(keys, values), call)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=5e-6)
    torch.testing.assert_close(reference.paged_attention(q, pages, call), want, rtol=1e-6, atol=1e-6)


def test_nothing_past_the_operands_is_read_or_written(form: Library) -> None:
    for dim in (5, 19, 64):
        pages = KVPages(*(at_the_end_of_memory(part) for part in vars_of(int8_pages(1, dim, dim, 2))))
        index = at_the_end_of_memory(torch.arange(32))
        x = at_the_end_of_memory(torch.randn(32, 1, dim))
        cos, sin = (at_the_end_of_memory(torch.rand(32, dim // 2)) for _ in range(2))
        append(form, pages, x, x.clone(), at_the_end_of_memory(x), cos, sin, torch.ones(32), index)
        cpu.rerotate_cached_keys(form, pages, index, index, cos, sin)
        table = at_the_end_of_memory(torch.arange(2, dtype=torch.int32)[None])
        single = decode_call(table, torch.tensor([32]), torch.ones(1), 1.0)
        rows = AttentionCall(table, torch.tensor([0, 32]), torch.tensor([32]), torch.ones(32), 1.0)
        assert torch.isfinite(cpu.paged_attention_decode(form, x[:1], pages, single)).all()
        assert torch.isfinite(cpu.paged_attention_prefill(form, x, pages, rows)).all()


def vars_of(pages: KVPages) -> list[torch.Tensor]:
    assert pages.key_scale is not None
    assert pages.value_scale is not None
    return [pages.key, pages.value, pages.key_scale, pages.value_scale]


def test_slots_outside_the_pages_are_refused(form: Library) -> None:
    pages = int8_pages(2, 16, 16)
    before, x, half = copy_of(pages), torch.randn(2, 2, 16), torch.ones(2, 8)
    with pytest.raises(IndexError, match="past"):
        append(form, pages, x.clone(), x, x, half, half, torch.ones(2), torch.tensor([1, 48]))
    for source, target in ((48, 0), (0, 48), (-1, 0), (0, -1)):
        operands = (pages, torch.tensor([3, source]), torch.tensor([9, target]), half, half)
        with pytest.raises(IndexError, match="outside"):
            cpu.rerotate_cached_keys(form, *operands)
    append(form, pages, x.clone(), x, x, half, half, torch.ones(2), torch.tensor([-1, -5]))  # padding
    for got, had in zip(vars_of(pages), vars_of(before), strict=True):
        assert torch.equal(got, had)


def rerotate_nothing(pages: KVPages) -> None:
    """Check the pages by a call without entries."""
    none, half = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)
    cpu.rerotate_cached_keys(cpu.load(), pages, none, none, half, half)


def test_unsuitable_scales_are_refused() -> None:
    kernels("generic")
    pages, q = int8_pages(2, 16, 16), torch.randn(1, 4, 16)
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
    kernels("generic")
    pages, other = int8_pages(2, 16, 16), int8_pages(2, 20, 16, blocks=2)
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
        int8_pages(1, 8, 8, size=24)
