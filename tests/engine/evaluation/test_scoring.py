"""The scorer against transformers, family by family, and its own bookkeeping of rows, chunks and stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distance_oracle import Distance, DistanceOracle, dual_chunk, rerope, self_extend
from helpers.tiny_models import FAMILIES, Reference, make_model

from windlass.engine.errors import RequestError
from windlass.engine.evaluation.scoring import Scorer
from windlass.engine.rotary.scaling import RopeScaling

LENGTH = 90
IDS = torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
DYNAMIC = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2})


def load(directory: Path, chunk: int = 512) -> Scorer:
    return Scorer(Scorer.load(directory, device="cpu").decoder, torch.float32, chunk=chunk)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=32)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_under_a_scaling(family: str, tmp_path: Path) -> None:
    """Windows of 8 and two rotary groups included; 16 rows at a time, so that chunks meet the cache."""
    scorer = load(make_model(family, tmp_path, max_position_embeddings=64), chunk=16)
    plan = scorer.plan(LENGTH, RopeScaling.from_dict({"rope_type": "yarn", "factor": 4}))
    names = [group.name for group in plan.groups]
    expected = Reference(tmp_path, plan.stage(LENGTH).specs, names).logits(IDS)
    logits = scorer.logits(IDS, plan)
    assert (logits - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("policy", ["frozen", "recompute", "rotate"])
def test_logprobs_are_those_of_the_logits_at_the_rows_asked_for(llama: Path, policy: str) -> None:
    scorer = load(llama, chunk=16)
    plan = scorer.plan(LENGTH, DYNAMIC, policy)  # type: ignore[arg-type]
    expected = scorer.logits(IDS, plan)[:-1].log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert torch.allclose(scorer.logprobs(IDS, plan), expected, atol=1e-5)
    rows = [0, 31, 32, 37, 38, 64, 88]  # both sides of changes at 32, 38 and 64 tokens
    assert torch.allclose(scorer.logprobs(IDS, plan, rows=rows), expected[rows], atol=1e-5)


@pytest.mark.parametrize("policy", ["frozen", "recompute", "rotate"])
def test_the_work_is_what_passes_through_the_model(llama: Path, policy: str) -> None:
    scorer = load(llama, chunk=16)
    plan = scorer.plan(LENGTH, DYNAMIC, policy)  # type: ignore[arg-type]
    for rows in (range(LENGTH - 1), [0, 31, 32, 37, 38, 64, 88], [40], []):
        passed: list[int] = []
        scorer.logprobs(IDS, plan, rows=rows, computed=passed.append)
        assert scorer.work(plan, rows) == sum(passed)


def test_exact_rows_are_uncached_passes_of_their_own_length(llama: Path) -> None:
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
def test_rules_of_distances(obj: dict[str, Any], distance: Distance, llama: Path) -> None:
    scorer = load(llama, chunk=16)
    plan = scorer.plan(LENGTH, RopeScaling.from_dict(obj))
    oracle = DistanceOracle(llama, plan.stage(LENGTH).specs[0].inv_freq, distance=distance)
    expected = oracle.logits(IDS)
    assert (scorer.logits(IDS, plan) - expected).abs().max() / expected.abs().max() < 1e-5


def test_bad_rows_and_tokens_are_refused(llama: Path) -> None:
    scorer = load(llama)
    plan = scorer.plan(LENGTH)
    with pytest.raises(RequestError, match="no next token"):
        scorer.logprobs(IDS, plan, rows=[LENGTH - 1])
    with pytest.raises(RequestError, match="between 0 and 127"):
        scorer.logprobs([1, 128, 3], plan)
    assert scorer.logprobs(IDS, plan, rows=[]).shape == (0,)
    assert scorer.logprobs([5], plan).shape == (0,)
