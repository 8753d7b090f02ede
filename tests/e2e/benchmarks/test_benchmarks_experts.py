"""The benchmark of experts and latent attention: its bound, the files it writes, and a run on tiny ones."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
TINY = {
    "moe": {"layers": 2, "hidden": 64, "width": 32, "experts": 8, "vocab": 96},
    "mla": {"layers": 2, "hidden": 1024, "width": 32, "rank": 32, "vocab": 96},
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("experts_and_latent")


def test_the_bound_counts_what_a_token_reads(script: ModuleType) -> None:
    shape = script.moe_shape(**TINY["moe"] | {"experts": 16})
    attention = 64 * (64 + 16 + 16) + 64 * 64
    experts, router, norms = 8 * 3 * 32 * 64, 16 * 64, 2 * 64 + 2 * 4
    blocks = 2 * (attention + experts) + 96 * 64
    assert shape.active_bytes() == blocks * 34 / 32 + 4 * (2 * (router + norms) + 64)


def test_a_run_writes_files_times_them_and_says_what_is_missing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {name: lambda make=make, name=name: make(**TINY[name]) for name, make in script.SHAPES.items()}
    monkeypatch.setattr(script, "SHAPES", shapes)
    monkeypatch.setattr(script.Rates, "__init__", lambda self, threads: None)
    monkeypatch.setattr(script.Rates, "now", lambda self, name: 10.0)
    monkeypatch.setattr(script, "our_samples", lambda *a, given=script.our_samples: given(*a, cache=16 << 20))
    out = tmp_path / "report.json"
    sizes = f"--rounds 2 --threads 1 --steps 4 --prompt 48 --work {tmp_path} --out {out}"
    monkeypatch.setattr(sys, "argv", ["experts_and_latent.py", *sizes.split()])
    script.main()
    report, shown = json.loads(out.read_text()), capsys.readouterr().out
    for name in shapes:
        result = report["results"][name]
        samples = result["samples"]["Windlass Q8_0"]
        assert {key: len(taken) for key, taken in samples.items()} == {"decode 1": 2, "decode 8": 2, "prefill": 2}
        assert all(value > 0 for taken in samples.values() for value in taken)
        share = script.share_of_bound(result, "Windlass Q8_0")
        assert share == pytest.approx(sum(samples["decode 1"]) / 2 * result["active_bytes"] / 10e9)
        assert f"| {name} | one stream | 8 streams | prompt | of its bound |" in shown
    assert "llama.cpp: not measured" in shown


def test_rows_of_llama_bench_are_read(script: ModuleType, tmp_path: Path) -> None:
    tool = tmp_path / "llama-bench"
    rows = [{"n_prompt": 512, "n_gen": 0, "avg_ts": 300.5}, {"n_prompt": 0, "n_gen": 64, "avg_ts": 20.25}]
    tool.write_text(f"#!{sys.executable}\nprint('''{json.dumps(rows)}''')\n")
    tool.chmod(0o755)
    assert script.their_samples(tool, tmp_path, 512, 64, 2) == {"prefill": 300.5, "decode 1": 20.25}


def test_a_tool_that_cannot_read_the_file_has_no_row(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "llama-bench"
    tool.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no: ' + ' '.join(sys.argv[1:3]))\n")
    tool.chmod(0o755)
    assert script.their_samples(tool, tmp_path, 512, 64, 2, ["-rtr", "1"]) == {}
    assert capsys.readouterr().out == "llama-bench cannot: no: -rtr 1\n"
    tool.write_text(f"#!{sys.executable}\nprint('no rows')\n")
    assert (
        script.their_samples(tool, tmp_path, 512, 64, 2) == script.their_samples(tmp_path, tmp_path, 512, 64, 2) == {}
    )
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(" cannot: " in line for line in said)
