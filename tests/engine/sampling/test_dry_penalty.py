"""The DRY penalty on repetitions against its definition in float64, and its effect on sampling."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.engine.interface.request import DryParams, SamplingParams
from windlass.engine.sampling.penalties import MAX_DECREASE, DryPenalty
from windlass.engine.sampling.sample_slot import ExtendedTokens, SampleSlot
from windlass.engine.sampling.sampler import Sampler
from windlass.kernels import select_backend
from windlass.kernels.backend import BackendOptions
from windlass.kernels.torch.torch_backend import TorchBackend


def by_definition(text: Sequence[int], s: DryParams) -> dict[int, float]:
    """Return the decrease of each token, by comparing the end of the text with every position."""
    breakers = [*((token,) for token in s.breaker_ids), *s.breaker_sequences]
    ends = [e for e in range(1, len(text) + 1) if any(tuple(text[max(0, e - len(b)) : e]) == b for b in breakers)]
    first = max(0, len(text) - s.last_n)
    limit = len(text) - ends[-1] if ends else len(text)
    lost: dict[int, float] = {}
    for place in range(first + 1, len(text)):
        length = 0
        while length < min(limit, place - first) and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= s.allowed_length and text[place] not in s.breaker_ids:
            amount = s.multiplier * s.base ** min(length - s.allowed_length, 2000)
            lost[text[place]] = max(lost.get(text[place], 0.0), min(amount, MAX_DECREASE))
    return lost


def found(repeats: DryPenalty) -> dict[int, float]:
    ids, amounts = repeats.decreases()
    assert ids.dtype == np.int64 and amounts.dtype == np.float32 and len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), amounts.tolist(), strict=True))


def same(got: dict[int, float], want: dict[int, float]) -> None:
    assert got.keys() == want.keys()
    for token, amount in want.items():
        assert got[token] == pytest.approx(amount, rel=1e-6)


penalties = st.builds(
    DryParams,
    multiplier=st.sampled_from([0.8, 3.0]),
    base=st.sampled_from([1.0, 1.75, 40.0]),
    allowed_length=st.integers(0, 5),
    last_n=st.sampled_from([1, 2, 5, 17, 60, 32768]),
    breaker_ids=st.frozensets(st.integers(0, 5), max_size=2),
    breaker_sequences=st.frozensets(st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple), max_size=3),
)


@pytest.mark.slow
@given(penalties, st.lists(st.integers(0, 4), max_size=90), st.data())
@settings(max_examples=400, deadline=None)
def test_the_penalty_equals_its_definition_for_text_in_any_pieces(
    s: DryParams, text: list[int], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {len(text)})
    repeats = DryPenalty(s)
    for cut in cuts:
        repeats.update(text[:cut])
        same(found(repeats), by_definition(text[:cut], s))
    repeats.update(text[: cuts[0]])  # shorter than before, or the same
    same(found(repeats), by_definition(text[: cuts[0]], s))


@pytest.mark.slow
@pytest.mark.parametrize(
    "last_n", [7, pytest.param(300, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_texts_longer_than_the_window(last_n: int) -> None:
    rng = random.Random(last_n)
    s = DryParams(0.5, 1.2, 2, last_n, frozenset({9}), frozenset({(1, 2, 3), (4, 4)}))
    phrases = [[rng.randrange(9) for _ in range(rng.randrange(1, 40))] for _ in range(5)] + [[9]]
    text = [token for _ in range(200) for token in rng.choice(phrases)]
    repeats, penalised = DryPenalty(s), 0
    for length in range(1, len(text)):
        repeats.update(text[:length])
        if length % 13 == 0:
            same(found(repeats), want := by_definition(text[:length], s))
            penalised += bool(want)
    assert penalised > 10


def test_the_published_example() -> None:
    """In `a b c c b c y a b c`, c would repeat four tokens, b two and y three."""
    a, b, c, y = 1, 2, 3, 4
    repeats = DryPenalty(DryParams(1.0, 2.0, 1, 100))
    repeats.update([a, b, c, c, b, c, y, a, b, c])
    assert found(repeats) == {c: 4.0, b: 1.0, y: 2.0}


def test_a_text_of_one_repeated_token() -> None:
    repeats = DryPenalty(DryParams(1.0, 1.001, 2, 32768))
    repeats.update([5] * 40_000)
    assert found(repeats)[5] == pytest.approx(1.001 ** (32767 - 2), rel=1e-6)
    steep = DryPenalty(DryParams(1.0, 100.0, 2, 32768))
    steep.update([5] * 3000)
    assert found(steep)[5] == np.float32(MAX_DECREASE)


def one(seq_id: int, text: Sequence[int], **sampling: Any) -> SampleSlot:
    return SampleSlot(seq_id, 0, SamplingParams(**sampling), 3, 2, text)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_penalty_follows_biases_and_other_penalties(compiled: bool) -> None:
    backend = select_backend("cpu") if compiled else TorchBackend(BackendOptions(torch.device("cpu")))
    logits = torch.zeros(1, 20)
    logits[0, 4], logits[0, 7] = 6.0, 4.0
    text = [1, 2, 4, 9, 1, 2]
    s = DryParams(1.0, 2.0, 1)  # 4 loses 1.0 * 2 ** 1

    def token(**sampling: Any) -> int:
        slot = one(0, text, temperature=0.0, repeats=s, **sampling)
        (drawn,) = Sampler(20, backend).sample(logits, [(0, slot)])
        return drawn.token_id

    assert token(logit_bias={7: -0.1}) == 4
    assert token(logit_bias={7: 0.1}) == 7
    # 6 / 1.4 - 2 is above 2.2; (6 - 2) / 1.4 would be above 2.8.
    assert token(repetition_penalty=1.4, logit_bias={7: -1.8}) == 4
    assert token(repetition_penalty=1.4, logit_bias={7: -1.5}) == 7
    assert token(allowed_token_ids=(4,)) == 4


def test_proposed_tokens_count_as_tokens_of_the_text() -> None:
    s = DryParams(0.7, 1.5, 1)
    text, draft = [1, 2, 3, 1, 2, 4, 1], (2, 3, 1)
    repeats = DryPenalty(s)
    for count in range(len(draft) + 1):
        repeats.update(ExtendedTokens(text, draft[:count]))
        same(found(repeats), by_definition([*text, *draft[:count]], s))
