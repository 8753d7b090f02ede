"""The sampler against brute force in numpy, exact probabilities, and the logits processors of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cpu_kernels import choose
from transformers.generation import logits_process as hf

from windlass.engine.errors import EngineError
from windlass.engine.interface.request import SamplingParams
from windlass.engine.sampling.logits_processor import LogitsProcessor
from windlass.engine.sampling.penalties import penalties_of
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.sampling.sampler import SampledToken, Sampler, token_logprobs, uniform
from windlass.kernels import Backend, Filters, cpu, select_backend
from windlass.kernels.torch.torch_backend import TorchBackend
from windlass.kernels.torch.torch_sampler import TorchSamplingRow, candidates

VOCAB = 97


@pytest.fixture(autouse=True, params=["compiled", "plain"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test with compiled draws and with plain torch."""
    if request.param == "plain":
        choose(monkeypatch, "for this test")
        assert isinstance(the_backend(), TorchBackend)
    elif cpu.unavailable_reason() is not None:
        pytest.skip(str(cpu.unavailable_reason()))
    return str(request.param)


def the_backend() -> Backend:
    return select_backend("cpu")


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def slot(
    seq_id: int = 0,
    token_ids: list[int] | None = None,
    prompt: int = 3,
    seed: int = 0,
    index: int = 0,
    stop_ids: tuple[int, ...] = (),
    **sampling: Any,
) -> SampleSlot:
    token_ids = [5, 6, 7] if token_ids is None else token_ids
    return SampleSlot(seq_id, index, SamplingParams(**sampling), seed, prompt, token_ids, stop_ids)


def sample_one(logits: torch.Tensor, one: SampleSlot) -> SampledToken:
    return Sampler(logits.shape[-1], the_backend()).sample(logits.view(1, -1), [(0, one)])[0]


def kept_ids(logits: torch.Tensor, filters: Filters) -> list[set[int]]:
    scaled = (logits - logits.amax(-1, keepdim=True)) / filters.temperature
    found = candidates(scaled, [filters] * len(logits))
    pairs = zip(found.token_ids, found.weights, strict=True)
    return [set(ids[weights > 0].tolist()) for ids, weights in pairs]


def kept_by_transformers(logits: torch.Tensor, warper: Any) -> list[set[int]]:
    scores = warper(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone())
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in scores]


def frequencies(logits: torch.Tensor, draws: int, **sampling: Any) -> np.ndarray:
    """Return how often each token is drawn from one row with different seeds, in one call."""
    sampler = Sampler(len(logits), the_backend())
    params = SamplingParams(**sampling)
    slots = [(0, SampleSlot(0, 0, params, seed, 3, [1, 2, 3])) for seed in range(draws)]
    tokens = [drawn.token_id for drawn in sampler.sample(logits.view(1, -1), slots)]
    return np.bincount(tokens, minlength=len(logits))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the chi-squared statistic in standard deviations above its mean, with cells of at least 5 expected draws."""
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    order = np.argsort(expected)
    statistic, cells, seen, wanted = 0.0, 0, 0.0, 0.0
    for i in order:
        seen, wanted = seen + counts[i], wanted + expected[i]
        if wanted >= 5:
            statistic, cells, seen, wanted = statistic + (seen - wanted) ** 2 / wanted, cells + 1, 0.0, 0.0
    return (statistic - (cells - 1)) / math.sqrt(2 * max(1, cells - 1))


# --- filters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, 3.0])
@pytest.mark.parametrize(
    ("filters", "warper"),
    [
        (Filters(top_k=1), hf.TopKLogitsWarper(1)),
        (Filters(top_k=17), hf.TopKLogitsWarper(17)),
        (Filters(top_p=0.1), hf.TopPLogitsWarper(0.1)),
        (Filters(top_p=0.9), hf.TopPLogitsWarper(0.9)),
        (Filters(top_p=0.999), hf.TopPLogitsWarper(0.999)),
        (Filters(min_p=0.02), hf.MinPLogitsWarper(0.02)),
        (Filters(min_p=0.5), hf.MinPLogitsWarper(0.5)),
        (Filters(typical_p=0.2), hf.TypicalLogitsWarper(0.2)),
        (Filters(typical_p=0.9), hf.TypicalLogitsWarper(0.9)),
    ],
)
def test_filters_keep_the_tokens_of_transformers(filters: Filters, warper: Any, scale: float) -> None:
    logits = random_logits(8, 1200, scale=scale)
    assert kept_ids(logits, filters) == kept_by_transformers(logits, warper)


def test_filters_apply_to_the_tokens_of_earlier_filters() -> None:
    logits = random_logits(8, 400)
    got = kept_ids(logits, Filters(temperature=1.7, min_p=0.01, top_k=60, top_p=0.8))
    chain = [
        hf.TemperatureLogitsWarper(1.7),
        hf.MinPLogitsWarper(0.01),
        hf.TopKLogitsWarper(60),
        hf.TopPLogitsWarper(0.8),
    ]
    assert got == kept_by_transformers(logits, hf.LogitsProcessorList(chain))


def test_rows_use_their_own_filters() -> None:
    logits = random_logits(5, 300)
    logits -= logits.amax(-1, keepdim=True)
    filters = [Filters(top_k=4), Filters(top_p=0.5), Filters(min_p=0.3), Filters(typical_p=0.4), Filters(top_k=299)]
    together = candidates(logits, filters)
    for row, f in enumerate(filters):
        alone = candidates(logits[row : row + 1], [f])
        real = together.weights[row] > 0
        kept = alone.weights[0] > 0
        assert together.token_ids[row][real].tolist() == alone.token_ids[0][kept].tolist()
        assert together.weights[row][real].tolist() == alone.weights[0][kept].tolist()


def test_equal_logits_are_kept_or_removed_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, -1.0]])
    assert kept_ids(logits, Filters(top_k=2)) == [{1, 2, 3}]
    assert kept_ids(logits, Filters(top_p=0.3)) == [{1, 2, 3}]
    assert kept_ids(torch.zeros(1, 7), Filters(top_p=0.5)) == [set(range(7))]


@pytest.mark.parametrize("filters", [Filters(top_p=0.0), Filters(typical_p=0.0), Filters(min_p=1.0)])
def test_the_strictest_filter_keeps_a_token(filters: Filters) -> None:
    logits = random_logits(4)
    kept = kept_ids(logits, filters)
    assert [len(ids) for ids in kept] == [1, 1, 1, 1]
    if filters.typical_p == 1:
        assert [min(ids) for ids in kept] == logits.argmax(-1).tolist()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("share", [1 - 2**-53, 1 - 1e-12, 0.9999999])
def test_shares_just_below_one_keep_the_likely_tokens(share: float) -> None:
    # The mass of a row is summed in two orders. Shares this close to 1 detect different rounding.
    for seed in range(150):
        logits = random_logits(3, 2 + 19 * seed, seed=seed, scale=5.0)
        logits -= logits.amax(-1, keepdim=True)
        filters = [Filters(top_p=share), Filters(top_p=share, typical_p=share), Filters(top_p=share, top_k=5)]
        weights = candidates(logits, filters).weights.sum(-1)
        whole = logits.double().exp()
        assert float(weights[0]) >= share * float(whole[0].sum()) * (1 - 1e-6)
        assert float(weights[1]) > 0
        top = whole[2].topk(min(5, whole.shape[1])).values
        assert float(weights[2]) >= share * float(top.sum()) * (1 - 1e-6)


# --- the draw -------------------------------------------------------------------------------------------------------


def softmax(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


@pytest.mark.parametrize("vocab", [40, 1500])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_exact_probabilities(vocab: int, temperature: float) -> None:
    logits, draws = random_logits(1, vocab, seed=3)[0], 4000
    counts = frequencies(logits, draws, temperature=temperature)
    assert abs(chi_square(counts, draws * softmax(logits, temperature))) < 4
    # The statistic would detect a temperature error of a fifth.
    assert chi_square(counts, draws * softmax(logits, temperature * 1.2)) > 6


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    "sampling", [{"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.7}, {"top_k": 30, "top_p": 0.9}]
)
def test_filtered_draws_follow_the_renormalised_probabilities(sampling: dict[str, Any]) -> None:
    logits, draws = random_logits(1, 200, seed=4)[0], 4000
    (kept,) = kept_ids(logits.view(1, -1), Filters(**sampling))
    exact = softmax(logits)
    exact[[token for token in range(200) if token not in kept]] = 0
    counts = frequencies(logits, draws, **sampling)
    assert abs(chi_square(counts, draws * exact / exact.sum())) < 4


@pytest.mark.parametrize("vocab", [700, 1024])
def test_a_draw_is_the_inverse_cdf_in_the_order_of_ids(vocab: int) -> None:
    logits = random_logits(1, vocab, seed=5)[0]
    edges = np.cumsum(softmax(logits))
    for seed in range(200):
        expected = int(np.searchsorted(edges, uniform(seed, 2, 4), side="right"))
        one = slot(token_ids=[1, 2, 3, 4, 5, 6, 7], seed=seed, index=2)
        assert sample_one(logits, one).token_id == expected
        # A filter that removes almost nothing changes no draw.
        narrowed = slot(token_ids=[1, 2, 3, 4, 5, 6, 7], seed=seed, index=2, min_p=1e-12)
        assert sample_one(logits, narrowed).token_id == expected


def test_uniforms_are_uniform_and_depend_on_every_argument() -> None:
    drawn = np.array([uniform(seed, index, i) for seed in range(20) for index in range(10) for i in range(20)])
    assert len(set(drawn.tolist())) == len(drawn)
    assert 0 <= drawn.min() < drawn.max() < 1
    histogram = np.bincount((drawn * 16).astype(int), minlength=16)
    assert abs(chi_square(histogram, np.full(16, len(drawn) / 16))) < 4
    assert uniform(-(2**70), 0, 0) != uniform(2**70, 0, 0)


def test_a_draw_depends_on_seed_sample_and_position_only() -> None:
    logits = random_logits(6, 500, seed=6)
    variety = [{}, {"top_k": 9}, {"top_p": 0.9}, {"temperature": 0.0}, {"typical_p": 0.5, "repetition_penalty": 1.3}]
    slots = [
        (row, slot(seq_id=i, seed=i * 7, index=i % 3, token_ids=[1, 2, 3, *range(i)], **variety[i % 5]))
        for i, row in enumerate([0, 1, 2, 3, 4, 5, 0, 2])
    ]
    together = Sampler(500, the_backend()).sample(logits, slots)
    backwards = Sampler(500, the_backend()).sample(logits, slots[::-1])[::-1]
    alone = [sample_one(logits[row], one) for row, one in slots]
    assert [d.token_id for d in together] == [d.token_id for d in alone] == [d.token_id for d in backwards]
    # Another sample index, seed or position gives other draws (a few of 40 may be equal by chance).
    base = [sample_one(logits[0], slot(seed=s)).token_id for s in range(40)]
    for other in ({"index": 1}, {"token_ids": [5, 6, 7, 8]}):
        moved = [sample_one(logits[0], slot(seed=s, **other)).token_id for s in range(40)]
        assert sum(a == b for a, b in zip(base, moved, strict=True)) < 20


@pytest.mark.parametrize("temperature", [1e-3, 1e-40])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = random_logits(1, seed=7)[0] * 1e4
    assert sample_one(logits, slot(temperature=temperature)).token_id == int(logits.argmax())


def test_greedy_is_argmax_and_does_not_change_the_logits() -> None:
    logits = random_logits(9)
    before = logits.clone()
    slots = [(row, slot(seq_id=row, temperature=t, top_k=5)) for row, t in enumerate([0.0] * 8 + [1.0])]
    drawn = Sampler(VOCAB, the_backend()).sample(logits, slots)
    assert [d.token_id for d in drawn[:8]] == logits[:8].argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_slots_of_one_sequence_in_one_call_are_separate() -> None:
    logits = random_logits(1, seed=21)
    slots = [(0, slot(seq_id=4, seed=s, logit_bias={s: 50.0}, token_ids=[1, 2, s])) for s in range(30)]
    drawn = Sampler(VOCAB, the_backend()).sample(logits, slots)
    assert [d.token_id for d in drawn] == list(range(30))


# --- allowed ids, biases, penalties ---------------------------------------------------------------------------------------


def processed(logits: torch.Tensor, one: SampleSlot) -> np.ndarray:
    """Return the final logits of a slot."""
    row = logits.clone()
    drawn = TorchSamplingRow(Filters(), penalties_of(one.sampling))
    drawn.change(LogitsProcessor(one, torch.device("cpu")).changes(one))
    drawn.apply(row)
    return row.numpy()


def test_penalties_match_a_plain_formula() -> None:
    logits = random_logits(1, seed=8)[0]
    tokens = [3, 3, 9, 11, 3, 3, 9, 50]  # prompt 3 3 9 11, output 3 3 9 50
    one = slot(token_ids=tokens, prompt=4, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=-0.3)
    expected = logits.double().numpy()
    for token in set(tokens):
        expected[token] = expected[token] * 1.5 if expected[token] < 0 else expected[token] / 1.5
    for token in (3, 9, 50):
        expected[token] -= 0.4 * [3, 3, 9, 50].count(token) - 0.3
    np.testing.assert_allclose(processed(logits, one), expected, rtol=1e-5, atol=1e-6)


def test_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(1, seed=9)
    tokens = [4, 8, 8, 90, 1]
    theirs = hf.RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([tokens]), logits.clone())[0]
    np.testing.assert_allclose(processed(logits[0], slot(token_ids=tokens, repetition_penalty=1.8)), theirs)


def test_counts_updated_in_steps_equal_new_counts() -> None:
    generator = np.random.default_rng(0)
    sampler, tokens = Sampler(VOCAB, the_backend()), [int(t) for t in generator.integers(0, VOCAB, 10)]
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.2, "temperature": 0.0}
    one = slot(seq_id=1, token_ids=tokens, prompt=10, **params)
    for step in range(60):
        logits = random_logits(1, seed=step)[0]
        kept = sampler.sample(logits.view(1, -1), [(0, one)])[0].token_id
        assert kept == sample_one(logits, slot(token_ids=list(tokens), prompt=10, **params)).token_id
        if step == 30:
            sampler.forget(1)  # what preemption does
        tokens.append(kept)
    assert sampler.num_tracked == 1
    sampler.forget(1)
    sampler.forget(1)
    assert sampler.num_tracked == 0


def test_forgetting_a_sequence_does_not_affect_others() -> None:
    sampler = Sampler(VOCAB, the_backend())
    slots = [(0, slot(seq_id=i, repetition_penalty=1.2)) for i in range(4)]
    sampler.sample(random_logits(1), slots)
    assert sampler.num_tracked == 4
    for seq_id in (0, 2, 3, 9):
        sampler.forget(seq_id)
    assert sampler.num_tracked == 1
    sampler.forget(1)
    assert sampler.num_tracked == 0


def test_a_step_counts_only_new_tokens() -> None:
    class Counting(list):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counting.reads += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
            return super().__getitem__(key)

    tokens = Counting([i % VOCAB for i in range(5000)])
    sampler = Sampler(VOCAB, the_backend())
    one = slot(token_ids=tokens, prompt=4000, repetition_penalty=1.1, bad_words=((1, 2, 3),), temperature=0.0)
    sampler.sample(random_logits(1), [(0, one)])
    Counting.reads = 0
    tokens.append(3)
    sampler.sample(random_logits(1), [(0, one)])
    assert 0 < Counting.reads < 10


def test_logit_bias_is_added_and_can_decide() -> None:
    logits = random_logits(1, seed=10)[0]
    biased = processed(logits, slot(logit_bias={4: 2.5, 60: -100.0}))
    expected = logits.clone()
    expected[4] += 2.5
    expected[60] -= 100
    np.testing.assert_allclose(biased, expected, rtol=1e-6)
    assert sample_one(logits, slot(logit_bias={12: 100.0})).token_id == 12


def test_only_allowed_tokens_are_drawn() -> None:
    logits = random_logits(1, seed=11)[0]
    for seed in range(40):
        drawn = sample_one(logits, slot(seed=seed, allowed_token_ids=(1, 2, 3), temperature=5.0)).token_id
        assert drawn in (1, 2, 3)
    best = 1 + int(logits[1:4].argmax())
    assert sample_one(logits, slot(allowed_token_ids=(1, 2, 3), temperature=0.0)).token_id == best


def test_bias_and_penalties_do_not_unmask_tokens() -> None:
    logits = random_logits(1, seed=11)[0]
    one = slot(allowed_token_ids=(1, 2), logit_bias={9: 100.0}, presence_penalty=-2.0, repetition_penalty=1e-3)
    assert np.isfinite(processed(logits, one)).nonzero()[0].tolist() == [1, 2]


def test_bad_words_are_never_completed_but_may_begin() -> None:
    logits = torch.zeros(VOCAB)
    logits[[20, 21, 22]] = torch.tensor([3.0, 2.0, 1.0])
    words = {"bad_words": ((7, 20), (6, 7, 21), (9, 22), (30,)), "temperature": 0.0}
    assert sample_one(logits, slot(token_ids=[5, 6, 7], **words)).token_id == 22
    assert sample_one(logits, slot(token_ids=[5, 5, 7], **words)).token_id == 21
    assert sample_one(logits, slot(token_ids=[7], prompt=1, bad_words=((1, 2, 7, 20),), temperature=0.0)).token_id == 20
    assert processed(logits, slot(**words))[30] == -math.inf


def test_min_tokens_masks_the_stop_ids_until_it_is_reached() -> None:
    logits = torch.zeros(VOCAB)
    logits[[40, 41]] = torch.tensor([9.0, 5.0])
    settings = {"temperature": 0.0, "min_tokens": 2, "stop_ids": (40,), "prompt": 3}
    assert sample_one(logits, slot(token_ids=[1, 2, 3], **settings)).token_id == 41
    assert sample_one(logits, slot(token_ids=[1, 2, 3, 4], **settings)).token_id == 41
    assert sample_one(logits, slot(token_ids=[1, 2, 3, 4, 5], **settings)).token_id == 40
    # The same holds if another option uses the processor of the row.
    assert sample_one(logits, slot(token_ids=[1, 2, 3, 4, 5], logit_bias={1: 0.5}, **settings)).token_id == 40


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_invalid_row_fails_without_affecting_others(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    logits[1, 8] = bad
    slots = [(row, slot(seq_id=row, temperature=temperature, logprobs=2)) for row in range(3)]
    healthy = Sampler(VOCAB, the_backend()).sample(random_logits(3), slots)
    drawn = Sampler(VOCAB, the_backend()).sample(logits, slots)
    assert isinstance(drawn[1].error, EngineError)
    assert "NaN" in str(drawn[1].error)
    assert [drawn[0], drawn[2]] == [healthy[0], healthy[2]]


def test_a_row_of_minus_infinity_fails() -> None:
    assert sample_one(torch.full((VOCAB,), -math.inf), slot()).error is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_set_of_tokens_is_explained(temperature: float) -> None:
    one = slot(allowed_token_ids=(4,), bad_words=((4,),), temperature=temperature)
    error = sample_one(random_logits(1)[0], one).error
    assert isinstance(error, EngineError)
    assert "allowed ids" in str(error)


def test_a_mask_of_the_wrong_width_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="columns"):
        Sampler(VOCAB + 1, the_backend()).sample(random_logits(1), [(0, slot())])


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_come_from_the_raw_logits() -> None:
    logits = random_logits(1, seed=12)[0]
    raw = logits.double().numpy()
    raw -= np.log(np.exp(raw).sum())
    drawn = sample_one(logits, slot(logit_bias={77: 100.0}, temperature=0.0, logprobs=4))
    assert drawn.token_id == 77
    entry = drawn.logprobs
    assert entry is not None
    assert entry.token_id == 77
    assert entry.rank == 1 + int((raw > raw[77]).sum())
    assert entry.logprob == pytest.approx(raw[77], abs=1e-5)
    order = np.argsort(-raw)[:4]
    assert [token for token, _ in entry.top] == order.tolist()
    np.testing.assert_allclose([logprob for _, logprob in entry.top], raw[order], atol=1e-5)


def test_each_slot_gets_its_number_of_alternatives() -> None:
    wanted = [None, 0, 3, 1, VOCAB]
    slots = [(0, slot(seq_id=i, logprobs=k, temperature=0.0)) for i, k in enumerate(wanted)]
    drawn = Sampler(VOCAB, the_backend()).sample(random_logits(1), slots)
    assert [None if d.logprobs is None else len(d.logprobs.top) for d in drawn] == wanted


def test_token_logprobs_over_many_rows_equals_row_by_row() -> None:
    logits = random_logits(150, seed=13)
    targets = torch.arange(150) % VOCAB
    raw = torch.log_softmax(logits.double(), -1)
    found = token_logprobs(the_backend(), logits, targets, 3)
    assert len(found) == 150
    for row, entry in enumerate(found):
        assert entry.token_id == int(targets[row])
        assert entry.logprob == pytest.approx(float(raw[row, targets[row]]), abs=1e-5)
        assert entry.rank == 1 + int((raw[row] > raw[row, targets[row]]).sum())
        assert [token for token, _ in entry.top] == raw[row].topk(3).indices.tolist()
    assert token_logprobs(the_backend(), logits[:0], targets[:0], 3) == []
    rows = torch.arange(149, -1, -1)
    assert token_logprobs(the_backend(), logits.flip(0), targets, 3, rows) == found
    logits[149, 0] = math.nan
    with pytest.raises(EngineError, match="NaN"):
        token_logprobs(the_backend(), logits, targets, 0)


def test_equal_alternatives_are_listed_by_id() -> None:
    logits = torch.zeros(1, VOCAB)
    (entry,) = token_logprobs(the_backend(), logits, torch.tensor([0]), VOCAB)
    assert [token for token, _ in entry.top] == list(range(VOCAB))
