"""Logits and greedy tokens compared with transformers: in chunks, batches, after preemption and from the prefix cache.

Reference: float32, eager attention, one pass over the whole sequence, cos and sin from float64 angles.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import FAMILIES, Reference, make_model
from safetensors.torch import load_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import EngineRequest

TOLERANCE = 1e-5  # of the largest reference logit


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_for(core: EngineCore, directory: Path, request: EngineRequest) -> Reference:
    names = [group.name for group in core.runner.decoder.spec.rotary_groups]
    return Reference(directory, specs_of(core, request), names)


def check(core: EngineCore, directory: Path, request: EngineRequest, result: Finished) -> None:
    reference = reference_for(core, directory, request).logits(request.prompt_token_ids + result.token_ids)
    expected = reference[len(request.prompt_token_ids) - 1 : -1]
    actual = torch.stack(result.logits)
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE
    assert result.token_ids == expected.argmax(dim=-1).tolist()


@pytest.mark.quick_cases(6)
def test_entire_prompt_equals_transformers(family: Path) -> None:
    core = make_core(family)
    request = greedy("a", prompt(40), 12)
    check(core, family, request, run(core, [request])["a", 0])
    assert core.runner.positions_computed == 40 + 12 - 1  # every position once; the last token is never fed


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("budget", [1, 7])
def test_odd_chunks_equal_transformers(family: Path, budget: int) -> None:
    core = make_core(family, max_num_batched_tokens=budget)
    request = greedy("a", prompt(41), 9)
    check(core, family, request, run(core, [request])["a", 0])
    assert core.runner.positions_computed == 41 + 9 - 1


@pytest.mark.quick_cases(7)
def test_batched_requests_equal_transformers(family: Path) -> None:
    core = make_core(family, max_num_batched_tokens=50)
    requests = [greedy(str(i), prompt(5 + 11 * i, i), 6 + 3 * i) for i in range(6)]
    results = run(core, requests)
    for request in requests:
        check(core, family, request, results[request.request_id, 0])
    lengths = [len(r.prompt_token_ids) + r.sampling.max_tokens - 1 for r in requests]
    assert core.runner.positions_computed == sum(lengths)


@pytest.mark.quick_cases(4)
def test_preempted_requests_equal_transformers(family: Path) -> None:
    spare = make_core(family)
    per_block = spare.info.kv_bytes_per_token * spare.info.block_size
    core = make_core(family, kv_cache_memory=9 * per_block, prefix_caching=False, max_model_len=96)
    requests = [greedy(str(i), prompt(20, i), 50) for i in range(8)]
    results = run(core, requests)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert core.runner.positions_computed == 8 * (20 + 50 - 1) + stats.recomputed_tokens["preemption"]
    for request in requests:
        check(core, family, request, results[request.request_id, 0])


@pytest.mark.quick_cases(6)
def test_prefix_hits_equal_transformers(family: Path) -> None:
    core = make_core(family)
    shared = prompt(48)
    first = greedy("first", shared + prompt(5, 1), 6)
    check(core, family, first, run(core, [first])["first", 0])
    before = core.runner.positions_computed
    second = greedy("second", shared + prompt(9, 2), 6)
    result = run(core, [second])["second", 0]
    check(core, family, second, result)
    assert result.outputs[0].cached_tokens == 48
    assert core.runner.positions_computed - before == 9 + 6 - 1
    # A full hit recomputes its last block, since something must be computed to have logits.
    before = core.runner.positions_computed
    third = greedy("third", shared, 6)
    check(core, family, third, run(core, [third])["third", 0])
    assert core.runner.positions_computed - before == 16 + 6 - 1
    assert core.stats().recomputed_tokens["full_prefix_hit"] == 16


@pytest.mark.quick_cases(6)
def test_samples_share_the_prompt(family: Path) -> None:
    core = make_core(family)
    request = greedy("a", prompt(21), 10, n=4, temperature=1.5, seed=7)
    results = run(core, [request])
    assert len({tuple(results["a", i].token_ids) for i in range(4)}) > 1
    assert core.runner.positions_computed == 21 + 4 * (10 - 1)
    reference = reference_for(core, family, request)
    for i in range(4):
        result = results["a", i]
        expected = reference.logits(request.prompt_token_ids + result.token_ids)[20:-1]
        assert (torch.stack(result.logits) - expected).abs().max() / expected.abs().max() < TOLERANCE


@pytest.mark.quick_cases(6)
def test_prompt_logprobs_equal_transformers(family: Path) -> None:
    core = make_core(family, max_num_batched_tokens=11)
    request = greedy("a", prompt(30), 1, prompt_logprobs=3)
    output = run(core, [request])["a", 0].outputs[0]
    reference = reference_for(core, family, request).logits(request.prompt_token_ids).log_softmax(-1)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 30
    assert output.prompt_logprobs[0] is None
    for i, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None and entry.token_id == request.prompt_token_ids[i + 1]
        row = reference[i]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.quick_cases(6)
def test_prompt_logprobs_of_a_part_use_the_prefix_cache(family: Path) -> None:
    core = make_core(family)
    text = prompt(60)
    whole = run(core, [greedy("a", text, 0, prompt_logprobs=0)])["a", 0].outputs[0].prompt_logprobs
    assert whole is not None
    for first in (33, 50, 59, 60):
        output = run(core, [greedy("b", text, 0, prompt_logprobs=0, prompt_logprobs_from=first)])["b", 0].outputs[0]
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 60
        assert output.cached_tokens == (first - 1) // 16 * 16
        assert output.prompt_logprobs[:first] == (None,) * first
        for entry, expected in zip(output.prompt_logprobs[first:], whole[first:], strict=True):
            assert entry is not None and expected is not None and entry.token_id == expected.token_id
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)


@pytest.mark.quick_cases(6)
def test_list_of_weights_names_the_checkpoint_and_the_decoder(family: Path) -> None:
    saved = {name: list(tensor.shape) for name, tensor in load_file(family / "model.safetensors").items()}
    decoder = make_core(family).runner.decoder
    specs = decoder.spec.weights()
    stored = [(tensor.name, tensor.rows, spec) for spec in specs for tensor in spec.stored]
    assert {name: [rows, *spec.shape[1:]] for name, rows, spec in stored} == saved
    assert len(stored) == len(saved)
    assert {name: tuple(weight.shape) for name, weight in decoder.weights().items()} == {
        spec.name: spec.shape for spec in specs
    }
    for spec in specs:
        assert sum(tensor.rows for tensor in spec.stored) == spec.shape[0]
