"""Triton's sampler, interpreted, against torch, token for token, on difficult rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.device import DEVICE
from kernels_helpers.interpreted import ON_THE_DEVICE
from torch import Tensor

from windlass.kernels import Filters, LogitsChanges, Penalties
from windlass.kernels.torch import torch_sampler
from windlass.kernels.torch.torch_sampler import TorchSampler
from windlass.kernels.triton import triton_sampler
from windlass.kernels.triton.triton_sampler import TritonSampler, row_maxima

pytestmark = ON_THE_DEVICE
VOCAB = 300
ROWS = ("random", "ties", "masked", "bad", "equal", "steep", "outlier", "nothing")
FILTERS = (
    Filters(),
    Filters(temperature=0.0),
    Filters(temperature=0.4, top_k=3),
    Filters(top_k=280, top_p=0.5),
    Filters(top_p=0.95, min_p=0.01, temperature=1.3),
    Filters(top_p=0.0),
    Filters(top_p=1 - 2**-53),
    Filters(min_p=1.0),
    Filters(top_k=1, temperature=1e-30),
    Filters(typical_p=0.8),
    Filters(exclude_from=0.02, temperature=0.0),
)


@pytest.fixture(autouse=True, params=[(64, 512), (128, 50)], ids=["many parts", "few parts"])
def several_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Many programs share a row with one block each, or few programs read several blocks."""
    block, programs = request.param
    monkeypatch.setattr(triton_sampler, "_SAMPLE_BLOCK", block)
    monkeypatch.setattr(triton_sampler, "_PROGRAMS", programs)
    monkeypatch.setattr(triton_sampler, "_BLOCK", 256)
    monkeypatch.setattr(triton_sampler, "_LIST", 16)
    monkeypatch.setattr(triton_sampler, "_PART", 128)


def logits() -> Tensor:
    x = torch.randn(len(ROWS), VOCAB) * 3
    x[1] = x[1].round()
    x[2, torch.rand(VOCAB) < 0.9] = -torch.inf
    x[2, 5] = 1.0
    x[3, 7] = torch.nan
    x[4] = -7.25
    x[5] *= 40
    x[6] *= 1e-4
    x[6, VOCAB - 1] = 20.0
    x[7] = -torch.inf
    return x


def changes(rng: random.Random) -> LogitsChanges:
    ids = torch.randperm(VOCAB)
    return LogitsChanges(
        torch.arange(3, 200) if rng.random() < 0.5 else None,
        ids[:5],
        ids[3:10],
        torch.randn(7),
        ids[:40],
        torch.randint(0, 3, (40,)).float(),
        ids[2:6],
        torch.rand(4),
        torch.randint(-(2**31), 2**31 - 1, (10,)).int().cpu() if rng.random() < 0.5 else None,
    )


def check(filters: tuple[Filters, ...], rows: list[int], seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    x, plans = logits(), []
    for own in filters:
        for row in rows:
            uniform = rng.choice([0.0, 1 - 2**-53, rng.random(), rng.random(), rng.random()])
            plans.append((own, row, uniform, changes(rng) if rng.random() < 0.5 else None))
    found = []
    for token_sampler in (TorchSampler(), TritonSampler()):
        draws = []
        for own, row, uniform, changed in plans:
            one = token_sampler.new(own, Penalties(1.3, 0.2, 0.1))
            one.row, one.uniform = row, uniform
            if changed is not None:
                one.change(changed)
            draws.append(one)
        before = x.clone()
        token_sampler.sample(x, draws)
        assert torch.equal(x.nan_to_num(), before.nan_to_num())
        found.append([(one.token, one.status) for one in draws])
    assert found[1] == found[0]
    assert len({token for token, _ in found[0]}) > 2


def test_the_tokens_of_plain_torch() -> None:
    check(FILTERS[:5], [0], 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_of_plain_torch_on_hard_rows(seed: int) -> None:
    check(FILTERS, list(range(len(ROWS))), seed)


def adjacent(first: float, count: int) -> Tensor:
    """Return adjacent float32 numbers."""
    return (torch.tensor(first).view(torch.int32) + torch.arange(count, dtype=torch.int32)).view(torch.float32)


def hard_magnitudes() -> Tensor:
    """Return distances from the largest logit in the order of weights, [R, V], equal on every device."""
    with torch.device("cpu"):
        return _hard_magnitudes().to(DEVICE)


def _hard_magnitudes() -> Tensor:
    rows = {
        "flat": torch.rand(VOCAB) * 0.3,
        "peaked": torch.randn(VOCAB).abs() * 5 + 8,
        "equal": torch.zeros(VOCAB),
        "of two values": (torch.rand(VOCAB) >= 0.1) * 3.0,
        "of bfloat16": (torch.rand(VOCAB) * 4).bfloat16().float(),
        "around an eighth": adjacent(0.125 * (1 - 2**-18), VOCAB),
        "over the end of a bucket": adjacent(2.0, VOCAB) + torch.arange(VOCAB) // 150 * 2**-7,
        "next to nothing": adjacent(0.0, VOCAB),
        "as much as nothing": torch.linspace(20.0, 30.0, VOCAB),
        "few": torch.where(torch.arange(VOCAB) < 9, torch.rand(VOCAB), torch.inf),
    }
    found = torch.stack(list(rows.values()))
    found[:, 0] = 0.0
    return found.sort(-1).values


def test_the_last_token_within_the_filters() -> None:
    """With uniforms just below 1, each kind of filter draws its last token."""
    torch.manual_seed(3)
    x = -hard_magnitudes()
    kept = [
        Filters(top_k=151),
        Filters(top_p=0.0),
        Filters(top_p=0.3),
        Filters(top_p=0.999),
        Filters(top_k=299, top_p=0.9),
        Filters(top_k=7, min_p=0.05),
    ]
    token_sampler, draws = TritonSampler(), []
    for row in range(len(x)):
        for own in kept:
            one = token_sampler.new(own, Penalties())
            one.row, one.uniform = row, 1 - 2**-53
            draws.append(one)
    token_sampler.sample(x, draws)
    expected = torch_sampler.sample(
        x[[one.row for one in draws]], [one.filters for one in draws], [1 - 2**-53] * len(draws)
    )
    assert [one.token for one in draws] == expected
    assert len(set(expected)) > 15


def test_number_of_selection_passes_follows_from_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    started, names = triton_sampler.launch, list[str]()

    def counted(kernel: Any, *operands: Any, **sizes: Any) -> None:
        names.append(kernel.__name__)
        started(kernel, *operands, **sizes)

    monkeypatch.setattr(triton_sampler, "launch", counted)
    token_sampler = TritonSampler()
    for filters, turns in (
        ([Filters(), Filters(min_p=0.1), Filters(temperature=0.0, top_k=3, top_p=0.5)], 0),
        ([Filters(top_k=300), Filters(top_p=0.5)], 3),
        ([Filters(top_k=3, top_p=0.5), Filters()], 5),
    ):
        names.clear()
        token_sampler.sample(torch.randn(1, VOCAB), [token_sampler.new(one, Penalties()) for one in filters])
        assert names.count("radix_select_kernel") == turns


@pytest.mark.parametrize("vocabulary", [1, 2, 33])
def test_small_vocabularies(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    x, tokens = torch.randn(1, vocabulary), []
    for token_sampler in (TorchSampler(), TritonSampler()):
        draws = [
            token_sampler.new(own, Penalties()) for own in (Filters(top_k=2, top_p=0.7), Filters(top_k=40), Filters())
        ]
        for one in draws:
            one.uniform = 0.9
        token_sampler.sample(x, draws)
        tokens.append([one.token for one in draws])
    assert tokens[0] == tokens[1]


def test_one_allowed_token_and_none() -> None:
    token_sampler, none = TritonSampler(), torch.zeros(0)
    draws = []
    for allowed in (torch.tensor([17]), torch.tensor([], dtype=torch.int64)):
        one = token_sampler.new(Filters(temperature=0.7, top_p=0.5), Penalties())
        one.uniform = 0.99
        one.change(LogitsChanges(allowed, none.long(), none.long(), none, none.long(), none, none.long(), none))
        draws.append(one)
    token_sampler.sample(torch.randn(1, VOCAB), draws)
    assert [(one.token, one.status) for one in draws] == [(17, 0), (-1, 2)]


def test_row_maxima_are_the_first_of_the_largest() -> None:
    x = logits()
    x[0, 17] = x[0, 20] = x[0, 290] = 99.0
    x[3, 9] = torch.inf
    places, largest = row_maxima(x)
    expected = torch_sampler.row_maxima(x)
    assert places.tolist() == expected[0]
    torch.testing.assert_close(largest, torch.tensor(expected[1]), equal_nan=True, rtol=0, atol=0)


def test_log_sums_depend_on_their_row_only() -> None:
    x = logits()
    found, expected = triton_sampler.log_sums(x), x.logsumexp(-1, keepdim=True)
    assert found.shape == (len(ROWS), 1)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=1e-6)
    for row in range(len(ROWS)):
        assert torch.equal(triton_sampler.log_sums(x[row : row + 1]).nan_to_num(), found[row : row + 1].nan_to_num())
    assert float(triton_sampler.log_sums(torch.tensor([[1.0, torch.inf]]))) == torch.inf
