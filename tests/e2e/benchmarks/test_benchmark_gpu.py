"""benchmarks/gpu.py: verdicts, bounds, and a run of all parts on tiny shapes on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


def test_verdicts(script: ModuleType) -> None:
    figure = script.Figure
    assert figure("a", 2.0, 1.0, 0.5).verdict == "met" and figure("a", 2.01, 1.0, 0.5).verdict == "missed"
    assert figure("a", 1e-3, wanted=1e-3).verdict == "met" and figure("a", 1.1e-3, wanted=1e-3).verdict == "missed"
    assert figure("a", 3.0).verdict == "" and figure("a", None, wanted=1.0).verdict == "not measured"
    assert figure("a", 2e-3, 1e-3, 0.75).line() == "| a | 2.000 ms | 1.000 ms | 50% | 75% | missed |"
    assert figure("a", 1.019, wanted=1.02, plain=True).line() == "| a | 1.019 |  |  | 1.02 | met |"
    report = script.Growing({"agreement": [{"name": "x", "verdict": "missed"}]}, None)
    report.add([figure("y", 2.0, 1.0, 0.5), figure("z", 3.0, 1.0, 0.5)])
    assert report.missed() == ["x", "z"]


@pytest.mark.parametrize("name", ["8b", "30b-a3b"])
def test_bounds_count_the_bytes_of_a_step_and_the_operations_of_a_prompt(
    script: ModuleType, name: str, tmp_path: Path
) -> None:
    bounds = script.Bounds(torch.device("cpu"), torch.float32, 1.0, 1.0)
    sizes = {"max_model_len": 64, "kv_cache_memory": 1 << 20, "dtype": "float32", "kv_cache_dtype": "float32"}
    streams = script.Streams(script.write_config(name, tmp_path, tiny=True), bounds, **sizes)
    hidden, layers, heads, kv_heads, dim, vocab = 64, 2, 4, 2, 16, 128
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    norms = layers * 2 * hidden + hidden + (0 if name == "8b" else layers * 2 * dim)
    router = 0 if name == "8b" else 4 * hidden
    expert = 3 * hidden * (96 if name == "8b" else 32)
    weights = streams.core.runner.decoder.weights()
    width = 2 if name == "8b" and weights["head"].nbytes == 2 * vocab * hidden else 4
    for count, read in ((1, 2), (3, 4 * (1 - 0.5**3))):  # expected number of chosen experts, of four
        experts = expert * (1 if name == "8b" else read)
        matrices = layers * (attention + experts) + vocab * hidden
        cached = count * 10 * layers * kv_heads * 2 * dim * 4
        stored = streams.bytes_of_step(count, 10) - cached
        assert stored == pytest.approx(matrices * width + 4 * (norms + layers * router), rel=2e-3)
    multiplied = layers * (attention + router + expert * (1 if name == "8b" else 2)) + norms
    pairs = layers * heads * dim * 4 * 20 * 21 / 2
    assert streams.operations_of_prompt(20) == 2 * multiplied * 20 + pairs


@pytest.mark.slow
def test_all_parts_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agreed = sys.modules["harness.gpu_agreement"]
    monkeypatch.setattr(agreed, "CASES", [agreed.CASES[0], agreed.CASES[-1]])
    out = tmp_path / "gpu.json"
    given = ["gpu.py", "--device", "cpu", "--tiny", "--shapes", "1b", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    code, printed, report = script.main(), capsys.readouterr().out, json.loads(out.read_text())
    names = [one["name"] for one in report["figures"]]
    for part in (
        "attention of decode",
        "attention of a prompt",
        "1b: 1 stream(s) behind 64",
        "1b: 8 stream(s)",
        "1b: a prompt",
    ):
        assert any(name.startswith(part) for name in names), part
    for part in ("8 scalings mixed", "a shift", "a step beyond its graph", "transformers"):
        assert any(part in name for name in names), part
    assert all(name in printed for name in names)
    assert [one["verdict"] for one in report["agreement"]] == ["met", "met"]
    assert {row["context"] for row in report["growth"]} >= {16, 64, 256} and all(
        r["bound"] > 0 for r in report["growth"]
    )
    missed = [one["name"] for one in report["figures"] if one["verdict"] == "missed"]
    assert code == bool(missed) and printed.rstrip().endswith(f"missed: {'; '.join(missed) or 'nothing'}")
    assert "not measured: " not in printed
    assert "| growth: 4 stream(s) behind 8 tokens, a token |" in printed


def test_unknown_shapes_and_cases_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--shapes", "1b,2b"])
    with pytest.raises(SystemExit):
        script.main()
    assert "no shape 2b: choose from 1b, 8b, 30b-a3b" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cases", "longrope"])
    with pytest.raises(SystemExit):
        script.main()
    assert "no case of the part agreement has longrope in its name" in capsys.readouterr().err
