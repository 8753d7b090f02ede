"""Ended, failed and finished requests leave nothing in the engine."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from helpers.cache_invariants import assert_balanced
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import NotFiniteError
from windlass.engine.interface.outputs import RequestOutput


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "model")


def drain(core: EngineCore) -> list[RequestOutput]:
    outputs = []
    for _ in range(200):
        if not core.has_work():
            return outputs
        outputs += core.step()
    raise AssertionError("not idle")


@pytest.mark.parametrize("n", [1, 3])
def test_invalid_prompt_logits_fail_only_their_own_request(model: Path, n: int) -> None:
    core = make_core(model, max_num_batched_tokens=12)
    expected = run(core, [greedy("fine", range(10, 40), 6)])["fine", 0].token_ids
    core.runner.decoder.embedding[5] = math.nan
    core.add(greedy("bad", [7, 8, 5, *range(9, 30)], 4, prompt_logprobs=2, n=n))
    core.add(greedy("fine", range(10, 40), 6))
    outputs = drain(core)
    failed = [output for output in outputs if output.request_id == "bad"]
    assert [type(output.error) for output in failed] == [NotFiniteError]
    fine = [output for output in outputs if output.request_id == "fine"]
    assert [token for output in fine for token in output.token_ids] == expected
    assert_balanced(core.blocks)


def test_state_does_not_grow_with_the_number_of_requests(model: Path) -> None:
    core = make_core(model)
    for i in range(1000):
        core.add(greedy(str(i), [5, 6, 7], 1, deadline=1e12, repetition_penalty=1.1))
        core.abort(str(i)) if i % 10 else drain(core)
    scheduler = core.scheduler
    requests, places = scheduler._requests, scheduler._queues
    held = (requests._deadlines, requests._samples, requests.by_id, places.waiting, places.running)
    assert max(map(len, held)) < 100
    assert core.runner.sampler.num_tracked <= 1 and core.runner.tables.num_live == 0


@pytest.mark.parametrize("how", ["finished", "abort", "end_sample", "deadline"])
def test_an_idle_engine_holds_no_request(model: Path, how: str) -> None:
    core = make_core(model)
    core.add(greedy("a", range(3, 40), 3, n=2, deadline=time.monotonic() + 3600, repetition_penalty=1.1))
    core.step()
    assert len(core.runner.input_batch) == core.runner.sampler.num_tracked == 2
    if how == "abort":
        core.abort("a")
    elif how == "end_sample":
        core.end_sample("a", 1)
        core.end_sample("a", 0)
    elif how == "deadline":
        core.scheduler.expire(math.inf)
        core.step()
    else:
        drain(core)
    assert not core.has_work()
    assert len(core.runner.input_batch) == core.runner.sampler.num_tracked == 0
    assert len(run(core, [greedy("b", range(3, 40), 3)])["b", 0].token_ids) == 3


def test_a_deadline_expires_among_many_ended_requests(model: Path) -> None:
    core = make_core(model)
    core.add(greedy("late", range(3, 20), 50, deadline=0.0))
    for i in range(200):
        core.add(greedy(str(i), [5, 6, 7], 1, deadline=1e12))
        core.abort(str(i))
    assert [(output.request_id, output.finish_reason) for output in core.step()] == [("late", "timeout")]


DEMO = Path(__file__).parents[3] / "models" / "demo"
LENGTH, EARLY = 300, 100


def sampled_tokens(core: EngineCore, request_id: str) -> dict[int, list[int]]:
    """Tokens of three samples, of which the outer ones are ended after the first tokens of the middle one."""
    core.add(greedy(request_id, range(100, 150), LENGTH, n=3, temperature=1.0, seed=5))
    made: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while core.has_work():
        for output in core.step():
            made[output.index] += output.token_ids
        if len(made[1]) == EARLY and request_id == "three":
            before = core.stats().kv_blocks_used
            core.end_sample(request_id, 0)  # the others were forked from it
            core.end_sample(request_id, 2)
            stats = core.stats()
            assert stats.num_running == 1
            assert before - stats.kv_blocks_used >= 2 * (EARLY // 16)  # the tokens after the prompt, which they share
    return made


@pytest.mark.slow
def test_ended_samples_free_their_blocks_and_others_continue() -> None:
    core = make_core(DEMO, kv_cache_memory=32 << 20)
    made = sampled_tokens(core, "three")
    assert [len(made[index]) for index in range(3)] == [EARLY, LENGTH, EARLY]
    stats = core.stats()
    assert (stats.num_running, stats.kv_blocks_used) == (0, 0)
    assert sampled_tokens(core, "again")[1] == made[1]
