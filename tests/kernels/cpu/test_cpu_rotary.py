"""Rotary angles, rotation of new keys and of cached ones, against float64 formulas and plain torch."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from helpers.code_pages import pages_of_codes
from helpers.cpu_kernels import FORMS, at_the_end_of_memory, choose, kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_helpers.checks import ROUNDING, TYPES, assert_near, same_bytes

from windlass.kernels import KVPages, cpu, select_backend
from windlass.kernels.cpu import attention_bindings, load
from windlass.kernels.cpu.library import Library
from windlass.kernels.torch import reference, row_independent

TWO_PI = Fraction("6.28318530717958647692528676655900576839433879875021164194989")


# -- angles --------------------------------------------------------------------------------------------------------


def test_angles_of_ten_million_tokens_and_more(form: Library) -> None:
    inv_freq = (5e5 ** -(torch.arange(31, dtype=torch.float64) / 31)).view(1, 1, 31)
    for limit in (10**7, 2**31):
        positions = torch.cat((torch.arange(8), torch.randint(limit // 2, limit, (64,))))
        cos, sin = cpu.rotary_angles(form, inv_freq, torch.zeros_like(positions), positions)
        plain = row_independent.rotary_angles(inv_freq, torch.zeros_like(positions), positions)
        assert torch.equal(cos, plain[0])
        assert torch.equal(sin, plain[1])
        worst = 0.0
        for t, position in enumerate(positions.tolist()):
            for j, frequency in enumerate(inv_freq[0, 0].tolist()):
                rest = float(Fraction(frequency) * position % TWO_PI)
                worst = max(worst, abs(float(cos[0, t, j]) - math.cos(rest)), abs(float(sin[0, t, j]) - math.sin(rest)))
        assert worst < (1e-7 if limit == 10**7 else 3e-7)


def test_angles_in_every_quarter_turn(form: Library) -> None:
    """The argument reduction changes at multiples of pi / 4. Above 3e9 radians the C library reduces."""
    quarter = math.pi / 4 * torch.arange(1, 65, dtype=torch.float64)
    inv_freq = torch.cat((quarter, quarter + 1e-9, quarter - 1e-9, torch.tensor([1e-300, 0.0, 1e9, 3e9, 1e15])))
    positions = torch.tensor([0, 1, 3, 1023])
    cos, sin = cpu.rotary_angles(form, inv_freq.view(1, 1, -1), torch.zeros_like(positions), positions)
    for t, position in enumerate(positions.tolist()):
        for j, frequency in enumerate(inv_freq.tolist()):
            angle = frequency * position
            assert abs(float(cos[0, t, j]) - math.cos(angle)) < 3.1e-8
            assert abs(float(sin[0, t, j]) - math.sin(angle)) < 3.1e-8


def test_angles_of_rows_and_groups(form: Library) -> None:
    inv_freq = torch.rand(3, 4, 10, dtype=torch.float64)
    rows, positions = torch.tensor([3, 0, 3, 1, 2]), torch.tensor([5, 6, 1000, 0, 9])
    got = cpu.rotary_angles(form, inv_freq, rows, positions)
    want = reference.rotary_angles(inv_freq, rows, positions)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == (3, 5, 10)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=6e-8)
    assert cpu.rotary_angles(form, inv_freq, rows[:0], positions[:0])[0].shape == (3, 0, 10)
    assert cpu.rotary_angles(form, inv_freq[:, :, :0].contiguous(), rows, positions)[0].shape == (3, 5, 0)
    for bad in (4, -1):
        with pytest.raises(IndexError, match="table of 4"):
            cpu.rotary_angles(form, inv_freq, torch.tensor([bad]), positions[:1])


def test_unsuitable_operands_of_angles_are_refused() -> None:
    kernels()
    inv_freq, index = torch.rand(1, 2, 8, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="float32"):
        cpu.rotary_angles(load(), inv_freq.float(), index, index)
    with pytest.raises(ValueError, match="float64"):
        cpu.rotary_angles(load(), inv_freq[..., ::2], index, index)
    with pytest.raises(ValueError, match="int64"):
        cpu.rotary_angles(load(), inv_freq, index, index.int())
    with pytest.raises(ValueError, match=r"\[3\]"):
        cpu.rotary_angles(load(), inv_freq, index, index[:2])


# -- new tokens ---------------------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Multiply each pair (j, j + d/2) as one complex number by cos + i sin, in float64."""
    half = cos.shape[-1]
    x = x.double()
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def angles(positions: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = positions.double()[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
    return turn.cos(), turn.sin()


@pytest.mark.quick_cases(25)
@pytest.mark.parametrize(("type_", "page_type"), itertools.product(TYPES, TYPES))
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 20), (17, 8), (128, 16), (256, 128), (512, 256), (6, 0)])
def test_rotate_and_append(form: Library, type_: torch.dtype, page_type: torch.dtype, dim: int, half: int) -> None:
    tokens, q_heads, kv_heads, value_dim, blocks, size = 9, 6, 2, dim // 2 + 1, 4, 8
    fused = torch.randn(tokens, (q_heads + kv_heads) * dim + kv_heads * value_dim).to(type_)
    q_part, k_part, v_part = fused.split([q_heads * dim, kv_heads * dim, kv_heads * value_dim], dim=1)
    q, k = q_part.view(tokens, q_heads, dim), k_part.view(tokens, kv_heads, dim)
    v = v_part.view(tokens, kv_heads, value_dim)
    before = fused.clone()
    cos, sin = angles(torch.tensor([0, 1, 2, 77, 4095, 131071, 10**6, 2**24 + 1, 10**9]), half)
    q_scale = torch.rand(tokens) + 0.5
    keys = torch.randn(blocks, size, kv_heads, dim).to(page_type)
    values = torch.randn(blocks, size, kv_heads, value_dim).to(page_type)
    keys_before, values_before = keys.clone(), values.clone()
    slots = torch.randperm(blocks * size)[:tokens]
    slots[3] = -1
    old_q = q.clone()
    cpu.rotate_and_append(form, q, k, v, cos.float(), sin.float(), q_scale, KVPages(keys, values), slots)

    want = rotated(old_q, cos.float().double(), sin.float().double())
    want[..., : 2 * half] *= q_scale.double()[:, None, None]
    assert_near(q, want)
    assert torch.equal(fused[:, q_heads * dim :], before[:, q_heads * dim :])  # k and v are unchanged
    written = slots[slots >= 0]
    tokens_written = (slots >= 0).nonzero()[:, 0]
    flat_keys, flat_values = keys.view(-1, kv_heads, dim), values.view(-1, kv_heads, value_dim)
    assert_near(flat_keys[written], rotated(k, cos.float().double(), sin.float().double())[tokens_written])
    assert torch.equal(flat_values[written], v[tokens_written].float().to(page_type))
    others = torch.ones(blocks * size, dtype=torch.bool)
    others[written] = False
    assert torch.equal(flat_keys[others], keys_before.view(-1, kv_heads, dim)[others])
    assert torch.equal(flat_values[others], values_before.view(-1, kv_heads, value_dim)[others])


@pytest.mark.parametrize("page_type", [*TYPES, torch.int8])
def test_queries_alone(form: Library, page_type: torch.dtype) -> None:
    """Without heads of keys and values the pages are unchanged, for any slots."""
    q, q_scale, slots = torch.randn(3, 4, 16), torch.rand(3) + 0.5, torch.tensor([0, 5, 16])
    cos, sin = angles(torch.tensor([0, 7, 4095]), 8)
    if page_type == torch.int8:
        codes, scales = torch.randint(-127, 128, (2, 16, 2, 16)).to(torch.int8), torch.rand(2, 16, 2)
        pages = pages_of_codes(codes, scales, codes, scales)
    else:
        pages = KVPages(*torch.randn(2, 2, 16, 2, 16).to(page_type))
    planes = [one for one in (pages.key, pages.value, pages.key_scale, pages.value_scale) if one is not None]
    before, own = [plane.clone() for plane in planes], q.clone()
    none = q[:, :0]
    cpu.rotate_and_append(form, q, none, none, cos.float(), sin.float(), q_scale, pages, slots)
    want = rotated(own, cos.float().double(), sin.float().double()) * q_scale.double()[:, None, None]
    assert_near(q, want)
    reference.rotate_and_append(own, none, none, cos.float(), sin.float(), q_scale, pages, slots)
    assert_near(own, want)
    assert all(torch.equal(plane, old) for plane, old in zip(planes, before, strict=True))


def test_many_tokens_and_no_tokens(form: Library) -> None:
    tokens = 300
    q, k, v = torch.randn(tokens, 4, 64), torch.randn(tokens, 2, 64), torch.randn(tokens, 2, 64)
    cos, sin = angles(torch.arange(tokens), 32)
    pages = KVPages(torch.zeros(20, 16, 2, 64), torch.zeros(20, 16, 2, 64))
    want_q, want_k = rotated(q, cos, sin), rotated(k, cos, sin)
    slots = torch.arange(tokens).flip(0) + 16
    operands = q, k, v, cos.float(), sin.float(), torch.ones(tokens)
    cpu.rotate_and_append(form, *operands, pages, slots)
    assert_near(q, want_q, 3e-6)
    assert_near(pages.key.view(-1, 2, 64)[slots], want_k, 3e-6)
    assert torch.equal(pages.value.view(-1, 2, 64)[slots], v)
    before = pages.key.clone()
    cpu.rotate_and_append(form, *(x[:0] for x in operands), pages, slots[:0])
    assert torch.equal(pages.key, before)


def test_a_slot_past_the_pages_changes_nothing(form: Library) -> None:
    q, k = torch.randn(2, 2, 16), torch.randn(2, 1, 16)
    cos, sin = (x.float() for x in angles(torch.arange(2), 8))
    pages = torch.zeros(2, 4, 1, 16)
    before = q.clone()
    with pytest.raises(IndexError, match="slot"):
        cpu.rotate_and_append(
            form, q, k, k, cos, sin, torch.ones(2), KVPages(pages, pages.clone()), torch.tensor([0, 8])
        )
    assert torch.equal(q, before)
    assert not pages.any()


def test_unsuitable_operands_of_appending_are_refused() -> None:
    kernels()
    q, k, pages = torch.randn(2, 2, 16), torch.randn(2, 1, 16), torch.zeros(2, 4, 1, 16)
    narrow, codes, other = k.bfloat16(), pages.to(torch.int8), torch.randn(2, 2, 16)
    half, ones, slots = torch.zeros(2, 8), torch.ones(2), torch.tensor([0, 1])
    cpu.rotate_and_append(load(), q, k, k, half, half, ones, KVPages(pages, pages), slots)
    for own_k, own_pages, word in ((narrow, pages, "bfloat16"), (k, codes, "int8"), (other, pages, "fit")):
        with pytest.raises(ValueError, match=word):
            cpu.rotate_and_append(load(), q, own_k, k, half, half, ones, KVPages(own_pages, own_pages), slots)
    table = torch.zeros(2, 9)
    with pytest.raises(ValueError, match="18 rotary dims"):
        cpu.rotate_and_append(load(), q, k, k, table, table, torch.ones(2), KVPages(pages, pages), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="cos and sin"):
        cpu.rotate_and_append(
            load(), q, k, k, table[:, :4], table[:, :5], torch.ones(2), KVPages(pages, pages), torch.tensor([0, 1])
        )


# -- re-rotation ---------------------------------------------------------------------------------------------------


def pages_of(kv_heads: int, dim: int, value_dim: int, type_: torch.dtype, blocks: int = 5, size: int = 8) -> KVPages:
    key = torch.randn(blocks, size, kv_heads, dim).to(type_)
    return KVPages(key, torch.randn(blocks, size, kv_heads, value_dim).to(type_))


def copy_of(pages: KVPages) -> KVPages:
    return KVPages(pages.key.clone(), pages.value.clone())


def rerotate(form: Library, pages: KVPages, sources, targets, cos, sin) -> None:  # type: ignore[no-untyped-def]
    cpu.rerotate_cached_keys(form, pages, sources, targets, cos, sin)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kv_heads=st.integers(1, 5),
    dims=st.sampled_from([(64, 64), (17, 3), (128, 96), (6, 6), (1, 1), (80, 5)]),
    half=st.integers(0, 64),
    elsewhere=st.integers(0, 20),
    in_place=st.integers(0, 8),
    type_=st.sampled_from(TYPES),
)
@pytest.mark.parametrize("name", FORMS)
def test_rerotations(name, seed, kv_heads, dims, half, elsewhere, in_place, type_):  # type: ignore[no-untyped-def]
    """Compare re-rotated keys with float64. Their values and all other slots keep their bits."""
    form = kernels(name)
    torch.manual_seed(seed)
    dim, value_dim = dims
    half = min(half, dim // 2)
    pages = pages_of(kv_heads, dim, value_dim, type_, blocks=6)
    before = copy_of(pages)
    slots = torch.randperm(48)
    sources, targets = slots[:elsewhere], slots[20 : 20 + elsewhere]
    sources, targets = (torch.cat((part, slots[40 : 40 + in_place])) for part in (sources, targets))
    order = torch.randperm(len(sources))
    sources, targets = sources[order], targets[order]
    angle = torch.randn(len(sources), half + 3, dtype=torch.float64)[:, :half] * 100
    cos, sin = angle.cos().float(), angle.sin().float()
    rerotate(form, pages, sources, targets, cos, sin)

    old, new = before.key.view(48, kv_heads, dim), pages.key.view(48, kv_heads, dim)
    first, second = old[sources][..., :half].double(), old[sources][..., half : 2 * half].double()
    c, s = cos.double()[:, None], sin.double()[:, None]
    want = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    assert ((new[targets][..., : 2 * half].double() - want).abs() <= 1e-6 + ROUNDING[type_] * 1.01 * want.abs()).all()
    assert same_bytes(new[targets][..., 2 * half :], old[sources][..., 2 * half :])
    values = before.value.view(48, kv_heads, value_dim)
    assert same_bytes(pages.value.view(48, kv_heads, value_dim)[targets], values[sources])
    others = torch.ones(48, dtype=torch.bool)
    others[targets] = False
    assert same_bytes(new[others], old[others])
    assert same_bytes(pages.value.view(48, kv_heads, value_dim)[others], values[others])

    plain = copy_of(before)
    reference.rerotate_cached_keys(plain, sources, targets, cos, sin)
    torch.testing.assert_close(pages.key, plain.key, rtol=ROUNDING[type_] * 2, atol=2e-6)
    assert torch.equal(pages.value, plain.value)


@pytest.mark.parametrize("type_", TYPES)
def test_a_move_without_rotated_pairs_copies_any_bits(form: Library, type_: torch.dtype) -> None:
    """NaN keeps its payload, and adjacent data is not read."""
    pages = pages_of(3, 20, 7, type_)
    for part in (pages.key, pages.value):
        integers = bits(part)
        integers.copy_(torch.randint(-(2**15), 2**15, integers.shape).to(integers.dtype))
    if type_ == torch.float32:
        bits(pages.key).mul_(2**16).add_(0x7F80_0001)
    before = copy_of(pages)
    sources, targets, none = torch.arange(16), torch.arange(24, 40), torch.empty(16, 0)
    rerotate(form, pages, sources, targets, none, none)
    for got, want in ((pages.key, before.key), (pages.value, before.value)):
        got, want = bits(got.flatten(0, 1)), bits(want.flatten(0, 1))
        assert torch.equal(got[24:40], want[:16])
        assert torch.equal(got[:24], want[:24])


def test_nan_stays_in_its_slot(form: Library) -> None:
    pages = pages_of(2, 24, 24, torch.float32)
    flat = pages.key.view(-1, 2, 24)
    flat[::2] = torch.nan
    sources, targets = torch.tensor([1, 3, 5]), torch.tensor([0, 3, 8])
    angle = torch.rand(3, 9)
    rerotate(form, pages, sources, targets, angle.cos(), angle.sin())
    assert torch.isfinite(flat[targets]).all()
    assert flat[2].isnan().all()
    assert flat[10].isnan().all()


def test_many_rerotations_over_threads(form: Library) -> None:
    pages = pages_of(4, 64, 64, torch.bfloat16, blocks=200)
    plain = copy_of(pages)
    sources, targets = torch.randperm(800), 800 + torch.randperm(800)
    angle = torch.rand(800, 32) * 6
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    rerotate(form, pages, sources, targets, angle.cos(), angle.sin())
    torch.set_num_threads(before)
    reference.rerotate_cached_keys(plain, sources, targets, angle.cos(), angle.sin())
    torch.testing.assert_close(pages.key, plain.key, rtol=2**-7, atol=1e-6)
    assert torch.equal(pages.value, plain.value)


@pytest.mark.parametrize(("source", "target"), [(40, 0), (0, 40), (-1, 0), (0, -1)])
def test_a_slot_outside_the_pages_changes_nothing(form: Library, source: int, target: int) -> None:
    pages = pages_of(2, 16, 16, torch.float32)
    before = copy_of(pages)
    half = torch.ones(2, 8)
    with pytest.raises(IndexError, match="outside"):
        rerotate(form, pages, torch.tensor([3, source]), torch.tensor([9, target]), half, half)
    assert torch.equal(pages.key, before.key)
    assert torch.equal(pages.value, before.value)


@pytest.mark.parametrize(("source", "target"), [(40, 0), (0, 40), (-1, 0), (0, -1)])
def test_torch_refuses_slots_outside_the_pages(monkeypatch: pytest.MonkeyPatch, source: int, target: int) -> None:
    choose(monkeypatch, "turned off by this test")
    pages = pages_of(2, 16, 16, torch.float32)
    before = copy_of(pages)
    half = torch.ones(2, 8)
    with pytest.raises(IndexError, match="outside"):
        select_backend("cpu").rerotate_cached_keys(
            pages, torch.tensor([3, source]), torch.tensor([9, target]), half, half
        )
    assert torch.equal(pages.key, before.key)
    assert torch.equal(pages.value, before.value)


def test_nothing_past_the_operands_is_read_or_written(form: Library) -> None:
    for type_ in TYPES:
        key, value = (at_the_end_of_memory(torch.randn(2, 4, 1, 19).to(type_)) for _ in range(2))
        cos, sin = (at_the_end_of_memory(torch.rand(8, 7)) for _ in range(2))
        index = at_the_end_of_memory(torch.arange(8))
        cpu.rerotate_cached_keys(form, KVPages(key, value), index, index, cos, sin)
        inv_freq = at_the_end_of_memory(torch.rand(1, 8, 19, dtype=torch.float64))
        assert torch.isfinite(cpu.rotary_angles(form, inv_freq, index, index)[0]).all()


def test_values_move_only_on_request() -> None:
    for form in ("reference", "cpu"):
        pages = pages_of(2, 16, 16, torch.float32)
        before = copy_of(pages)
        sources, targets, angle = torch.arange(3), torch.arange(3) + 8, torch.rand(3, 8)
        if form == "cpu":
            cpu.rerotate_cached_keys(load(), pages, sources, targets, angle.cos(), angle.sin(), values=False)
        else:
            reference.rerotate_cached_keys(pages, sources, targets, angle.cos(), angle.sin(), values=False)
        assert same_bytes(pages.value, before.value)
        assert not torch.equal(pages.key.view(-1, 2, 16)[targets], before.key.view(-1, 2, 16)[targets])


def test_unsuitable_operands_of_rerotation_are_refused() -> None:
    kernels()
    pages, index, half = pages_of(2, 16, 16, torch.float32), torch.arange(2), torch.ones(2, 8)
    codes = KVPages(pages.key.to(torch.int8), pages.value.to(torch.int8))
    with pytest.raises(ValueError, match="int8"):
        cpu.rerotate_cached_keys(load(), codes, index, index, half, half)
    with pytest.raises(ValueError, match="18 rotary dims"):
        cpu.rerotate_cached_keys(load(), pages, index, index, torch.ones(2, 9), torch.ones(2, 9))
    with pytest.raises(ValueError, match="cos and sin"):
        cpu.rerotate_cached_keys(load(), pages, index, index, half, half[:1])
    with pytest.raises(ValueError, match="int64"):
        cpu.rerotate_cached_keys(load(), pages, index, index.int(), half, half)
    with pytest.raises(ValueError, match="contiguous"):
        apart = KVPages(pages.key[:, ::2], pages.value[:, ::2])
        cpu.rerotate_cached_keys(load(), apart, index, index, half, half)


# -- large appends bypass the caches ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "half", "shift"), [(64, 32, 0), (64, 16, 0), (48, 12, 0), (64, 32, 1), (40, 16, 0)])
def test_bypassing_the_caches_gives_the_same_bits(
    form: Library, monkeypatch: pytest.MonkeyPatch, dim: int, half: int, shift: int
) -> None:
    """For rows of whole, aligned vectors and for others. shift: floats by which the pages are misaligned."""
    tokens, heads, room = 40, 3, 6 * 8 * 3 * dim
    q, k, v = (torch.randn(tokens, heads, dim) for _ in range(3))
    angle, slots = torch.rand(tokens, half), torch.randperm(48)[:tokens]
    found = []
    for cache_bytes in (1 << 40, 0):
        monkeypatch.setattr(attention_bindings, "_cache_bytes", lambda size=cache_bytes: size)
        key, value = (torch.zeros(room + 16)[shift : shift + room].view(6, 8, heads, dim) for _ in range(2))
        turned = q.clone()
        operands = turned, k, v, angle.cos(), angle.sin(), torch.full((tokens,), 1.5), KVPages(key, value), slots
        cpu.rotate_and_append(form, *operands)
        found.append(torch.stack((key.view(-1, heads, dim)[slots], value.view(-1, heads, dim)[slots], turned)))
    assert torch.equal(*found)


def test_appends_larger_than_half_the_cache_bypass_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = KVPages(torch.empty(4, 16, 4, 64), torch.empty(4, 16, 4, 32))
    monkeypatch.setattr(attention_bindings, "_cache_bytes", lambda: 200 * 4 * (64 + 32) * 4)
    assert not attention_bindings._outgrows_caches(pages, 100)
    assert attention_bindings._outgrows_caches(pages, 101)


def test_the_cache_size_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, want in (("32768K\n", 32 << 20), ("8M\n", 8 << 20), ("", 32 << 20), ("some", 32 << 20)):
        (tmp_path / "size").write_text(text)
        monkeypatch.setattr(attention_bindings, "_CACHE_SIZE_FILE", tmp_path / "size")
        assert attention_bindings._cache_bytes.__wrapped__() == want
    monkeypatch.setattr(attention_bindings, "_CACHE_SIZE_FILE", tmp_path / "none")
    assert attention_bindings._cache_bytes.__wrapped__() == 32 << 20
