"""`windlass rope sweep` over several texts: intervals, chosen scalings, KV cache types and resumption."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.engines import make_core

from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer
from windlass.lab.sweep_progress import SweepProgress, duration
from windlass.server.text.tokenizer import Tokenizer

TRAINED, MAX_LEN = 32, 128


YARN, DYNAMIC = '{"rope_type": "yarn", "factor": 4}', '{"rope_type": "dynamic", "factor": 2}'


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    for name, step in (("b", 7), ("a", 11), ("c", 13)):
        lines = " ".join(f"{name} {i} costs {i * step % 89} pence;" for i in range(40))
        (folder / f"{name}.txt").write_text(lines, encoding="utf-8")
    (folder / "other.md").write_text("not read", encoding="utf-8")
    return folder


@pytest.fixture
def sweep(model: Path, texts: Path, tmp_path: Path, run_sweep: Callable[..., int]) -> Callable[..., dict]:
    """Sweep over the texts, and its JSON report."""

    def run(*more: object, code: int = 0) -> dict:
        options = ["--text", texts, "--max-len", MAX_LEN, "--windows", 1, "--scaling", YARN, *more]
        assert run_sweep(model, tmp_path, *options) == code
        return json.loads((tmp_path / "report.json").read_text()) if code == 0 else {}

    return run


def test_several_texts_have_paired_intervals(
    model: Path, texts: Path, tmp_path: Path, sweep: Callable[..., dict]
) -> None:
    """Mean over texts of the loss above no scaling, with an interval by Student's t."""
    found = sweep()
    assert [text["name"] for text in found["texts"]] == ["a.txt", "b.txt", "c.txt"]
    assert [curve["name"] for curve in found["curves"]] == ["no scaling", "text cut to the trained length", "yarn 4"]
    tokenizer, scorer = Tokenizer.from_directory(model), Scorer.load(model, device="cpu")
    plans = [scorer.plan(MAX_LEN, RopeScaling.from_dict(json.loads(t))) for t in (YARN, '{"rope_type": "default"}')]
    apart = []
    for name in ("a", "b", "c"):
        ids = tokenizer.encode((texts / f"{name}.txt").read_text())[: MAX_LEN + 1]
        yarn, plain = (-scorer.logprobs(ids, plan).double()[MAX_LEN - 16 :].mean().item() for plan in plans)
        apart.append(yarn - plain)
    mean, half_width = np.mean(apart), 4.302653 * np.std(apart, ddof=1) / math.sqrt(3)
    above = found["curves"][2]["nats_above_no_scaling"]["at the end (128)"]
    assert above["mean"] == pytest.approx(mean, abs=2e-5)
    assert above["interval"] == pytest.approx([mean - half_width, mean + half_width], abs=2e-5)
    assert found["curves"][0]["nats_above_no_scaling"]["at the end (128)"] is None
    low, high = found["curves"][0]["perplexity_interval"]["at the end (128)"]
    assert low < found["curves"][0]["perplexity"]["at the end (128)"] < high
    words = (tmp_path / "report.md").read_text()
    assert "means over 3 texts" in words and "| against no scaling, % |" in words


@pytest.mark.slow
def test_interrupted_sweep_is_resumed(
    tmp_path: Path, sweep: Callable[..., dict], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = sweep("--no-cut")
    keep = tmp_path / "passes.jsonl"
    logprobs, read = Scorer.logprobs, []

    def stops(self: Scorer, *arguments: object, **named: object) -> torch.Tensor:
        if len(read) == 4:
            raise KeyboardInterrupt
        read.append(1)
        return logprobs(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Scorer, "logprobs", stops)
    sweep("--no-cut", "--keep", keep, code=130)
    assert len(keep.read_text().splitlines()) == 4
    capsys.readouterr()
    with keep.open("a") as file:
        file.write('{"key": "0123", "nll": [1.0, 2.')  # a line that was written partly
    read.clear()
    assert sweep("--no-cut", "--keep", keep) == complete
    assert len(read) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "perplexity" in line]
    assert len(lines) == 2 and "; 1 of 2 passes, about " in lines[0] and lines[1].endswith("; 2 of 2 passes")
    read.clear()
    assert sweep("--no-cut", "--keep", keep) == complete and not read
    # Passes with another cache are separate.
    monkeypatch.setattr(Scorer, "logprobs", logprobs)
    sweep("--no-cut", "--keep", keep, "--kv-cache-dtype", "bfloat16")
    assert len(keep.read_text().splitlines()) == 1 + 6 + 6


def test_chosen_scalings_and_policies(tmp_path: Path, sweep: Callable[..., dict]) -> None:
    found = sweep("--no-cut", "--scaling", DYNAMIC, "--policy", "rotate")
    assert [curve["name"] for curve in found["curves"]] == ["no scaling", "yarn 4", "dynamic 2, rotate"]
    assert [curve["rope_update"] for curve in found["curves"]] == [None, None, "rotate"]
    assert found["exact"] is None and all(curve["holds_to"] is None for curve in found["curves"])
    assert "grey line" not in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_window_with_sinks_is_a_row_and_not_recommended(
    model: Path, texts: Path, tmp_path: Path, sweep: Callable[..., dict]
) -> None:
    given = ["--attention-window", "28", "--attention-sinks", "2", "--keep", tmp_path / "passes.jsonl"]
    found = sweep(*given)
    assert [curve["name"] for curve in found["curves"]][2:] == ["yarn 4", "window 28 and 2 sinks"]
    row = found["curves"][3]
    assert (row["attention_window"], row["attention_sinks"], row["rope_scaling"]) == (28, 2, {"rope_type": "default"})
    assert found["curves"][0]["attention_window"] is None
    tokenizer, core = Tokenizer.from_directory(model), make_core(model, max_model_len=MAX_LEN + 1)
    rule, losses = ContextRule(attention_window=28, attention_sinks=2), []
    for name in ("a", "b", "c"):
        ids = tokenizer.encode((texts / f"{name}.txt").read_text())[: MAX_LEN + 1]
        core.add(EngineRequest(name, ids, SamplingParams(max_tokens=0, prompt_logprobs=0), context=rule))
        entries = [e for _ in iter(core.has_work, False) for out in core.step() for e in out.prompt_logprobs or () if e]
        losses.append([-entry.logprob for entry in entries])
    assert row["perplexity"]["all positions"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)
    assert row["perplexity"]["at the end (128)"] == pytest.approx(
        math.exp(np.mean(np.array(losses)[:, -16:])), rel=1e-3
    )
    assert sweep(*given) == found
    other = sweep(*given[:2], "--attention-sinks", "0", *given[4:])
    assert other["curves"][3]["perplexity"] != row["perplexity"] and other["curves"][:3] == found["curves"][:3]
    words = (tmp_path / "report.md").read_text()
    assert "| *window 28 and 0 sinks* |" in words and "no reason to recommend a window" in words


def test_window_is_added_to_the_default_scalings(
    model: Path, texts: Path, tmp_path: Path, run_sweep: Callable[..., int]
) -> None:
    options = ["--text", texts / "a.txt", "--max-len", 64, "--windows", 1, "--samples", 0, "--attention-window", 20]
    assert run_sweep(model, tmp_path, *options) == 0
    names = [curve["name"] for curve in json.loads((tmp_path / "report.json").read_text())["curves"]]
    assert "window 20 and 4 sinks" in names and "yarn 2" in names


def test_int8_cache_changes_the_perplexity(tmp_path: Path, sweep: Callable[..., dict]) -> None:
    full = sweep("--no-cut")
    narrow = sweep("--no-cut", "--kv-cache-dtype", "int8")
    assert "cached as int8" in (tmp_path / "report.md").read_text() and narrow["kv_cache_dtype"] == "int8"
    a, b = (found["curves"][0]["perplexity"]["all positions"] for found in (full, narrow))
    assert a != b and b == pytest.approx(a, rel=0.05)


def test_progress_bar_counts_tokens_and_estimates_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    with SweepProgress(terminal=True) as progress:
        progress.expect(100)
        progress.expect(300)
        progress.begin("yarn 4: [a].txt")
        progress.computed(100)
        progress.finished("yarn 4: [a].txt: perplexity 3.00")
    shown = " ".join(capsys.readouterr().err.split())
    assert "yarn 4: [a].txt: perplexity 3.00; 1 of 2 passes, about 0 s to go" in shown
    assert [duration(s) for s in (45, 600, 9000)] == ["45 s", "10 min", "2.5 h"]
