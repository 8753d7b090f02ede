"""Latent attention: products by head and the norm against float64, and attention that uses keys as values."""

from __future__ import annotations

import pytest
import torch
from helpers.cpu_kernels import at_the_end_of_memory

from windlass.kernels import AttentionCall, KeyRanges, KVPages, cpu, page_tensor_shapes
from windlass.kernels.backend import BackendOptions
from windlass.kernels.cpu import attention_bindings, elementwise_bindings, load
from windlass.kernels.cpu.library import Library
from windlass.kernels.torch import reference
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

TYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Rotated, plain, value and latent dims: those of DeepSeek, and some that fill no vector.
SHAPES = [(64, 128, 128, 512), (8, 12, 10, 24), (2, 1, 3, 5), (4, 7, 33, 67)]


def operands(
    shape: tuple[int, int, int, int], x_type: torch.dtype, up_type: torch.dtype, tokens: int = 6, heads: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return strided queries and attention results, and the matrices of the heads."""
    rotary, plain, values, dim = shape
    q = torch.randn(tokens, heads, rotary + plain + 3).to(x_type)[:, :, : rotary + plain]
    attended = torch.randn(tokens, heads, rotary + dim).to(x_type)[:, :, rotary:]
    return q, attended, torch.randn(heads, plain + values, dim).to(up_type) / dim**0.5


def expected_queries(q: torch.Tensor, up: torch.Tensor, rotary: int) -> torch.Tensor:
    plain = q.shape[2] - rotary
    products = torch.einsum("thn,hnc->thc", q[..., rotary:].double(), up[:, :plain].double())
    return torch.cat((q[..., :rotary].double(), products), dim=-1)


def expected_values(attended: torch.Tensor, up: torch.Tensor, values: int) -> torch.Tensor:
    return torch.einsum("thc,hvc->thv", attended.double(), up[:, -values:].double()).flatten(1)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    allowed = 2e-5 + 1.01 * ROUNDING[got.dtype] * want.abs()
    assert got.shape == want.shape and ((got.double() - want).abs() <= allowed).all()


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("x_type", "up_type"), [(a, b) for a in TYPES for b in TYPES])
def test_products_by_head(
    form: Library, shape: tuple[int, int, int, int], x_type: torch.dtype, up_type: torch.dtype
) -> None:
    rotary, _, values, _ = shape
    q, attended, up = operands(shape, x_type, up_type)
    assert_near(attention_bindings.latent_queries(form, q, up, rotary), expected_queries(q, up, rotary))
    assert_near(attention_bindings.latent_values(form, attended, up, values), expected_values(attended, up, values))


@pytest.mark.parametrize("backend", [TorchBackend, RowIndependentBackend])
def test_plain_torch_agrees(backend: type[TorchBackend]) -> None:
    bound = backend(BackendOptions(torch.device("cpu")))
    for shape in SHAPES:
        q, attended, up = operands(shape, torch.float32, torch.bfloat16)
        assert_near(bound.latent_queries(q, up, shape[0]), expected_queries(q, up, shape[0]))
        assert_near(bound.latent_values(attended, up, shape[2]), expected_values(attended, up, shape[2]))


def test_a_token_has_the_same_bits_alone(form: Library) -> None:
    for shape in SHAPES:
        q, attended, up = operands(shape, torch.float32, torch.bfloat16, tokens=11)
        queries = attention_bindings.latent_queries(form, q, up, shape[0])
        values = attention_bindings.latent_values(form, attended, up, shape[2])
        for t in range(11):
            assert torch.equal(attention_bindings.latent_queries(form, q[t : t + 1], up, shape[0])[0], queries[t])
            assert torch.equal(attention_bindings.latent_values(form, attended[t : t + 1], up, shape[2])[0], values[t])


@pytest.mark.parametrize("type_", TYPES)
def test_nothing_past_the_operands_is_read(form: Library, type_: torch.dtype) -> None:
    for shape in SHAPES[1:]:
        q, attended, up = (at_the_end_of_memory(x.contiguous()) for x in operands(shape, type_, type_))
        attention_bindings.latent_queries(form, q, up, shape[0])
        attention_bindings.latent_values(form, attended, up, shape[2])
        x = at_the_end_of_memory(torch.randn(3, shape[3]).to(type_))
        elementwise_bindings.rms_norm_in_place(form, x, at_the_end_of_memory(torch.ones(shape[3])), 1e-6)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("dim", [512, 24, 5, 67])
def test_norms_in_place_do_not_change_the_rest_of_a_row(form: Library, type_: torch.dtype, dim: int) -> None:
    rows = torch.randn(7, 8 + dim + 2).to(type_)
    weight, before = torch.rand(dim) + 0.5, rows.clone()
    x = before[:, 8 : 8 + dim].double()
    want = x / (x.square().mean(dim=1, keepdim=True) + 1e-3).sqrt() * weight.double()
    elementwise_bindings.rms_norm_in_place(form, rows[:, 8 : 8 + dim], weight, 1e-3)
    assert_near(rows[:, 8 : 8 + dim], want)
    assert torch.equal(rows[:, :8], before[:, :8]) and torch.equal(rows[:, 8 + dim :], before[:, 8 + dim :])
    plain = before.clone()
    TorchBackend(BackendOptions(torch.device("cpu"))).rms_norm_in_place(plain[:, 8 : 8 + dim], weight, 1e-3)
    assert_near(plain[:, 8 : 8 + dim], want)


@pytest.mark.parametrize(("heads", "dim"), [(16, 576), (40, 288), (5, 29)])
@pytest.mark.parametrize("page_type", TYPES)
def test_attention_with_keys_as_values(form: Library, heads: int, dim: int, page_type: torch.dtype) -> None:
    """Sequences of one and of several new tokens, without and with key ranges."""
    lengths, news, blocks = [300, 70, 33], [1, 9, 3], 40
    pages = KVPages(
        *(torch.randn(shape).to(kind) for shape, kind in page_tensor_shapes(blocks, 16, 1, dim, 0, page_type))
    )
    tables = torch.randperm(blocks)[: 3 * 12].view(3, 12).repeat(1, 2)[:, :19].to(torch.int32).contiguous()
    q = torch.randn(sum(news), heads, dim)
    start = torch.tensor([0, 1, 10, 13])
    call = AttentionCall(tables, start, torch.tensor(lengths), torch.rand(13) + 0.5, dim**-0.5)
    seen = pages.with_keys_as_values
    want = reference.paged_attention(q, seen, call)
    got = attention_bindings.paged_attention_prefill(form, q, seen, call)
    assert (got - want).abs().max() < 1e-5
    rows, own = call.decode_part() or (None, None)
    assert rows is not None and own is not None
    decoded = attention_bindings.paged_attention_decode(form, q[rows], seen, own)
    assert (decoded - want[rows]).abs().max() < 1e-5
    query_copies = torch.cat((q, torch.randn(13, heads, dim)))
    first = torch.tensor([[16, 300], [16, 70], [16, 33]])
    ranged = AttentionCall(
        *(tables, start, torch.tensor(lengths), call.score_scale, dim**-0.5),
        ranges=KeyRanges(
            first, torch.stack((start[:3] + 13, start[:3]), dim=1).contiguous(), torch.full((3, 2), 10**6)
        ),
    )
    want = reference.paged_attention(query_copies, seen, ranged)
    got = attention_bindings.paged_attention_prefill(form, query_copies, seen, ranged)
    assert (got - want).abs().max() < 1e-5


def test_appending_and_rerotation_do_not_change_latent_dims(form: Library) -> None:
    pages = KVPages(
        *(torch.zeros(shape, dtype=kind) for shape, kind in page_tensor_shapes(4, 16, 1, 40, 0, torch.bfloat16))
    )
    other = KVPages(pages.key.clone(), pages.value.clone())
    q, k, angle = torch.randn(3, 5, 40), torch.randn(3, 1, 40), torch.rand(3, 4)
    slots, moved = torch.tensor([7, 20, 33]), torch.tensor([50, 51, 52])
    own, theirs = q.clone(), q.clone()
    operands_ = (k[:, :, :0], angle.cos(), angle.sin(), torch.full((3,), 1.5))
    cpu.rotate_and_append(form, own, k, *operands_, pages, slots)
    reference.rotate_and_append(theirs, k, *operands_, other, slots)
    assert (own - theirs).abs().max() < 1e-6 and torch.equal(own[..., 8:], q[..., 8:])
    rows = pages.key.view(-1, 40)
    assert torch.equal(rows[slots][:, 8:], k[:, 0, 8:].bfloat16())
    cpu.rerotate_cached_keys(form, pages, slots, moved, angle.cos(), angle.sin())
    reference.rerotate_cached_keys(other, slots, moved, angle.cos(), angle.sin())
    assert torch.equal(rows[moved][:, 8:], rows[slots][:, 8:])
    assert (rows[moved].float() - other.key.view(-1, 40)[moved].float()).abs().max() < 0.05


def test_unsuitable_operands_are_refused() -> None:
    q, attended, up = operands(SHAPES[1], torch.float32, torch.float32)
    with pytest.raises(ValueError, match="does not fit"):
        attention_bindings.latent_queries(load(), q, up, 21)
    with pytest.raises(ValueError, match="does not fit"):
        attention_bindings.latent_values(load(), attended[:, :, :20], up, 10)
    with pytest.raises(ValueError, match="for 2 heads"):
        attention_bindings.latent_values(load(), attended[:, :2], up, 10)
    with pytest.raises(ValueError, match="weight"):
        elementwise_bindings.rms_norm_in_place(load(), torch.randn(2, 8), torch.ones(7), 1e-6)
