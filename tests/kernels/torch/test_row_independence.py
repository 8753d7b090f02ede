"""In deterministic mode the bits of a row do not depend on the other rows, for every operation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.cpu_kernels import FORMS, choose
from helpers.cpu_kernels import kernels as form_of
from helpers.marks import slow_but

from windlass.kernels import AttentionCall, Backend, KVPages, select_backend
from windlass.kernels.torch import reference, row_independent

ROWS = 37
Operation = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[*FORMS, "plain torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select one variant of the compiled kernels, or none."""
    torch.manual_seed(3)
    choose(monkeypatch, "turned off by this test" if request.param == "plain torch" else form_of(request.param))
    return str(request.param)


@pytest.fixture
def backend(form: str) -> Backend:
    return select_backend("cpu", deterministic=True)


def assert_rows_are_independent(operation: Operation, x: torch.Tensor) -> torch.Tensor:
    whole = operation(x)
    for size in (1, 2, 5, 16):
        parts = [operation(x[i : i + size]) for i in range(0, len(x), size)]
        assert torch.equal(torch.cat(parts), whole), size
    order = torch.randperm(len(x))
    assert torch.equal(operation(x[order]), whole[order])
    return whole


@pytest.mark.parametrize(
    ("x_type", "w_type"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_linear(form: str, x_type: torch.dtype, w_type: torch.dtype) -> None:
    backend = select_backend("cpu", x_type, w_type, deterministic=True)
    for inner, columns in ((64, 96), (1031, 77), (5, 1)):
        weight, bias = torch.randn(columns, inner).to(w_type), torch.randn(columns).to(x_type)
        x = torch.randn(ROWS, inner).to(x_type)
        got = assert_rows_are_independent(lambda x, w=weight, b=bias: backend.linear(x, w, b), x)
        want = x.double() @ weight.double().T + bias.double()
        rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[x_type]
        assert got.dtype == x_type
        assert ((got.double() - want).abs() <= rounding * (want.abs() + inner**0.5 * 4)).all()
    assert backend.linear(x[:0], weight, bias).shape == (0, 1)


def xielu(x: torch.Tensor, alpha_p: float, alpha_n: float) -> torch.Tensor:
    """xIELU in float64 (arXiv 2411.13010)."""
    above, below = np.logaddexp(alpha_p, 0.0), 0.5 + np.logaddexp(alpha_n, 0.0)
    return torch.where(x > 0, above * x**2 + x / 2, below * (torch.expm1(x.clamp(max=0)) - x) + x / 2)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [7, 64, 1023])
def test_norm_activations_and_soft_cap(form: str, type_: torch.dtype, dim: int) -> None:
    backend = select_backend("cpu", type_, deterministic=True)
    x, weight = torch.randn(ROWS, 2 * dim).to(type_), torch.randn(2 * dim)
    got = assert_rows_are_independent(lambda x: backend.rms_norm(x, weight, 1e-5), x)
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5))
    heads = x.view(ROWS, 2, dim)
    whole = backend.rms_norm(heads, weight[:dim], 1e-5)
    assert torch.equal(whole[5:6], backend.rms_norm(heads[5:6], weight[:dim], 1e-5))
    for name in ("silu", "gelu_tanh"):
        got = assert_rows_are_independent(lambda x, n=name: backend.gated_activation(x, n), x)
        wide = reference.gated_activation(x.double(), name)
        torch.testing.assert_close(got, wide.to(type_))
    got = assert_rows_are_independent(lambda x: backend.layer_norm(x, weight, weight.flip(0), 1e-5), x)
    torch.testing.assert_close(got, reference.layer_norm(x, weight, weight.flip(0), 1e-5))
    whole = backend.layer_norm(heads, weight[:dim], None, 1e-5)
    assert torch.equal(whole[5:6], backend.layer_norm(heads[5:6], weight[:dim], None, 1e-5))
    numbers = [torch.tensor([number]) for number in (0.7, -0.3, 0.5, -1e-6)]
    got = assert_rows_are_independent(lambda x: backend.xielu(x, *numbers), x)
    torch.testing.assert_close(got, xielu(x.double(), 0.7, -0.3).to(type_))
    limited = x.clone()
    backend.clip(limited, 0.5)
    assert torch.equal(limited, x.clamp(-0.5, 0.5))
    for by in (x.flip(1), torch.tensor([0.3])):
        multiplied = x.clone()
        backend.multiply(multiplied, by)
        assert torch.equal(multiplied, (x.float() * by.float()).to(type_))
    logits = x.float() * 30
    got = assert_rows_are_independent(lambda x: backend.soft_cap(x, 25.0), logits)
    torch.testing.assert_close(got.double(), 25.0 * torch.tanh(logits.double() / 25.0), rtol=1e-6, atol=1e-6)
    assert backend.soft_cap(logits[:0], 25.0).shape == (0, 2 * dim)
    assert backend.gated_activation(x[:0], "silu").shape == (0, dim)


@pytest.mark.parametrize("half", [1, 3, 8, 64])
def test_rotary_angles_do_not_depend_on_other_rows(backend: Backend, half: int) -> None:
    inv_freq = 1e4 ** -(torch.arange(half, dtype=torch.float64) / half).repeat(2, 5, 1)
    inv_freq[1] *= 0.37
    rows, positions = torch.randint(0, 5, (ROWS,)), torch.randint(0, 2**31, (ROWS,))
    inv_freq[:, 3] *= torch.rand(half, dtype=torch.float64)
    both = torch.stack(backend.rotary_angles(inv_freq, rows, positions))
    for size in (1, 2, 16):
        pieces = zip(rows.split(size), positions.split(size), strict=True)
        parts = [backend.rotary_angles(inv_freq, *piece) for piece in pieces]
        assert torch.equal(torch.cat([torch.stack(part) for part in parts], dim=2), both)
    # The plain form and the compiled ones round to the same numbers.
    assert torch.equal(torch.stack(row_independent.rotary_angles(inv_freq, rows, positions)), both)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (32, 2)])
@pytest.mark.parametrize("window", slow_but([None, 1, 40, 300], None, 40))
def test_attention(backend: Backend, form: str, heads: int, kv_heads: int, window: int | None) -> None:
    """Compute a prompt in one call, in chunks, token by token, and together with other sequences."""
    length, dim, size = 600 if form != "plain torch" else 330, 20, 16
    begin = length - 70
    table = torch.randperm(-(-length // size) + 3).int()[None, :-2]
    pages = KVPages(*(torch.randn(table.shape[1] + 2, size, kv_heads, dim).to(torch.bfloat16) for _ in range(2)))
    q, temperature = torch.randn(70, heads, dim), torch.rand(70) + 0.5

    def attend(first: int, last: int, soft_cap: float | None = None) -> torch.Tensor:
        call = AttentionCall(
            table,
            torch.tensor([0, last - first]),
            torch.tensor([begin + last]),
            temperature[first:last],
            dim**-0.5,
            window=window,
            soft_cap=soft_cap,
        )
        return backend.paged_attention(q[first:last], pages, call)

    whole = attend(0, 70)
    for chunk in (1, 7, 33):
        parts = [attend(first, min(first + chunk, 70)) for first in range(0, 70, chunk)]
        assert torch.equal(torch.cat(parts), whole), chunk
    call = AttentionCall(table, torch.tensor([0, 70]), torch.tensor([length]), temperature, dim**-0.5, window=window)
    want = reference.paged_attention(q, pages, call)
    torch.testing.assert_close(whole, want, rtol=2e-5, atol=2e-6)
    capped = attend(0, 70, soft_cap=2.0)
    assert torch.equal(torch.cat([attend(i, i + 1, soft_cap=2.0) for i in range(70)]), capped)
    # A batch of three sequences over the same pages: a chunk, a single token, a chunk.
    call = AttentionCall(
        table.expand(3, -1).contiguous(),
        torch.tensor([0, 40, 41, 61]),
        torch.tensor([begin + 40, length, begin + 30]),
        torch.cat((temperature[:40], temperature[69:], temperature[10:30])),
        dim**-0.5,
        window=window,
    )
    mixed = backend.paged_attention(torch.cat((q[:40], q[69:], q[10:30])), pages, call)
    assert torch.equal(mixed, torch.cat((whole[:40], whole[69:], whole[10:30])))


def test_short_prompts_from_the_first_token(backend: Backend) -> None:
    """Packs contain rows that end before the first chunk does. Unused table entries are -1."""
    pages = KVPages(*(torch.full((9, 16, 2, 16), torch.nan) for _ in range(2)))
    for part in (pages.key, pages.value):
        part.view(-1, 2, 16)[:100].normal_()
    table = torch.full((1, 9), -1, dtype=torch.int32)
    table[0, :7] = torch.arange(7)
    q, ones = torch.randn(100, 4, 16), torch.ones(100)

    def attend(first: int, last: int) -> torch.Tensor:
        start, lens = torch.tensor([0, last - first]), torch.tensor([last])
        call = AttentionCall(table, start, lens, ones[first:last], 0.25)
        return backend.paged_attention(q[first:last], pages, call)

    whole = attend(0, 100)
    assert torch.isfinite(whole).all()
    assert torch.equal(torch.cat([attend(i, i + 1) for i in range(100)]), whole)
    start, lens = torch.tensor([0, 100]), torch.tensor([100])
    want = reference.paged_attention(q, pages, AttentionCall(table, start, lens, ones, 0.25))
    torch.testing.assert_close(whole, want, rtol=2e-5, atol=2e-6)
