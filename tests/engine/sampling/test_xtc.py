"""Exclusion of top choices (XTC) against its definition in float64, and its probability."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from windlass.engine.interface.request import SamplingParams
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.sampling.sampler import Sampler, uniform, xtc_uniform
from windlass.kernels import Backend, Filters, select_backend
from windlass.kernels.backend import BackendOptions
from windlass.kernels.torch.torch_backend import TorchBackend
from windlass.kernels.torch.torch_sampler import candidates

Probabilities = dict[int, float]


@pytest.fixture(params=["compiled", "plain"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return select_backend("cpu") if request.param == "compiled" else TorchBackend(BackendOptions(torch.device("cpu")))


def by_definition(probabilities: Probabilities, threshold: float) -> Probabilities:
    """Return the remaining tokens, by sorting distinct probabilities with a sum of 1."""
    order = sorted(probabilities, key=lambda token: -probabilities[token])
    top = [token for token in order if probabilities[token] >= threshold]
    kept = order[len(top) - 1 :] if len(top) > 1 else order
    return {token: probabilities[token] for token in kept}


def kept_by(logits: torch.Tensor, filters: Filters) -> set[int]:
    scaled = ((logits - logits.max()) / filters.temperature).view(1, -1)
    found = candidates(scaled, [filters])
    return set(found.token_ids[0][found.weights[0] > 0].tolist())


def probabilities_of(logits: torch.Tensor, filters: Filters) -> Probabilities:
    """Apply the definition to the tokens that the other filters keep."""
    kept = sorted(kept_by(logits, replace(filters, exclude_from=1.0)))
    shares = torch.softmax((logits[kept].double() - logits.max().double()) / filters.temperature, 0)
    return dict(zip(kept, shares.tolist(), strict=True))


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 0.51, 1.0])
@pytest.mark.parametrize(
    "others",
    [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2}, {"typical_p": 0.6}, {"temperature": 2.5}, {"temperature": 0.3}],
)
def test_remaining_tokens_equal_the_definition(threshold: float, others: dict[str, Any]) -> None:
    excluded = 0
    for seed in range(20):
        logits = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * 2.5
        filters = Filters(exclude_from=threshold, **others)
        before = probabilities_of(logits, filters)
        want = set(by_definition(before, threshold))
        assert kept_by(logits, filters) == want
        excluded += len(before) - len(want)
    assert excluded == 0 if threshold > 0.5 else excluded > 0 or threshold > 0.01


def test_equal_logits_are_kept_or_removed_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0, -3.0])  # probabilities of 0.53, 0.19, 0.19, 0.07 and less
    assert kept_by(logits, Filters(exclude_from=0.1)) == {1, 2, 3, 4}
    assert kept_by(logits, Filters(exclude_from=0.05)) == {3, 4}
    assert kept_by(torch.tensor([1.0, 1.0, -2.0]), Filters(exclude_from=0.1)) == {0, 1, 2}
    assert kept_by(torch.tensor([9.0, 1.0, -2.0]), Filters(exclude_from=0.1)) == {0, 1, 2}


def slot(seed: int, length: int = 4, index: int = 0, **sampling: Any) -> SampleSlot:
    return SampleSlot(seed, index, SamplingParams(**sampling), seed, 3, [1] * length)


def test_draws_follow_the_remaining_probabilities(backend: Backend) -> None:
    logits = torch.tensor([[1.5, 1.2, 0.9, 0.2, -0.5, -1.0]])
    exact = torch.softmax(logits[0].double(), 0).tolist()
    left = by_definition(dict(enumerate(exact)), 0.15)
    assert sorted(left) == [2, 3, 4, 5]
    draws, chance = 6000, 0.4
    slots = [(0, slot(seed, xtc_probability=chance, xtc_threshold=0.15)) for seed in range(draws)]
    tokens = [drawn.token_id for drawn in Sampler(6, backend).sample(logits, slots)]
    counts = np.bincount(tokens, minlength=6) / draws
    whole = sum(left.values())
    want = [(1 - chance) * p + chance * left.get(token, 0.0) / whole for token, p in enumerate(exact)]
    assert np.abs(counts - want).max() < 5 * 0.5 / draws**0.5
    for seed, token in enumerate(tokens):
        if xtc_uniform(seed, 0, 1) < chance:
            assert token in left


def test_a_probability_of_one_always_excludes_and_greedy_never(backend: Backend) -> None:
    logits = torch.tensor([[3.0, 2.9, 2.8, -4.0]])
    sampler = Sampler(4, backend)
    always = sampler.sample(logits, [(0, slot(s, xtc_probability=1.0, xtc_threshold=0.2)) for s in range(200)])
    assert {drawn.token_id for drawn in always} <= {2, 3}
    (greedy,) = sampler.sample(logits, [(0, slot(0, temperature=0.0, xtc_probability=1.0, xtc_threshold=0.2))])
    assert greedy.token_id == 0


def test_a_draw_does_not_depend_on_earlier_steps_or_other_requests(backend: Backend) -> None:
    """Exclusion depends only on the position, for samples step by step with others and at once in another sampler."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    settings = {"xtc_probability": 0.5, "xtc_threshold": 0.03}
    long_lived = Sampler(50, backend)
    for length in range(4, 40):
        pair = [
            (0, slot(7, length, **settings)),
            (0, slot(8, length, temperature=0.5)),
            (0, slot(9, length, 1, **settings)),
        ]
        together = [drawn.token_id for drawn in long_lived.sample(logits, pair)]
        alone = [Sampler(50, backend).sample(logits, [one])[0].token_id for one in pair]
        assert together == alone


def test_exclusion_and_draw_use_different_numbers() -> None:
    places = [(seed, index, position) for seed in range(10) for index in range(4) for position in range(25)]
    drawn, chances = (np.array([number(*place) for place in places]) for number in (uniform, xtc_uniform))
    assert len({*drawn.tolist(), *chances.tolist()}) == 2 * len(places)
    assert abs(np.corrcoef(drawn, chances)[0, 1]) < 0.1 and abs(chances.mean() - 0.5) < 0.05
