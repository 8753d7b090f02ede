"""Warm-up steps prepare decode steps and change no output or count."""

from __future__ import annotations

import math
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from helpers.configs import engine_config
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.marks import slow_but
from helpers.tiny_models import FAMILIES, make_model

from windlass.engine.core.engine_process import EngineLoop, default_core
from windlass.engine.core.messages import Close
from windlass.engine.execution import dummy_runs

DEMO = Path(__file__).parents[3] / "models" / "demo"
# One family per set of operations.
QUICK_FAMILIES = ("llama", "gemma3", "hunyuan")
OPTIONS = [
    {},
    {"quantization": "int8"},
    {"kv_cache_dtype": "int8", "deterministic": True},
    {"max_model_len": 3},  # too short for the warm-up steps
    {"max_model_len": 9, "block_size": 16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_warm_up_changes_no_result_or_count(options):
    found = []
    for warm in (False, True):
        core = make_core(DEMO, **options)
        if warm:
            core.warm_up(max_seconds=math.inf)
        assert core.runner.positions_computed == core.runner.sampler.num_tracked == core.runner.tables.num_live == 0
        length = min(40, core.info.max_model_len - 1)
        results = run(core, [greedy("a", range(5, 5 + length - 1), max_tokens=1), greedy("b", [7], max_tokens=2)])
        stats = core.stats()
        found.append(
            (
                {key: result.token_ids for key, result in results.items()},
                core.runner.positions_computed,
                (stats.prompt_tokens, stats.generation_tokens, stats.kv_blocks_used),
            )
        )
    assert found[0] == found[1]


@ON_A_CPU
def test_the_first_stream_uses_recorded_steps():
    core = make_core(DEMO)
    core.warm_up(max_seconds=math.inf)
    if core.runner.replay.obstacle is not None:
        pytest.skip(core.runner.replay.obstacle)
    before = core.runner.replay.num_replayed
    run(core, [greedy("a", [5, 6, 7], max_tokens=6)])
    assert core.runner.replay.num_replayed - before == 5


@ON_A_CPU
def test_the_engine_process_warms_up_until_a_message_arrives():
    core = default_core(engine_config(DEMO, device="cpu", kv_cache_memory=8 << 20), lambda *_: None)
    steps = []
    execute, inbox = core.runner.execute, SimpleQueue()

    def count(plan):
        steps.append(plan)
        if len(steps) == 2:
            inbox.put(Close())
        return execute(plan)

    core.runner.execute = count
    EngineLoop(core, inbox, lambda message: None).run()
    assert len(steps) == 2 and core.runner.tables.num_live == core.runner.positions_computed == 0
    core.warm_up()
    assert len(steps) == 2, "it is done once"


def test_the_warm_up_time_is_bounded(monkeypatch):
    core = make_core(DEMO)
    steps = []
    core.runner.execute = steps.append
    monkeypatch.setattr(dummy_runs, "time", SimpleNamespace(monotonic=lambda: 2.0 * len(steps)))
    core.warm_up(max_seconds=1.0)
    assert len(steps) == 1 and core.runner.tables.num_live == 0


@pytest.mark.parametrize("family", slow_but(sorted(FAMILIES), *QUICK_FAMILIES))
def test_a_warm_up_changes_no_result_of_any_family(family, tmp_path):
    directory = make_model(family, tmp_path)
    found = []
    for warm in (False, True):
        core = make_core(directory)
        if warm:
            core.warm_up(max_seconds=math.inf)
        found.append(run(core, [greedy("a", range(5, 60), max_tokens=3)])["a", 0].token_ids)
    assert found[0] == found[1]
