"""Triton's rotation, interpreted, against plain torch: new tokens, cached keys, and query copies."""

from __future__ import annotations

import pytest
import torch
from helpers.device import DEVICE
from kernels_helpers.interpreted import ON_THE_DEVICE, assert_near
from torch import Tensor

from windlass.kernels import KVPages, page_tensor_shapes
from windlass.kernels.torch import reference
from windlass.kernels.triton import rotary_embedding

pytestmark = ON_THE_DEVICE
FLOAT8 = torch.float8_e4m3fn
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, FLOAT8)
# Rotated keys are rounded twice. The interpreter truncates float32 to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.int8: 1e-6, FLOAT8: 2**-3}
# Head dim, rotated pairs, value dim.
SHAPES = ((16, 8, 16), (10, 3, 6), (12, 0, 4), (80, 16, 80), (96, 48, 96), (512, 256, 512))


def pages_of(kind: torch.dtype, dim: int, value_dim: int, heads: int = 2, device: str = DEVICE) -> KVPages:
    shapes = page_tensor_shapes(3, 16, heads, dim, value_dim, kind)
    return KVPages(*[torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes])


def planes(pages: KVPages) -> list[Tensor]:
    found = (pages.key, pages.value, pages.key_scale, pages.value_scale)
    return [plane.float() if plane.dtype == FLOAT8 else plane for plane in found if plane is not None]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("dim", "half", "value_dim"), SHAPES)
def test_new_tokens_and_rotation_of_cached_keys(kind: torch.dtype, dim: int, half: int, value_dim: int) -> None:
    tokens, heads, kv_heads = 4, 3, 2
    fused = torch.randn(tokens, (heads + kv_heads) * dim + kv_heads * value_dim)
    k = fused[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    v = fused[:, (heads + kv_heads) * dim :].view(tokens, kv_heads, value_dim)
    k[1, 0, 3], k[2, 1], v[0, 1, 1] = torch.nan, 0.0, torch.inf  # NaN, infinity and zeros are preserved
    k[0, 0] *= 1e-31
    angles, scale, slots = torch.randn(tokens, half), torch.rand(tokens), torch.tensor([5, -1, 17, 31])
    sources, targets, turn = torch.tensor([5, 17, 31]), torch.tensor([6, 17, 40]), torch.randn(3, half)
    found = []
    for form, device in ((reference, "cpu"), (rotary_embedding, DEVICE)):
        own = [x.to(device) for x in (k, v, angles.cos(), angles.sin(), scale)]
        pages, q = pages_of(kind, dim, value_dim, device=device), fused.to(device, copy=True)[:, : heads * dim]
        q = q.view(tokens, heads, dim)
        form.rotate_and_append(q, *own, pages, slots.to(device))
        own = [x.to(device) for x in (sources, targets, turn.cos(), turn.sin())]
        for values in (True, False):
            form.rerotate_cached_keys(pages, *own, values=values)
        found.append([x.cpu() for x in (q, *planes(pages))])
    for plain, own in zip(*found, strict=True):
        assert_near(own, plain, TOLERANCE[kind])


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_queries_alone(kind: torch.dtype) -> None:
    """Without heads of keys and values the pages are unchanged."""
    q, q_scale, slots = torch.randn(3, 4, 16), torch.rand(3) + 0.5, torch.tensor([0, 5, 16])
    angles, none, found = torch.randn(3, 8), q[:, :0], []
    for form in (reference, rotary_embedding):
        own, pages = q.clone(), pages_of(kind, 16, 16)
        before = [plane.clone() for plane in planes(pages)]
        form.rotate_and_append(own, none, none, angles.cos(), angles.sin(), q_scale, pages, slots)
        assert all(torch.equal(plane, old) for plane, old in zip(planes(pages), before, strict=True))
        found.append(own)
    assert_near(found[1], found[0], TOLERANCE[torch.float32])
    assert not torch.equal(found[0], q)


def test_float8_rounding_equals_torch() -> None:
    """All float8 numbers are preserved. Ties, underflow, overflow, zeros and NaN are rounded as in torch."""
    every = torch.arange(256).to(torch.uint8).view(FLOAT8).float()
    between = (every[:126] + every[1:127]) / 2
    odd = torch.tensor(
        [1e-9, 2**-10, -(2.0**-10), 449, 463.9, 470, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, -0.0]
    )
    x = torch.cat((every, between, -between, between.nextafter(between * 2), between.nextafter(between * 0), odd))
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 1, 64)
    pages, none = pages_of(FLOAT8, 64, 64, heads=1), torch.zeros(len(x), 0)
    slots = torch.arange(len(x)) + 5
    rotary_embedding.rotate_and_append(x.clone(), x, x, none, none, torch.ones(len(x)), pages, slots)
    for plane in (pages.key, pages.value):
        found, expected = plane.cpu().flatten(0, 2)[slots.cpu()], x[:, 0].cpu().clamp(-448, 448).to(FLOAT8)
        assert torch.equal(found.float().isnan(), expected.float().isnan())
        assert torch.equal(found.float().nan_to_num(), expected.float().nan_to_num())
        assert torch.equal(found.view(torch.uint8) >> 7, expected.view(torch.uint8) >> 7)


def test_slots_outside_the_pages_are_refused() -> None:
    pages, angles = pages_of(torch.float32, 8, 8), torch.zeros(1, 4)
    for slot in (-1, 48):
        with pytest.raises(IndexError, match="outside"):
            rotary_embedding.rerotate_cached_keys(pages, torch.tensor([0]), torch.tensor([slot]), angles, angles)


@pytest.mark.parametrize(("dim", "half"), [(16, 8), (10, 3), (6, 0), (512, 256)])
def test_rotated_query_copies(dim: int, half: int) -> None:
    q = torch.randn(3, 2, dim + 5)[:, :, :dim]
    rows, angles = torch.tensor([2, 0]), torch.randn(2, half)
    found = rotary_embedding.rotate_queries(q, rows, angles.cos(), angles.sin())
    assert_near(found, reference.rotate_queries(q, rows, angles.cos(), angles.sin()), 1e-6)
    assert found.is_contiguous()
    for row in (-1, 3):
        wrong = rotary_embedding.rotate_queries(q, torch.tensor([row, 0]), angles.cos(), angles.sin())
        assert wrong[3].isnan().all() and torch.equal(wrong[4:], found[4:])
    with pytest.raises(ValueError, match="cosines"):
        rotary_embedding.rotate_queries(q, rows, angles[:1].cos(), angles.sin())
