"""Samples that are ended from outside, in the real engine."""

from __future__ import annotations

from pathlib import Path

from helpers.engines import greedy, make_core

from windlass.engine.core.engine_core import EngineCore

DEMO = Path(__file__).parents[3] / "models" / "demo"
LENGTH, EARLY = 300, 100


def made_by(core: EngineCore, request_id: str) -> dict[int, list[int]]:
    """The tokens of three samples, of which the outer ones are ended once the middle one has its first tokens."""
    core.add(greedy(request_id, range(100, 150), LENGTH, n=3, temperature=1.0, seed=5))
    made: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while core.has_work():
        for output in core.step():
            made[output.index] += output.token_ids
        if len(made[1]) == EARLY and request_id == "three":
            before = core.stats().kv_blocks_used
            core.end_sample(request_id, 0)  # the one that the others were forked from
            core.end_sample(request_id, 2)
            stats = core.stats()
            assert stats.num_running == 1
            assert before - stats.kv_blocks_used >= 2 * (EARLY // 16)  # the tokens after the prompt, which they share
    return made


def test_a_sample_that_is_ended_frees_its_blocks_and_the_others_go_on() -> None:
    core = make_core(DEMO, kv_cache_memory=32 << 20)
    made = made_by(core, "three")
    assert [len(made[index]) for index in range(3)] == [EARLY, LENGTH, EARLY]
    stats = core.stats()
    assert (stats.num_running, stats.kv_blocks_used) == (0, 0)
    assert made_by(core, "again")[1] == made[1]
