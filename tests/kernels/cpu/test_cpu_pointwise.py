"""rotate_and_append, rms_norm and gated activations against float64 formulas; and how the library is found."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.code_pages import pages_of_codes
from helpers.cpu_kernels import at_the_end_of_memory, kernels

from windlass.kernels import KVPages, cpu
from windlass.kernels.cpu import load
from windlass.kernels.cpu.library import Library
from windlass.kernels.torch import reference

TYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_near(got: torch.Tensor, want: torch.Tensor, slack: float = 1e-6) -> None:
    allowed = slack + ROUNDING[got.dtype] * 1.01 * want.abs()
    assert ((got.double() - want).abs() <= allowed).all(), (got.double() - want).abs().max()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Each pair (j, j + d/2) as one complex number times cos + i sin, in float64."""
    half = cos.shape[-1]
    x = x.double()
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def angles(positions: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = positions.double()[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
    return turn.cos(), turn.sin()


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
    assert torch.equal(fused[:, q_heads * dim :], before[:, q_heads * dim :])  # k and v are left alone
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
    """Keys and values without heads: pages stay as they are, whatever the slots say."""
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


def test_many_tokens_over_threads_and_no_tokens(form: Library) -> None:
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


def test_a_slot_past_the_pages_writes_nothing(form: Library) -> None:
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


def test_rotate_refusals_say_why() -> None:
    kernels("generic")
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


@pytest.mark.parametrize("type_", TYPES)
def test_rms_norm(form: Library, type_: torch.dtype) -> None:
    for rows, dim in ((1, 1), (3, 7), (5, 64), (2, 2049), (40, 1000)):
        x = (torch.randn(rows, dim + 5) * 3).to(type_)[:, :dim]
        weight = torch.randn(dim)
        want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert_near(cpu.rms_norm(form, x, weight, 1e-5), want, 2e-6)

        residual = torch.randn(rows, dim).to(type_)
        total = x + residual  # rounded to the type, as the sum that later layers see is
        want = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        got = cpu.rms_norm(form, x, weight, 1e-5, residual)
        assert torch.equal(residual, total)
        assert_near(got, want, 2e-6)
    fused = torch.randn(5, 7 * 40).to(type_)  # adjacent heads of q, k and v
    for heads in (fused.view(5, 7, 40)[:, :4], fused.view(5, 7, 40)[:, 4:6], fused[:, 3:39].unflatten(1, (2, 18))):
        weight = torch.randn(heads.shape[2])
        got = cpu.rms_norm(form, heads, weight, 1e-5)
        rows = heads.reshape(-1, heads.shape[2])
        assert torch.equal(got.view(rows.shape), cpu.rms_norm(form, rows, weight, 1e-5))
        assert got.is_contiguous() and torch.equal(heads.reshape(rows.shape), rows)
    values = torch.randn(5, 10, 512).to(type_)[:, 8:]  # adjacent to queries and keys
    want = values.double() / (values.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_near(cpu.rms_norm(form, values, torch.ones(512), 1e-6), want, 2e-6)
    assert cpu.rms_norm(form, torch.randn(0, 4).to(type_), torch.ones(4), 1e-5).shape == (0, 4)


@pytest.mark.parametrize("type_", TYPES)
def test_embed_rows(form: Library, type_: torch.dtype) -> None:
    for rows, dim in ((5, 1), (7, 15), (40, 64), (3, 2049)):
        table = at_the_end_of_memory(torch.randn(rows, dim).to(type_))
        ids = torch.tensor([rows - 1, 0, rows // 2, 0])
        assert torch.equal(cpu.embed_rows(form, table, ids), table[ids].float())
        assert torch.equal(cpu.embed_rows(form, table, ids, 1.7), table[ids].float() * 1.7)
        for dtype in TYPES:
            found = cpu.embed_rows(form, table, ids, 1.7, dtype=dtype)
            assert torch.equal(found, (table[ids].float() * 1.7).to(dtype))
        part = table[:, : dim // 2 + 1]
        assert torch.equal(cpu.embed_rows(form, part, ids), part[ids].float())
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="not a row"):
            cpu.embed_rows(form, table, torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="adjacent"):
        cpu.embed_rows(form, table.t(), ids)


@pytest.mark.parametrize("type_", TYPES)
def test_gated_activations(form: Library, type_: torch.dtype) -> None:
    for rows, dim in ((1, 1), (3, 7), (5, 64), (1, 9001)):
        gate_up = torch.cat((torch.randn(rows, dim) * 6, torch.randn(rows, dim + 3)), dim=1).to(type_)[:, : 2 * dim]
        gate, up = gate_up.double().chunk(2, dim=-1)
        assert_near(cpu.gated_activation(form, gate_up, "silu"), F.silu(gate) * up)
        want = F.gelu(gate, approximate="tanh") * up
        assert_near(cpu.gated_activation(form, gate_up, "gelu_tanh"), want, 4e-6)


def test_activations_at_the_ends_of_the_range(form: Library) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 89.0, -89.0, 1e4, -1e4, torch.inf, 3e38, torch.nan])
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    got = cpu.gated_activation(form, gate_up, "silu")[0]
    torch.testing.assert_close(got.double(), F.silu(gate.double()), rtol=1e-6, atol=1e-30, equal_nan=True)
    got = cpu.gated_activation(form, gate_up, "gelu_tanh")[0]
    want = F.gelu(gate.double(), approximate="tanh")
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-30, equal_nan=True)


def test_silu_is_close_over_the_whole_range(form: Library) -> None:
    gate = torch.linspace(-87.0, 88.0, 40001)
    got = cpu.gated_activation(form, torch.cat((gate, torch.ones_like(gate)))[None], "silu")[0]
    torch.testing.assert_close(got.double(), F.silu(gate.double()), rtol=1e-6, atol=0)


def test_nothing_past_the_rows_is_read_or_written(form: Library) -> None:
    for type_ in TYPES:
        x = at_the_end_of_memory(torch.randn(3, 38).to(type_))
        weight = at_the_end_of_memory(torch.ones(38))
        residual = at_the_end_of_memory(torch.zeros(3, 38).to(type_))
        assert torch.isfinite(cpu.rms_norm(form, x, weight, 1e-5, residual)).all()
        assert torch.isfinite(cpu.gated_activation(form, x, "silu")).all()


def test_wrong_operands_are_refused() -> None:
    kernels("generic")
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="weight"):
        cpu.rms_norm(load(), x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        cpu.rms_norm(load(), x, torch.ones(8), 1e-5, torch.zeros(3, 8))
    with pytest.raises(ValueError, match="float64"):
        cpu.rms_norm(load(), x.double(), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="relu"):
        cpu.gated_activation(load(), x, "relu")
    with pytest.raises(ValueError, match="2F"):
        cpu.gated_activation(load(), x[:, :7], "silu")


def run_with(isa: str) -> str:
    program = (
        "from windlass.kernels import cpu, select_backend\n"
        "reason = cpu.unavailable_reason()\n"
        "print(reason if reason else cpu.load().isa)\n"
        "import torch\n"
        "print(select_backend('cpu').explain())\n"
        "try:\n    print(cpu.linear_small(cpu.load(), torch.ones(1, 4), torch.ones(2, 4)).tolist())\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "WINDLASS_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_the_environment_forces_a_lower_instruction_set_or_none() -> None:
    kernels("generic")
    assert run_with("generic").splitlines() == ["generic", "compiled CPU kernels (generic)", "[[4.0, 4.0]]"]
    assert run_with("off").splitlines()[1:] == [
        "plain torch kernels: WINDLASS_CPU_ISA=off turns the compiled CPU kernels off",
        "WINDLASS_CPU_ISA=off turns the compiled CPU kernels off",
    ]
    assert "WINDLASS_CPU_ISA=mmx is not one of generic" in run_with("mmx")
