"""The scorer against transformers for each family, and its rows, chunks and rotary stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.distance_oracle import Distance, DistanceOracle, dual_chunk, rerope, self_extend
from engine_helpers.raw_key_oracle import RawKeyOracle
from helpers.tiny_models import FAMILIES, Reference, make_model

from windlass.engine.errors import RequestError
from windlass.engine.interface.context import ContextRule
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer

LENGTH = 90
IDS = torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
DYNAMIC = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2})


def load(directory: Path, chunk: int = 512) -> Scorer:
    return Scorer(Scorer.load(directory, device="cpu").decoder, torch.float32, chunk=chunk)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=32)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_of_every_family_with_a_scaling(family: str, tmp_path: Path) -> None:
    """Includes windows of 8 and two rotary groups. Chunks of 16 rows attend to cached keys."""
    scorer = load(make_model(family, tmp_path, max_position_embeddings=64), chunk=16)
    plan = scorer.plan(LENGTH, RopeScaling.from_dict({"rope_type": "yarn", "factor": 4}))
    names = [group.name for group in plan.groups]
    expected = Reference(tmp_path, plan.stage(LENGTH).specs, names).logits(IDS)
    logits = scorer.logits(IDS, plan)
    assert (logits - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("policy", ["frozen", "recompute", "rotate"])
def test_logprobs_equal_the_logits_of_the_requested_rows(llama: Path, policy: str) -> None:
    scorer = load(llama, chunk=16)
    plan = scorer.plan(LENGTH, DYNAMIC, policy)  # type: ignore[arg-type]
    expected = scorer.logits(IDS, plan)[:-1].log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert torch.allclose(scorer.logprobs(IDS, plan), expected, atol=1e-5)
    rows = [0, 31, 32, 37, 38, 64, 88]  # both sides of changes at 32, 38 and 64 tokens
    assert torch.allclose(scorer.logprobs(IDS, plan, rows=rows), expected[rows], atol=1e-5)


@pytest.mark.parametrize("policy", ["frozen", "recompute", "rotate"])
def test_work_is_the_number_of_computed_tokens(llama: Path, policy: str) -> None:
    scorer = load(llama, chunk=16)
    plan = scorer.plan(LENGTH, DYNAMIC, policy)  # type: ignore[arg-type]
    for rows in (range(LENGTH - 1), [0, 31, 32, 37, 38, 64, 88], [40], []):
        passed: list[int] = []
        scorer.logprobs(IDS, plan, rows=rows, computed=passed.append)
        assert scorer.work(plan, rows) == sum(passed)


def test_exact_rows_equal_uncached_passes(llama: Path) -> None:
    scorer = load(llama)
    plan = scorer.plan(LENGTH, DYNAMIC, "recompute", exact=True)
    rows = [10, 40, 41, 77]
    found = scorer.logprobs(IDS, plan, rows=rows)
    for row, value in zip(rows, found, strict=True):
        reference = Reference(llama, plan.stage(row + 1).specs, ["full_attention"])
        logits = reference.logits(IDS[: row + 1])[-1]
        assert float(value) == pytest.approx(float(logits.log_softmax(-1)[IDS[row + 1]]), abs=1e-4)
    assert len({plan.stage(row + 1).specs for row in rows}) == 4


@pytest.mark.parametrize(
    ("obj", "distance"),
    [
        ({"rope_type": "dual_chunk"}, dual_chunk(20, 24)),
        ({"rope_type": "self_extend", "group_size": 3}, self_extend(3, 8)),
        ({"rope_type": "rerope", "window": 10, "factor": 2.5}, rerope(10, 2.5)),
    ],
)
def test_distance_based_scalings(obj: dict[str, Any], distance: Distance, llama: Path) -> None:
    scorer = load(llama, chunk=16)
    plan = scorer.plan(LENGTH, RopeScaling.from_dict(obj))
    oracle = DistanceOracle(llama, plan.stage(LENGTH).specs[0].inv_freq, distance=distance)
    expected = oracle.logits(IDS)
    assert (scorer.logits(IDS, plan) - expected).abs().max() / expected.abs().max() < 1e-5


WINDOW = ContextRule(attention_window=19, attention_sinks=3)


def windowed_logits(directory: Path, scorer: Scorer, ids: list[int]) -> torch.Tensor:
    """[T, V] with keys rotated again for every token, which sees 19 tokens and 3 sinks at the positions just before them."""
    oracle = RawKeyOracle(directory, scorer.plan(len(ids)).stage(len(ids)).specs, ["full_attention"])
    for i, token in enumerate(ids):
        first = max(0, i - 18)
        places = [j + max(0, first - 3) if j < 3 else j for j in range(i + 1)]
        oracle.step(token, i, places, [j < 3 or j >= first for j in range(i + 1)], i)
    return torch.stack(oracle.logits())


@pytest.mark.parametrize("chunk", [16, 512])
def test_window_with_sinks(chunk: int, llama: Path) -> None:
    scorer = load(llama, chunk)
    logits = windowed_logits(llama, scorer, IDS)[:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    found = scorer.logprobs(IDS, scorer.plan(LENGTH), context=WINDOW)
    assert torch.allclose(found, expected, atol=2e-5)
    assert not torch.allclose(found, scorer.logprobs(IDS, scorer.plan(LENGTH)), atol=1e-2)


@pytest.mark.parametrize("seen", [None, WINDOW])
def test_endings_are_scored_independently(seen: ContextRule | None, llama: Path) -> None:
    """The text ends within a block, one ending reaches the next block, and one is longer than a chunk."""
    scorer = load(llama, chunk=16)
    passed: list[int] = []
    endings = [IDS[61:63], IDS[5:30], [7], IDS[61:90], IDS[61:63]]
    found = scorer.endings(IDS[:61], endings, scorer.plan(LENGTH), context=seen, computed=passed.append)
    for ending, entries in zip(endings, found, strict=True):
        whole = [*IDS[:61], *ending]
        reference = Reference(llama, scorer.plan(LENGTH).stage(LENGTH).specs, ["full_attention"])
        logits = reference.logits(whole) if seen is None else windowed_logits(llama, scorer, whole)
        rows = logits[60 : len(whole) - 1].log_softmax(-1)
        assert [entry.token_id for entry in entries] == ending
        for entry, row in zip(entries, rows, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-5)
            assert entry.rank == 1 + int((row > row[entry.token_id] + 1e-6).sum())
    assert found[0] == found[4]
    assert sum(passed) == 61 + sum(map(len, endings))


def test_endings_that_cannot_share_the_text_are_refused(llama: Path) -> None:
    scorer = load(llama)
    plan = scorer.plan(LENGTH, DYNAMIC, "recompute")
    assert len(scorer.endings(IDS[:10], [[3], [4, 5]], plan)) == 2  # within the trained length
    with pytest.raises(RequestError, match="same frequencies"):
        scorer.endings(IDS[:31], [[3], [4, 5]], plan)
    for text, endings in (([], [[3]]), ([3], [[]])):
        with pytest.raises(RequestError, match="at least one token"):
            scorer.endings(text, endings, plan)
    with pytest.raises(RequestError, match="between 0 and 127"):
        scorer.endings([3], [[128]], plan)
    for rule in (ContextRule(attention_window=0), ContextRule(attention_window=4, attention_sinks=-1)):
        with pytest.raises(RequestError, match="attention_window must be at least 1"):
            scorer.logprobs(IDS, plan, context=rule)


def test_invalid_rows_and_tokens_are_refused(llama: Path) -> None:
    scorer = load(llama)
    plan = scorer.plan(LENGTH)
    with pytest.raises(RequestError, match="no next token"):
        scorer.logprobs(IDS, plan, rows=[LENGTH - 1])
    with pytest.raises(RequestError, match="between 0 and 127"):
        scorer.logprobs([1, 128, 3], plan)
    assert scorer.logprobs(IDS, plan, rows=[]).shape == (0,)
    assert scorer.logprobs([5], plan).shape == (0,)
