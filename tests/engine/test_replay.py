"""Steps by repetition give the bits of steps run one by one, and steps that cannot be repeated are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.core import EngineCore
from windlass.engine.rotary.scaling import RopeScaling
from windlass.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="without compiled kernels nothing repeats")

LINEAR = RopeScaling.from_dict({"rope_type": "linear", "factor": 3.0})


def work(core: EngineCore, repeat: bool) -> dict[tuple[str, int], Any]:
    """Streams of several lengths that come and go, so that shapes change and come back."""
    if not repeat:
        core.runner.replay.obstacle = "for comparison"
    requests = [
        greedy("a", range(3, 20), 70, n=2),
        greedy("b", range(5, 9), 40, logprobs=2),
        greedy("c", range(4, 44), 12, rope_scaling=LINEAR),
    ]
    found = run(core, requests)
    return found | run(core, [greedy("d", range(9, 60), 60), greedy("e", range(2, 30), 50, temperature=0.7, seed=3)])


def assert_same_bits(directory: Path, **options: Any) -> EngineCore:
    """Every token and every logit with repetition as without; returns the core that repeats."""
    plain = work(make_core(directory, max_model_len=256, **options), repeat=False)
    core = make_core(directory, max_model_len=256, **options)
    repeated = work(core, repeat=True)
    assert repeated.keys() == plain.keys()
    for key, entry in plain.items():
        assert repeated[key].token_ids == entry.token_ids
        assert torch.equal(torch.stack(repeated[key].logits), torch.stack(entry.logits)), key
    return core


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "helium", "qwen3", "gemma3"])
def test_the_bits_are_the_same(family: str, deterministic: bool, tmp_path: Path) -> None:
    core = assert_same_bits(make_model(family, tmp_path), deterministic=deterministic)
    assert core.runner.replay.obstacle is None and core.runner.replay.num_repeated > 60


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4", "kv_cache_dtype": "int8"}])
def test_quantized_models_are_repeated(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    core = assert_same_bits(make_model(family, tmp_path), **options)
    assert core.runner.replay.obstacle is None and core.runner.replay.num_repeated > 60


def test_norms_after_the_rotation_are_not_repeated(tmp_path: Path) -> None:
    core = assert_same_bits(make_model("hunyuan", tmp_path))
    assert "outside the compiled" in str(core.runner.replay.obstacle) and core.runner.replay.num_repeated == 0


def test_what_computes_outside_the_kernels_is_run_every_time() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with cpu.record() as recording:
        y = cpu.linear_small(x, weight)
    assert recording.obstacle is None and len(recording.calls) == 1
    x.copy_(torch.randn(2, 8))
    assert recording.repeat() and torch.equal(y, cpu.linear_small(x, weight))
    with cpu.record() as other:
        cpu.linear_small(torch.randn(2, 8), weight)
    assert recording.same_values(other)  # addresses aside
    with cpu.record() as wider:
        cpu.linear_small(torch.randn(3, 8), weight)
    assert not recording.same_values(wider)
    with cpu.record() as torch_work:
        cpu.linear_small(x + 1, weight)
    assert "add" in str(torch_work.obstacle)
    with cpu.record() as angles:
        cpu.rotary_angles(torch.ones(1, 1, 2, dtype=torch.float64), torch.tensor([0]), torch.tensor([5]))
    assert "rotary_angles" in str(angles.obstacle)
    with pytest.raises(ValueError, match="cannot be repeated"):
        angles.repeat()
    assert cpu.load() is cpu.load() and isinstance(cpu.load(), cpu.Library)


def test_every_argument_comes_back() -> None:
    """Calls with floats between integers, addresses that are none, and several of a kind."""
    x, weight, residual = torch.randn(3, 8), torch.rand(8), torch.randn(3, 8)

    def work() -> list[torch.Tensor]:
        a = cpu.rms_norm(x, weight, 0.25)
        b = cpu.rms_norm(a, weight, 1e-5, residual)
        return [a, b, cpu.soft_cap(b, 0.3), cpu.gated_activation(b, "gelu_tanh"), cpu.gated_activation(a, "silu")]

    with cpu.record() as recording:
        recorded = work()
    x.copy_(torch.randn(3, 8))
    start = residual.copy_(torch.randn(3, 8)).clone()
    assert recording.repeat()
    after = residual.clone()
    residual.copy_(start)
    assert all(map(torch.equal, recorded, work())) and torch.equal(residual, after)


def test_a_call_that_fails_ends_the_repetition() -> None:
    x, pages, slots = torch.randn(1, 1, 4), torch.zeros(1, 2, 1, 4), torch.tensor([1])
    table, ones, values = torch.ones(1, 2), torch.ones(1), torch.zeros(1, 2, 1, 4)
    row = torch.randn(1, 4)
    with cpu.record() as recording:
        cpu.rotate_and_append(x, x, x, table, table, ones, pages, values, slots)
        y = cpu.soft_cap(row, 1.0)
    y.zero_()
    slots[0] = 2  # past the pages
    assert not recording.repeat() and not y.any()
    slots[0] = 0
    assert recording.repeat() and y.any()


def test_recording_ends_with_an_error() -> None:
    before = cpu.load()
    with pytest.raises(ZeroDivisionError), cpu.record():
        _ = 1 // 0
    assert cpu.load() is before


def test_large_models_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.engine.model.replay._MAX_BYTES", 0)
    core = make_core(make_model("llama", tmp_path))
    run(core, [greedy("a", range(3, 9), 20)])
    assert core.runner.replay.num_repeated == 0
