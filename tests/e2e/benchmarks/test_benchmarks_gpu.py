"""The benchmark of a GPU: its verdicts and bounds, and a run of all of its parts on tiny shapes on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

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
def test_bounds_count_what_a_step_reads_and_a_prompt_multiplies(script: ModuleType, name: str, tmp_path: Path) -> None:
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
    for count, read in ((1, 2), (3, 4 * (1 - 0.5**3))):  # experts of four that some stream chose
        experts = expert * (1 if name == "8b" else read)
        matrices = layers * (attention + experts) + vocab * hidden
        kept = count * 10 * layers * kv_heads * 2 * dim * 4
        stored = streams.bytes_of_step(count, 10) - kept
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
    code, said, report = script.main(), capsys.readouterr().out, json.loads(out.read_text())
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
    assert all(name in said for name in names)
    assert [one["verdict"] for one in report["agreement"]] == ["met", "met"]
    assert {row["context"] for row in report["growth"]} >= {16, 64, 256} and all(
        r["bound"] > 0 for r in report["growth"]
    )
    missed = [one["name"] for one in report["figures"] if one["verdict"] == "missed"]
    assert code == bool(missed) and said.rstrip().endswith(f"missed: {'; '.join(missed) or 'nothing'}")
    assert "not measured: " not in said, "a CPU has no graphs, and nothing failed"
    assert "| growth: 4 stream(s) behind 8 tokens, a token |" in said


def compared(script: ModuleType, directory: Path, parts: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """The cases of the part agreement by name, on a CPU beside itself."""
    return {case["name"]: case for case in script.agreement(torch.device("cpu"), directory, parts)}


def test_a_difference_is_missed(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = sys.modules["harness.gpu_agreement"]
    monkeypatch.setattr(agreed, "CASES", [("llama", {}, {"rope_scaling": None})])
    real, calls = agreed._Engines.text, []

    def other(*given: Any) -> Any:
        calls.append(given)
        found = real(*given)
        return replace(found, logprobs=[one + 0.01 * (len(calls) == 3) for one in found.logprobs])

    monkeypatch.setattr(agreed._Engines, "text", other)
    (case,) = compared(script, tmp_path).values()
    assert case["verdict"] == "missed" and case["nats"] == pytest.approx(0.01) and case["apart"] < 1e-5


def test_what_a_request_asks_for_can_be_told(script: ModuleType, tmp_path: Path) -> None:
    """Each scaling, window and shift changes what a CPU computes, and each into something else."""
    found = compared(script, tmp_path, ("rope_scaling", "context"))
    assert {case["verdict"] for case in found.values()} == {"met"} and len(found) == 7
    apart = [case["apart"] for case in found.values()]
    assert min(apart) > 0.05 and len({round(most, 4) for most in apart}) == 7


@pytest.mark.slow
def test_what_an_engine_is_asked_for_can_be_told(script: ModuleType, tmp_path: Path) -> None:
    found = compared(script, tmp_path, ("llama",))
    assert {case["verdict"] for case in found.values()} == {"met"} and len(found) == 13
    alike = {name for name, case in found.items() if case["apart"] < 1e-5}
    speculates = "llama float32 speculative_ngram=3 speculative_ngram_min=1"
    assert alike == {"llama float32", "llama float32 deterministic=True", speculates}


def test_what_is_drawn_can_be_told_in_bfloat16(script: ModuleType, tmp_path: Path) -> None:
    """A CPU's bfloat16 comes within the bound for all tokens, those behind shifts and accepted proposals among them."""
    agreed = sys.modules["harness.gpu_agreement"]
    compared(script, tmp_path, ("context=shift",))  # makes the model
    for case in script.chosen(["context=shift", "speculative", "rotate"]):
        engines = agreed._Engines(tmp_path / "llama", case[1])
        want = engines.text("cpu", "float32", case[2])
        got = engines.text("cpu", "bfloat16", case[2], want.drawn)
        assert got.drawn == want.drawn and len(got.logprobs) == 99 and got.accepted == want.accepted
        assert 1e-4 < agreed._furthest(want, got) < agreed.ROUNDED
        other = [3 + token % 120 for token in want.drawn]
        assert engines.text("cpu", "bfloat16", case[2], other).drawn == other != want.drawn


def test_a_case_that_cannot_tell_is_missed(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = sys.modules["harness.gpu_agreement"]
    monkeypatch.setattr(agreed, "_TRAINED", {})  # of 256 tokens: dynamic scaling never begins
    (case,) = compared(script, tmp_path, ("frozen",)).values()
    assert (case["verdict"], case["nats"], case["note"]) == ("missed", 0.0, "the case cannot tell")
    monkeypatch.setattr(agreed, "_DRAWN", 1)  # nothing is left to propose
    (case,) = compared(script, tmp_path, ("speculative",)).values()
    assert case["verdict"] == "missed" and case["note"] == "the case cannot tell"


def test_an_engine_that_fails_leaves_the_other_cases(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = sys.modules["harness.gpu_agreement"]
    monkeypatch.setattr(agreed, "CASES", [("llama", {"block_size": -1}, {}), ("llama", {}, {})])
    first, second = agreed.agreement(torch.device("cpu"), tmp_path)
    assert first["verdict"] == "not measured" and "block_size" in first["note"] and second["verdict"] == "met"


def run_on_cpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, parts: str) -> tuple[int, Any]:
    given = ["gpu.py", "--device", "cpu", "--tiny", "--shapes", "1b", "--parts", parts, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    bounds = script.Bounds(torch.device("cpu"), torch.float32, 1e10, 1e10)
    monkeypatch.setattr(script.Bounds, "measure", lambda *given, **options: bounds)
    monkeypatch.setattr(script, "_give_back", lambda device: None)
    return script.main(), json.loads(out.read_text())


def test_a_part_that_fails_is_noted_and_the_rest_goes_on(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing:
        def __init__(self, *given: object, **options: object) -> None:
            raise torch.OutOfMemoryError("no memory\nand where it went")

    monkeypatch.setattr(script, "Streams", Refusing)
    monkeypatch.setattr(script, "seconds_of_token", lambda *given: None.seconds)  # type: ignore[attr-defined]

    def silent(*given: object, **options: object) -> Any:
        yield script.Figure("one that was there", 1.0)
        raise RuntimeError

    monkeypatch.setattr(script, "tier_figures", silent)
    code, report = run_on_cpu(script, monkeypatch, tmp_path / "gpu.json", "growth,tier,peer")
    found = {one["name"]: (one["verdict"], one["note"]) for one in report["figures"]}
    assert found.pop("one that was there") == ("", "")
    assert found == {
        "1b: streams and growth": ("not measured", "OutOfMemoryError: no memory"),
        "1b: tier": ("not measured", "RuntimeError"),
        "1b: peer, transformers": ("not measured", "AttributeError: 'NoneType' object has no attribute 'seconds'"),
    }
    said = capsys.readouterr().out
    assert code == 3 and f"not measured: {'; '.join(found)}\n\nmissed: nothing\n" in said


def test_a_run_that_is_cut_short_leaves_what_it_had(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two:
        def __init__(self, *given: object, **options: object) -> None:
            pass

    out, seen = tmp_path / "gpu.json", list[int]()

    def rows(streams: object, count: int, length: int, steps: int) -> dict[str, Any]:
        written = json.loads(out.read_text())
        seen.append(len(written.get("growth", [])) + len(written["figures"]))
        if length == 64:
            raise ValueError("a row that fails")
        if length == 256:
            raise KeyboardInterrupt  # as where time is up
        return {"streams": count, "context": length, "seconds": 1.0, "bound": 0.5}

    monkeypatch.setattr(script, "Streams", Two)
    monkeypatch.setattr(script, "growth", rows)
    with pytest.raises(KeyboardInterrupt):
        run_on_cpu(script, monkeypatch, out, "growth")
    report = json.loads(out.read_text())
    assert seen == [0, 1, 2] and [row["context"] for row in report["growth"]] == [16]
    assert [one["note"] for one in report["figures"]] == ["ValueError: a row that fails"]


def test_what_is_captured_is_captured_on_the_device_that_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def measured(device: torch.device, *given: object, **options: object) -> None:
        events.append(f"measures {device}")
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append(f"current {device}"))
    monkeypatch.setattr(script.Bounds, "measure", measured)
    for device in ("cuda:1", "cuda"):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", device])
        with pytest.raises(InterruptedError):
            script.main()
    assert events == ["current cuda:1", "measures cuda:1", "measures cuda"]


def test_copies_are_timed_once_what_came_before_has_ended(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, events = sys.modules["harness.gpu_tier"], list[str]()
    monkeypatch.setattr(tier, "wait", lambda device: events.append("wait"))
    monkeypatch.setattr(tier.time, "perf_counter", lambda: events.append("clock") or 0.0)
    tier._timed(lambda: events.append("work"), torch.device("cpu"))
    assert events == ["wait", "clock", "work", "clock"]


def test_what_there_is_not_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--shapes", "1b,2b"])
    with pytest.raises(SystemExit):
        script.main()
    assert "there is no 2b: choose from 1b, 8b, 30b-a3b" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cases", "longrope"])
    with pytest.raises(SystemExit):
        script.main()
    assert "no case of the part agreement has longrope in its name" in capsys.readouterr().err
