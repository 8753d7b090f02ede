"""The cost of kinds that change distances: which batches are timed, and a run on a tiny model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.tiny_models import make_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("distance_cost")


def test_a_batch_of_every_kind_and_one_of_all(script: ModuleType) -> None:
    found = script.mixes(8)
    assert set(found) == {*script.KINDS, script.MIXED}
    assert found["rerope"] == ["rerope"] * 8 and len(found[script.MIXED]) == 8
    assert set(found[script.MIXED]) == set(script.KINDS)
    assert script.MIXED not in script.mixes(1)


def test_a_step_that_gives_a_stream_several_tokens_is_no_step(script: ModuleType, tmp_path: Path) -> None:
    from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig, SchedulerConfig

    model = make_model("llama", tmp_path / "model")
    bursts = SchedulerConfig(max_num_seqs=1, burst_seconds=1.0)
    sizes = {"compute": ComputeConfig(device="cpu", threads=1), "cache": CacheConfig(memory=1 << 20)}
    config = EngineConfig(model=str(model), max_model_len=128, scheduling=bursts, **sizes)
    with pytest.raises(RuntimeError, match=r"a step of 1 streams gave \d+ tokens"):
        script.Streams(script.EngineCore(config), 96, 1, 32).step_seconds(["none"])


def test_steps_of_other_benchmarks_give_each_stream_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts are off where steps are timed: a step that gave several tokens would end these runs."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rotary, overhead = importlib.import_module("rotary_kernels"), importlib.import_module("step_overhead")
    found = rotary.mixing(ROOT / "models" / "demo", "the bundled model", 8, 16)
    assert found["one scaling"]["median_us"] > 0
    core = overhead.build(str(ROOT / "models" / "demo"), 8, 16, temperature=0.0, top_p=1.0, seed=0)
    for _ in range(10):  # how long a step takes is learnt
        core.step()
    assert overhead.measure(core, overhead.Clock(), {}, 4, 8)["whole step"]["min_us"] > 0


def test_a_run_writes_what_it_timed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_model("llama", tmp_path / "model", max_position_embeddings=64), tmp_path / "cost.json"
    sizes = "--context 96 --batch-context 64 --streams 3 --rounds 1 --steps 8 --max-foreign 1 --threads 1 --kv-cache-memory 1"
    monkeypatch.setattr(sys, "argv", ["distance_cost.py", str(model), *sizes.split(), "--out", str(out)])
    script.main()
    report, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert set(report["measured"]["one stream"]["milliseconds"]) == set(script.KINDS)
    assert set(report["measured"]["batch"]["milliseconds"]) == {*script.KINDS, script.MIXED}
    assert "| none | " in shown and "| each under another | " in shown and "batch, 3 × 64 tokens" in shown
