"""Speculation on a simulated device with captured proposals and verification; the oracle has neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_helpers.played_engines import device_of, graphed, played_device
from helpers.engines import greedy, make_core, run
from helpers.every_request import prompt, run_checked, same, small_models, traffic
from helpers.marks import slow_but
from helpers.prediction_layers import make_predicting
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution import batch_builder
from windlass.kernels.torch.torch_backend import TorchBackend

__all__ = ["played_device"]
OPTIONS: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 3}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return small_models(tmp_path_factory)


def drafted(directory: Path, draft: Path, **options: Any) -> EngineCore:
    options = {"speculative_model": str(draft), "speculative_adaptive": False, **OPTIONS, **options}
    return graphed(directory, **options)[0]


def replays(core: EngineCore) -> tuple[int, int]:
    """The number of replayed steps of the model and of its draft model."""
    graphs, proposer = core.runner.graphs, core.runner.proposer
    assert graphs is not None and proposer is not None and proposer.graphs is not None
    return graphs.num_replayed, proposer.graphs.num_replayed


@pytest.mark.parametrize("draft", slow_but(["llama", "qwen3"], "llama"))
def test_a_draft_model_changes_no_answer(draft: str, directory_of: Callable[[str], Path]) -> None:
    want = run(make_core(directory_of("llama"), cuda_graphs=False, **OPTIONS), traffic())
    core = drafted(directory_of("llama"), directory_of(draft))
    same(run_checked(core, traffic(), every_logit=False), want, 0.0)
    assert min(replays(core)) > 50


def test_proposals_follow_each_other_on_the_device(directory_of: Callable[[str], Path]) -> None:
    """Four proposals in each of eight steps: a missing token is computed first; the host waits once for the rest."""
    core = drafted(directory_of("llama"), directory_of("llama"), deterministic=True, max_num_seqs=1)
    run(core, [greedy("x", prompt(1, 20), 41)])
    stats = core.stats()
    assert stats.num_steps == 1 + 8 and stats.spec_decode_model_num_accepted_tokens == 32
    verified, proposed = replays(core)
    assert (verified, proposed) == (8, 8 * 4)
    proposer = core.runner.proposer
    assert proposer is not None and proposer.positions_computed == 20 + 41 - 2
    waits = device_of(proposer.decoder).waits
    assert len(set(waits)) <= 2 * 8


def test_streams_that_want_different_numbers(directory_of: Callable[[str], Path]) -> None:
    sent = [greedy(f"{i}", prompt(i, 9 + i), 20 + i, temperature=0.6 * (i % 2), seed=i) for i in range(5)]
    want = run(make_core(directory_of("llama"), cuda_graphs=False, **OPTIONS), sent)
    core = drafted(directory_of("llama"), directory_of("llama"), speculative_adaptive=True, speculative_tokens=12)
    same(run(core, sent, every_logit=False), want, 0.0)
    assert min(replays(core)) > 10


@pytest.mark.slow
def test_a_smaller_vocabulary_and_a_larger_one(tmp_path: Path) -> None:
    """Token ids that one of them lacks are neither proposed nor looked up."""
    tokens, found = {f"t{i}": i for i in range(96)}, []
    for size in (96, 128):
        directory = make_model("llama", tmp_path / str(size), vocab_size=size, max_position_embeddings=64)
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added": size}))
        found.append(directory)
    for model, draft in (found, reversed(found)):
        sent = [greedy("x", [5, 6, 7], 40), greedy("y", [9, 8, 7, 6], 40, temperature=1.0, seed=3)]
        options = {"max_model_len": 64, "max_num_seqs": 2}
        want = run(make_core(model, cuda_graphs=False, **options), sent)
        core = drafted(model, draft, **options)
        same(run(core, sent, every_logit=False), want, 0.0)
        assert min(replays(core)) > 10


def test_a_models_own_layer_beside_captured_steps(tmp_path: Path) -> None:
    """With a model that has recurrent states; the MTP layer's steps are not captured."""
    model = make_predicting("qwen3_5", tmp_path, seed=1)
    want = run(make_core(model, cuda_graphs=False, **OPTIONS), traffic())
    options = {"speculative_mtp": True, "speculative_adaptive": False, **OPTIONS}
    core, _ = graphed(model, **options)
    same(run_checked(core, traffic(), every_logit=False), want, 0.0)
    assert core.runner.graphs is not None and core.runner.graphs.num_replayed > 50
    assert core.stats().spec_decode_model_num_accepted_tokens > 20


def test_text_that_repeats_itself(directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one stream in one captured step; over many keys they are a chunk, which is not captured."""
    sent = [greedy(f"{i}", prompt(i, 7) * 4, 30) for i in range(2)]
    want = run(make_core(directory_of("llama"), cuda_graphs=False, **OPTIONS), sent)
    counts = []
    for most in (batch_builder._MAX_ROW_BY_ROW_KEYS, 100):
        monkeypatch.setattr(batch_builder, "_MAX_ROW_BY_ROW_KEYS", most)
        options = {"speculative_ngram": 3, "speculative_ngram_min": 1, **OPTIONS}
        core, device = graphed(directory_of("llama"), **options)
        assert core.runner.graphs is not None and core.runner.graphs.captured == [1, 2, 4, 8, 12]
        same(run(core, sent, every_logit=False), want, 0.0)
        assert core.stats().spec_decode_num_draft_tokens > 20
        counts.append((device.replays, core.stats().num_steps))
    assert counts[0][0] == counts[0][1] - 1 and counts[1][0] < counts[1][1] - 5


def test_a_device_without_graphs_has_none(directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.kernels.backend_selector._NATIVE_BACKENDS", {})
    options = {"speculative_model": str(directory_of("llama")), **OPTIONS}
    core = make_core(directory_of("llama"), **options)
    assert isinstance(core.runner.decoder.backend, TorchBackend)
    assert core.runner.proposer is not None and core.runner.proposer.graphs is core.runner.graphs is None
