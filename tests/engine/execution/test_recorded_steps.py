"""Recorded steps give the same bits as steps that are not recorded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.marks import slow_after
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.recorded_steps import StepOutputs
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import SchedulerOutput, StepResult
from windlass.kernels import cpu

pytestmark = [
    ON_A_CPU,
    pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="without compiled kernels no step is recorded"),
]

LINEAR = RopeScaling.from_dict({"rope_type": "linear", "factor": 3.0})


def results_of(core: EngineCore, repeat: bool) -> dict[tuple[str, int], Any]:
    """Streams of several lengths that start and end, so that shapes change and recur."""
    if not repeat:
        core.runner.replay.max_rows = 0
    requests = [
        greedy("a", range(3, 20), 70, n=2),
        greedy("b", range(5, 9), 40, logprobs=2),
        greedy("c", range(4, 44), 12, rope_scaling=LINEAR),
    ]
    found = run(core, requests)
    return found | run(core, [greedy("d", range(9, 60), 60), greedy("e", range(2, 30), 50, temperature=0.7, seed=3)])


def assert_same_bits(directory: Path, **options: Any) -> EngineCore:
    """Compare all tokens and logits with and without replay; return the core that replays."""
    plain = results_of(make_core(directory, max_model_len=256, **options), repeat=False)
    core = make_core(directory, max_model_len=256, **options)
    repeated = results_of(core, repeat=True)
    assert repeated.keys() == plain.keys()
    for key, entry in plain.items():
        assert repeated[key].token_ids == entry.token_ids
        assert torch.equal(torch.stack(repeated[key].logits), torch.stack(entry.logits)), key
    return core


NARROW: list[dict[str, Any]] = [
    {"quantization": "int8"},
    {"quantization": "int4", "kv_cache_dtype": "int8"},
    {"dtype": "bfloat16"},
]
CASES: list[tuple[str, dict[str, Any]]] = [
    *itertools.product(
        ["llama", "qwen2", "mistral", "helium", "qwen3", "gemma3"], [{"deterministic": False}, {"deterministic": True}]
    ),
    *itertools.product(["qwen2", "qwen3", "gemma3", "gemma4_e2b"], NARROW),
    # LayerNorm, clipped queries and keys, exact GELU, squared ReLU, xIELU; norms after the rotation with and without weights,
    # attention chunks and temperatures; experts in parallel with a feed-forward, layer scales.
    *(
        (family, {})
        for family in ("gpt_neox", "apertus", "olmo", "nemotron", "nanochat", "llama4", "hunyuan", "gemma4_26b")
    ),
]
# Every operation once; other rows repeat operations in another order.
QUICK = {"llama", "gemma3", "gpt_neox", "apertus", "nemotron", "llama4", "gemma4_26b"}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(
            *case, marks=[] if case[0] in QUICK and case[1] not in NARROW[1:2] else pytest.mark.slow, id=f"{case}"
        )
        for case in CASES
    ],
)
def test_recorded_steps_give_the_same_bits(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    core = assert_same_bits(make_model(family, tmp_path), **options)
    assert core.runner.replay.obstacle is None and core.runner.replay.num_replayed > 60


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("rows", slow_after(1, [8, 1, 2, 33]))
def test_steps_of_any_batch_size_are_recorded(rows: int, quantization: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    requests = [greedy(f"r{i}", range(3 + i, 9 + i), 24) for i in range(rows)]
    found = {}
    for repeat in (False, True):
        core = make_core(tmp_path, max_num_seqs=rows, quantization=quantization)
        if not repeat:
            core.runner.replay.max_rows = 0
        found[repeat] = run(core, requests)
    assert core.runner.replay.num_replayed >= 15 and core.runner.replay.obstacle is None
    for key, entry in found[False].items():
        assert torch.equal(torch.stack(found[True][key].logits), torch.stack(entry.logits)), key


def test_results_are_valid_until_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of several shapes share the arena, which may be overwritten between steps."""
    make_model("llama", tmp_path)
    plain = results_of(make_core(tmp_path, max_model_len=256), repeat=False)
    monkeypatch.setattr("windlass.engine.execution.recorded_steps._ARENA_BYTES", 1 << 20)
    arenas: list[cpu.Arena] = []

    class Watched(cpu.Arena):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            arenas.append(self)

    monkeypatch.setattr("windlass.kernels.cpu.cpu_backend.Arena", Watched)
    core = make_core(tmp_path, max_model_len=256)
    (arena,) = arenas
    memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
    replay, execute = core.runner.replay.run, core.runner.execute
    results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run_and_record(batch: ForwardBatch, *, maxima: bool) -> StepOutputs | None:
        memory.fill_(0xFF)  # NaN
        found = replay(batch, maxima=maxima)
        if found is not None:
            results.extend((x, x.clone()) for x in (found.hidden, found.logits, *(found.maxima or ())))
        return found

    def execute_and_check(output: SchedulerOutput) -> list[StepResult]:
        results.clear()
        found = execute(output)
        assert all(torch.equal(x, copy) for x, copy in results)
        return found

    core.runner.replay.run = run_and_record
    core.runner.execute = execute_and_check
    repeated = results_of(core, repeat=True)
    assert core.runner.replay.num_replayed > 60
    assert all(torch.equal(torch.stack(repeated[k].logits), torch.stack(plain[k].logits)) for k in plain)


def test_the_arena_size_limits_recorded_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    # For each row: the normalized state and the logits, 4 * (64 + 128) bytes, and a little more while layers run.
    monkeypatch.setattr("windlass.engine.execution.recorded_steps._ARENA_BYTES", 5000)
    core = assert_same_bits(tmp_path)
    assert core.runner.replay.max_rows == 2 and "no place" in str(core.runner.replay.obstacle)
    assert core.runner.replay.num_replayed > 30


def test_no_step_is_recorded_without_an_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.engine.execution.recorded_steps._ARENA_BYTES", 0)
    core = assert_same_bits(make_model("llama", tmp_path))
    assert core.runner.replay.max_rows == 0 and core.runner.replay.num_replayed == 0
